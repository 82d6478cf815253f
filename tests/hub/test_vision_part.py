"""The vision towers of full SAM and BLIP checkpoints match transformers, and are exported alone."""

import json
import random

import pytest
import torch
from transformers import (
    BlipConfig,
    BlipForConditionalGeneration,
    BlipForImageTextRetrieval,
    BlipVisionModel,
    SamConfig,
    SamModel,
)
from transformers.models.sam.modeling_sam import SamVisionModel

from helpers import randomize, relative
from vitrail.errors import CheckpointError
from vitrail.hub import from_hf, to_hf
from vitrail.hub.checkpoint_info import find_checkpoint

VALUES, GRADIENTS = 1e-4, 1e-3  # max |Δ| / max |reference|
TEXT = {"hidden_size": 12, "intermediate_size": 9, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 40}


def build_sam(draw: random.Random) -> SamModel:
    heads, patch, layers, out = draw.choice([1, 2]), draw.choice([2, 3]), draw.randint(1, 3), 8 * draw.randint(1, 2)
    size = patch * draw.randint(3, 6)
    vision = {
        "hidden_size": heads * draw.choice([4, 6]),
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "mlp_dim": draw.randint(7, 30),
        "patch_size": patch,
        "image_size": size,
        "window_size": draw.choice([0, 2]),
        "global_attn_indexes": [i for i in range(layers) if draw.random() < 0.4],
        "output_channels": out,
    }
    prompt = {"hidden_size": out, "image_size": size, "patch_size": patch}
    decoder = {"hidden_size": out, "mlp_dim": 8, "num_attention_heads": 1, "iou_head_hidden_dim": 8}
    return SamModel(SamConfig(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder))


def build_blip(draw: random.Random) -> BlipForConditionalGeneration | BlipForImageTextRetrieval:
    heads, patch = draw.choice([1, 2, 3]), draw.choice([2, 3, 5])
    vision = {
        "hidden_size": heads * draw.choice([4, 6]),
        "num_attention_heads": heads,
        "num_hidden_layers": draw.randint(1, 3),
        "intermediate_size": draw.randint(7, 30),
        "patch_size": patch,
        "image_size": patch * draw.randint(2, 5),
        "hidden_act": draw.choice(["gelu", "quick_gelu"]),
    }
    text = {**TEXT, "encoder_hidden_size": vision["hidden_size"]}
    model = draw.choice([BlipForConditionalGeneration, BlipForImageTextRetrieval])
    return model(BlipConfig(vision_config=vision, text_config=text))


CASES = {
    "sam": (build_sam, lambda model: model.vision_encoder, SamVisionModel, lambda x: x.flatten(2).mT),
    "blip": (build_blip, lambda model: model.vision_model, BlipVisionModel, lambda x: x[:, 1:]),
}


@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize("seed", range(6))
def test_tower_of_a_full_checkpoint(family, seed, tmp_path):
    build, get_tower, tower_class, to_features = CASES[family]
    reference = randomize(build(random.Random(seed)), seed=seed).eval()
    reference.save_pretrained(tmp_path / "theirs")
    ours, theirs = from_hf(tmp_path / "theirs"), get_tower(reference)
    pixels = torch.randn(2, ours.config.channels, ours.config.image_size, ours.config.image_size)
    mine, other = pixels.clone().requires_grad_(), pixels.clone().requires_grad_()
    features, expected = ours(mine), to_features(theirs(other).last_hidden_state)
    assert features.shape == expected.shape and relative(features, expected) <= VALUES
    weight = torch.randn_like(expected)
    (gradient,) = torch.autograd.grad((features * weight).sum(), mine)
    (expected_gradient,) = torch.autograd.grad((expected * weight).sum(), other)
    assert relative(gradient, expected_gradient) <= GRADIENTS

    to_hf(ours, tmp_path / "back", family=f"{family}_vision_model")
    assert json.loads((tmp_path / "back/config.json").read_text())["architectures"] == [tower_class.__name__]
    back = tower_class.from_pretrained(tmp_path / "back")
    stored = {name.removeprefix("vision_encoder."): p for name, p in back.state_dict().items()}
    assert stored.keys() == theirs.state_dict().keys()
    assert all(torch.equal(p, stored[name]) for name, p in theirs.state_dict().items())


def test_full_checkpoints_are_not_written(tmp_path):
    reference = build_sam(random.Random(0))
    reference.save_pretrained(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match="cannot be written as sam") as error:
        to_hf(from_hf(tmp_path / "theirs"), tmp_path / "back", family="sam")
    assert "sam_vision_model" in error.value.remedy


HUGE = {"hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16, "mlp_dim": 5120}
RELEASED = {
    # The class defaults of transformers, and the sizes of the huge model; parameters of the image encoder as published.
    "facebook/sam-vit-base": ({"model_type": "sam", "vision_config": {}}, 89_670_912),
    "facebook/sam-vit-huge": (
        {"model_type": "sam", "vision_config": {**HUGE, "global_attn_indexes": [7, 15, 23, 31]}},
        637_026_048,
    ),
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_sizes(name, tmp_path):
    hf_config, count = RELEASED[name]
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    found = find_checkpoint(tmp_path)
    with torch.device("meta"):
        assert sum(p.numel() for p in found.model_class(found.config).parameters()) == count
