"""Frames as one launch: what is recorded is what a plain rollout draws, after another start and other weights too."""

import copy

import pytest
import torch

import worlds
from helpers import randomize
from vitrail.errors import ConfigError
from vitrail.generate import captured_world
from vitrail.generate.captured_world import CapturedRollout
from vitrail.generate.rollout import Rolling, Rollout
from vitrail.generate.sampling import Sampling


class Again:
    """Stands for a CUDA graph: what it was made of is done again, on the same tensors."""

    made = 0

    def __init__(self, call, rehearse):
        type(self).made += 1
        rehearse(), rehearse()
        self.replay = call


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
            model.dynamics.head = copy.deepcopy(model.dynamics.head)


def test_what_is_recorded_is_what_is_drawn(monkeypatch):
    monkeypatch.setattr(captured_world, "graph_of", Again)
    monkeypatch.setattr(captured_world, "unfit", lambda model: None)
    monkeypatch.setattr(Again, "made", 0)
    same("cpu")
    assert Again.made == 2  # once for two rows, and once for one


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_graph_draws_what_is_drawn_without(compiled):
    same("cuda", compiled=compiled)


def test_a_graph_needs_a_gpu():
    with pytest.raises(ConfigError, match="CUDA"):
        CapturedRollout(worlds.genie())
