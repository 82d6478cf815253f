"""Every layout against transformers' where it has one; text against 1-D, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, PixtralVisionConfig, Qwen2VLTextConfig, Qwen3VLTextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.pixtral.modeling_pixtral import PixtralVisionRotaryEmbedding
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding, Qwen2VLVisionRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from vitrail.errors import ConfigError
from vitrail.nn import LAYOUTS, Rotary, RotaryConfig, grid_positions, rotate, text_positions
from vitrail.nn.rotary import NTK, Linear, Llama3, YaRN

SECTIONS = {"mrope": (16, 24, 24), "mrope_interleaved": (24, 20, 20)}


def config(layout: str, head_dim: int = 128, **more) -> RotaryConfig:
    return RotaryConfig(head_dim=head_dim, layout=layout, sections=SECTIONS.get(layout), **more)


def doubled(rotation):
    return torch.cat([rotation.cos] * 2, -1), torch.cat([rotation.sin] * 2, -1)


positions = torch.randint(0, 5000, (2, 37, 3), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if not name.startswith("2d")])
@pytest.mark.parametrize("scaling", [None, Linear(factor=4.0), YaRN(factor=8.0, original_length=4096)])
def test_text_is_one_dimensional_bit_for_bit(layout, scaling):
    text = text_positions(300, start=17)[None]
    ours = Rotary(config(layout, scaling=scaling))(text)
    plain = Rotary(config("1d", scaling=scaling))(text[..., 0])
    assert torch.equal(ours.cos, plain.cos)
    assert torch.equal(ours.sin, plain.sin)


def test_one_axis_agrees_with_llama():
    oracle = LlamaRotaryEmbedding(LlamaConfig(head_dim=96, hidden_size=192, num_attention_heads=2))
    cos, sin = oracle(torch.zeros(1), positions[..., 0])
    ours = doubled(Rotary(config("1d", 96))(positions[..., 0]))
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
    ours = doubled(Rotary(config(layout, theta=theta))(positions))
    assert torch.equal(ours[0], cos)
    assert torch.equal(ours[1], sin)


def test_interleaved_slots_are_the_published_ones():
    axis = Rotary(config("mrope_interleaved")).axis
    assert (axis == 1).nonzero().flatten().tolist() == list(range(1, 59, 3))
    assert (axis == 2).nonzero().flatten().tolist() == list(range(2, 60, 3))
    assert (axis == 0).nonzero().flatten().tolist() == [*range(0, 58, 3), 60, 61, 62, 63]


@pytest.mark.parametrize(
    ("layout", "oracle"),
    [
        ("2d", Qwen2VLVisionRotaryEmbedding(Qwen2VLVisionConfig(embed_dim=160, num_heads=2))),
        ("2d_split", PixtralVisionRotaryEmbedding(PixtralVisionConfig(hidden_size=160, num_attention_heads=2))),
    ],
)
def test_two_axes_agree_with_towers(layout, oracle):
    at = positions[0]  # (N, 3)
    # transformers 5.22 reads (N, 2) rows of (h, w) in one tower and (1, 2, N) in the other
    ids = at[:, 1:] if layout == "2d" else at[:, 1:].T[None]
    cos, sin = oracle(torch.zeros(1), ids)
    ours = doubled(Rotary(config(layout, 80))(at[None]))
    assert torch.equal(ours[0].squeeze(), cos.squeeze())
    assert torch.equal(ours[1].squeeze(), sin.squeeze())


@pytest.mark.parametrize(
    ("scaling", "parameters"),
    [
        (Linear(factor=3.0), {"rope_type": "linear", "factor": 3.0}),
        (
            YaRN(factor=4.0, original_length=4096),
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
        ),
        (
            YaRN(factor=40.0, original_length=4096, mscale=1.0, mscale_all_dim=0.7, truncate=False, beta_fast=20.0),
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
            Llama3(factor=8.0, original_length=8192),
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
def test_scalings_agree(scaling, parameters, head_dim):
    reference = LlamaConfig(
        head_dim=head_dim, hidden_size=2 * head_dim, num_attention_heads=2, max_position_embeddings=32768
    )
    reference.rope_parameters = {"rope_theta": 500000.0, **parameters}
    frequency, amplitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](reference)
    ours = Rotary(config("1d", head_dim, theta=500000.0, scaling=scaling))
    torch.testing.assert_close(ours.frequency, frequency, rtol=1e-6, atol=0)
    assert ours.amplitude == pytest.approx(amplitude, rel=1e-12)


def test_ntk_is_dynamic_ntk_at_its_length():
    reference = LlamaConfig(head_dim=64, hidden_size=128, num_attention_heads=2, max_position_embeddings=2048)
    reference.rope_parameters = {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 2.0}
    frequency, _ = ROPE_INIT_FUNCTIONS["dynamic"](reference, seq_len=8192)  # 2·4 − 1 = 7
    ours = Rotary(config("1d", 64, scaling=NTK(factor=7.0)))
    torch.testing.assert_close(ours.frequency, frequency, rtol=1e-6, atol=0)


def test_absolute_time_multiplies_before_it_truncates():
    half_seconds = grid_positions(6, 1, 1, start=10, step=0.5 * 2)
    assert half_seconds[:, 0].tolist() == [10, 11, 12, 13, 14, 15]
    assert half_seconds[:, 1].tolist() == [10] * 6
    slow = grid_positions(5, 1, 1, step=0.7)
    assert slow[:, 0].tolist() == [0, 0, 1, 2, 2]


def test_rotation_agrees_with_llama():
    q = torch.randn(2, 37, 4, 64)
    rotation = Rotary(config("1d", 64))(positions[..., 0])
    cos, sin = doubled(rotation)
    reference, _ = apply_rotary_pos_emb(q.transpose(1, 2), q.transpose(1, 2), cos, sin)
    torch.testing.assert_close(rotate(q, rotation), reference.transpose(1, 2), rtol=0, atol=1e-6)


@given(
    layout=st.sampled_from(sorted(LAYOUTS)), pairing=st.sampled_from(["half", "adjacent"]), shift=st.integers(0, 500)
)
@settings(max_examples=40)
def test_scores_depend_on_distance_alone_and_norms_stay(layout, pairing, shift):
    rotary = Rotary(config(layout, pairing=pairing))
    q, k = torch.randn(1, 6, 2, 128), torch.randn(1, 6, 2, 128)
    here = positions[:1, :6] % 500

    def scores(at):
        rotation = rotary(at)
        return torch.einsum("bqhd,bkhd->bhqk", rotate(q, rotation), rotate(k, rotation))

    torch.testing.assert_close(scores(here), scores(here + shift), rtol=1e-3, atol=2e-3)
    torch.testing.assert_close(rotate(q, rotary(here)).norm(dim=-1), q.norm(dim=-1))


def test_pairings_are_permutations_of_each_other():
    x = torch.randn(1, 5, 1, 64)
    half = Rotary(config("1d", 64))(torch.arange(5)[None])
    adjacent = half._replace(pairing="adjacent")
    reorder = torch.arange(64).view(2, 32).T.flatten()  # (0, 32, 1, 33, …)
    torch.testing.assert_close(rotate(x, half)[..., reorder], rotate(x[..., reorder], adjacent))


def test_partial_rotation_leaves_the_rest():
    x = torch.randn(1, 5, 2, 64)
    turned = rotate(x, Rotary(RotaryConfig(head_dim=64, dim=16))(torch.arange(1, 6)[None]))
    assert torch.equal(turned[..., 16:], x[..., 16:])
    assert not torch.allclose(turned[..., :16], x[..., :16])


def test_frequencies_survive_casts_and_the_meta_device():
    reference = Rotary(config("1d", 64)).frequency
    assert torch.equal(Rotary(config("1d", 64)).bfloat16().frequency, reference)
    with torch.device("meta"):
        rotary = Rotary(config("1d", 64))
    assert rotary.frequency.is_meta
    assert torch.equal(rotary.to_empty(device="cpu").frequency, reference)
    assert not list(rotary.state_dict())


@pytest.mark.parametrize(
    "bad",
    [
        {"head_dim": 63},
        {"head_dim": 66, "layout": "2d"},
        {"head_dim": 64, "dim": 128},
        {"head_dim": 128, "layout": "mrope"},
        {"head_dim": 128, "layout": "mrope", "sections": (16, 16, 16)},
        {"head_dim": 128, "sections": (16, 24, 24)},
        {"head_dim": 128, "layout": "mrope", "sections": (-8, 36, 36)},
        {"head_dim": 64, "theta": 0.0},
        {"head_dim": 64, "scaling": Linear(factor=0.0)},
        {"head_dim": 0},
        {"head_dim": 2, "scaling": NTK(factor=2.0)},
        {"head_dim": 4, "layout": "2d", "scaling": NTK(factor=2.0)},
        {"head_dim": 64, "layout": "3d"},
        {"head_dim": 128, "layout": "mrope_interleaved", "sections": (4, 30, 30)},
    ],
)
def test_impossible_layouts_are_refused(bad):
    with pytest.raises(ConfigError, match=r"rotary|sections|theta|layout"):
        RotaryConfig(**bad)


def test_a_scaling_is_read_by_its_kind():
    data = {"head_dim": 64, "scaling": {"kind": "yarn", "factor": 4.0, "original_length": 4096}}
    read = RotaryConfig.read(data)
    assert read.scaling == YaRN(factor=4.0, original_length=4096)
    assert RotaryConfig.read(read.plain()) == read
    with pytest.raises(ConfigError, match=r"scaling\.factr"):
        RotaryConfig.read({"head_dim": 64, "scaling": {"kind": "linear", "factor": 1.0, "factr": 2}})
