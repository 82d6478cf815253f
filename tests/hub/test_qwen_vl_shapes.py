"""Released shapes of Qwen-VL models, on the meta device."""

import json
from pathlib import Path

import pytest
import torch

from hub.test_qwen_vl import MODELS, stored
from vitrail.hub.qwen3_5 import QWEN3_5_VARIANTS
from vitrail.hub.qwen_vl import DEFAULT_OUT_SIZE, QWEN_VL_VARIANTS, TEXT_SIZE_KEYS
from vitrail.models.vlm import VLM
from vitrail.registry import FAMILIES


def second(tied: bool, vision: dict, *sizes: int) -> dict:
    rope = {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    windows = {"use_sliding_window": False, "sliding_window": 32_768}
    text = dict(zip(TEXT_SIZE_KEYS, (*sizes, 32_768, 1e-6), strict=False))
    return {**text, **rope, **windows, "tie_word_embeddings": tied, "vision_config": vision}


def two(width: int) -> dict:
    sizes = {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "patch_size": 14}
    return {**sizes, "hidden_size": width, "in_chans": 3, "spatial_patch_size": 14, "model_type": "qwen2_vl"}


def two_and_a_half(width: int) -> dict:
    sizes = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3}
    more = {"fullatt_block_indexes": [7, 15, 23, 31], "window_size": 112, "tokens_per_second": 2}
    return {**sizes, **more, "out_hidden_size": width, "model_type": "qwen2_5_vl"}


SMALL = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
LARGE = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}


def third(tied: bool, vision: dict, *sizes: int, **more) -> dict:
    scaling = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    text = dict(zip(TEXT_SIZE_KEYS, (*sizes, 262_144, 1e-6, 5e6), strict=True))
    text |= {"head_dim": 128, "rope_scaling": scaling, **more}
    return {
        "text_config": text,
        "vision_config": {**vision, "out_hidden_size": text["hidden_size"]},
        "tie_word_embeddings": tied,
    }


EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
WIDER = EXPERTS | {"moe_intermediate_size": 1536}
# fmt: off
RELEASED = {
    # its family, the settings of its config.json, parameters in millions
    "Qwen2-VL-2B":      ("qwen2_vl",     second(True, two(1536), 151_936, 1536, 8960, 28, 12, 2), 2209),
    "Qwen2-VL-7B":      ("qwen2_vl",     second(False, two(3584), 152_064, 3584, 18_944, 28, 28, 4), 8291),
    "Qwen2.5-VL-3B":    ("qwen2_5_vl",   second(True, two_and_a_half(2048), 151_936, 2048, 11_008, 36, 16, 2), 3755),
    "Qwen2.5-VL-7B":    ("qwen2_5_vl",   second(False, two_and_a_half(3584), 152_064, 3584, 18_944, 28, 28, 4), 8292),
    "Qwen3-VL-2B":      ("qwen3_vl",     third(True, SMALL, 151_936, 2048, 6144, 28, 16, 8), 2128),
    "Qwen3-VL-4B":      ("qwen3_vl",     third(True, SMALL, 151_936, 2560, 9728, 36, 32, 8), 4438),
    "Qwen3-VL-8B":      ("qwen3_vl",     third(False, LARGE, 151_936, 4096, 12_288, 36, 32, 8), 8767),
    "Qwen3-VL-32B":     ("qwen3_vl",     third(False, LARGE, 151_936, 5120, 25_600, 64, 64, 8), 33_357),
    "Qwen3-VL-235B-A22B": ("qwen3_vl_moe",
                         third(False, LARGE, 151_936, 4096, 12_288, 94, 64, 4, **WIDER), 235_670),
    "Qwen3-VL-30B-A3B": ("qwen3_vl_moe", third(False, LARGE, 151_936, 2048, 6144, 48, 32, 4, **EXPERTS), 31_071),
}
# fmt: on


@pytest.mark.parametrize("name", RELEASED)
def test_released_shapes(name):
    family, about, millions = RELEASED[name]
    config, model = MODELS[family]
    row = FAMILIES[family]
    ours = row.read_config(about, Path("config.json"))
    assert row.supports(ours)
    with torch.device("meta"):
        mine, theirs = VLM(ours), model(config(**json.loads(json.dumps(about))))
    count = sum(p.numel() for p in mine.parameters())
    assert count == sum(p.numel() for p in theirs.parameters())
    assert round(count / 1e6) == millions
    names = {stored(family, key) for key, _ in theirs.named_parameters()}
    assert {x for move in row.tensor_rules(ours) for x in move.hf} == names
    rope = theirs.config.text_config.rope_parameters
    rotary = ours.decoder.rotary
    assert (list(rotary.sections), rotary.theta) == (rope["mrope_section"], rope["rope_theta"])
    assert ours.rules.tokens_per_second == 2


@pytest.mark.parametrize("variant", QWEN_VL_VARIANTS + QWEN3_5_VARIANTS, ids=lambda variant: variant.name)
def test_config_defaults(variant):
    config, _ = MODELS[variant.name]
    theirs = config()
    assert getattr(theirs.vision_config, variant.out_size_key) == DEFAULT_OUT_SIZE
    ours = FAMILIES[variant.name].from_hf_config(agreed(variant))
    assert {f"{mark}_token_id": id for mark, id in ours.vision_token_ids.items()}.items() <= theirs.to_dict().items()
    assert ours.rules.fill_id == theirs.image_token_id
    if variant.position_rule == "qwen2.5-vl":  # the class says 4, its released configs 2
        assert ours.rules.tokens_per_second == theirs.vision_config.tokens_per_second == 4


def agreed(variant) -> dict:
    """Make the default widths of merger and language model equal."""
    return {"vision_config": {variant.out_size_key: variant.text_defaults["hidden_size"]}}
