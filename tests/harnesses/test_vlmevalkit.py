"""VLMEvalKit's messages: texts and pictures in their order, roles, and options, as the model is asked."""

import importlib

import pytest

from vitrail.errors import ConfigError, TextError
from vitrail.generate.sampling import GREEDY, Sampling


@pytest.fixture
def kit(adapter):
    return adapter("vlmevalkit", "vlmeval")


def text(value, **more):
    return {"type": "text", "value": value, **more}


def image(value, **more):
    return {"type": "image", "value": value, **more}


def test_what_is_asked(kit, talker, pictures, heard):
    a, b, _ = pictures
    model = kit.Vitrail(talker, max_new_tokens=512, do_sample=True, temperature=0.3, top_p=0.9, stop="###", seed=7)
    assert model.INTERLEAVE and not model.use_custom_prompt("MMBench") and not model.VIDEO_LLM
    assert (
        model.generate([text("is"), image(a), text("larger than"), image(b), text("?")], dataset="MMBench")
        == "answer 1"
    )
    assert model.generate("how many balls?") == "answer 2"
    model.generate_inner([text("Be brief.", role="system"), image(a, role="user"), text("what?", role="user")])
    (first, how), (second, other), (third, _) = heard
    words = [{"type": "text", "text": said} for said in ("is", "larger than", "?")]
    shown = [{"type": "image", "image": picture} for picture in (a, b)]
    assert first == [{"role": "user", "content": [words[0], shown[0], words[1], shown[1], words[2]]}]
    drawn = Sampling(temperature=0.3, top_p=0.9, seed=7)
    assert how == {"max_new": 512, "sampling": drawn, "stop_strings": ("###",)}
    assert other["sampling"] == drawn.with_(seed=8)
    assert second == [{"role": "user", "content": [{"type": "text", "text": "how many balls?"}]}]
    assert [(turn["role"], len(turn["content"])) for turn in third] == [("system", 1), ("user", 2)]


def test_answers_are_the_models(kit, talker, pictures):
    a, b, _ = pictures
    model = kit.Vitrail(talker, max_new_tokens=6)
    assert model.how["sampling"] == GREEDY
    said = model.generate([image(a), image(b), text("what is this?")])
    assert said == talker.ask([a, b], "what is this?", max_new=6)
    said = model.generate([text("is "), image(a), text(" larger than "), image(b), text("?")])
    assert said == talker.ask([a, b], "is <image> larger than <image>?", max_new=6)
    turns = [
        {"role": "user", "content": [image(a), text("what is this?")]},
        {"role": "assistant", "content": [text("a cube")]},
        {"role": "user", "content": [text("how many balls?")]},
    ]
    again = [
        talker.turn(a, "what is this?"),
        {"role": "assistant", "content": "a cube"},
        talker.turn([], "how many balls?"),
    ]
    assert model.chat_inner(turns) == talker.chat(again, max_new=6)


def test_videos_say_how_they_are_read(kit, talker, heard):
    model = kit.Vitrail(talker, frames=8)
    clip = {"type": "video", "value": "clip.mp4"}
    model.generate_inner([clip, {**clip, "nframes": 4}, {**clip, "fps": 1.0}, text("what happens?")])
    parts = heard[0][0][0]["content"][:3]
    assert [{key: part[key] for key in part if key != "type"} for part in parts] == [
        {"video": "clip.mp4", "frames": 8}, {"video": "clip.mp4", "frames": 4}, {"video": "clip.mp4", "fps": 1.0},
    ]  # fmt: skip


def test_what_is_wrong_is_said(kit, talker, pictures):
    model = kit.Vitrail(talker)
    with pytest.raises(ConfigError, match="'min_pixels' of its image"):
        model.generate_inner([image(pictures[0], min_pixels=4), text("what?")])
    with pytest.raises(TextError, match="does not end with the user"):
        model.chat_inner([{"role": "assistant", "content": [text("a cube")]}])
    with pytest.raises(TextError, match="kind 'audio'"):
        model.generate_inner([{"type": "audio", "value": "a.wav"}, text("what?")])
    with pytest.raises(ConfigError, match="3 beams"):
        kit.Vitrail("nowhere", num_beams=3)  # before anything is read


def test_a_name_of_its_own(kit, talker, pictures, monkeypatch):
    known = {}
    monkeypatch.setattr(importlib.import_module("vlmeval.config"), "supported_VLM", known)
    kit.register("mine", talker, max_new_tokens=4)
    assert known["mine"]().generate([image(pictures[0]), text("what?")]) == talker.ask(pictures[0], "what?", max_new=4)
