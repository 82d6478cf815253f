"""DINOv3 and AIMv2 match transformers on random checkpoints of odd shapes: features, pooling, gradients, export."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Aimv2VisionConfig, Aimv2VisionModel, DINOv3ViTConfig, DINOv3ViTModel

from helpers import randomize, relative
from vitrail.encoders import ViT
from vitrail.encoders.presets import VIT_PRESETS
from vitrail.errors import CheckpointError
from vitrail.hub import from_hf, load, save, to_hf
from vitrail.registry import FAMILIES

CASES = 12
VALUES, GRADIENTS = 1e-4, 1e-3  # max |Δ| / max |reference|


def draw_sizes(draw: random.Random, channels_per_head: list[int]) -> dict:
    heads, patch = draw.choice([1, 2, 3]), draw.choice([2, 3, 5])
    return {
        "hidden_size": heads * draw.choice(channels_per_head),
        "num_attention_heads": heads,
        "num_hidden_layers": draw.randint(1, 4),
        "intermediate_size": draw.randint(7, 50),
        "patch_size": patch,
        "image_size": patch * draw.randint(2, 5),
        "num_channels": draw.choice([1, 3, 4]),
        "hidden_act": draw.choice(["gelu", "silu", "gelu_pytorch_tanh"]),
    }


def build_dinov3(draw: random.Random) -> DINOv3ViTModel:
    config = DINOv3ViTConfig(
        **draw_sizes(draw, [4, 12, 20]),
        rope_theta=draw.choice([100.0, 17.0]),
        layer_norm_eps=draw.choice([1e-5, 1e-3]),
        key_bias=draw.random() < 0.3,
        mlp_bias=draw.random() < 0.7,
        layerscale_value=draw.choice([1.0, 1e-5]),
        use_gated_mlp=draw.random() < 0.5,
        num_register_tokens=draw.choice([0, 1, 4]),
    )
    return DINOv3ViTModel(config)


def build_aimv2(draw: random.Random) -> Aimv2VisionModel:
    config = Aimv2VisionConfig(
        **draw_sizes(draw, [4, 8, 12]),
        rms_norm_eps=draw.choice([1e-5, 1e-3]),
        qkv_bias=draw.random() < 0.5,
        mlp_bias=draw.random() < 0.5,
        use_head=draw.random() < 0.7,
        is_native=draw.random() < 0.5,
    )
    return Aimv2VisionModel(config)


BUILDERS = {"dinov3_vit": build_dinov3, "aimv2_vision_model": build_aimv2}


def build_checkpoint(family: str, seed: int, folder):
    reference = randomize(BUILDERS[family](random.Random(seed)), seed=seed).eval()
    reference.save_pretrained(folder)
    return reference, from_hf(folder)


def check_values(ours, expected, limit=VALUES):
    assert ours.shape == expected.shape
    assert relative(ours, expected) <= limit


def check_gradients(family, ours, reference, output, expected, pixels, theirs):
    """Gradients of the input and of every weight."""
    weight = torch.randn_like(expected)
    names, parameters = zip(*ours.named_parameters(), strict=True)
    got = torch.autograd.grad((output * weight).sum(), [pixels, *parameters], allow_unused=True)
    kept = dict(reference.named_parameters())
    want = torch.autograd.grad((expected * weight).sum(), [theirs, *kept.values()], allow_unused=True)
    check_values(got[0], want[0], GRADIENTS)
    grads = {
        name.removeprefix("model."): torch.zeros_like(p) if g is None else g
        for (name, p), g in zip(kept.items(), want[1:], strict=True)
    }
    for rule in FAMILIES[family].tensor_rules(ours.config):
        for name, expected_grad in zip(rule.native, rule.load([grads[x] for x in rule.hf]), strict=True):
            own = got[1 + names.index(name)]
            if own is None:
                assert not expected_grad.any(), name
            else:  # below this a gradient is rounding alone: without rotation softmax drops a bias on k
                bound = GRADIENTS * expected_grad.abs().max().clamp_min(1e-2)
                assert (own - expected_grad).abs().max() <= bound, name


def check_round_trip(ours, reference, folder, pixels):
    """Exports load in transformers with equal weights; native round trips are exact."""
    to_hf(ours, folder / "back")
    hf_config = json.loads((folder / "back/config.json").read_text())
    assert (hf_config["model_type"], hf_config["architectures"]) == (
        reference.config.model_type,
        [type(reference).__name__],
    )
    stored, original = load_file(folder / "back/model.safetensors"), load_file(folder / "theirs/model.safetensors")
    assert stored.keys() == original.keys()
    assert all(torch.equal(stored[name], original[name]) for name in stored)
    back = type(reference).from_pretrained(folder / "back")
    theirs, again = reference.state_dict(), back.state_dict()
    assert theirs.keys() == again.keys() and all(torch.equal(theirs[name], again[name]) for name in theirs)
    save(ours, folder / "native")
    loaded = load(folder / "native")
    assert loaded.config == ours.config and torch.equal(loaded(pixels), ours(pixels))


@pytest.mark.parametrize("family", BUILDERS)
@pytest.mark.parametrize("seed", range(CASES))
def test_towers_match_transformers(family, seed, tmp_path):
    reference, ours = build_checkpoint(family, seed, tmp_path / "theirs")
    config, draw = ours.config, random.Random(seed)
    X, P, size = config.num_prefix_tokens, config.patch_size, config.image_size
    sizes = [(size, size)]
    if config.positions != "patches":  # transformers takes other sizes too
        sizes += [(P * draw.randint(1, 6), P * draw.randint(1, 6))]
    for height, width in sizes:
        pixels = torch.randn(2, config.channels, height, width, requires_grad=True)
        theirs = pixels.detach().clone().requires_grad_()
        states = reference(theirs, output_hidden_states=True)
        check_values(ours.forward_tokens(pixels), states.last_hidden_state)
        check_values(ours(pixels), states.last_hidden_state[:, X:])
        for layer in (0, 1, -1, -2):
            check_values(ours.forward_tokens(pixels, layer=layer), states.hidden_states[layer])
        pooled = config.pool != "none"
        output = ours.forward_pooled(pixels) if pooled else ours(pixels)
        expected = states.pooler_output if pooled else states.last_hidden_state
        check_values(output, expected.view_as(output))
        check_gradients(family, ours, reference, output, expected.view_as(output), pixels, theirs)
    check_round_trip(ours, reference, tmp_path, pixels)


def test_masked_patches(tmp_path):
    reference, ours = build_checkpoint("dinov3_vit", 3, tmp_path)
    pixels = torch.randn(2, ours.config.channels, ours.config.image_size, ours.config.image_size)
    masked = torch.rand(2, ours.config.grid_size**2) < 0.4
    expected = reference(pixels, bool_masked_pos=masked).last_hidden_state
    check_values(ours(pixels, patch_mask=masked), expected[:, ours.config.num_prefix_tokens :])


def test_names_of_transformers_in_memory(tmp_path):
    """Files with the module names of transformers 5 load too."""
    reference, ours = build_checkpoint("dinov3_vit", 2, tmp_path)
    save_file(dict(reference.state_dict()), tmp_path / "model.safetensors")
    again = from_hf(tmp_path)
    assert all(torch.equal(p, again.state_dict()[name]) for name, p in ours.state_dict().items())


def test_unsupported_biases_name_the_keys():
    with pytest.raises(CheckpointError, match="query_bias False, key_bias True"):
        FAMILIES["dinov3_vit"].from_hf_config({"query_bias": False, "key_bias": True})


@pytest.mark.parametrize("family", BUILDERS)
def test_dtype_is_kept(family, tmp_path):
    reference = BUILDERS[family](random.Random(5)).bfloat16()
    reference.save_pretrained(tmp_path)
    ours = from_hf(tmp_path)
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    pixels = torch.randn(1, ours.config.channels, ours.config.image_size, ours.config.image_size)
    assert ours(pixels).dtype == torch.bfloat16


B, L = {"hidden_size": 768, "intermediate_size": 3072}, {"hidden_size": 1024, "intermediate_size": 4096}
RELEASED = {
    # preset: (model and config of transformers, millions of parameters as published)
    "dinov3-s16": (DINOv3ViTModel, DINOv3ViTConfig(num_register_tokens=4), 21.6),
    "dinov3-b16": (DINOv3ViTModel, DINOv3ViTConfig(**B, num_attention_heads=12, num_register_tokens=4), 85.7),
    "dinov3-l16": (
        DINOv3ViTModel,
        DINOv3ViTConfig(**L, num_hidden_layers=24, num_attention_heads=16, num_register_tokens=4),
        303.1,
    ),
    "aimv2-l14-224": (Aimv2VisionModel, Aimv2VisionConfig(use_head=False), 309.2),
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_shapes(name):
    model_class, config, millions = RELEASED[name]
    row = FAMILIES[config.model_type]
    assert row.from_hf_config(json.loads(config.to_json_string(use_diff=False))) == VIT_PRESETS[name]
    with torch.device("meta"):
        ours, reference = ViT(VIT_PRESETS[name]), model_class(config)
    counts = [sum(p.numel() for p in model.parameters()) for model in (ours, reference)]
    assert counts[0] == counts[1] and round(counts[0] / 1e6, 1) == millions
