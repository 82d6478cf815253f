"""Whole systems: against the ledger of their parts, sums by hand, and what was measured elsewhere."""

import pytest
import torch

from vitrail.errors import ConfigError
from vitrail.lab.ledger import DEVICES, LENGTHS, ledger
from vitrail.lab.systems import WHOLE, WORDS, system
from vitrail.models.presets import SYSTEMS

WRITING = ["llava-1.5-7b", "qwen3-vl-8b", "llama-3.2-11b-vision", "token-scaling"]


@pytest.mark.parametrize("name", WHOLE)
def test_every_system_has_its_figures(name):
    found = system(name)
    assert found.parameters == sum(found.parts.values()) and found.weights == 2 * found.parameters
    assert found.active <= found.parameters
    keys = [found.own, *(LENGTHS if found.grows else ())]
    assert sorted(found.flops) == sorted(found.cache) == sorted(set(keys))
    assert list(found.reach) == list(DEVICES)
    for device, reached in found.reach.items():
        for n, reach in reached.items():
            assert reach.seconds >= found.flops[n] / DEVICES[device].flops * (1 - 1e-9)
            assert reach.hz == pytest.approx(max(1, found.frames) / reach.seconds)
            assert sum(reach.passes.values()) == pytest.approx(reach.seconds)
            assert reach.needed >= found.weights / DEVICES[device].memory
    if found.grows:
        costs = [found.flops[n] for n in LENGTHS]
        assert costs == sorted(costs) and found.cache[LENGTHS[0]] < found.cache[LENGTHS[-1]]
    assert torch.empty(1).device.type == "cpu"


@pytest.mark.parametrize("name", WRITING)
def test_an_answer_without_context_is_the_ledgers_question(name):
    found, one = system(name, devices=["h200"], lengths=()), ledger(name, context=WORDS, devices=["h200"])
    assert (found.parameters, found.own, found.picture) == (one.parameters, one.tokens, one.seen)
    assert found.flops[found.own] == one.forward
    assert found.cache[found.own] == one.cache[one.tokens]
    assert found.reach["h200"][found.own].seconds == pytest.approx(one.floors[0].forward.floor)


def test_a_context_is_seen_by_every_new_token_and_computed_once():
    """LLaVA-1.5-7B: 608 tokens behind n that are cached cost 608 · n more pairs in 32 layers of width 4096."""
    found = system("llava-1.5-7b", devices=())
    for n in LENGTHS:
        assert found.flops[n] - found.flops[found.own] == 32 * 4 * 4096 * 608 * n
        assert found.cache[n] - found.cache[found.own] == ledger("llama-2-7b", devices=()).cache[1] * n


def test_an_action_is_seven_tokens():
    """The first with the picture, and six more, each reading all weights of the decoder."""
    found = system("openvla-7b", devices=["a100"], lengths=())
    word = ledger("llama-2-7b", context=found.own + 1, devices=["a100"], lengths=()).floors[0].decode[found.own + 1]
    first = found.flops[found.own] - 6 * ledger("llama-2-7b", context=found.own + 1, devices=()).decode
    assert found.reach["a100"][found.own].seconds == pytest.approx(6 * word.floor + first / DEVICES["a100"].flops)


def test_tokens_of_a_second():
    rates = {name: system(name, devices=(), lengths=()).second for name in ("llava-1.5-7b", "qwen3-vl-2b", "gaia-1")}
    assert rates == {"llava-1.5-7b": 2 * 576, "qwen3-vl-2b": 300, "gaia-1": 3600}  # two frames of Qwen's are one patch
    assert system("octo-base", devices=()).second is None


def test_cosmos_keeps_all_its_tokens():
    """12,800 of them, eight groups of 128, 16 layers; 10,240 are written one after another, behind 2,560 to 12,799."""
    found = system("cosmos-ar-4b", devices=(), lengths=(8192,))
    assert found.cache == {n: (n + more) * 2 * 8 * 128 * 16 * 2 for n, more in ((12_800, 0), (8192, 12_800))}
    pairs = 10_240 * (2560 + 5120) + 2560 * 2561 // 2
    assert found.flops[8192] - found.flops[12_800] == 16 * 4 * 4096 * 12_800 * 8192
    assert found.flops[12_800] > 16 * 4 * 4096 * pairs


def test_genie_by_hand():
    """25 passes of 920 tokens through 48 × (two attentions of 36 × 128, an MLP of 2,048), width 5120."""
    found = system("genie-11b", devices=())
    layer = 2 * 4 * 5120 * 4608 + 2 * 5120 * 2048
    pairs = 4 * 4608 * 920 * (920 + 16)
    assert found.flops == {14_720: 25 * (48 * (2 * layer * 920 + pairs) + 2 * 5120 * 1024 * 920)}
    assert found.parameters == pytest.approx(10.1e9 + 0.5e9, rel=0.01)
    assert found.told == ("tokenizer", "latent actions")


def test_what_was_measured_elsewhere_lies_above_the_floor():
    """Cosmos-2 2B: 50 s a clip of 480p on an H200; CogVideoX and Genie are told slower than this too."""
    assert 30 < system("cosmos-2-2b", devices=["h200"]).reach["h200"][37_440].seconds < 50
    assert system("genie-11b", devices=["h100"]).reach["h100"][14_720].hz > 1  # told: about 1 frame a second


def test_ten_frames_a_second_leave_a_token_a_pass_no_room():
    """Told of Cosmos on eight H100, with several tokens a pass. If all eight read the weights of the 4B together and
    nothing else took time, a token a pass would just do."""
    hz = 8 * system("cosmos-ar-4b", devices=["h100"], lengths=()).reach["h100"][12_800].hz
    assert 10 < hz < 11


def test_qwen_flagship_is_the_8b_with_another_decoder():
    eight, flagship = (system(name, devices=()) for name in ("qwen3-vl-8b", "qwen3-vl-235b-a22b"))
    assert eight.parts["tower"] == flagship.parts["tower"] and eight.parts["connector"] == flagship.parts["connector"]
    assert flagship.parts["decoder"] == ledger("qwen3-235b-a22b", devices=()).parameters
    assert set(WRITING) < set(SYSTEMS)


def test_what_is_refused_says_what_to_do():
    with pytest.raises(ConfigError, match="did you mean 'gaia-1'"):
        system("gaia-2")
    with pytest.raises(ConfigError, match="no device is called 'abacus'"):
        system("gaia-1", devices=["abacus"])
