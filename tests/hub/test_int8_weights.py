"""Int8 weights: bounded error, and exact for stored values."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from vitrail import hub
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import CheckpointError
from vitrail.hub.checkpoint_info import list_bundled_models
from vitrail.hub.int8_weights import SCALE_SUFFIX, quantize_tensors
from vitrail.nn import AttentionConfig, BlockConfig
from vitrail.nn.mlp import PlainMLPConfig


def tower() -> ViT:
    block = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=PlainMLPConfig(intermediate_size=32))
    return ViT(ViTConfig(layers=2, block=block, image_size=16, patch_size=4)).eval()


def test_round_trip_error_is_half_a_step(tmp_path):
    model = tower()
    hub.save(model, tmp_path, int8=True)
    again, names = hub.load(tmp_path), dict(model.named_parameters())
    stored = load_file(tmp_path / "model.safetensors")
    for name, weight in again.named_parameters():
        if weight.ndim < 2:
            assert torch.equal(weight, names[name])
            continue
        step = stored[name + SCALE_SUFFIX].view(-1, *[1] * (weight.ndim - 1))
        assert stored[name].dtype == torch.int8
        assert bool(((weight - names[name]).abs() <= 0.5001 * step).all())
    pixels = torch.randn(2, 3, 16, 16)
    assert torch.allclose(again(pixels), model(pixels), atol=0.1)
    hub.save(again, tmp_path / "twice", int8=True)  # what was rounded once rounds to itself
    twice = load_file(tmp_path / "twice" / "model.safetensors")
    assert all(torch.equal(twice[name], stored[name]) for name in stored)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1.1e-5, 1.0, 1e7, 3e38])
def test_rows_of_any_scale(size):
    rows = torch.tensor([[size, -size / 3, 0.0]])
    kept = dict(quantize_tensors([("w", rows)]))
    back = kept["w"].float() * kept["w" + SCALE_SUFFIX][:, None]
    assert bool(((back - rows).abs() <= size / 253).all())


def test_subnormal_rows_keep_sign():
    kept = dict(quantize_tensors([("w", torch.tensor([[2e-43, -2e-43]]))]))["w"]
    assert kept[0, 0] >= 0 >= kept[0, 1]


def test_nan_and_empty_tensors():
    assert dict(quantize_tensors([("w", torch.zeros(3, 0))]))["w"].shape == (3, 0)
    for bad in (torch.inf, torch.nan):
        with pytest.raises(CheckpointError, match="'w'"):
            list(quantize_tensors([("w", torch.tensor([[1.0, bad]]))]))


@pytest.mark.parametrize("spoil", ["shape", "type", "lost", "unscaled", "nan", "negative"])
def test_inconsistent_file_raises(tmp_path, spoil):
    hub.save(tower(), tmp_path, int8=True)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "embed.proj.weight"
    if spoil == "shape":
        tensors[name + SCALE_SUFFIX] = tensors[name + SCALE_SUFFIX][:-1]
    elif spoil == "type":
        tensors[name] = tensors[name].float()
    elif spoil == "unscaled":
        del tensors[name + SCALE_SUFFIX]
    elif spoil in ("nan", "negative"):
        tensors[name + SCALE_SUFFIX][0] = torch.nan if spoil == "nan" else -1.0
    else:
        del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=name):
        hub.load(tmp_path)


@pytest.mark.parametrize("name", list_bundled_models())
def test_bundled_models_load_by_name(name):
    model = hub.load(name)
    assert sum(p.numel() for p in model.parameters()) > 0


def test_half_precision_round_trip_dtype(tmp_path):
    weights = {"m.weight": torch.randn(3, 4, dtype=torch.bfloat16), "m.bias": torch.ones(3, dtype=torch.bfloat16)}
    assert {str(t.dtype) for name, t in quantize_tensors(weights.items())} == {"torch.int8", "torch.float32"}
