"""Token budgets: costs match the ledger, and choices are optimal."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.errors import ConfigError
from vitrail.hub.checkpoint_info import read_config
from vitrail.lab.cost_ledger import compute_ledger
from vitrail.lab.scaling_law import fit_law
from vitrail.lab.token_budget import Budget, InferenceCost, choose_tokens, make_cost_fn, powers_of_two
from vitrail.models.presets import get_vlm_config
from vitrail.nn import Workload, cost

N = [1, 8, 64, 512]


def cheap(tokens: int) -> InferenceCost:
    return InferenceCost(
        tokens=tokens, first_token_seconds=0.1, seconds=0.1 + 0.001 * tokens, memory=1000 + tokens, flops=10 * tokens
    )


def test_decoder_cost_matches_the_ledger():
    one = make_cost_fn("smollm2-135m", num_words=40, answer_tokens=1, batch_size=3)(88)
    result = compute_ledger("smollm2-135m", context_length=128, batch_size=3, context_lengths=())
    assert one.flops == 3 * result.forward_flops
    assert one.first_token_seconds == one.seconds == result.rooflines[0].forward.roofline
    assert one.memory == result.weight_bytes + 3 * result.cache_bytes[128]


def test_answer_cost_is_the_sum_of_its_steps():
    import torch

    from vitrail.backbones.decoder import Decoder
    from vitrail.backbones.presets import DECODER_PRESETS

    with torch.device("meta"):
        decoder = Decoder(DECODER_PRESETS["smollm2-135m"])
    steps = sum(cost.count_flops(decoder, Workload.decode(40 + 88 + n)) for n in range(1, 10))
    short, long = (make_cost_fn("smollm2-135m", num_words=40, answer_tokens=n)(88) for n in (1, 10))
    assert long.flops - short.flops == steps
    assert long.memory - short.memory == 9 * compute_ledger("smollm2-135m", context_lengths=()).cache_bytes[1]


@pytest.mark.parametrize("name", ["llava-1.5-7b", "token-scaling", "cogvlm-17b"])
def test_vlm_cost_matches_the_ledger(name):
    result = compute_ledger(name, context_length=64, context_lengths=())
    one = make_cost_fn(name, num_words=64, answer_tokens=1)(result.image_tokens)
    assert one.flops == result.forward_flops
    assert one.memory == result.weight_bytes + result.cache_bytes[result.tokens]
    assert one.first_token_seconds >= result.rooflines[0].forward.roofline * (1 - 1e-9)  # components run in sequence


def test_unified_cost_matches_the_ledger():
    mini = read_config("mini")
    result, price = (
        compute_ledger(mini, context_length=20, context_lengths=()),
        make_cost_fn(mini, num_words=20, answer_tokens=1),
    )
    one = price(144)
    assert (one.flops, one.memory) == (result.forward_flops, result.weight_bytes + result.cache_bytes[165])
    assert one.first_token_seconds >= result.rooflines[0].forward.roofline * (1 - 1e-9)
    fewer = price(16)
    assert (
        one.memory - fewer.memory == 128 * result.cache_bytes[165] // 165
    )  # the codec processes the whole image anyway
    assert result.components["tower"].forward_flops < fewer.flops < one.flops


def test_queries_are_as_many_as_the_tokens():
    price, alone = make_cost_fn("token-scaling"), make_cost_fn(get_vlm_config("token-scaling").decoder)
    few, many = (price(n).flops - alone(n).flops for n in (16, 512))
    assert many > few  # the query model costs more too


laws = st.builds(
    lambda c, alpha: fit_law(N, [c * n**-alpha for n in N]),
    st.floats(1, 100),
    st.floats(-0.5, 0.5).filter(lambda a: abs(a) > 1e-3),
)


@settings(max_examples=60)
@given(laws, st.floats(0.101, 0.8), st.one_of(st.none(), st.floats(0, 0.5)))
def test_choices_are_optimal_within_the_budget(law, seconds, loss):
    budget = Budget(seconds=seconds, loss=loss)
    (one,) = choose_tokens({"task": law}, cheap, budget)
    best = max(law([1, 512]))
    fits = [n for n in range(1, 513) if cheap(n).seconds <= seconds]
    assert one.tokens in fits and one.cost == cheap(one.tokens)
    assert one.fraction_of_best == pytest.approx(float(law(one.tokens)) / best)
    enough = [n for n in fits if law(n) >= (1 - (loss or 0)) * best * (1 - 1e-9)]
    if loss is not None and enough:
        assert one.meets_loss and one.reason == "loss" and one.tokens == enough[0]
    else:
        assert law(one.tokens) == max(law(fits))
        assert one.meets_loss == (loss is None)


def test_choice_reports_its_reason():
    rising, falling = fit_law(N, [10, 12, 14, 16]), fit_law(N, [16, 14, 12, 10])
    output = {
        (name, tuple(budget.to_dict().items())): choose_tokens({"": law}, cheap, budget)[0].reason
        for name, law in (("up", rising), ("down", falling))
        for budget in (Budget(seconds=0.2), Budget(memory=1200.0), Budget(flops=50.0), Budget(flops=1e9))
    }
    assert list(output.values()) == ["seconds", "memory", "flops", "most", *["score"] * 4]


def test_max_tokens_extends_the_measured_range():
    rising = fit_law(N, [10, 12, 14, 16])
    assert choose_tokens({"": rising}, cheap, Budget(flops=1e9), max_tokens=2000)[0].tokens == 2000


def test_undefined_scores_are_not_chosen():
    """Far beyond the measured range a saturating law may be undefined."""
    falling = fit_law([1, 8, 64, 512, 4096], [40, 32, 25, 17, 9], "saturating")
    assert np.isnan(falling(10**6))
    (one,) = choose_tokens({"": falling}, cheap, Budget(flops=1e9), max_tokens=10**6)
    assert (one.tokens, one.fraction_of_best) == (1, 1) and np.isfinite([one.score, *one.interval]).all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Budget(), "budget is empty"),
        (lambda: Budget(loss=1.0), "loss of 1 or more"),
        (lambda: Budget(seconds=-1.0), "negative limit"),
        (lambda: Budget(seconds=math.nan), "not finite"),
        (lambda: Budget(memory=math.inf, loss=0.1), "not finite"),
        (lambda: Budget(loss=math.nan), "not finite"),
        (lambda: make_cost_fn("llama-3.2-11b-vision"), "llama-3.2-11b-vision has no image tokens"),
        (lambda: make_cost_fn("clip-b16"), "no image tokens"),
        (lambda: make_cost_fn("smollm2-135m", answer_tokens=0), "answer of 0"),
        (lambda: make_cost_fn("smollm2-135m", device="h300"), "h300"),
        (
            lambda: choose_tokens({"a": fit_law(N, [1, 2, 3, 4])}, cheap, Budget(seconds=0.05)),
            "a: even 1 tokens exceed the limit of seconds",
        ),
        (
            lambda: choose_tokens({"a": fit_law([8, 64, 512], [2, 3, 4])}, cheap, Budget(loss=0.1), max_tokens=4),
            "from 8 tokens on",
        ),
    ],
)
def test_invalid_budgets_raise(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_powers_of_two():
    assert powers_of_two(1, 768) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768]
    assert (
        powers_of_two(8, 8) == [8] and powers_of_two(3, 9) == [3, 4, 8, 9] and powers_of_two(8, 64) == [8, 16, 32, 64]
    )
