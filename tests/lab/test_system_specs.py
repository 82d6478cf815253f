"""Costs of systems against the ledger, manual sums and published measurements."""

import pytest
import torch

from vitrail.errors import ConfigError
from vitrail.lab.cost_ledger import CONTEXT_LENGTHS, DEVICES, compute_ledger
from vitrail.lab.system_specs import QUESTION_TOKENS, SYSTEM_SPECS, get_system_cost
from vitrail.models.presets import ALL_VLM_PRESETS

WRITING = ["llava-1.5-7b", "qwen3-vl-8b", "llama-3.2-11b-vision", "token-scaling"]


@pytest.mark.parametrize("name", SYSTEM_SPECS)
def test_every_system_has_costs(name):
    found = get_system_cost(name)
    assert found.parameters == sum(found.components.values()) and found.weight_bytes == 2 * found.parameters
    assert found.active_parameters <= found.parameters
    keys = [found.own_context, *(CONTEXT_LENGTHS if found.is_context_open else ())]
    assert sorted(found.flops) == sorted(found.cache_bytes) == sorted(set(keys))
    assert list(found.latency) == list(DEVICES)
    for device, reached in found.latency.items():
        for n, reach in reached.items():
            assert reach.seconds >= found.flops[n] / DEVICES[device].flops * (1 - 1e-9)
            assert reach.hz == pytest.approx(max(1, found.num_frames) / reach.seconds)
            assert sum(reach.pass_seconds.values()) == pytest.approx(reach.seconds)
            assert reach.num_devices >= found.weight_bytes / DEVICES[device].memory
    if found.is_context_open:
        costs = [found.flops[n] for n in CONTEXT_LENGTHS]
        assert costs == sorted(costs) and found.cache_bytes[CONTEXT_LENGTHS[0]] < found.cache_bytes[CONTEXT_LENGTHS[-1]]
    assert torch.empty(1).device.type == "cpu"


@pytest.mark.parametrize("name", WRITING)
def test_answer_without_context_matches_the_ledger(name):
    found, one = (
        get_system_cost(name, devices=["h200"], context_lengths=()),
        compute_ledger(name, context_length=QUESTION_TOKENS, devices=["h200"]),
    )
    assert (found.parameters, found.own_context, found.tokens_per_image) == (
        one.parameters,
        one.tokens,
        one.image_tokens,
    )
    assert found.flops[found.own_context] == one.forward_flops
    assert found.cache_bytes[found.own_context] == one.cache_bytes[one.tokens]
    assert found.latency["h200"][found.own_context].seconds == pytest.approx(one.rooflines[0].forward.roofline)


def test_every_new_token_attends_to_the_context():
    """LLaVA-1.5-7B: 608 tokens behind n that are cached cost 608 · n more pairs in 32 layers of width 4096."""
    found = get_system_cost("llava-1.5-7b", devices=())
    for n in CONTEXT_LENGTHS:
        assert found.flops[n] - found.flops[found.own_context] == 32 * 4 * 4096 * 608 * n
        assert (
            found.cache_bytes[n] - found.cache_bytes[found.own_context]
            == compute_ledger("llama-2-7b", devices=()).cache_bytes[1] * n
        )


def test_action_is_seven_tokens():
    """The first with the picture, and six more, each reading all weights of the decoder."""
    found = get_system_cost("openvla-7b", devices=["a100"], context_lengths=())
    word = (
        compute_ledger("llama-2-7b", context_length=found.own_context + 1, devices=["a100"], context_lengths=())
        .rooflines[0]
        .decode[found.own_context + 1]
    )
    first = (
        found.flops[found.own_context]
        - 6 * compute_ledger("llama-2-7b", context_length=found.own_context + 1, devices=()).decode_flops
    )
    assert found.latency["a100"][found.own_context].seconds == pytest.approx(
        6 * word.roofline + first / DEVICES["a100"].flops
    )


def test_tokens_per_second_of_video():
    rates = {
        name: get_system_cost(name, devices=(), context_lengths=()).tokens_per_second
        for name in ("llava-1.5-7b", "qwen3-vl-2b", "gaia-1")
    }
    assert rates == {"llava-1.5-7b": 2 * 576, "qwen3-vl-2b": 300, "gaia-1": 3600}  # two frames of Qwen's are one patch
    assert get_system_cost("octo-base", devices=()).tokens_per_second is None


def test_cosmos_caches_all_tokens():
    """12,800 of them, eight groups of 128, 16 layers; 10,240 are written one after another, behind 2,560 to 12,799."""
    found = get_system_cost("cosmos-ar-4b", devices=(), context_lengths=(8192,))
    assert found.cache_bytes == {n: (n + more) * 2 * 8 * 128 * 16 * 2 for n, more in ((12_800, 0), (8192, 12_800))}
    pairs = 10_240 * (2560 + 5120) + 2560 * 2561 // 2
    assert found.flops[8192] - found.flops[12_800] == 16 * 4 * 4096 * 12_800 * 8192
    assert found.flops[12_800] > 16 * 4 * 4096 * pairs


def test_genie_matches_a_manual_computation():
    """25 passes of 920 tokens through 48 × (two attentions of 36 × 128, an MLP of 2,048), width 5120."""
    found = get_system_cost("genie-11b", devices=())
    layer = 2 * 4 * 5120 * 4608 + 2 * 5120 * 2048
    pairs = 4 * 4608 * 920 * (920 + 16)
    assert found.flops == {14_720: 25 * (48 * (2 * layer * 920 + pairs) + 2 * 5120 * 1024 * 920)}
    assert found.parameters == pytest.approx(10.1e9 + 0.5e9, rel=0.01)
    assert found.published_components == ("tokenizer", "latent actions")


def test_published_times_are_above_the_roofline():
    """Cosmos-2 2B: 50 s for a clip of 480p on an H200. Published times of CogVideoX and Genie are also longer."""
    assert 30 < get_system_cost("cosmos-2-2b", devices=["h200"]).latency["h200"][37_440].seconds < 50
    assert get_system_cost("genie-11b", devices=["h100"]).latency["h100"][14_720].hz > 1  # told: about 1 frame a second


def test_ten_frames_per_second_exceed_one_token_per_pass():
    """Told of Cosmos on eight H100, with several tokens a pass. If all eight read the weights of the 4B together and
    nothing else took time, a token a pass would just do."""
    hz = 8 * get_system_cost("cosmos-ar-4b", devices=["h100"], context_lengths=()).latency["h100"][12_800].hz
    assert 10 < hz < 11


def test_qwen_flagship_is_the_8b_with_another_decoder():
    eight, flagship = (get_system_cost(name, devices=()) for name in ("qwen3-vl-8b", "qwen3-vl-235b-a22b"))
    assert (
        eight.components["tower"] == flagship.components["tower"]
        and eight.components["connector"] == flagship.components["connector"]
    )
    assert flagship.components["decoder"] == compute_ledger("qwen3-235b-a22b", devices=()).parameters
    assert set(WRITING) < set(ALL_VLM_PRESETS)


def test_unknown_names_raise():
    with pytest.raises(ConfigError, match="did you mean 'gaia-1'"):
        get_system_cost("gaia-2")
    with pytest.raises(ConfigError, match="no device is named 'abacus'"):
        get_system_cost("gaia-1", devices=["abacus"])
