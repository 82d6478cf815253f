import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.errors import ConfigError
from vitrail.generate.sampling import (
    GREEDY,
    RowRandom,
    SamplingConfig,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    process_logits,
    sample_from_weights,
    sample_tokens,
)

SETTINGS = st.fixed_dictionaries(
    {
        "temperature": st.floats(0.1, 3),
        "top_k": st.none() | st.integers(1, 60),
        "top_p": st.none() | st.floats(0.01, 1),
        "min_p": st.none() | st.floats(0, 1),
        "repetition_penalty": st.sampled_from([1.0, 0.7, 1.3]),
        "seed": st.integers(0, 2**40),
    }
)


def logits_of(rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def transformers_shape(logits, s: SamplingConfig, ids):
    from transformers.generation import logits_process as warp

    steps = []
    if s.repetition_penalty != 1:
        steps.append(warp.RepetitionPenaltyLogitsProcessor(s.repetition_penalty))
    steps.append(warp.TemperatureLogitsWarper(s.temperature))
    if s.top_k is not None:
        steps.append(warp.TopKLogitsWarper(s.top_k))
    if s.top_p is not None and s.top_p < 1:  # as in `generate`: at 1 it would leave out what underflows to 0
        steps.append(warp.TopPLogitsWarper(s.top_p))
    if s.min_p is not None:
        steps.append(warp.MinPLogitsWarper(s.min_p))
    for step in steps:
        logits = step(ids, logits)
    return logits


@settings(max_examples=150)
@given(choice=SETTINGS, rows=st.integers(1, 4), vocab=st.integers(1, 50), seed=st.integers(0, 1000))
def test_filters_agree_with_transformers(choice, rows, vocab, seed):
    sampling, logits = SamplingConfig(**choice), logits_of(rows, vocab, seed)
    ids = torch.randint(vocab, (rows, 5), generator=torch.Generator().manual_seed(seed))
    seen = torch.zeros(rows, vocab, dtype=torch.bool).scatter(1, ids, True)
    torch.testing.assert_close(process_logits(logits, sampling, seen), transformers_shape(logits, sampling, ids))


def test_transformers_applies_them_in_our_order():
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    settings = GenerationConfig(do_sample=True, temperature=0.5, top_k=4, top_p=0.9, min_p=0.1, repetition_penalty=1.2)
    settings.num_beams = 1
    names = [type(step).__name__ for step in model._get_logits_processor(settings, input_ids_seq_length=3)]
    ours = ["RepetitionPenalty", "Temperature", "TopK", "TopP", "MinP"]
    assert [name.removesuffix("LogitsProcessor").removesuffix("LogitsWarper") for name in names] == ours


@settings(max_examples=60)
@given(choice=SETTINGS, rows=st.integers(2, 5), seed=st.integers(0, 1000))
def test_a_row_does_not_depend_on_its_neighbours(choice, rows, seed):
    sampling, logits = SamplingConfig(**choice | {"repetition_penalty": 1.0}), logits_of(rows, 40, seed)
    dice = RowRandom(rows, sampling.seed)
    together = torch.stack([sample_tokens(logits, sampling, dice.uniform()) for _ in range(3)], dim=1)
    for i in range(rows):
        dice = RowRandom(1, sampling.seed + i)
        alone = torch.stack([sample_tokens(logits[i : i + 1], sampling, dice.uniform()) for _ in range(3)], dim=1)
        assert together[i].tolist() == alone[0].tolist()


def test_draws_follow_the_weights():
    weights = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0]).expand(20_000, -1)
    chance = torch.tensor(np.random.default_rng(0).random(20_000))
    share = sample_from_weights(weights, chance).bincount(minlength=6) / 20_000
    assert share[[0, 2, 5]].tolist() == [0, 0, 0]
    assert torch.allclose(share, weights[0], atol=0.01)


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-30, 0.1, 1.0]), min_size=1, max_size=8).filter(any),
    chance=st.sampled_from([0.0, 0.5, math.nextafter(1, 0)]),
)
def test_what_is_forbidden_is_never_drawn(weights, chance):
    token = sample_from_weights(torch.tensor([weights]), torch.tensor([chance], dtype=torch.float64)).item()
    assert weights[token] > 0


def test_greedy_is_the_likeliest_and_the_first_of_equals():
    assert sample_tokens(torch.tensor([[0.0, 2.0, 2.0], [3.0, 0.0, 1.0]]), GREEDY).tolist() == [1, 0]


def test_a_large_vocabulary_in_half_precision():
    logits = logits_of(2, 150_000).bfloat16()
    sampling = SamplingConfig(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, seed=3)
    token = sample_tokens(logits, sampling, RowRandom(2, 3).uniform())
    assert (logits.gather(1, token[:, None]) >= logits.topk(50).values[:, -1:]).all()


@pytest.mark.parametrize(
    "keep", [lambda x: keep_top_k(x, 1), lambda x: keep_top_p(x, 1e-9), lambda x: keep_min_p(x, 1)]
)
def test_the_strictest_filter_leaves_the_likeliest(keep):
    logits = logits_of(5, 30)
    assert (keep(logits) > -torch.inf).sum(-1).tolist() == [1] * 5
    assert keep(logits).argmax(-1).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1}, {"temperature": math.nan}, {"top_k": 0}, {"top_p": 0}, {"top_p": 1.1}, {"min_p": 2},
     {"repetition_penalty": 0}, {"seed": -1}],
)  # fmt: skip
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))) as caught:
        SamplingConfig(**wrong)
    assert caught.value.remedy


def test_a_draw_without_chance_is_refused():
    with pytest.raises(ConfigError, match="uniform"):
        sample_tokens(torch.zeros(1, 3), SamplingConfig())
