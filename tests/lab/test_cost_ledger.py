"""The cost ledger against manual sums, published figures and measurements."""

import resource

import pytest
import torch

from experiments.published_figures.audit import (
    GAIA_CONFIG,
    GAIA_CONTEXT_LENGTH,
    GAIA_FRAME_TOKENS,
    TABLE_7_TFLOPS,
    count_gaia_frame_flops,
    count_min_flops_per_token,
    interpolate_table_7,
)
from vitrail.backbones.presets import DECODER_PRESETS
from vitrail.errors import ConfigError
from vitrail.lab import cost_ledger
from vitrail.lab.cost_ledger import (
    CONTEXT_LENGTHS,
    DEVICES,
    PRESETS,
    DeviceSpec,
    compute_ledger,
    compute_roofline,
    find_compute_bound_batch_size,
    get_preset,
)
from vitrail.models.presets import ALL_VLM_PRESETS
from vitrail.nn import AttentionConfig, Block, BlockConfig, GatedMLPConfig, Workload, cost


def test_llama_matches_a_manual_computation():
    """Llama-3.1-8B: 32 layers of width 4096, 32 heads over 8 of 128, hidden 14,336, vocabulary 128,256."""
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14_336
    products, head, norms = 32 * layer, 128_256 * 4096, 65 * 4096
    pair = 4 * 4096 * 32  # q·k and weights·v in every layer
    found = compute_ledger("llama-3.1-8b", context_length=1000)
    assert found.parameters == found.active_parameters == products + 2 * head + norms
    assert found.weight_bytes == 2 * found.parameters
    assert found.forward_flops == 2 * products * 1000 + 2 * head + pair * 1000 * 1001 // 2
    assert found.decode_flops == 2 * (products + head) + pair * 1000
    assert found.training_flops * 1000 == 3 * (2 * (products + head) * 1000 + pair * 1000 * 1001 // 2)
    assert found.cache_bytes == {n: n * 2 * 8 * 128 * 32 * 2 for n in (1, 1000, *CONTEXT_LENGTHS)}

    (floor,) = found.rooflines
    read = 2 * (products + head + norms)
    assert floor.decode[8192].memory == pytest.approx(
        (read + 2 * 4096 + found.cache_bytes[8192]) / 4.3e12
    )  # and its embedding row
    assert floor.decode[8192].compute == pytest.approx((2 * (products + head) + pair * 8192) / 790e12)
    assert floor.forward.bound == "compute"
    assert floor.decode[8192].bound == "memory"
    assert floor.max_batch_size == int((141e9 - found.weight_bytes) // found.cache_bytes[1000])
    assert floor.num_devices == 1


@pytest.mark.parametrize(("name", "billions"), [("qwen3-30b-a3b", 3.3), ("qwen3-235b-a22b", 22.0)])
def test_active_parameters_match_model_cards(name, billions):
    found = compute_ledger(name, devices=())
    assert found.active_parameters / 1e9 == pytest.approx(billions, rel=0.02)
    assert found.active_parameters < found.parameters


def test_235b_parameters_take_little_memory():
    compute_ledger("stories15m")  # torch's first meta tensor loads its decompositions
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = compute_ledger("qwen3-235b-a22b", devices=tuple(DEVICES))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000  # kB; the weights are 470 GB
    assert [floor.num_devices for floor in found.rooflines] == [4, 6, 6, 20, 8]
    assert all(floor.max_batch_size == 0 for floor in found.rooflines)


def test_dtypes_scale_bytes():
    sizes = {
        dtype: compute_ledger("smollm2-135m", dtype=dtype, devices=()) for dtype in ("float32", "float16", "float8")
    }
    assert [sizes[d].weight_bytes for d in sizes] == [4 * 134_515_008, 2 * 134_515_008, 134_515_008]
    assert [sizes[d].cache_bytes[1] for d in sizes] == [n * 2 * 3 * 64 * 30 for n in (4, 2, 1)]
    assert len({found.forward_flops for found in sizes.values()}) == 1


# ---- time -------------------------------------------------------------------------------------------------------


def test_batch_adds_products_and_cache_not_weights():
    one, many = (compute_ledger("llama-3.1-8b", context_length=4096, batch_size=b).rooflines[0] for b in (1, 64))
    assert many.forward.compute == pytest.approx(64 * one.forward.compute)
    row = (4096 * 131_072 + 2 * 4096) / 4.3e12  # its cache and its embedding row
    assert many.decode[4096].memory - one.decode[4096].memory == pytest.approx(63 * row)


def block() -> Block:
    attention = AttentionConfig(heads=8, kv_heads=2, head_dim=16)
    return Block(BlockConfig(width=128, attention=attention, mlp=GatedMLPConfig(intermediate_size=512), norm="rms"))


def test_compute_bound_batch_size_is_the_smallest():
    model = block()
    device = DeviceSpec(flops=100e9, bandwidth=1e9, memory=1e9, origin="made up")
    for context in (1, 5, 15):
        found = find_compute_bound_batch_size(model, context, device)
        sides = [compute_roofline(model, Workload.decode(context, b), device).bound for b in (found - 1, found)]
        assert sides == ["memory", "compute"]


def test_cache_bound_decoding_has_no_compute_bound_batch_size():
    model = block()
    device = DeviceSpec(flops=100e9, bandwidth=1e9, memory=1e9, origin="made up")
    row = (
        cost.count_flops(model, Workload.decode(5000)) / device.flops,
        cost.count_bytes(model, Workload.decode(5000)).cache / 1e9,
    )
    assert row[0] < row[1]
    assert find_compute_bound_batch_size(model, 5000, device) is None


def test_measured_times_are_above_the_roofline():
    """Measured on the H200 of the table: 998 tokens/s and 8,864 images/s."""
    perf = compute_ledger("perf-1.1b", context_length=512)
    assert 998 < 1 / perf.rooflines[0].decode[512].roofline < 2100
    siglip = compute_ledger("siglip-b16-256", batch_size=512)
    assert 8_864 < 512 / siglip.rooflines[0].forward.roofline < 2 * 8_864


# ---- towers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tokens", "parameters"),
    [
        ("clip-l14-336", 576, 304e6),
        ("siglip-b16-256", 256, 93e6),
        ("siglip-so400m-384", 729, 428e6),
        ("dinov2-l14", 1369, 304e6),
        ("prismatic-224", 256, 732e6),
    ],
)
def test_towers_have_patches_and_no_cache(name, tokens, parameters):
    found = compute_ledger(name)
    assert (found.input_kind, found.tokens) == ("image", tokens)
    assert found.parameters == pytest.approx(parameters, rel=0.01)
    assert found.training_flops == 3 * found.forward_flops
    assert found.decode_flops is None and not found.cache_bytes and not found.rooflines[0].decode
    assert found.rooflines[0].compute_bound_batch_size is found.rooflines[0].max_batch_size is None


def test_two_towers_match_published_flops():
    """350 to 400 GFLOPs at 224², about a TFLOP at 384²."""
    assert 350e9 < compute_ledger("prismatic-224").forward_flops < 400e9
    assert compute_ledger("prismatic-384").forward_flops == pytest.approx(1.1e12, rel=0.05)


def test_text_towers_and_contrastive_models():
    from vitrail.encoders.presets import TEXT_TOWER_PRESETS, VIT_PRESETS
    from vitrail.models.contrastive_model import ContrastiveConfig

    text = compute_ledger("clip-l-text")
    assert (text.input_kind, text.tokens) == ("text", 77)
    pair = compute_ledger(
        ContrastiveConfig(image=VIT_PRESETS["clip-l14"], text=TEXT_TOWER_PRESETS["clip-l"], embed_dim=768),
        name="CLIP-L",
    )
    assert (pair.name, pair.input_kind, pair.tokens) == ("CLIP-L", "pair", 256)
    both = compute_ledger("clip-l14").forward_flops + text.forward_flops
    assert both < pair.forward_flops < 1.001 * both  # plus two projections
    assert round(pair.parameters / 1e6) == 428


# ---- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "lama-3.1-8b"}, "did you mean 'llama-3.1-8b'"),
        ({"model": "Qwen3-4B"}, "did you mean 'qwen3-4b'"),
        ({"model": "?"}, "run `vitrail ledger`"),
        ({"dtype": "bfloat61"}, "did you mean 'bfloat16'"),
        ({"devices": ["abacus"]}, "known: h200, h100, a100, rtx4090, orin"),
        ({"context_length": 0}, "at least 1"),
        ({"batch_size": -1}, "at least 1"),
        ({"model": DECODER_PRESETS["stories15m"].block}, "does not support a BlockConfig"),
    ],
)
def test_invalid_arguments_raise(settings, message):
    with pytest.raises(ConfigError, match=message):
        compute_ledger(**{"model": "stories15m", **settings})


def test_every_preset_has_a_ledger(monkeypatch):
    """Systems are tested in test_ledger_vlm."""
    monkeypatch.setattr(cost_ledger, "VIDEO_FRAMES", 1)  # a pass of 49 frames takes a second
    rows = {
        compute_ledger(name, devices=(), context_lengths=()).input_kind
        for name in PRESETS.keys() - ALL_VLM_PRESETS.keys()
    }
    assert rows == {"prompt", "image", "text", "video"}
    assert get_preset("qwen3-4b") is DECODER_PRESETS["qwen3-4b"]
    assert torch.empty(1).device.type == "cpu"  # the default device is restored


# ---- published figures ------------------------------------------------------------------------------------------


def test_gaia_needs_1e17_flops_only_without_a_cache():
    assert compute_ledger(GAIA_CONFIG, devices=()).parameters == pytest.approx(6.5e9, rel=0.01)
    assert (GAIA_FRAME_TOKENS, GAIA_CONTEXT_LENGTH) == (576, 15_860)
    without, cached = count_gaia_frame_flops(cached=False), count_gaia_frame_flops(cached=True)
    assert without.weights == pytest.approx(2 * 6.5e9 * 576 * 15_860, rel=0.02)
    assert without.weights == pytest.approx(1.15e17, rel=0.05)  # the published figure
    assert sum(cached) == pytest.approx(1.2e13, rel=0.03)
    # published: 29 s on an A100
    a100 = DEVICES["a100"]
    assert without.weights / a100.flops > 6 * 60
    floor = (
        compute_ledger(GAIA_CONFIG, context_length=GAIA_CONTEXT_LENGTH, devices=["a100"])
        .rooflines[0]
        .decode[GAIA_CONTEXT_LENGTH]
    )
    assert floor.bound == "memory"
    assert GAIA_FRAME_TOKENS * floor.roofline == pytest.approx(6.0, rel=0.02)


def test_table_7_counts_multiply_adds_and_repeats_a_row():
    off = {n for n, output in TABLE_7_TFLOPS.items() if abs(output - interpolate_table_7(n)) > 0.001}
    assert off == {512, 768}
    assert TABLE_7_TFLOPS[512] == TABLE_7_TFLOPS[768] == TABLE_7_TFLOPS[256]
    slope = 1e12 * (interpolate_table_7(2) - interpolate_table_7(1))
    assert slope == pytest.approx(6.945e9, rel=1e-3)
    assert slope < count_min_flops_per_token() == 2 * 6_476_005_376
    assert count_min_flops_per_token() / 2 < slope  # in multiply-adds, the rest is the fusion module
