"""Rotary layouts and scalings against transformers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, PixtralVisionConfig, Qwen2VLTextConfig, Qwen3VLTextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25VisionConfig
from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25VisionRotaryEmbedding as KimiVisionRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.pixtral.modeling_pixtral import PixtralVisionRotaryEmbedding
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding, Qwen2VLVisionRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from vitrail.errors import ConfigError
from vitrail.nn import (
    ROTARY_LAYOUTS,
    RotaryConfig,
    RotaryEmbedding,
    apply_rotation,
    build_grid_positions,
    build_text_positions,
)
from vitrail.nn.rotary_embedding import LinearScaling, Llama3Scaling, NTKScaling, YaRNScaling

SECTIONS = {"mrope": (16, 24, 24), "mrope_interleaved": (24, 20, 20)}


def config(layout: str, head_dim: int = 128, **more) -> RotaryConfig:
    return RotaryConfig(head_dim=head_dim, layout=layout, sections=SECTIONS.get(layout), **more)


def doubled(rotation):
    return torch.cat([rotation.cos] * 2, -1), torch.cat([rotation.sin] * 2, -1)


positions = torch.randint(0, 5000, (2, 37, 3), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("layout", [name for name in ROTARY_LAYOUTS if not name.startswith("2d")])
@pytest.mark.parametrize("scaling", [None, LinearScaling(factor=4.0), YaRNScaling(factor=8.0, original_length=4096)])
def test_text_equals_the_1d_layout(layout, scaling):
    text = build_text_positions(300, start=17)[None]
    ours = RotaryEmbedding(config(layout, scaling=scaling))(text)
    plain = RotaryEmbedding(config("1d", scaling=scaling))(text[..., 0])
    assert torch.equal(ours.cos, plain.cos)
    assert torch.equal(ours.sin, plain.sin)


def test_1d_layout_agrees_with_llama():
    oracle = LlamaRotaryEmbedding(LlamaConfig(head_dim=96, hidden_size=192, num_attention_heads=2))
    cos, sin = oracle(torch.zeros(1), positions[..., 0])
    ours = doubled(RotaryEmbedding(config("1d", 96))(positions[..., 0]))
    assert torch.equal(ours[0], cos)
    assert torch.equal(ours[1], sin)


@pytest.mark.parametrize(
    ("layout", "oracle", "settings_", "theta"),
    [
        ("mrope", Qwen2VLRotaryEmbedding, Qwen2VLTextConfig, 1e6),
        ("mrope_interleaved", Qwen3VLTextRotaryEmbedding, Qwen3VLTextConfig, 5e6),
    ],
)
def test_mrope_agrees_with_qwen(layout, oracle, settings_, theta):
    rope = {"rope_type": "default", "rope_theta": theta, "mrope_section": list(SECTIONS[layout])}
    reference = oracle(settings_(hidden_size=256, num_attention_heads=2, head_dim=128, rope_parameters=rope))
    cos, sin = reference(torch.zeros(1), positions.permute(2, 0, 1))
    ours = doubled(RotaryEmbedding(config(layout, theta=theta))(positions))
    assert torch.equal(ours[0], cos)
    assert torch.equal(ours[1], sin)


def test_interleaved_slots_are_published():
    axis = RotaryEmbedding(config("mrope_interleaved")).axis
    assert (axis == 1).nonzero().flatten().tolist() == list(range(1, 59, 3))
    assert (axis == 2).nonzero().flatten().tolist() == list(range(2, 60, 3))
    assert (axis == 0).nonzero().flatten().tolist() == [*range(0, 58, 3), 60, 61, 62, 63]


@pytest.mark.parametrize(
    ("layout", "oracle"),
    [
        ("2d", Qwen2VLVisionRotaryEmbedding(Qwen2VLVisionConfig(embed_dim=160, num_heads=2))),
        ("2d_split", PixtralVisionRotaryEmbedding(PixtralVisionConfig(hidden_size=160, num_attention_heads=2))),
        ("2d_interleaved", KimiVisionRotaryEmbedding(Kimi_K25VisionConfig(hidden_size=160, num_attention_heads=2))),
    ],
)
def test_2d_layouts_agree_with_towers(layout, oracle):
    at = positions[0]  # (N, 3)
    # transformers 5.22 reads (1, 2, N) in one tower, and (N, 2) rows of (h, w) in the others
    ids = at[:, 1:].T[None] if layout == "2d_split" else at[:, 1:]
    cos, sin = oracle(torch.zeros(1), ids)
    ours = doubled(RotaryEmbedding(config(layout, 80))(at[None]))
    assert torch.equal(ours[0].squeeze(), cos.squeeze())
    assert torch.equal(ours[1].squeeze(), sin.squeeze())


@pytest.mark.parametrize(
    ("scaling", "parameters"),
    [
        (LinearScaling(factor=3.0), {"rope_type": "linear", "factor": 3.0}),
        (
            YaRNScaling(factor=4.0, original_length=4096),
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
        ),
        (
            YaRNScaling(
                factor=40.0, original_length=4096, mscale=1.0, mscale_all_dim=0.7, truncate=False, beta_fast=20.0
            ),
            {
                "rope_type": "yarn",
                "factor": 40.0,
                "original_max_position_embeddings": 4096,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
                "truncate": False,
                "beta_fast": 20.0,
            },
        ),
        (
            Llama3Scaling(factor=8.0, original_length=8192),
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
    ],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_scalings_agree_with_transformers(scaling, parameters, head_dim):
    reference = LlamaConfig(
        head_dim=head_dim, hidden_size=2 * head_dim, num_attention_heads=2, max_position_embeddings=32768
    )
    reference.rope_parameters = {"rope_theta": 500000.0, **parameters}
    frequency, amplitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](reference)
    ours = RotaryEmbedding(config("1d", head_dim, theta=500000.0, scaling=scaling))
    torch.testing.assert_close(ours.frequency, frequency, rtol=1e-6, atol=0)
    assert ours.attention_scaling == pytest.approx(amplitude, rel=1e-12)


def test_ntk_equals_dynamic_ntk():
    reference = LlamaConfig(head_dim=64, hidden_size=128, num_attention_heads=2, max_position_embeddings=2048)
    reference.rope_parameters = {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 2.0}
    frequency, _ = ROPE_INIT_FUNCTIONS["dynamic"](reference, seq_len=8192)  # 2·4 − 1 = 7
    ours = RotaryEmbedding(config("1d", 64, scaling=NTKScaling(factor=7.0)))
    torch.testing.assert_close(ours.frequency, frequency, rtol=1e-6, atol=0)


def test_absolute_time_is_truncated_after_scaling():
    half_seconds = build_grid_positions(6, 1, 1, start=10, step=0.5 * 2)
    assert half_seconds[:, 0].tolist() == [10, 11, 12, 13, 14, 15]
    assert half_seconds[:, 1].tolist() == [10] * 6
    slow = build_grid_positions(5, 1, 1, step=0.7)
    assert slow[:, 0].tolist() == [0, 0, 1, 2, 2]


def test_rotation_agrees_with_llama():
    q = torch.randn(2, 37, 4, 64)
    rotation = RotaryEmbedding(config("1d", 64))(positions[..., 0])
    cos, sin = doubled(rotation)
    reference, _ = apply_rotary_pos_emb(q.transpose(1, 2), q.transpose(1, 2), cos, sin)
    torch.testing.assert_close(apply_rotation(q, rotation), reference.transpose(1, 2), rtol=0, atol=1e-6)


@given(
    layout=st.sampled_from(sorted(ROTARY_LAYOUTS)),
    pairing=st.sampled_from(["half", "adjacent"]),
    shift=st.integers(0, 500),
)
@settings(max_examples=40)
def test_scores_depend_only_on_distance(layout, pairing, shift):
    rotary = RotaryEmbedding(config(layout, pairing=pairing))
    q, k = torch.randn(1, 6, 2, 128), torch.randn(1, 6, 2, 128)
    here = positions[:1, :6] % 500

    def scores(at):
        rotation = rotary(at)
        return torch.einsum("bqhd,bkhd->bhqk", apply_rotation(q, rotation), apply_rotation(k, rotation))

    torch.testing.assert_close(scores(here), scores(here + shift), rtol=1e-3, atol=2e-3)
    torch.testing.assert_close(apply_rotation(q, rotary(here)).norm(dim=-1), q.norm(dim=-1))


def test_pairings_are_permutations_of_each_other():
    x = torch.randn(1, 5, 1, 64)
    half = RotaryEmbedding(config("1d", 64))(torch.arange(5)[None])
    adjacent = half._replace(pairing="adjacent")
    reorder = torch.arange(64).view(2, 32).T.flatten()  # (0, 32, 1, 33, …)
    torch.testing.assert_close(apply_rotation(x, half)[..., reorder], apply_rotation(x[..., reorder], adjacent))


def test_partial_rotation_keeps_other_channels():
    x = torch.randn(1, 5, 2, 64)
    turned = apply_rotation(x, RotaryEmbedding(RotaryConfig(head_dim=64, rotary_dim=16))(torch.arange(1, 6)[None]))
    assert torch.equal(turned[..., 16:], x[..., 16:])
    assert not torch.allclose(turned[..., :16], x[..., :16])


def test_frequencies_survive_casts_and_the_meta_device():
    reference = RotaryEmbedding(config("1d", 64)).frequency
    assert torch.equal(RotaryEmbedding(config("1d", 64)).bfloat16().frequency, reference)
    with torch.device("meta"):
        rotary = RotaryEmbedding(config("1d", 64))
    assert rotary.frequency.is_meta
    assert torch.equal(rotary.to_empty(device="cpu").frequency, reference)
    assert not list(rotary.state_dict())


@pytest.mark.parametrize(
    "bad",
    [
        {"head_dim": 63},
        {"head_dim": 66, "layout": "2d"},
        {"head_dim": 64, "rotary_dim": 128},
        {"head_dim": 128, "layout": "mrope"},
        {"head_dim": 128, "layout": "mrope", "sections": (16, 16, 16)},
        {"head_dim": 128, "sections": (16, 24, 24)},
        {"head_dim": 128, "layout": "mrope", "sections": (-8, 36, 36)},
        {"head_dim": 64, "theta": 0.0},
        {"head_dim": 0},
        {"head_dim": 2, "scaling": NTKScaling(factor=2.0)},
        {"head_dim": 4, "layout": "2d", "scaling": NTKScaling(factor=2.0)},
        {"head_dim": 64, "layout": "3d"},
        {"head_dim": 128, "layout": "mrope_interleaved", "sections": (4, 30, 30)},
    ],
)
def test_invalid_layouts_raise(bad):
    with pytest.raises(ConfigError, match=r"rotary|sections|theta|layout"):
        RotaryConfig(**bad)


def test_scaling_factors_are_positive():
    with pytest.raises(ConfigError, match=r"LinearScaling\.factor is 0\.0.*\n.*above 0"):
        LinearScaling(factor=0.0)
    with pytest.raises(ConfigError, match=r"scaling\.factor is -1"):
        RotaryConfig.from_dict({"head_dim": 64, "scaling": {"kind": "linear", "factor": -1}})


def test_scaling_is_selected_by_kind():
    data = {"head_dim": 64, "scaling": {"kind": "yarn", "factor": 4.0, "original_length": 4096}}
    read = RotaryConfig.from_dict(data)
    assert read.scaling == YaRNScaling(factor=4.0, original_length=4096)
    assert RotaryConfig.from_dict(read.to_dict()) == read
    with pytest.raises(ConfigError, match=r"scaling\.factr"):
        RotaryConfig.from_dict({"head_dim": 64, "scaling": {"kind": "linear", "factor": 1.0, "factr": 2}})
