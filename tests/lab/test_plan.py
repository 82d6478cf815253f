"""Plans: prices are the ledger's, choices keep the budget and could not be better."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.errors import ConfigError
from vitrail.hub.configs import read_config
from vitrail.lab.ledger import ledger
from vitrail.lab.plan import Budget, Price, ladder, plan, pricer
from vitrail.lab.scaling import fit
from vitrail.models.presets import vlm_named
from vitrail.nn import Work, cost

N = [1, 8, 64, 512]


def cheap(tokens: int) -> Price:
    return Price(tokens=tokens, first=0.1, seconds=0.1 + 0.001 * tokens, memory=1000 + tokens, flops=10 * tokens)


def test_a_decoders_price_is_the_ledgers():
    one = pricer("smollm2-135m", words=40, answer=1, batch=3)(88)
    told = ledger("smollm2-135m", context=128, batch=3, lengths=())
    assert one.flops == 3 * told.forward
    assert one.first == one.seconds == told.floors[0].forward.floor
    assert one.memory == told.weights + 3 * told.cache[128]


def test_an_answer_is_its_tokens_one_after_another():
    import torch

    from vitrail.backbones.decoder import Decoder
    from vitrail.backbones.presets import DECODERS

    with torch.device("meta"):
        decoder = Decoder(DECODERS["smollm2-135m"])
    steps = sum(cost.flops(decoder, Work.decode(40 + 88 + n)) for n in range(1, 10))
    short, long = (pricer("smollm2-135m", words=40, answer=n)(88) for n in (1, 10))
    assert long.flops - short.flops == steps
    assert long.memory - short.memory == 9 * ledger("smollm2-135m", lengths=()).cache[1]


@pytest.mark.parametrize("name", ["llava-1.5-7b", "token-scaling", "cogvlm-17b"])
def test_a_systems_price_at_its_own_tokens_is_the_ledgers(name):
    told = ledger(name, context=64, lengths=())
    one = pricer(name, words=64, answer=1)(told.seen)
    assert one.flops == told.forward
    assert one.memory == told.weights + told.cache[told.tokens]
    assert one.first >= told.floors[0].forward.floor * (1 - 1e-9)  # parts one after another


def test_the_price_of_a_model_that_reads_and_draws_is_the_ledgers():
    mini = read_config("mini")
    told, price = ledger(mini, context=20, lengths=()), pricer(mini, words=20, answer=1)
    one = price(144)
    assert (one.flops, one.memory) == (told.forward, told.weights + told.cache[165])
    assert one.first >= told.floors[0].forward.floor * (1 - 1e-9)
    fewer = price(16)
    assert one.memory - fewer.memory == 128 * told.cache[165] // 165  # the codec looks at all of it all the same
    assert told.parts["tower"].forward < fewer.flops < one.flops


def test_fused_queries_are_as_many_as_the_tokens():
    price, alone = pricer("token-scaling"), pricer(vlm_named("token-scaling").decoder)
    few, many = (price(n).flops - alone(n).flops for n in (16, 512))
    assert many > few  # the small model that fuses them reads more too


laws = st.builds(
    lambda c, alpha: fit(N, [c * n**-alpha for n in N]),
    st.floats(1, 100),
    st.floats(-0.5, 0.5).filter(lambda a: abs(a) > 1e-3),
)


@settings(max_examples=60)
@given(laws, st.floats(0.101, 0.8), st.one_of(st.none(), st.floats(0, 0.5)))
def test_choices_keep_the_budget_and_none_is_better(law, seconds, loss):
    budget = Budget(seconds=seconds, loss=loss)
    (one,) = plan({"task": law}, cheap, budget)
    best = max(law([1, 512]))
    fits = [n for n in range(1, 513) if cheap(n).seconds <= seconds]
    assert one.tokens in fits and one.price == cheap(one.tokens)
    assert one.kept == pytest.approx(float(law(one.tokens)) / best)
    enough = [n for n in fits if law(n) >= (1 - (loss or 0)) * best * (1 - 1e-9)]
    if loss is not None and enough:
        assert one.within and one.because == "loss" and one.tokens == enough[0]
    else:
        assert law(one.tokens) == max(law(fits))
        assert one.within == (loss is None)


def test_what_set_the_number_is_said():
    rising, falling = fit(N, [10, 12, 14, 16]), fit(N, [16, 14, 12, 10])
    said = {
        (name, tuple(budget.plain().items())): plan({"": law}, cheap, budget)[0].because
        for name, law in (("up", rising), ("down", falling))
        for budget in (Budget(seconds=0.2), Budget(memory=1200.0), Budget(flops=50.0), Budget(flops=1e9))
    }
    assert list(said.values()) == ["seconds", "memory", "flops", "most", *["score"] * 4]


def test_most_goes_beyond_what_was_measured():
    rising = fit(N, [10, 12, 14, 16])
    assert plan({"": rising}, cheap, Budget(flops=1e9), most=2000)[0].tokens == 2000


def test_a_law_that_falls_below_nothing_is_not_recommended():
    """Far beyond what was measured a saturating law may say no score at all."""
    falling = fit([1, 8, 64, 512, 4096], [40, 32, 25, 17, 9], "saturating")
    assert np.isnan(falling(10**6))
    (one,) = plan({"": falling}, cheap, Budget(flops=1e9), most=10**6)
    assert (one.tokens, one.kept) == (1, 1) and np.isfinite([one.score, *one.interval]).all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Budget(), "without a budget"),
        (lambda: Budget(loss=1.0), "everything"),
        (lambda: Budget(seconds=-1.0), "below nothing"),
        (lambda: Budget(seconds=math.nan), "no number"),
        (lambda: Budget(memory=math.inf, loss=0.1), "no number"),
        (lambda: Budget(loss=math.nan), "no number"),
        (lambda: pricer("llama-3.2-11b-vision"), "llama-3.2-11b-vision reads no"),
        (lambda: pricer("clip-b16"), "reads no"),
        (lambda: pricer("smollm2-135m", answer=0), "answer of 0"),
        (lambda: pricer("smollm2-135m", device="h300"), "h300"),
        (lambda: plan({"a": fit(N, [1, 2, 3, 4])}, cheap, Budget(seconds=0.05)), "even 1 tokens of a pass .* seconds"),
        (lambda: plan({"a": fit([8, 64, 512], [2, 3, 4])}, cheap, Budget(loss=0.1), most=4), "from 8 tokens on"),
    ],
)
def test_plans_that_cannot_be(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_ladder():
    assert ladder(1, 768) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768]
    assert ladder(8, 8) == [8] and ladder(3, 9) == [3, 4, 8, 9] and ladder(8, 64) == [8, 16, 32, 64]
