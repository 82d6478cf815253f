"""Rollouts: a cache that equals none at any length, codes that are fed back, temperature on logits, rows alone."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

import worlds
from helpers import randomize, relative
from vitrail.errors import ConfigError, DataError
from vitrail.generate.rollout import Rollout, RolloutConfig, generate_frame, rollout_frames
from vitrail.generate.sampling import RowRandom, SamplingConfig
from vitrail.models.genie_model import Genie
from vitrail.nn import SpaceTimeTransformer
from vitrail.nn.single_frame import SingleFrameRunner

SEEDED = SamplingConfig(seed=3)


def world(**given) -> Genie:
    made = worlds.genie(layers=2, **given)
    randomize(made)
    return made


def frames(B=2, T=None, seed=0) -> Tensor:
    shape = (B, 3, 8, 8) if T is None else (B, T, 3, 8, 8)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def without_cache(model: Genie, start: Tensor, given: Tensor, actions: Tensor, rolling: RolloutConfig) -> tuple:
    """The same rollout with every pass made over the whole video."""
    ids, shifted_actions = model.encode_frames(model.codec.to_pixels(start)), model.dynamics.shift_actions(given)
    chance = RowRandom(len(start), rolling.sampling.seed)
    for action in actions.unbind(1):
        shifted_actions = torch.cat([shifted_actions, action[:, None]], 1)

        def say(new: Tensor, hidden: Tensor, ids=ids, shifted_actions=shifted_actions) -> Tensor:
            seen = torch.zeros_like(ids, dtype=torch.bool)
            return model.dynamics(torch.cat([ids, new], 1), shifted_actions, torch.cat([seen, hidden], 1))[:, -1:]

        ids = torch.cat([ids, generate_frame(say, ids[:, -1:], rolling, chance.uniform(rolling.steps, 2, 4))], 1)
    return ids, model.codec.to_uint8(model.codec.decode(model.codec.lookup(ids)))


@pytest.mark.parametrize("acts", ["added", "token"])
@pytest.mark.parametrize("order", ["random", "confidence"])
@pytest.mark.parametrize("before", [1, 2, 5])
def test_a_cache_equals_none_beyond_the_memory_too(acts, order, before):
    """The memory is three frames, and eight are drawn."""
    model, rolling = world(acts=acts, latent=False), RolloutConfig(steps=3, sampling=SEEDED, order=order)
    start, given, actions = frames(T=before), torch.randint(0, 2, (2, before - 1)), torch.randint(0, 2, (2, 8))
    with torch.no_grad():
        ids, shown = without_cache(model, start, given, actions, rolling)
    ours = Rollout(model, rolling)
    ours.start(start, given)
    for t, action in enumerate(actions.unbind(1)):
        frame = ours.step(action)
        assert torch.equal(ours.last_frame_codes, ids[:, before + t])
        assert (frame.int() - shown[:, before + t].int()).abs().max() <= 1  # rounding of bytes
    assert ours.dynamics_cache.num_cached_frames == 2 and ours.dynamics_cache.num_frames == before + 8


def test_drawn_codes_condition_the_next_frame():
    """Codes that were drawn are fed back: by the same start and actions, what is said of the next frame differs only
    where another one was drawn before it."""
    model, hidden = world(latent=False), torch.ones(2, 1, 2, 2, dtype=torch.bool)

    def output(seed: int) -> tuple[Tensor, Tensor]:
        ours = Rollout(model, RolloutConfig(steps=2))
        ours.start(frames(), seed=seed)
        ours.step(torch.tensor([0, 1]))
        with torch.no_grad():
            return ours.last_frame_codes, model.dynamics(
                torch.zeros_like(hidden).long(), torch.ones(2, 1).long(), hidden, ours.dynamics_cache
            )

    (ids, a), (same, b), (other, c) = output(0), output(0), output(5)
    assert torch.equal(ids, same) and torch.equal(a, b)
    assert not torch.equal(ids, other) and not torch.allclose(a, c)


def test_each_pass_reads_the_codes_of_the_last():
    given = []

    def say(ids: Tensor, hidden: Tensor) -> Tensor:
        given.append((ids.clone(), hidden.clone()))
        return torch.zeros(*ids.shape, 9)

    drawn = generate_frame(
        say, torch.zeros(2, 1, 4, 4, dtype=torch.long), RolloutConfig(steps=4), RowRandom(2, 0).uniform(4, 2, 16)
    )
    counts = [hidden.flatten(1).sum(1).tolist() for _, hidden in given]
    assert counts == [[16, 16], [15, 15], [12, 12], [7, 7]]
    for (ids, hidden), (after, _) in pairwise(given):
        assert torch.equal(after[~hidden], ids[~hidden])  # what was settled stays
    ids, hidden = given[-1]
    assert torch.equal(drawn[~hidden], ids[~hidden])


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_divides_logits(temperature):
    """Dividing probabilities, as public code does, changes nothing once they are normalised."""
    logits = torch.tensor([2.0, 0.5, 0.0])
    rolling = RolloutConfig(steps=1, sampling=SamplingConfig(temperature=temperature))
    drawn = generate_frame(
        lambda ids, hidden: logits.expand(*ids.shape, 3),
        torch.zeros(1, 1, 100, 200).long(),
        rolling,
        RowRandom(1, 0).uniform(1, 2, 20_000),
    )
    share = drawn.flatten().bincount(minlength=3) / drawn.numel()
    assert torch.allclose(share, (logits / temperature).softmax(-1), atol=0.012)
    assert (share - logits.softmax(-1)).abs().max() > 0.05


def test_actions_matter_and_rows_stand_alone():
    model, rolling = world(latent=False), RolloutConfig(steps=2, sampling=SEEDED)
    start, actions = frames(3), torch.tensor([[0, 0, 0], [1, 1, 1], [0, 1, 0]])
    together = rollout_frames(model, start, actions, rolling)
    assert together.shape == (3, 3, 3, 8, 8) and together.dtype == torch.uint8
    alone = rollout_frames(model, start[1:2], actions[1:2], rolling.replace(sampling=SamplingConfig(seed=4)))
    assert torch.equal(alone[0], together[1])
    assert not torch.equal(rollout_frames(model, start, 1 - actions, rolling), together)
    assert torch.equal(rollout_frames(model, start, actions, rolling, seed=3), together)
    assert not torch.equal(rollout_frames(model, start, actions, rolling, seed=9), together)
    assert rollout_frames(model, start, actions[:, :0], rolling).shape == (3, 0, 3, 8, 8)


def test_half_precision_goes_on_too():
    """Of a world in bfloat16 every pass with the cache is what one without it is, but for rounding."""
    model = world(latent=False).bfloat16()
    ours = Rollout(model, RolloutConfig(steps=2, sampling=SEEDED))
    ours.start(frames())
    ids, shifted_actions = [ours.last_frame_codes], [torch.full((2,), 2)]
    for t in range(6):
        frame = ours.step(action := torch.tensor([t % 2, 1]))
        ids.append(ours.last_frame_codes), shifted_actions.append(action)
    assert frame.dtype == torch.uint8 and isinstance(ours.dynamics_cache, SingleFrameRunner)
    hidden, new = torch.ones(2, 1, 2, 2, dtype=torch.bool), torch.zeros(2, 1, 2, 2).long()
    seen = torch.cat([torch.zeros(2, 7, 2, 2, dtype=torch.bool), hidden], 1)
    with torch.no_grad():
        cached = model.dynamics(new, torch.ones(2, 1).long(), hidden, ours.dynamics_cache)
        known = torch.stack([*ids, new[:, 0]], 1), torch.stack([*shifted_actions, torch.ones(2).long()], 1)
        assert relative(cached.float(), model.dynamics(*known, seen)[:, -1:].float()) < 0.03


def test_the_usual_way_draws_the_same(monkeypatch):
    """Where blocks are none that can go in few operations: by a cache, and a ring once it is full."""
    model, rolling = world(latent=False), RolloutConfig(steps=2, sampling=SEEDED)
    actions = torch.randint(0, 2, (2, 6))
    ours = rollout_frames(model, frames(), actions, rolling)
    monkeypatch.setattr(SpaceTimeTransformer, "make_single_frame_runner", lambda self, cache: None)
    assert (ours.int() - rollout_frames(model, frames(), actions, rolling).int()).abs().max() <= 1  # rounding of bytes


def test_a_frame_is_seen_before_it_is_taken_in():
    """Whether and when one settles changes nothing, and settling twice is settling once."""
    model, rolling = world(latent=False), RolloutConfig(steps=2, sampling=SEEDED)
    one, other = Rollout(model, rolling), Rollout(model, rolling)
    one.start(frames()), other.start(frames())
    for t, action in enumerate(torch.randint(0, 2, (6, 2))):
        assert torch.equal(one.step(action), other.predict_frame(action))
        assert (one.dynamics_cache.num_frames, other.dynamics_cache.num_frames) == (t + 2, t + 1)
        for _ in range(t % 3):
            other.update_memory()
    other.predict_frame(action)
    assert torch.equal(other.start(frames(seed=1)), one.start(frames(seed=1)))  # what was left over is forgotten
    assert torch.equal(other.step(action), one.step(action))


def test_another_start_forgets_the_last():
    model, rolling = world(latent=False), RolloutConfig(steps=2, sampling=SEEDED)
    ours, actions = Rollout(model, rolling), torch.randint(0, 2, (2, 6))
    for B in (2, 1, 2):  # the buffers of one start serve another, where they fit
        ours.start(frames(B, seed=B))
        again = torch.stack([ours.step(one[:B]) for one in actions.unbind(1)], 1)
        assert torch.equal(again, rollout_frames(model, frames(B, seed=B), actions[:B], rolling))


def test_actions_between_frames_given_are_inferred():
    model, start = world(), frames(T=3)
    found = model.infer_actions(model.codec.to_pixels(start))
    ours, result = Rollout(model, RolloutConfig(sampling=SEEDED)), Rollout(model, RolloutConfig(sampling=SEEDED))
    assert torch.equal(ours.start(start), result.start(start, found))
    assert torch.equal(ours.step(torch.tensor([7, 2])), result.step(torch.tensor([7, 2])))
    assert (ours.num_actions, ours.frame_shape) == (8, (8, 8, 3))


def test_what_cannot_be_is_refused():
    model = world(latent=False)
    ours = Rollout(model)
    with pytest.raises(ConfigError, match="has not started"):
        ours.step(torch.zeros(1, dtype=torch.long))
    with pytest.raises(DataError, match="no latent action model"):
        ours.start(frames(T=3))
    with pytest.raises(DataError, match="2 × 3 frames"):
        ours.start(frames(T=3), torch.zeros(2, 1, dtype=torch.long))
    ours.start(frames())
    with pytest.raises(DataError, match="with 2 worlds"):
        ours.step(torch.zeros(1, dtype=torch.long))
    with pytest.raises(DataError, match="actions are outside"):
        ours.step(torch.tensor([0, 2]))
    for wrong in ({"steps": 0}, {"sampling": SamplingConfig(repetition_penalty=1.2)}):
        with pytest.raises(ConfigError):
            RolloutConfig(**wrong)


def test_empty_passes_are_skipped(monkeypatch):
    passes, rolling = [], RolloutConfig(steps=12, sampling=SEEDED)

    def say(ids: Tensor, hidden: Tensor) -> Tensor:
        passes.append(1)
        return torch.where(hidden, 0, ids)[..., None] * torch.arange(16.0)

    empty, chance = torch.zeros(3, 1, 2, 2, dtype=torch.long), torch.rand(3, 12, 2, 4)
    found = generate_frame(say, empty, rolling, chance)
    assert len(passes) == 4
    monkeypatch.setattr("vitrail.generate.rollout.find_active_passes", lambda total, steps: [True] * steps)
    assert torch.equal(generate_frame(say, empty, rolling, chance), found) and len(passes) == 16


def test_random_order_is_the_default():
    """Confident codes are those that did not change, so a confidence order would copy the last frame."""
    assert RolloutConfig().order == "random"
