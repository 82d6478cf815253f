"""Exports open in transformers: processor inputs and answers match; released processor files are kept."""

import importlib
import json
import shutil
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers as T
from PIL import Image
from transformers.models.auto.processing_auto import processor_class_from_name
from transformers.models.pixtral import image_processing_pil_pixtral
from transformers.models.smolvlm import processing_smolvlm

import vitrail
from helpers import randomize
from vitrail import hub
from vitrail.cli import checkpoint_conversion_command
from vitrail.encoders.multi_tower import normalize_pixels
from vitrail.models.cross_attention_vlm import CrossAttentionVLM
from vitrail.pipelines import ChatPipeline
from vitrail.processing.chat_template import ChatTemplate
from vitrail.processing.patchify import patchify_blocks
from vitrail.processing.resolution_policies import LongestEdgePolicy, NativePolicy
from vitrail.processing.tokenizer import Tokenizer
from vitrail.registry import FAMILIES

SAID = ["USER: what is this? ASSISTANT: a red cube. Question: how many? Answer: User: what?\nAssistant: a blue ball"]
ASK = "what is this?"
WHOLE, GENERATION, TOKENS = "processor_config.json", "generation_config.json", "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
SMALL = {"hidden_size": 24, "intermediate_size": 30, "num_hidden_layers": 2, "num_attention_heads": 2}
TOWER = {**SMALL, "image_size": 30, "patch_size": 7}  # two pixels of a side are not read
CLIP = {"model_type": "clip_vision_model", **TOWER}
SIGLIP = {"model_type": "siglip_vision_model", **TOWER}
JANUS_TOWER = {key: value for key, value in TOWER.items() if key != "intermediate_size"} | {"mlp_ratio": 1.25}
SAM = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_dim": 30, "image_size": 72}
SAM |= {"patch_size": 6, "window_size": 5, "global_attn_indexes": [0], "output_channels": 4}
PINPOINTS = [[30, 60], [60, 30], [60, 60], [90, 30]]
PACKED = {"depth": 2, "num_heads": 1, "patch_size": 3, "temporal_patch_size": 2, "spatial_merge_size": 2}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}}
THIRD = {**PACKED, "hidden_size": 12, "intermediate_size": 20, "out_hidden_size": 24}
TALKED = ["<|im_start|>", "<|im_end|>"]
ROWS = ["[IMG_BREAK]", "[IMG_END]"]
PIXTRAL = {"model_type": "pixtral", **SMALL, "image_size": 60, "patch_size": 5}
EYE = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
GEMMA4_BOUNDARIES = {"boi_token_id": "<|image>", "eoi_token_id": "<image|>"}
GLM_VISION = ["<|begin_of_image|>", "<|end_of_image|>", "<|image|>"]
SPLIT = ["<image>", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>", "<end_of_utterance>"]
SPLIT_TOWER = {**TOWER, "image_size": 31, "patch_size": 7}
GEMMA = ["<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"]
HEADERS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


class Case(NamedTuple):
    """about: config.json without token ids; specials: special tokens; named: bos, eos, pad."""

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
    "llava_pixtral": Case(
        {"vision_config": PIXTRAL, "vision_feature_select_strategy": "full", "vision_feature_layer": -1},
        ["[IMG]", *ROWS],
        image="[IMG]",
    ),
    "mistral3": Case({"vision_config": PIXTRAL, "tie_word_embeddings": False}, ["[IMG]", *ROWS], image="[IMG]"),
    "janus": Case(
        {"vision_config": {**JANUS_TOWER, "projection_dim": 24}, "tie_word_embeddings": False},
        ["<pic>", "<begin_of_image>", "<end_of_image>"],
        image="<pic>",
        mark="image_token_id",
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
    "glm4v": Case(
        {
            "vision_config": {**THIRD, "image_size": 12},
            "text_config": {"rope_parameters": {**ROPE["rope_parameters"], "partial_rotary_factor": 1.0}},
        },
        ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", *GLM_VISION],
        {"eos": "<|endoftext|>"},
        "<|image|>",
        "image_token_id",
    ),
    "gemma3": Case(
        {"vision_config": {**SIGLIP, "vision_use_head": False}, "mm_tokens_per_image": 4},
        GEMMA,
        {"bos": "<bos>", "eos": "<eos>"},
        "<image_soft_token>",
    ),
    "idefics3": Case({"vision_config": SPLIT_TOWER}, SPLIT, mark="image_token_id"),
    "smolvlm": Case({"vision_config": SPLIT_TOWER, "scale_factor": 1}, SPLIT, mark="image_token_id"),
    "paligemma": Case({"vision_config": SIGLIP, "projection_dim": 24}, named={"bos": "<bos>", "eos": "<eos>"}),
    "gemma4": Case(
        {
            "vision_config": {**SMALL, "num_key_value_heads": 2, "head_dim": 12, "patch_size": 3},
            "text_config": {"head_dim": 12, "global_head_dim": 16, "hidden_size_per_layer_input": 0},
            "vision_soft_tokens_per_image": 70,
            "tie_word_embeddings": False,
        },
        ["<|turn>", "<turn|>", "<|image>", "<image|>", "<|image|>", "<|audio>", "<audio|>", "<|audio|>", "<|video|>"],
        {"bos": "<bos>", "eos": "<eos>", "pad": "<pad>"},
        "<|image|>",
        "image_token_id",
    ),
    "qwen2_vl": Case(
        {"vision_config": {**PACKED, "embed_dim": 12, "mlp_ratio": 2, "hidden_size": 24}, "text_config": ROPE}, **CHATML
    ),
    "qwen2_5_vl": Case(
        {"vision_config": {**THIRD, "window_size": 12, "fullatt_block_indexes": [1]}, "text_config": ROPE}, **CHATML
    ),
    "qwen3_5": Case(
        {
            "vision_config": {**THIRD, "num_position_embeddings": 16},
            "text_config": {
                "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
                "head_dim": 16,
                "layer_types": ["linear_attention", "full_attention"],
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 6,
                "linear_value_head_dim": 8,
            },
        },
        **CHATML,
    ),
    "qwen3_vl": Case(
        {
            "vision_config": {**THIRD, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            "text_config": {**ROPE, "head_dim": 12},
        },
        **CHATML,
    ),
}


def template_config(name: str) -> Any:
    return FAMILIES[name.partition(",")[0]].chat_config


def made(name: str, template: str | None = None) -> tuple[Any, Tokenizer]:
    """Build a random model and its tokenizer."""
    case, family = CASES[name], FAMILIES[name.partition(",")[0]]
    named: dict[str, Any] = case.named
    words = Tokenizer.train(SAID * 3, 300, special_tokens=[], **named)
    at = words.vocab_size
    words.add_special_tokens(case.specials)
    words.chat_template = template
    text = {**SMALL, "vocab_size": words.vocab_size, "num_key_value_heads": 2, "max_position_embeddings": 2000}
    text |= {"rms_norm_eps": 1e-5, **case.about.get("text_config", {})}
    about = {**case.about, "model_type": family.name, "text_config": text, case.mark: words.token_to_id(case.image)}
    if family.name == "idefics":
        about |= {**text, "vocab_size": at, "image_token_id": words.token_to_id("<image>")}
    if name.startswith(("llava", "blip", "idefics3", "smolvlm")):
        text["model_type"] = "llama"
    if name == "gemma3":
        about |= {"boi_token_index": words.token_to_id(GEMMA[2]), "eoi_token_index": words.token_to_id(GEMMA[3])}
    about |= {f"{mark[2:-2]}_token_id": words.token_to_id(mark) for mark in EYE[:2] if mark in case.specials}
    about |= {f"image_{mark[5:-1].lower()}_token_id": words.token_to_id(mark) for mark in ROWS if mark in case.specials}
    about |= next(
        ({"video_token_id": words.token_to_id(one)} for one in (EYE[3], "<video>") if one in case.specials), {}
    )
    if family.name == "gemma4":
        about |= {key: words.token_to_id(token) for key, token in GEMMA4_BOUNDARIES.items()}
    config = family.from_hf_config(about)
    if isinstance(config.policy, NativePolicy):
        config = config.replace(policy=config.policy.replace(min_pixels=500, max_pixels=3000))
    return randomize(family.model_class(config).eval(), 3, 0.3), words


@pytest.fixture(scope="module")
def picture():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (41, 97, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Map each name to an exported folder and the model loaded from it."""
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
    """Load the transformers processor, without the parts that need torchvision."""
    result = json.loads((folder / WHOLE).read_text())
    if result["processor_class"] == "PixtralProcessor":  # its module imports the other image processor
        monkeypatch.setitem(
            sys.modules, image_processing_pil_pixtral.__name__.replace("_pil", ""), image_processing_pil_pixtral
        )
        kind = importlib.import_module("transformers.models.pixtral.processing_pixtral").PixtralProcessor
        result.pop("processor_class")
    else:
        kind = processor_class_from_name(result.pop("processor_class"))
        if "video_processor" not in kind.get_attributes():
            return T.AutoProcessor.from_pretrained(folder)
    monkeypatch.setattr(processing_smolvlm, "num2words", str)  # an optional package, for videos
    monkeypatch.setattr(T.ProcessorMixin, "check_argument_for_proper_class", lambda *given: None)
    loaded = {"image_processor": T.AutoImageProcessor, "tokenizer": T.AutoTokenizer}
    parts: dict[str, Any] = {name: part.from_pretrained(folder) for name, part in loaded.items()}
    stand_in = SimpleNamespace(num_frames=4, fps=1.0) if kind is T.SmolVLMProcessor else None
    videos: dict[str, Any] = {"video_processor": stand_in} if "video_processor" in kind.get_attributes() else {}
    if "feature_extractor" in kind.get_attributes():
        videos["feature_extractor"] = getattr(T, result.pop("feature_extractor")["feature_extractor_type"])()
    return kind(**parts, **videos, chat_template=(folder / TEMPLATE).read_text(), **result)


def asked(processor, picture) -> Any:
    """Return the processor's inputs, by chat template or by the authors' prompt format."""
    if isinstance(processor, T.Blip2Processor):
        return processor(picture, f"Question: {ASK} Answer:", return_tensors="pt")
    if isinstance(processor, T.PaliGemmaProcessor):
        given = processor(picture, f"<image>{ASK}", return_tensors="pt")
        return {key: value for key, value in given.items() if key != "labels"}
    if isinstance(processor, T.Florence2Processor):
        return processor(images=picture, text=ASK, return_tensors="pt")
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
    output = model.generate(**given, max_new_tokens=8, do_sample=False)[0, given["input_ids"].shape[1] :]
    return processor.decode(output, skip_special_tokens=True).strip()


@pytest.mark.parametrize("name", CASES)
def test_exported_processor_and_model_match(name, exported, picture, monkeypatch):
    folder, chat_pipeline = exported(name)
    processor = opened(folder, monkeypatch)
    assert type(processor).__name__ == template_config(name).processor_class
    given = asked(processor, picture)
    stream, shown, _ = chat_pipeline.build_prompt([chat_pipeline.build_message(picture, ASK)])
    assert given["input_ids"][0].tolist() == stream.ids.tolist()
    if name == "deepseek_vl_hybrid":  # whose towers take the mean and deviation of each: see test_deepseek_vl
        pixels, tower = given["high_res_pixel_values"], chat_pipeline.model.config.tower
        shown = shown._replace(pixels=normalize_pixels(shown.pixels, tower.mean, tower.std))
    elif "image_sizes" in given and isinstance(policy := chat_pipeline.model.config.policy, LongestEdgePolicy):
        pixels, _ = patchify_blocks(
            given["pixel_values"][0], policy.patch_size, merge_size=policy.merge_size, temporal_patch_size=1
        )
    elif "image_position_ids" in given:  # padded rows × columns × channels, not normalized
        policy, (layout,) = chat_pipeline.model.config.policy, shown.layouts
        sides = [layout.num_rows, policy.merge_size, layout.num_columns, policy.merge_size]
        patches = given["pixel_values"][0, : layout.num_patches].view(*sides, policy.patch_size, policy.patch_size, 3)
        pixels = 2 * patches.permute(0, 2, 1, 3, 6, 4, 5).reshape(shown.pixels.shape) - 1
    else:
        pixels = given["pixel_values"].reshape(shown.pixels.shape)
    torch.testing.assert_close(pixels, shown.pixels, atol=1e-5, rtol=0)
    output = answer(folder, processor, given)
    if name != "mllama":  # where transformers differs from Meta's own code: see below
        assert output == chat_pipeline.ask(picture, ASK, max_new_tokens=8) and output


@pytest.mark.parametrize(
    "name", [name for name in CASES if template_config(name).takes_chat_template and name != "llava_onevision"]
)
def test_conversation(name, exported, picture, monkeypatch):
    folder, chat_pipeline = exported(name)
    turns = [turn(picture, ASK), {"role": "assistant", "content": "a cube"}, turn(picture, "and here?")]
    given = chatted(opened(folder, monkeypatch), turns)
    assert given["input_ids"][0].tolist() == chat_pipeline.build_prompt(turns).stream.ids.tolist()


def test_mllama_answers_match_transformers(picture, tmp_path):
    """All tokens see the image, and taps are taken as in transformers."""
    model, words = made("mllama", "{{ '<|image|>' + bos_token + messages[0].content[1].text }}")
    hub.to_hf(model, tmp_path, tokenizer=words)
    processor = T.AutoProcessor.from_pretrained(tmp_path)
    tower = model.config.tower.replace(feature_layers=tuple(tap + 1 for tap in model.config.tower.feature_layers))
    other = CrossAttentionVLM(model.config.replace(tower=tower))
    other.load_state_dict(model.state_dict())
    output = ChatPipeline(other, words, ChatTemplate.from_tokenizer(words)).ask(picture, ASK, max_new_tokens=8)
    assert output == answer(tmp_path, processor, asked(processor, picture)) and output


@pytest.mark.parametrize(
    "name", ["llava", "llava_next", "deepseek_vl", "deepseek_vl_hybrid", "blip-2", "idefics", "mllama"]
)
def test_processor_files_round_trip(name, exported, tmp_path):
    """Processor, tokenizer and generation settings survive native save and export."""
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
    hub.save(hub.from_hf(folder), tmp_path / "ours", hub.load_tokenizer(folder))
    hub.to_hf(hub.load(tmp_path / "ours"), tmp_path / "again", tokenizer=hub.load_tokenizer(tmp_path / "ours"))
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
def test_video_processor_files_come_from_config(name, exported, tmp_path):
    """The exported video processor file contains the settings of the model config only."""
    folder, file = tmp_path / "theirs", "video_preprocessor_config.json"
    shutil.copytree(exported(name)[0], folder)
    output = {"video_processor_type": "X", "fps": 3.0, "odd": 1}
    (folder / file).write_text(json.dumps(output))
    (folder / WHOLE).write_text(json.dumps({"video_processor": output, "odd": 2}))
    hub.save(hub.from_hf(folder), tmp_path / "ours", hub.load_tokenizer(folder))
    model = hub.load(tmp_path / "ours")
    hub.to_hf(model, tmp_path / "again", tokenizer=hub.load_tokenizer(tmp_path / "ours"))
    part, whole = (json.loads((tmp_path / "again" / name).read_text()) for name in (file, WHOLE))
    assert (
        part["fps"] == model.config.resolved_video_sampling.fps == 3.0
        and "odd" not in part
        and "video_processor" not in whole
    )
    assert whole["odd"] == 2 and whole["processor_class"] == template_config(name).processor_class


@pytest.mark.parametrize("name", CASES)
def test_written_files_match_transformers(name, exported, tmp_path, monkeypatch):
    """Keys of processor_config.json without image settings, and named tokens of the tokenizer."""
    folder, _ = exported(name)
    processor = opened(folder, monkeypatch)
    ours, theirs = json.loads((folder / WHOLE).read_text()), processor.to_dict()
    if "feature_extractor" in theirs:  # written without its settings, which are the defaults
        key = "feature_extractor_type"
        theirs["feature_extractor"] = {key: theirs["feature_extractor"][key]}
    assert ours == {key: value for key, value in theirs.items() if key not in ("image_processor", "video_processor")}
    named = json.loads((folder / TOKENS).read_text()).get("extra_special_tokens", {})
    assert named.items() <= processor.tokenizer.special_tokens_map.items()


def test_missing_image_token_is_reported(tmp_path, capsys):
    model, words = made("llava")
    bare = Tokenizer.train(SAID, 280, special_tokens=[], bos="<s>", eos="</s>")  # without a word for a picture
    assert hub.to_hf(model, tmp_path / "none") == []
    wordless = f"{TEMPLATE} was not written: the tokenizer has no image token"
    assert hub.to_hf(model, tmp_path / "bare", tokenizer=bare) == [wordless]
    for name in ("none", "bare"):
        result = {"patch_size": 7, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
        assert json.loads((tmp_path / name / WHOLE).read_text()) == {**result, "processor_class": "LlavaProcessor"}
        assert not (tmp_path / name / TEMPLATE).exists()
    hub.save(model, tmp_path / "ours", bare)
    checkpoint_conversion_command.export_checkpoint(str(tmp_path / "ours"), out=tmp_path / "told")
    assert wordless in capsys.readouterr().out
    hub.save(model, tmp_path / "ours", words)
    checkpoint_conversion_command.export_checkpoint(str(tmp_path / "ours"), out=tmp_path / "whole")
    assert "written" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "lacks", "message"),
    [
        ("blip-2", "<image>", "Blip2Processor uses the image token <image>, but the tokenizer has <pic>"),
        ("idefics", "<image>", "IdeficsProcessor uses the image token <image>, but the tokenizer has <pic>"),
        ("internvl", "</img>", "InternVLProcessor puts <img> and </img> around an image, which the tokenizer lacks"),
        ("qwen2_vl", "<|im_start|>", f"{TEMPLATE} was not written: the tokenizer lacks <|im_start|>"),
    ],
)
def test_tokenizer_mismatch_is_reported(name, lacks, message, tmp_path):
    model, words = made(name)
    spelt = json.dumps(lacks, ensure_ascii=False)
    words.save(tmp_path / "words")
    file = tmp_path / "words" / "tokenizer.json"
    file.write_text(file.read_text().replace(spelt, json.dumps("<pic>")))
    [output] = hub.to_hf(model, tmp_path / "hf", tokenizer=Tokenizer.load(file.parent))
    assert message in output
    assert (tmp_path / "hf" / WHOLE).exists() == (name == "qwen2_vl")
