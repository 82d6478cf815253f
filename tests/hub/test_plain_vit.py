"""The original ViT, and CLIP's text tower with its projection, match transformers on random checkpoints."""

import json
import random

import pytest
import torch
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, ViTConfig, ViTForImageClassification, ViTModel

from helpers import randomize, relative
from vitrail.hub import from_hf, load, save, to_hf

CASES = 6


def build_vit(seed: int) -> ViTModel | ViTForImageClassification:
    draw = random.Random(seed)
    heads, patch = draw.choice([1, 2, 3]), draw.choice([2, 3, 5])
    config = ViTConfig(
        hidden_size=heads * draw.choice([4, 6, 10]),
        num_hidden_layers=draw.randint(1, 3),
        num_attention_heads=heads,
        intermediate_size=draw.randint(5, 40),
        hidden_act=draw.choice(["gelu", "gelu", "relu"]),
        layer_norm_eps=draw.choice([1e-12, 1e-6]),
        image_size=patch * draw.randint(2, 5),
        patch_size=patch,
        num_channels=draw.choice([1, 3]),
        qkv_bias=draw.random() < 0.7,
    )
    if seed % 2:
        config.num_labels = draw.randint(2, 9)
        return ViTForImageClassification(config)
    config.pooler_output_size = draw.choice([config.hidden_size, 7])
    return ViTModel(config)


def check_round_trip(ours, reference, folder):
    to_hf(ours, folder / "back")
    hf_config = json.loads((folder / "back/config.json").read_text())
    assert hf_config["model_type"] == reference.config.model_type
    back = type(reference).from_pretrained(folder / "back")
    theirs, again = reference.state_dict(), back.state_dict()
    assert theirs.keys() == again.keys() and all(torch.equal(theirs[name], again[name]) for name in theirs)
    save(ours, folder / "native")
    assert load(folder / "native").config == ours.config


def check_gradients(output, parameters, expected, reference_parameters):
    weight = torch.randn_like(expected)
    ours = torch.autograd.grad((output * weight).sum(), parameters)
    theirs = torch.autograd.grad((expected * weight).sum(), reference_parameters)
    for a, b in zip(ours, theirs, strict=True):
        assert relative(a.view_as(b), b) <= 1e-3


@pytest.mark.parametrize("seed", range(CASES))
def test_vit_matches_transformers(seed, tmp_path):
    reference = randomize(build_vit(seed), seed=seed).eval()
    reference.save_pretrained(tmp_path / "theirs")
    ours = from_hf(tmp_path / "theirs")
    size = ours.config.image_size
    pixels = torch.randn(2, ours.config.channels, size, size, requires_grad=True)
    tower = getattr(reference, "vit", reference)
    assert relative(ours.forward_tokens(pixels), tower(pixels).last_hidden_state) <= 1e-4
    pooled = ours.forward_pooled(pixels)
    expected = reference(pixels).logits if tower is not reference else reference(pixels).pooler_output
    assert relative(pooled, expected) <= 1e-4
    head = reference.classifier if tower is not reference else reference.pooler.dense
    check_gradients(
        pooled,
        [pixels, ours.positions.table, ours.head.weight],
        expected,
        [pixels, tower.embeddings.position_embeddings, head.weight],
    )
    larger = torch.randn(1, ours.config.channels, size + ours.config.patch_size, 2 * size)
    resized = tower(larger, interpolate_pos_encoding=True).last_hidden_state
    assert relative(ours.forward_tokens(larger), resized) <= 1e-4
    check_round_trip(ours, reference, tmp_path)


@pytest.mark.parametrize("eos", [2, 5])
def test_clip_text_projection_matches_transformers(eos, tmp_path):
    config = CLIPTextConfig(
        hidden_size=12,
        intermediate_size=17,
        num_hidden_layers=2,
        num_attention_heads=3,
        vocab_size=31,
        max_position_embeddings=9,
        projection_dim=7,
        hidden_act="gelu",
        eos_token_id=eos,
    )
    reference = randomize(CLIPTextModelWithProjection(config)).eval()
    reference.save_pretrained(tmp_path / "theirs")
    ours = from_hf(tmp_path / "theirs")
    ids = torch.randint(6, 31, (3, 9))
    ids[:, -1] = 30 if eos == 2 else eos
    pooled, expected = ours.forward_pooled(ids), reference(ids).text_embeds
    assert relative(pooled, expected) <= 1e-4
    check_gradients(pooled, [ours.head.weight], expected, [reference.text_projection.weight])
    check_round_trip(ours, reference, tmp_path)
