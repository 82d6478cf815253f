"""Patches and learned position embeddings against convolutions and transformers."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import relative
from vitrail.errors import ConfigError, ImageError
from vitrail.nn import (
    LearnedPositionEmbedding,
    PatchEmbed,
    build_grid_positions,
    build_text_positions,
    patchify,
    unpatchify,
)

small = st.integers(1, 4)


@given(small, small, small, small, small, small, small, st.integers(0, 2))
@settings(max_examples=80)
def test_patches_round_trip(t, p, q, gt, gh, gw, channels, batch):
    video = torch.randn(batch, channels, gt * t, gh * p, gw * q)
    patches = patchify(video, (t, p, q))
    assert patches.shape == (batch, gt * gh * gw, channels * t * p * q)
    assert torch.equal(unpatchify(patches, (t, p, q), (gt, gh, gw)), video)


@pytest.mark.parametrize("bias", [True, False])
def test_patch_embedding_equals_a_convolution(bias):
    conv = torch.nn.Conv3d(3, 20, (2, 7, 5), stride=(2, 7, 5), bias=bias)
    embed = PatchEmbed((2, 7, 5), 20, bias=bias)
    with torch.no_grad():
        embed.proj.weight.copy_(conv.weight.flatten(1))
        if bias:
            embed.proj.bias.copy_(conv.bias)
    video = torch.randn(2, 3, 4, 21, 15)
    reference = conv(video).flatten(2).transpose(1, 2)
    assert relative(embed(video), reference) <= 1e-5
    still = video[:, :, 0]  # a still image is repeated
    assert relative(embed(still), conv(still[:, :, None].repeat(1, 1, 2, 1, 1)).flatten(2).transpose(1, 2)) <= 1e-5
    assert relative(embed(patchify(video, (2, 7, 5))), reference) <= 1e-5


def test_mismatched_pixels_raise():
    embed = PatchEmbed((1, 14, 14), 8)
    with pytest.raises(ImageError, match="patches of 1 × 14 × 14"):
        embed(torch.randn(1, 3, 28, 30))
    with pytest.raises(ImageError, match="expects 3 channels"):
        embed(torch.randn(1, 4, 28, 28))
    with pytest.raises(ImageError):
        embed(torch.randn(1, 3, 0, 28))
    with pytest.raises(ConfigError):
        unpatchify(torch.randn(1, 5, 12), (1, 2, 2), (1, 2, 2))


def test_grid_positions_are_row_major():
    assert build_grid_positions(1, 2, 3, start=5).tolist() == [[5, 5 + h, 5 + w] for h in range(2) for w in range(3)]
    assert build_text_positions(2, start=7).tolist() == [[7, 7, 7], [8, 8, 8]]


# ---- learned positions ------------------------------------------------------------------------------------------

SIZES = [(5, 9), (16, 16), (3, 40), (1, 1)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", ["clip", "dinov2", "dinov2_with_registers"])
def test_interpolation_agrees_with_towers_with_cls(family, size):
    import importlib

    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    name = {"clip": "CLIPVision", "dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}[family]
    config_module = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    config = getattr(config_module, f"{name}Config")(image_size=16 * 8, patch_size=8, hidden_size=12)
    embeddings = getattr(module, f"{name}Embeddings")(config)
    resize = "bicubic_antialias" if family == "dinov2_with_registers" else "bicubic"
    ours = LearnedPositionEmbedding((16, 16), 12, num_prefix_tokens=1, interpolation=resize)
    theirs = embeddings.position_embedding.weight if family == "clip" else embeddings.position_embeddings
    with torch.no_grad():
        theirs.copy_(torch.randn(theirs.shape))
        ours.table.copy_(theirs.view(-1, 12))
    h, w = size
    reference = embeddings.interpolate_pos_encoding(torch.zeros(1, 1 + h * w, 12), h * 8, w * 8)[0]
    if h * w == 1:  # one patch: the reference has a shortcut for square inputs
        assert reference.shape == ours(h, w).shape
    assert relative(ours(h, w), reference) <= 1e-5


@pytest.mark.parametrize("size", SIZES)
def test_interpolation_agrees_with_siglip2(size):
    from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

    h, w = size
    ours = LearnedPositionEmbedding((16, 16), 12, interpolation="bilinear_antialias")
    reference = Siglip2VisionEmbeddings.resize_positional_embeddings(
        ours.table.view(16, 16, 12), torch.tensor([[h, w]]), max_length=h * w
    )[0]
    assert relative(ours(h, w), reference) <= 1e-5


@pytest.mark.parametrize("size", SIZES)
def test_interpolation_agrees_with_qwen3(size):
    from transformers.vision_utils import get_vision_interpolation_indices_and_weights

    h, w = size
    ours = LearnedPositionEmbedding((48, 48), 12, interpolation="bilinear_corners")
    index, weight = get_vision_interpolation_indices_and_weights(
        torch.tensor([[1, h, w]]), 48, mode="bilinear", align_corners=True
    )
    reference = (F.embedding(index, ours.table) * weight[..., None]).sum(-2)
    assert relative(ours(h, w), reference) <= 1e-5


def test_prefix_rows_are_not_interpolated():
    ours = LearnedPositionEmbedding((4, 4), 6, num_prefix_tokens=3)
    assert torch.equal(ours(7, 2)[:3], ours.table[:3])
    assert ours(7, 2).shape == (3 + 14, 6)
    assert torch.equal(ours(4, 4), ours.table)
    with pytest.raises(ConfigError):
        ours(0, 3)


@pytest.mark.parametrize("resize", ["bicubic_antialias", "bilinear_antialias"])
def test_interpolation_to_one_column(resize):
    """Compared with float64: torch's antialiased interpolation of channels-last tables is wrong in float32."""
    ours = LearnedPositionEmbedding((5, 5), 8, interpolation=resize)
    cells = ours.table.detach().double().view(5, 5, 8).permute(2, 0, 1)[None].contiguous()
    for h in (2, 3, 7):
        reference = F.interpolate(cells, size=(h, 1), mode=resize.removesuffix("_antialias"), antialias=True)
        assert relative(ours(h, 1).double(), reference[0].flatten(1).T) <= 1e-5


def test_half_precision_is_interpolated_in_float32():
    ours = LearnedPositionEmbedding((7, 7), 6)
    exact = ours(11, 5)
    rounded = ours.bfloat16()(11, 5)
    assert rounded.dtype == torch.bfloat16
    assert relative(rounded.float(), exact) <= 1e-2
