"""Many texts at once are drawn as the model weighs them, end where they should, and can be had again."""

import pytest
import torch

from helpers import randomize
from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.errors import ConfigError
from vitrail.generate.bulk_generation import generate_many
from vitrail.generate.sampling import SamplingConfig
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, RotaryConfig

V = 7


@pytest.fixture(scope="module")
def model() -> Decoder:
    torch.manual_seed(0)
    block = BlockConfig(
        width=16, attention=AttentionConfig(heads=2), mlp=GatedMLPConfig(intermediate_size=32), norm="rms"
    )
    config = DecoderConfig(vocab_size=V, layers=2, block=block, rotary=RotaryConfig(head_dim=8), context_length=32)
    return randomize(Decoder(config), spread=0.5).eval()


def written(model, count, **more):
    asked = {"max_new_tokens": 5, "stop_ids": (), "sampling": SamplingConfig(seed=1)} | more
    return [one.ids for one in generate_many(model, [1, 2], count, **asked)]


def test_sampling_frequencies_match_probabilities(model):
    """All 49 pairs of two tokens are as frequent as their probabilities."""
    count = 6000
    found = torch.tensor(written(model, count, max_new_tokens=2, batch_size=1500))
    with torch.no_grad():
        first = model(torch.tensor([[1, 2]]))[0, -1].softmax(-1)
        second = torch.stack([model(torch.tensor([[1, 2, i]]))[0, -1].softmax(-1) for i in range(V)])
    wanted = (first[:, None] * second).flatten() * count
    counted = torch.bincount(found[:, 0] * V + found[:, 1], minlength=V * V)
    chi = ((counted - wanted).square() / wanted.clamp(min=1)).sum()
    assert chi < 100  # 48 degrees of freedom: above in one of 70,000 cases


def test_near_zero_temperature_is_greedy(model):
    row, wanted = [1, 2], []
    for _ in range(5):
        with torch.no_grad():
            wanted.append(int(model(torch.tensor([row + wanted]))[0, -1].argmax()))
    assert written(model, 5, sampling=SamplingConfig(temperature=1e-3), batch_size=2) == [wanted] * 5


def test_a_text_ends_before_its_end(model):
    whole, cut = written(model, 200, max_new_tokens=24), written(model, 200, max_new_tokens=24, stop_ids=(3, 5))
    assert any(len(ids) < 24 for ids in cut) and any(3 in ids or 5 in ids for ids in whole)
    for ids, full in zip(cut, whole, strict=True):
        assert ids == full[: len(ids)] and (len(ids) == 24 or full[len(ids)] in (3, 5))
    result = generate_many(model, [1, 2], 200, max_new_tokens=24, stop_ids=(3, 5), sampling=SamplingConfig(seed=1))
    assert [one.is_complete for one in result] == [len(ids) < 24 for ids in cut]


def test_batch_ends_when_all_rows_end(model):
    calls = []
    made = model.forward
    model.forward = lambda *a, **k: calls.append(1) or made(*a, **k)
    try:
        assert written(model, 3, max_new_tokens=30, stop_ids=range(V)) == [[]] * 3
    finally:
        del model.forward
    assert len(calls) < 20


def test_a_seed_writes_the_same_again_and_a_count_is_a_beginning(model):
    assert written(model, 50, batch_size=16) == written(model, 50, batch_size=16)
    for fewer in (1, 16, 43, 48):
        assert written(model, 50, batch_size=16)[:fewer] == written(model, fewer, batch_size=16)
    assert written(model, 50, batch_size=16) != written(model, 50, batch_size=16, sampling=SamplingConfig(seed=2))
    assert len({tuple(ids) for ids in written(model, 64, batch_size=16)}) > 48  # no batch says what another did
    assert all(max(ids, default=0) < 4 for ids in written(model, 50, vocab_size=4))


@pytest.mark.parametrize("more", [{"max_new_tokens": 0}, {"max_new_tokens": 31}, {"sampling": SamplingConfig(repetition_penalty=1.2)},  # noqa: E501
                                  {"sampling": SamplingConfig(temperature=0.0)}])  # fmt: skip
def test_what_cannot_be_written_is_refused_at_once(model, more):
    asked = {"max_new_tokens": 5, "stop_ids": (), "sampling": SamplingConfig(seed=1)} | more
    with pytest.raises(ConfigError):
        generate_many(model, [1, 2], 1, **asked)
