"""VLMEvalKit adapter: order of texts and images, roles and options."""

import importlib

import pytest

from vitrail.errors import ConfigError, TextError
from vitrail.generate.sampling import GREEDY, SamplingConfig


@pytest.fixture
def kit(adapter):
    return adapter("vlmevalkit", "vlmeval")


def text(value, **more):
    return {"type": "text", "value": value, **more}


def image(value, **more):
    return {"type": "image", "value": value, **more}


def test_items_become_messages(kit, chat_pipeline, pictures, heard):
    a, b, _ = pictures
    model = kit.VitrailModel(
        chat_pipeline, max_new_tokens=512, do_sample=True, temperature=0.3, top_p=0.9, stop="###", seed=7
    )
    assert model.INTERLEAVE and not model.use_custom_prompt("MMBench") and not model.VIDEO_LLM
    assert (
        model.generate([text("is"), image(a), text("larger than"), image(b), text("?")], dataset="MMBench")
        == "answer 1"
    )
    assert model.generate("how many balls?") == "answer 2"
    model.generate_inner([text("Be brief.", role="system"), image(a, role="user"), text("what?", role="user")])
    (first, how), (second, other), (third, _) = heard
    words = [{"type": "text", "text": output} for output in ("is", "larger than", "?")]
    shown = [{"type": "image", "image": picture} for picture in (a, b)]
    assert first == [{"role": "user", "content": [words[0], shown[0], words[1], shown[1], words[2]]}]
    drawn = SamplingConfig(temperature=0.3, top_p=0.9, seed=7)
    assert how == {"max_new_tokens": 512, "sampling": drawn, "stop_strings": ("###",)}
    assert other["sampling"] == drawn.replace(seed=8)
    assert second == [{"role": "user", "content": [{"type": "text", "text": "how many balls?"}]}]
    assert [(turn["role"], len(turn["content"])) for turn in third] == [("system", 1), ("user", 2)]


def test_answers_match_model(kit, chat_pipeline, pictures):
    a, b, _ = pictures
    model = kit.VitrailModel(chat_pipeline, max_new_tokens=6)
    assert model.options["sampling"] == GREEDY
    output = model.generate([image(a), image(b), text("what is this?")])
    assert output == chat_pipeline.ask([a, b], "what is this?", max_new_tokens=6)
    output = model.generate([text("is "), image(a), text(" larger than "), image(b), text("?")])
    assert output == chat_pipeline.ask([a, b], "is <image> larger than <image>?", max_new_tokens=6)
    turns = [
        {"role": "user", "content": [image(a), text("what is this?")]},
        {"role": "assistant", "content": [text("a cube")]},
        {"role": "user", "content": [text("how many balls?")]},
    ]
    again = [
        chat_pipeline.build_message(a, "what is this?"),
        {"role": "assistant", "content": "a cube"},
        chat_pipeline.build_message([], "how many balls?"),
    ]
    assert model.chat_inner(turns) == chat_pipeline.chat(again, max_new_tokens=6)


def test_video_sampling_options(kit, chat_pipeline, heard):
    model = kit.VitrailModel(chat_pipeline, num_frames=8)
    clip = {"type": "video", "value": "clip.mp4"}
    model.generate_inner([clip, {**clip, "nframes": 4}, {**clip, "fps": 1.0}, text("what happens?")])
    parts = heard[0][0][0]["content"][:3]
    assert [{key: part[key] for key in part if key != "type"} for part in parts] == [
        {"video": "clip.mp4", "num_frames": 8},
        {"video": "clip.mp4", "num_frames": 4},
        {"video": "clip.mp4", "fps": 1.0},
    ]


def test_invalid_inputs_raise(kit, chat_pipeline, pictures):
    model = kit.VitrailModel(chat_pipeline)
    with pytest.raises(ConfigError, match="image item has the unknown key 'min_pixels'"):
        model.generate_inner([image(pictures[0], min_pixels=4), text("what?")])
    with pytest.raises(TextError, match="does not end with a user message"):
        model.chat_inner([{"role": "assistant", "content": [text("a cube")]}])
    with pytest.raises(TextError, match="type 'audio'"):
        model.generate_inner([{"type": "audio", "value": "a.wav"}, text("what?")])
    with pytest.raises(ConfigError, match="num_beams is 3"):
        kit.VitrailModel("nowhere", num_beams=3)  # before anything is read


def test_registered_model(kit, chat_pipeline, pictures, monkeypatch):
    known = {}
    monkeypatch.setattr(importlib.import_module("vlmeval.config"), "supported_VLM", known)
    kit.register_model("mine", chat_pipeline, max_new_tokens=4)
    assert known["mine"]().generate([image(pictures[0]), text("what?")]) == chat_pipeline.ask(
        pictures[0], "what?", max_new_tokens=4
    )
