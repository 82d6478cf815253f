"""Frames as one launch: what is recorded is what a plain rollout draws, after another start and other weights too."""

import copy

import pytest
import torch

import worlds
from helpers import randomize
from vitrail.errors import ConfigError, DataError
from vitrail.generate import captured_world
from vitrail.generate.captured_world import CapturedRollout
from vitrail.generate.rollout import Rolling, Rollout
from vitrail.generate.sampling import Sampling
from vitrail.nn import SpaceTime


class Again:
    """Stands for a CUDA graph: what it was made of is done again, on the same tensors."""

    made = 0

    def __init__(self, call, rehearse):
        type(self).made += 1
        rehearse(), rehearse()
        self.replay = call


def as_on_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(captured_world, "unfit", lambda model: None)
    monkeypatch.setattr(SpaceTime, "one_frame", lambda self, cache: None)


def same(device: str, **how) -> None:
    model = worlds.genie(layers=2, latent=False)
    randomize(model)
    model.to(device)
    rolling = Rolling(steps=3, sampling=Sampling(seed=3))
    plain, ours = Rollout(model, rolling), CapturedRollout(model, rolling, **how)
    for seed, B in ((0, 2), (1, 2), (2, 1)):
        chance = torch.Generator().manual_seed(seed)
        start = torch.randint(0, 256, (B, 3, 8, 8), dtype=torch.uint8, generator=chance)
        actions = torch.randint(0, 2, (8, B), generator=chance)
        kept = [(ours.start(start), plain.start(start))]
        kept += [(ours.step(one), plain.step(one)) for one in actions]
        assert all(torch.equal(a, b) for a, b in kept)  # none was overwritten by a later one
        assert torch.equal(ours.ids, plain.ids) and ours.past.seen == plain.past.seen == 9
        if seed == 1:  # weights that lie elsewhere
            model.dynamics.code = copy.deepcopy(model.dynamics.code)


def test_what_is_recorded_is_what_is_drawn(monkeypatch):
    monkeypatch.setattr(captured_world, "graph_of", Again)
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(Again, "made", 0)
    same("cpu")
    assert Again.made == 2  # once for two rows, and once for one


def test_a_world_that_could_not_be_recorded_goes_on(monkeypatch):
    class Broken(Again):
        broken = 2

        def __init__(self, call, rehearse):
            super().__init__(call, rehearse)
            if type(self).broken:
                type(self).broken -= 1
                call()
                raise RuntimeError("no capture")

    monkeypatch.setattr(captured_world, "graph_of", Broken)
    as_on_a_gpu(monkeypatch)
    model = worlds.genie(layers=2, latent=False)
    randomize(model)
    plain, ours = Rollout(model, Rolling(steps=2)), CapturedRollout(model, Rolling(steps=2))
    start, action = torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 1])
    for world in (plain, ours):
        world.start(start, seed=4)
        world.step(action)
    ids, codes = ours.ids, ours.codes
    for _ in range(2):
        chance = copy.deepcopy(ours.chance)
        with pytest.raises(RuntimeError, match="no capture"):
            ours.step(action)
        assert torch.equal(ours.ids, ids) and ours.codes is codes and ours.past.seen == ours.shown.seen == 2
        ours.chance = chance
    for _ in range(4):
        assert torch.equal(ours.step(action), plain.step(action))


def test_a_graph_is_of_one_grid(monkeypatch):
    """4 × 16 pixels have as many codes as 8 × 8."""
    monkeypatch.setattr(captured_world, "unfit", lambda model: None)
    with pytest.raises(DataError, match=r"the model's are \(8, 8\)"):
        CapturedRollout(worlds.genie()).start(torch.zeros(1, 3, 4, 16, dtype=torch.uint8))


def test_a_plain_world_may_be_of_any_grid():
    """The buffers of one are filled anew for another that has as many codes."""
    model, actions = worlds.genie(layers=2, latent=False), torch.tensor([[0], [1], [1], [0]])
    randomize(model)
    square, long = (torch.full((1, 3, *size), 90, dtype=torch.uint8) for size in ((8, 8), (4, 16)))
    world, fresh = Rollout(model, Rolling(steps=2)), Rollout(model, Rolling(steps=2))
    for one, start in ((world, square), (world, long), (fresh, long)):
        one.start(start, seed=1)
        drawn = [one.step(action) for action in actions]
        if one is world:
            again = drawn
    assert all(torch.equal(a, b) for a, b in zip(again, drawn, strict=True)) and drawn[0].shape == (1, 3, 4, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_graph_draws_what_is_drawn_without(compiled):
    same("cuda", compiled=compiled)


def test_a_graph_needs_a_gpu():
    with pytest.raises(ConfigError, match="CUDA"):
        CapturedRollout(worlds.genie())
