"""Exports as transformers opens them: its processor makes of a picture and a question what ours makes of them, and its
model answers what ours answers; what a released folder said comes back from ours."""

import json
import shutil
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers as T
from PIL import Image
from transformers.models.auto.processing_auto import processor_class_from_name

import vitrail
from helpers import randomize
from vitrail import hub
from vitrail.cli import port
from vitrail.encoders.towers import normalized
from vitrail.hub.families import FAMILIES
from vitrail.models.looking import LookingVLM
from vitrail.processing.chat import ChatTemplate
from vitrail.processing.resolution import Native
from vitrail.processing.text import Tokenizer
from vitrail.talker import Talker

SAID = ["USER: what is this? ASSISTANT: a red cube. Question: how many? Answer: User: what?\nAssistant: a blue ball"]
ASK = "what is this?"
WHOLE, GENERATION, TOKENS = "processor_config.json", "generation_config.json", "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
SMALL = {"hidden_size": 24, "intermediate_size": 30, "num_hidden_layers": 2, "num_attention_heads": 2}
TOWER = {**SMALL, "image_size": 30, "patch_size": 7}  # two pixels of a side are not read
CLIP = {"model_type": "clip_vision_model", **TOWER}
SIGLIP = {"model_type": "siglip_vision_model", **TOWER}
SAM = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_dim": 30, "image_size": 72}
SAM |= {"patch_size": 6, "window_size": 5, "global_attn_indexes": [0], "output_channels": 4}
PINPOINTS = [[30, 60], [60, 30], [60, 60], [90, 30]]
PACKED = {"depth": 2, "num_heads": 1, "patch_size": 3, "temporal_patch_size": 2, "spatial_merge_size": 2}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}}
THIRD = {**PACKED, "hidden_size": 12, "intermediate_size": 20, "out_hidden_size": 24}
TALKED = ["<|im_start|>", "<|im_end|>"]
EYE = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
HEADERS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


class Case(NamedTuple):
    """about: config.json, without what the tokenizer says; specials: of the tokenizer; named: its bos, eos, pad"""

    about: dict[str, Any]
    specials: list[str] = ["<image>"]
    named: dict[str, str] = {"bos": "<s>", "eos": "</s>"}
    image: str = "<image>"
    mark: str = "image_token_index"


CHATML: dict[str, Any] = {"specials": [*TALKED, *EYE], "named": {"eos": "<|im_end|>"}, "image": "<|image_pad|>"}
CHATML |= {"mark": "image_token_id"}
CASES = {
    "llava": Case({"vision_config": CLIP}, ["<pic>"], image="<pic>"),
    "llava, siglip": Case({"vision_config": SIGLIP, "vision_feature_select_strategy": "full"}),
    "llava, with CLS": Case({"vision_config": CLIP, "vision_feature_select_strategy": "full"}),
    "llava_next": Case({"vision_config": CLIP, "image_grid_pinpoints": PINPOINTS}),
    "llava_onevision": Case(
        {"vision_config": SIGLIP, "image_grid_pinpoints": PINPOINTS, "vision_aspect_ratio": "anyres_max_2"},
        [*TALKED, "<pic>", "<video>"],
        {"eos": "<|im_end|>"},
        "<pic>",
    ),
    "llava_next_video": Case(
        {"vision_config": CLIP, "image_grid_pinpoints": PINPOINTS}, ["<pic>", "<video>"], image="<pic>"
    ),
    "deepseek_vl": Case({"vision_config": SIGLIP}, ["<pic>"], image="<pic>", mark="image_token_id"),
    "deepseek_vl_hybrid": Case({"vision_config": SIGLIP, "high_res_vision_config": SAM}, mark="image_token_id"),
    "blip-2": Case(
        {"vision_config": TOWER, "qformer_config": SMALL, "num_query_tokens": 5}, named={"bos": "</s>", "eos": "</s>"}
    ),
    "idefics": Case(
        {"additional_vocab_size": 3, "vision_config": {**TOWER, "embed_dim": 24}},
        ["<fake_token_around_image>", "<image>", "<end_of_utterance>"],
    ),
    "mllama": Case(
        {
            "vision_config": {
                **SMALL,
                "attention_heads": 2,
                "num_global_layers": 1,
                "image_size": 28,
                "patch_size": 7,
                "max_num_tiles": 4,
                "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
                "intermediate_layers_indices": [0],
                "vision_output_dim": 48,
            },
            "text_config": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
        },
        [*HEADERS, "<|image|>"],
        {"bos": "<|begin_of_text|>", "eos": "<|eot_id|>"},
        "<|image|>",
    ),
    "internvl": Case(
        {"vision_config": {**SMALL, "image_size": [12, 12], "patch_size": [3, 3]}},
        [*TALKED, "<img>", "</img>", "<IMG_CONTEXT>"],
        {"eos": "<|im_end|>"},
        "<IMG_CONTEXT>",
        "image_token_id",
    ),
    "qwen2_vl": Case(
        {"vision_config": {**PACKED, "embed_dim": 12, "mlp_ratio": 2, "hidden_size": 24}, "text_config": ROPE}, **CHATML
    ),
    "qwen2_5_vl": Case(
        {"vision_config": {**THIRD, "window_size": 12, "fullatt_block_indexes": [1]}, "text_config": ROPE}, **CHATML
    ),
    "qwen3_vl": Case(
        {
            "vision_config": {**THIRD, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            "text_config": {**ROPE, "head_dim": 12},
        },
        **CHATML,
    ),
}


def habit(name: str) -> Any:
    return FAMILIES[name.partition(",")[0]].habit


def made(name: str, template: str | None = None) -> tuple[Any, Tokenizer]:
    """A random model and its tokenizer."""
    case, family = CASES[name], FAMILIES[name.partition(",")[0]]
    named: dict[str, Any] = case.named
    words = Tokenizer.train(SAID * 3, 300, specials=[], **named)
    at = words.size
    words.add_specials(case.specials)
    words.chat_template = template
    text = {**SMALL, "vocab_size": words.size, "num_key_value_heads": 2, "max_position_embeddings": 2000}
    text |= {"rms_norm_eps": 1e-5, **case.about.get("text_config", {})}
    about = {**case.about, "model_type": family.name, "text_config": text, case.mark: words.id(case.image)}
    if family.name == "idefics":
        about |= {**text, "vocab_size": at, "image_token_id": words.id("<image>")}
    if name.startswith(("llava", "blip")):
        text["model_type"] = "llama"
    about |= {f"{mark[2:-2]}_token_id": words.id(mark) for mark in EYE[:2] if mark in case.specials}
    about |= next(({"video_token_id": words.id(one)} for one in (EYE[3], "<video>") if one in case.specials), {})
    config = family.read(about)
    if isinstance(config.policy, Native):
        config = config.with_(policy=config.policy.with_(min_pixels=500, max_pixels=3000))
    return randomize(family.model(config).eval(), 3, 0.3), words


@pytest.fixture(scope="module")
def picture():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (41, 97, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """name → a folder that we wrote, and ours that was read from it."""
    kept = {}

    def of(name: str):
        if name not in kept:
            folder = tmp_path_factory.mktemp("hf")
            model, words = made(name)
            hub.to_hf(model, folder, tokenizer=words, family=name.partition(",")[0])
            kept[name] = folder, vitrail.load(folder, device="cpu")
        return kept[name]

    return of


def opened(folder, monkeypatch):
    """Their processor. Of those that take videos, too, it is put together here as they do, save for the part that reads
    videos, which needs torchvision."""
    told = json.loads((folder / WHOLE).read_text())
    kind = processor_class_from_name(told.pop("processor_class"))
    if "video_processor" not in kind.get_attributes():
        return T.AutoProcessor.from_pretrained(folder)
    monkeypatch.setattr(T.ProcessorMixin, "check_argument_for_proper_class", lambda *given: None)
    loaded = {"image_processor": T.AutoImageProcessor, "tokenizer": T.AutoTokenizer}
    parts: dict[str, Any] = {name: part.from_pretrained(folder) for name, part in loaded.items()}
    return kind(**parts, video_processor=None, chat_template=(folder / TEMPLATE).read_text(), **told)


def asked(processor, picture) -> Any:
    """Their inputs: by the chat template or, of those whose processor takes none, in the words of their authors."""
    if isinstance(processor, T.Blip2Processor):
        return processor(picture, f"Question: {ASK} Answer:", return_tensors="pt")
    if isinstance(processor, T.IdeficsProcessor):
        return processor(text=["User:", picture, f"{ASK}<end_of_utterance>", "\nAssistant:"], return_tensors="pt")
    return chatted(processor, [turn(picture, ASK)])


def chatted(processor, turns) -> Any:
    return processor.apply_chat_template(
        turns, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )


def turn(picture, text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": text}]}


def answer(folder, processor, given) -> str:
    model = T.AutoModelForImageTextToText.from_pretrained(folder).eval()
    said = model.generate(**given, max_new_tokens=8, do_sample=False)[0, given["input_ids"].shape[1] :]
    return processor.decode(said, skip_special_tokens=True).strip()


@pytest.mark.parametrize("name", CASES)
def test_their_processor_and_model_do_as_ours(name, exported, picture, monkeypatch):
    folder, talker = exported(name)
    processor = opened(folder, monkeypatch)
    assert type(processor).__name__ == habit(name).processor
    given = asked(processor, picture)
    stream, shown, _ = talker.prompt([talker.turn(picture, ASK)])
    assert given["input_ids"][0].tolist() == stream.ids.tolist()
    if name == "deepseek_vl_hybrid":  # whose towers take the mean and deviation of each: see test_deepseek_vl
        pixels, tower = given["high_res_pixel_values"], talker.model.config.tower
        shown = shown._replace(pixels=normalized(shown.pixels, tower.mean, tower.std))
    else:
        pixels = given["pixel_values"].reshape(shown.pixels.shape)
    torch.testing.assert_close(pixels, shown.pixels, atol=1e-5, rtol=0)
    said = answer(folder, processor, given)
    if name != "mllama":  # where transformers differs from Meta's own code: see below
        assert said == talker.ask(picture, ASK, max_new=8) and said


@pytest.mark.parametrize("name", [name for name in CASES if habit(name).chats and name != "llava_onevision"])
def test_a_conversation(name, exported, picture, monkeypatch):
    folder, talker = exported(name)
    turns = [turn(picture, ASK), {"role": "assistant", "content": "a cube"}, turn(picture, "and here?")]
    given = chatted(opened(folder, monkeypatch), turns)
    assert given["input_ids"][0].tolist() == talker.prompt(turns).stream.ids.tolist()


def test_mllama_answers_as_transformers_does(picture, tmp_path):
    """Asked so that every word sees the picture, with the taps of the tower taken where transformers takes them."""
    model, words = made("mllama", "{{ '<|image|>' + bos_token + messages[0].content[1].text }}")
    hub.to_hf(model, tmp_path, tokenizer=words)
    processor = T.AutoProcessor.from_pretrained(tmp_path)
    tower = model.config.tower.with_(taps=tuple(tap + 1 for tap in model.config.tower.taps))
    other = LookingVLM(model.config.with_(tower=tower))
    other.load_state_dict(model.state_dict())
    said = Talker(other, words, ChatTemplate.of(words)).ask(picture, ASK, max_new=8)
    assert said == answer(tmp_path, processor, asked(processor, picture)) and said


@pytest.mark.parametrize(
    "name", ["llava", "llava_next", "deepseek_vl", "deepseek_vl_hybrid", "blip-2", "idefics", "mllama"]
)
def test_what_came_is_kept(name, exported, tmp_path):
    """As transformers saves it, with manners and settings of its own: into our format, and out of it again."""
    folder = tmp_path / "theirs"
    shutil.copytree(exported(name)[0], folder)
    processor = T.AutoProcessor.from_pretrained(folder)
    processor.chat_template = processor.tokenizer.chat_template = "{{ bos_token }}{{ messages[0].role }}"
    processor.save_pretrained(folder)
    settings = {"temperature": 0.25, "do_sample": True}
    manners = {"padding_side": "left", "model_max_length": 77}
    for file, more in ((WHOLE, {"odd": [1]}), (GENERATION, settings), (TOKENS, manners)):
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | more))
    (folder / "preprocessor_config.json").unlink()  # the whole processor's file says it
    hub.save(hub.from_hf(folder), tmp_path / "ours", hub.tokenizer(folder))
    hub.to_hf(hub.load(tmp_path / "ours"), tmp_path / "again", tokenizer=hub.tokenizer(tmp_path / "ours"))
    again = T.AutoProcessor.from_pretrained(tmp_path / "again")
    assert again.to_dict() == processor.to_dict()
    assert again.chat_template == T.AutoProcessor.from_pretrained(folder).chat_template
    assert again.tokenizer.chat_template == processor.tokenizer.chat_template
    assert again.tokenizer.special_tokens_map == processor.tokenizer.special_tokens_map
    assert (again.tokenizer.padding_side, again.tokenizer.model_max_length) == ("left", 77)
    for file in (WHOLE, GENERATION):
        was, found = (json.loads((tmp_path / place / file).read_text()) for place in ("theirs", "again"))
        assert found == {key: value for key, value in was.items() if key != "image_processor"}


@pytest.mark.parametrize("name", ["internvl", "qwen2_vl", "llava_onevision", "llava_next_video"])
def test_what_came_about_videos(name, exported, tmp_path):
    """Nothing but what the config of a model that is shown videos says, in its own words."""
    folder, file = tmp_path / "theirs", "video_preprocessor_config.json"
    shutil.copytree(exported(name)[0], folder)
    said = {"video_processor_type": "X", "fps": 3.0, "odd": 1}
    (folder / file).write_text(json.dumps(said))
    (folder / WHOLE).write_text(json.dumps({"video_processor": said, "odd": 2}))
    hub.save(hub.from_hf(folder), tmp_path / "ours", hub.tokenizer(folder))
    model = hub.load(tmp_path / "ours")
    hub.to_hf(model, tmp_path / "again", tokenizer=hub.tokenizer(tmp_path / "ours"))
    part, whole = (json.loads((tmp_path / "again" / name).read_text()) for name in (file, WHOLE))
    assert part["fps"] == model.config.films.fps == 3.0 and "odd" not in part and "video_processor" not in whole
    assert whole["odd"] == 2 and whole["processor_class"] == habit(name).processor


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_is_what_they_save(name, exported, tmp_path, monkeypatch):
    """The keys of a processor_config.json, pictures aside, and what its tokenizer calls by name."""
    folder, _ = exported(name)
    processor = opened(folder, monkeypatch)
    ours, theirs = json.loads((folder / WHOLE).read_text()), processor.to_dict()
    assert ours == {key: value for key, value in theirs.items() if key not in ("image_processor", "video_processor")}
    named = json.loads((folder / TOKENS).read_text()).get("extra_special_tokens", {})
    assert named.items() <= processor.tokenizer.special_tokens_map.items()


def test_what_cannot_be_said(tmp_path, capsys):
    model, words = made("llava")
    bare = Tokenizer.train(SAID, 280, specials=[], bos="<s>", eos="</s>")  # without a word for a picture
    assert hub.to_hf(model, tmp_path / "none") == []
    wordless = f"no {TEMPLATE} was written: the tokenizer has no word for a picture"
    assert hub.to_hf(model, tmp_path / "bare", tokenizer=bare) == [wordless]
    for name in ("none", "bare"):
        told = {"patch_size": 7, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
        assert json.loads((tmp_path / name / WHOLE).read_text()) == {**told, "processor_class": "LlavaProcessor"}
        assert not (tmp_path / name / TEMPLATE).exists()
    hub.save(model, tmp_path / "ours", bare)
    port.give(str(tmp_path / "ours"), out=tmp_path / "told")
    assert wordless in capsys.readouterr().out
    hub.save(model, tmp_path / "ours", words)
    port.give(str(tmp_path / "ours"), out=tmp_path / "whole")
    assert "written" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "lacks", "says"),
    [
        ("blip-2", "<image>", "Blip2Processor takes <image> for a picture, and the tokenizer has <pic> for it"),
        ("idefics", "<image>", "IdeficsProcessor takes <image> for a picture, and the tokenizer has <pic> for it"),
        ("internvl", "</img>", "InternVLProcessor puts <img> and </img> around a picture, which the tokenizer lacks"),
        ("qwen2_vl", "<|im_start|>", f"no {TEMPLATE} was written: the tokenizer lacks <|im_start|>"),
    ],
)
def test_a_tokenizer_that_does_not_suit_their_processor(name, lacks, says, tmp_path):
    model, words = made(name)
    spelt = json.dumps(lacks, ensure_ascii=False)
    words.save(tmp_path / "words")
    file = tmp_path / "words" / "tokenizer.json"
    file.write_text(file.read_text().replace(spelt, json.dumps("<pic>")))
    [said] = hub.to_hf(model, tmp_path / "hf", tokenizer=Tokenizer.load(file.parent))
    assert says in said
    assert (tmp_path / "hf" / WHOLE).exists() == (name == "qwen2_vl")
