"""A captured rollout equals a plain one, also after another start and with other weights."""

import copy

import pytest
import torch

import worlds
from helpers import randomize
from vitrail.errors import ConfigError, DataError
from vitrail.generate import cuda_graph_rollout
from vitrail.generate.cuda_graph_rollout import CUDAGraphRollout
from vitrail.generate.rollout import Rollout, RolloutConfig
from vitrail.generate.sampling import SamplingConfig
from vitrail.nn import SpaceTimeTransformer


class Again:
    """Replacement of a CUDA graph that repeats the captured calls on the same tensors."""

    made = 0

    def __init__(self, call, rehearse):
        type(self).made += 1
        rehearse(), rehearse()
        self.replay = call


def as_on_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(cuda_graph_rollout, "explain_unsupported", lambda model: None)
    monkeypatch.setattr(SpaceTimeTransformer, "make_single_frame_runner", lambda self, cache: None)


def same(device: str, **how) -> None:
    model = worlds.genie(layers=2, latent=False)
    randomize(model)
    model.to(device)
    rolling = RolloutConfig(steps=3, sampling=SamplingConfig(seed=3))
    plain, ours = Rollout(model, rolling), CUDAGraphRollout(model, rolling, **how)
    for seed, B in ((0, 2), (1, 2), (2, 1)):
        chance = torch.Generator().manual_seed(seed)
        start = torch.randint(0, 256, (B, 3, 8, 8), dtype=torch.uint8, generator=chance)
        actions = torch.randint(0, 2, (8, B), generator=chance)
        kept = [(ours.start(start), plain.start(start))]
        kept += [(ours.step(one), plain.step(one)) for one in actions]
        assert all(torch.equal(a, b) for a, b in kept)  # none was overwritten by a later one
        assert (
            torch.equal(ours.last_frame_codes, plain.last_frame_codes)
            and ours.dynamics_cache.num_frames == plain.dynamics_cache.num_frames == 9
        )
        if seed == 1:  # weights that lie elsewhere
            model.dynamics.code_embed = copy.deepcopy(model.dynamics.code_embed)


def test_recorded_frames_equal_drawn_frames(monkeypatch):
    monkeypatch.setattr(cuda_graph_rollout, "capture_graph", Again)
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

    monkeypatch.setattr(cuda_graph_rollout, "capture_graph", Broken)
    as_on_a_gpu(monkeypatch)
    model = worlds.genie(layers=2, latent=False)
    randomize(model)
    plain, ours = Rollout(model, RolloutConfig(steps=2)), CUDAGraphRollout(model, RolloutConfig(steps=2))
    start, action = torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 1])
    for world in (plain, ours):
        world.start(start, seed=4)
        world.step(action)
    ids, codes = ours.last_frame_codes, ours.codebook
    for _ in range(2):
        chance = copy.deepcopy(ours.rng)
        with pytest.raises(RuntimeError, match="no capture"):
            ours.step(action)
        assert (
            torch.equal(ours.last_frame_codes, ids)
            and ours.codebook is codes
            and ours.dynamics_cache.num_frames == ours.decoder_cache.num_frames == 2
        )
        ours.rng = chance
    for _ in range(4):
        assert torch.equal(ours.step(action), plain.step(action))


def test_a_graph_is_of_one_grid(monkeypatch):
    """4 × 16 pixels have as many codes as 8 × 8."""
    monkeypatch.setattr(cuda_graph_rollout, "explain_unsupported", lambda model: None)
    with pytest.raises(DataError, match=r"give frames of \(8, 8\) pixels"):
        CUDAGraphRollout(worlds.genie()).start(torch.zeros(1, 3, 4, 16, dtype=torch.uint8))


def test_a_plain_world_may_be_of_any_grid():
    """The buffers of one grid are reused for another with as many codes."""
    model, actions = worlds.genie(layers=2, latent=False), torch.tensor([[0], [1], [1], [0]])
    randomize(model)
    square, long = (torch.full((1, 3, *size), 90, dtype=torch.uint8) for size in ((8, 8), (4, 16)))
    world, fresh = Rollout(model, RolloutConfig(steps=2)), Rollout(model, RolloutConfig(steps=2))
    for one, start in ((world, square), (world, long), (fresh, long)):
        one.start(start, seed=1)
        drawn = [one.step(action) for action in actions]
        if one is world:
            again = drawn
    assert all(torch.equal(a, b) for a, b in zip(again, drawn, strict=True)) and drawn[0].shape == (1, 3, 4, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_graph_draws_the_same_image(compiled):
    same("cuda", use_compile=compiled)


def test_a_graph_needs_a_gpu():
    with pytest.raises(ConfigError, match="CUDA"):
        CUDAGraphRollout(worlds.genie())
