"""The ledger against sums by hand, published figures and what was measured."""

import time

import pytest
import torch

from vitrail.backbones.presets import DECODERS
from vitrail.errors import ConfigError
from vitrail.lab.audit import (
    GAIA,
    GAIA_CONTEXT,
    GAIA_FRAME,
    TABLE_7,
    gaia_frame,
    table_7_least,
    table_7_line,
)
from vitrail.lab.ledger import DEVICES, LENGTHS, PRESETS, Device, ledger, named, time_floor, turning
from vitrail.models.presets import SYSTEMS
from vitrail.nn import AttentionConfig, Block, BlockConfig, GatedConfig, Work, cost


def test_llama_by_hand():
    """Llama-3.1-8B: 32 layers of width 4096, 32 heads over 8 of 128, hidden 14,336, vocabulary 128,256."""
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14_336
    products, head, norms = 32 * layer, 128_256 * 4096, 65 * 4096
    pair = 4 * 4096 * 32  # q·k and weights·v in every layer
    found = ledger("llama-3.1-8b", context=1000)
    assert found.parameters == found.active == products + 2 * head + norms
    assert found.weights == 2 * found.parameters
    assert found.forward == 2 * products * 1000 + 2 * head + pair * 1000 * 1001 // 2
    assert found.decode == 2 * (products + head) + pair * 1000
    assert found.train * 1000 == 3 * (2 * (products + head) * 1000 + pair * 1000 * 1001 // 2)
    assert found.cache == {n: n * 2 * 8 * 128 * 32 * 2 for n in (1, 1000, *LENGTHS)}

    (floor,) = found.floors
    read = 2 * (products + head + norms)
    assert floor.decode[8192].memory == pytest.approx((read + 2 * 4096 + found.cache[8192]) / 4.3e12)  # and its row
    assert floor.decode[8192].compute == pytest.approx((2 * (products + head) + pair * 8192) / 790e12)
    assert floor.forward.bound == "compute"
    assert floor.decode[8192].bound == "memory"
    assert floor.fitting == int((141e9 - found.weights) // found.cache[1000])
    assert floor.needed == 1


@pytest.mark.parametrize(("name", "billions"), [("qwen3-30b-a3b", 3.3), ("qwen3-235b-a22b", 22.0)])
def test_active_parameters_are_those_of_the_cards(name, billions):
    found = ledger(name, devices=())
    assert found.active / 1e9 == pytest.approx(billions, rel=0.02)
    assert found.active < found.parameters


def test_235_billion_cost_neither_memory_nor_patience():
    ledger("stories15m")  # torch's first meta tensor loads its decompositions
    started = time.perf_counter()
    found = ledger("qwen3-235b-a22b", devices=tuple(DEVICES))
    assert time.perf_counter() - started < 4
    assert [floor.needed for floor in found.floors] == [4, 6, 6, 20, 8]
    assert all(floor.fitting == 0 for floor in found.floors)


def test_types_weigh_what_they_weigh():
    sizes = {dtype: ledger("smollm2-135m", dtype=dtype, devices=()) for dtype in ("float32", "float16", "float8")}
    assert [sizes[d].weights for d in sizes] == [4 * 134_515_008, 2 * 134_515_008, 134_515_008]
    assert [sizes[d].cache[1] for d in sizes] == [n * 2 * 3 * 64 * 30 for n in (4, 2, 1)]
    assert len({found.forward for found in sizes.values()}) == 1


# ---- time -------------------------------------------------------------------------------------------------------


def test_batch_is_paid_for_in_products_and_cache_but_not_in_weights():
    one, many = (ledger("llama-3.1-8b", context=4096, batch=b).floors[0] for b in (1, 64))
    assert many.forward.compute == pytest.approx(64 * one.forward.compute)
    row = (4096 * 131_072 + 2 * 4096) / 4.3e12  # its cache, and its row of the embedding
    assert many.decode[4096].memory - one.decode[4096].memory == pytest.approx(63 * row)


def block() -> Block:
    attention = AttentionConfig(heads=8, kv_heads=2, head_dim=16)
    return Block(BlockConfig(width=128, attention=attention, mlp=GatedConfig(hidden=512), norm="rms"))


def test_the_turning_batch_is_the_first():
    model = block()
    device = Device(flops=100e9, bandwidth=1e9, memory=1e9, origin="made up")
    for context in (1, 5, 15):
        found = turning(model, context, device)
        sides = [time_floor(model, Work.decode(context, b), device).bound for b in (found - 1, found)]
        assert sides == ["memory", "compute"]


def test_no_batch_turns_what_the_cache_bounds():
    model = block()
    device = Device(flops=100e9, bandwidth=1e9, memory=1e9, origin="made up")
    row = cost.flops(model, Work.decode(5000)) / device.flops, cost.bytes(model, Work.decode(5000)).cache / 1e9
    assert row[0] < row[1]
    assert turning(model, 5000, device) is None


def test_what_was_measured_lies_above_the_floor():
    """On the H200 whose rates stand in the table: 998 tokens and 8,864 pictures a second."""
    perf = ledger("perf-1.1b", context=512)
    assert 998 < 1 / perf.floors[0].decode[512].floor < 2100
    siglip = ledger("siglip-b16-256", batch=512)
    assert 8_864 < 512 / siglip.floors[0].forward.floor < 2 * 8_864


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
    found = ledger(name)
    assert (found.row, found.tokens) == ("picture", tokens)
    assert found.parameters == pytest.approx(parameters, rel=0.01)
    assert found.train == 3 * found.forward
    assert found.decode is None and not found.cache and not found.floors[0].decode
    assert found.floors[0].turning is found.floors[0].fitting is None


def test_two_towers_cost_what_the_text_says():
    """350 to 400 GFLOPs at 224², about a TFLOP at 384²."""
    assert 350e9 < ledger("prismatic-224").forward < 400e9
    assert ledger("prismatic-384").forward == pytest.approx(1.1e12, rel=0.05)


def test_text_towers_and_pairs():
    from vitrail.encoders.presets import TEXTS, VITS
    from vitrail.models.clip import ContrastiveConfig

    text = ledger("clip-l-text")
    assert (text.row, text.tokens) == ("text", 77)
    pair = ledger(ContrastiveConfig(image=VITS["clip-l14"], text=TEXTS["clip-l"], embed=768), name="CLIP-L")
    assert (pair.name, pair.row, pair.tokens) == ("CLIP-L", "pair", 256)
    both = ledger("clip-l14").forward + text.forward
    assert both < pair.forward < 1.001 * both  # and two projections
    assert round(pair.parameters / 1e6) == 428


# ---- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model": "lama-3.1-8b"}, "did you mean 'llama-3.1-8b'"),
        ({"model": "Qwen3-4B"}, "did you mean 'qwen3-4b'"),
        ({"model": "?"}, "`vitrail ledger` lists"),
        ({"dtype": "bfloat61"}, "did you mean 'bfloat16'"),
        ({"devices": ["abacus"]}, "known: h200, h100, a100, rtx4090, orin"),
        ({"context": 0}, "at least one"),
        ({"batch": -1}, "at least one"),
        ({"model": DECODERS["stories15m"].block}, "no ledger for a BlockConfig"),
    ],
)
def test_what_is_refused_says_what_to_do(settings, says):
    with pytest.raises(ConfigError, match=says):
        ledger(**{"model": "stories15m", **settings})


def test_every_preset_has_a_ledger():
    """Whole systems have theirs in test_ledger_vlm."""
    rows = {ledger(name, devices=(), lengths=()).row for name in PRESETS.keys() - SYSTEMS.keys()}
    assert rows == {"prompt", "picture", "text"}
    assert named("qwen3-4b") is DECODERS["qwen3-4b"]
    assert torch.empty(1).device.type == "cpu"  # the meta device is left again


# ---- figures of the texts ---------------------------------------------------------------------------------------


def test_gaia_spends_1e17_only_without_a_cache():
    assert ledger(GAIA, devices=()).parameters == pytest.approx(6.5e9, rel=0.01)
    assert (GAIA_FRAME, GAIA_CONTEXT) == (576, 15_860)
    without, cached = gaia_frame(cached=False), gaia_frame(cached=True)
    assert without.weights == pytest.approx(2 * 6.5e9 * 576 * 15_860, rel=0.02)
    assert without.weights == pytest.approx(1.15e17, rel=0.05)  # the figure told
    assert sum(cached) == pytest.approx(1.2e13, rel=0.03)
    # told beside it: 29 s on an A100
    a100 = DEVICES["a100"]
    assert without.weights / a100.flops > 6 * 60
    floor = ledger(GAIA, context=GAIA_CONTEXT, devices=["a100"]).floors[0].decode[GAIA_CONTEXT]
    assert floor.bound == "memory"
    assert GAIA_FRAME * floor.floor == pytest.approx(6.0, rel=0.02)


def test_table_7_counts_multiply_adds_and_repeats_a_row():
    off = {n for n, said in TABLE_7.items() if abs(said - table_7_line(n)) > 0.001}
    assert off == {512, 768}
    assert TABLE_7[512] == TABLE_7[768] == TABLE_7[256]
    slope = 1e12 * (table_7_line(2) - table_7_line(1))
    assert slope == pytest.approx(6.945e9, rel=1e-3)
    assert slope < table_7_least() == 2 * 6_476_005_376
    assert table_7_least() / 2 < slope  # as multiply-adds there is room for the fusion module
