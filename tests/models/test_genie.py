"""Genie: what the dynamics look at and learn from, each part a stage of its own, and bugs that public code has."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import worlds
from helpers import randomize, relative
from vitrail.codecs.quantizers import ContinuousConfig
from vitrail.errors import ConfigError, DataError
from vitrail.models.genie import DynamicsConfig, Genie, GenieConfig
from vitrail.nn import cost
from vitrail.objectives.masked import hide_codes

ACTS = ["added", "token"]


def dynamics(acts="added", **more):
    made = worlds.genie(acts=acts, latent=False, **more).dynamics
    randomize(made)
    return made


def batch(B=3, T=4, seed=0):
    torch.manual_seed(seed)
    ids, actions = torch.randint(0, 25, (B, T, 2, 2)), torch.randint(0, 2, (B, T - 1))
    return ids, actions, hide_codes((B, T, 2, 2), (0.5, 1.0))


@pytest.mark.parametrize("acts", ACTS)
def test_what_is_hidden_is_not_looked_at(acts):
    ours, (ids, actions, hidden) = dynamics(acts), batch()
    other = torch.where(hidden, (ids + 7) % 25, ids)
    led = ours.led(actions)
    assert torch.equal(ours(ids, led, hidden), ours(other, led, hidden))
    assert not torch.allclose(ours(ids, led), ours(other, led))


@pytest.mark.parametrize("acts", ACTS)
def test_what_is_learned_from_is_what_was_hidden(acts):
    """Not what the mask put in its place."""
    ours, (ids, actions, hidden) = dynamics(acts), batch()
    led = ours.led(actions)
    missed, said = ours.missed(ids, led, hidden), ours(ids, led, hidden).log_softmax(-1)
    for b, t, h, w in hidden.nonzero().tolist():
        assert missed[b, t, h, w].item() == pytest.approx(-said[b, t, h, w, ids[b, t, h, w]].item(), rel=1e-5)
    elsewhere = torch.where(hidden, (ids + 1) % 25, ids)
    assert not torch.allclose(ours.missed(elsewhere, led, hidden)[hidden], missed[hidden])


@pytest.mark.parametrize("acts", ACTS)
def test_the_future_does_not_reach_the_past(acts):
    ours, (ids, actions, _) = dynamics(acts, layers=2), batch(T=5)
    other, done = ids.clone(), actions.clone()
    other[:, 3:], done[:, 2:] = (other[:, 3:] + 1) % 25, 1 - done[:, 2:]  # frame 3, and the action that leads to it
    a, b = ours(ids, ours.led(actions)), ours(other, ours.led(done))
    assert relative(a[:, :3], b[:, :3]) < 1e-6 and relative(a[:, 3:], b[:, 3:]) > 1e-3


@pytest.mark.parametrize("acts", ACTS)
def test_an_action_reaches_the_frame_it_leads_to(acts):
    ours, (ids, actions, hidden) = dynamics(acts), batch()
    done = actions.clone()
    done[:, 1] = 1 - done[:, 1]
    a, b = ours(ids, ours.led(actions), hidden), ours(ids, ours.led(done), hidden)
    moved = (a - b).abs().amax((0, 2, 3, 4)) > 1e-6
    assert moved.tolist() == [False, False, True, True]
    assert ours.led(actions)[:, 0].tolist() == [2, 2, 2]  # to the first frame nothing led


def test_shares_hidden_are_those_asked_for():
    hidden = hide_codes((400, 5, 8, 8), (0.5, 1.0))
    assert not hidden[:, 0].any()
    share = hidden[:, 1:].float().mean((1, 2, 3))
    assert share.min() > 0.4 and share.max() > 0.98 and share.mean().item() == pytest.approx(0.75, abs=0.03)
    assert share.std().item() == pytest.approx(0.5 / math.sqrt(12), abs=0.03)  # uniform over videos, not a constant
    assert hide_codes((2, 3, 4, 4), (1.0, 1.0))[:, 1:].all()
    half = hide_codes((400, 5, 8, 8), (1.0, 1.0), whole=0.5)
    frames = half.flatten(2)
    assert torch.equal(frames.any(2), frames.all(2)) and not frames[:, 0].any()  # a frame is hidden, or it is not
    assert 0.45 < frames[:, 1:].float().mean() < 0.55
    with pytest.raises(ConfigError, match="not hidden at all"):
        hide_codes((1, 2, 1, 1), (0.5, 1.0), whole=1.0)
    with pytest.raises(ConfigError, match="rates"):
        hide_codes((1, 2, 1, 1), (0.8, 0.2))


def test_a_part_that_a_stage_leaves_frozen_stays_as_it_is():
    ours, (video, _) = Genie(worlds.genie_config(codes=16)), worlds.dots(8)
    ours.codec.requires_grad_(False)
    ours.train()
    assert not ours.codec.training and ours.latent.training and ours.dynamics.training
    before = ours.codec.quantizer.codebook.clone()
    ours.look(video)
    assert torch.equal(ours.codec.quantizer.codebook, before)
    ours.requires_grad_(True).train()
    assert ours.codec.training
    ours.codec(video)
    assert not torch.equal(ours.codec.quantizer.codebook, before)


def test_actions_are_learned_or_known():
    ours, known, (video, actions) = worlds.genie(), worlds.genie(latent=False), worlds.dots(4)
    assert ours.actions == 8 and ours.infer(video).shape == (4, 2)
    assert known.actions == 2 and known.latent is None
    known.check_actions(actions)
    with pytest.raises(DataError, match="controls are known"):
        known.infer(video)
    with pytest.raises(DataError, match=r"outside 0 … 1"):
        known.check_actions(actions + 1)
    plain = worlds.genie_config().plain()
    for wrong in ({"controls": 3}, {"latent": None}):
        with pytest.raises(ConfigError, match="learned or known"):
            GenieConfig.read(plain | wrong)
    with pytest.raises(ConfigError, match="one is predicted"):
        Genie(worlds.genie_config().with_(codec=worlds.codec_config().with_(quantizer=ContinuousConfig(dim=4))))


@pytest.mark.parametrize("acts", ACTS)
def test_operations_are_those_that_run(acts):
    ours = worlds.genie(acts=acts)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        ours.dynamics(torch.zeros(2, 1, 2, 2, dtype=torch.long), torch.zeros(2, 1, dtype=torch.long))
    assert cost.flops(ours, ours.work(1, 2)) == counter.get_total_flops()
    assert cost.bytes(ours, ours.work(1, 2)).weights >= sum(p.numel() * 4 for p in ours.parameters())


def test_dynamics_learn_what_an_action_does():
    """Codes that turn by the action: with it they are known, without it they would be a coin's toss."""
    torch.manual_seed(0)
    ours = worlds.genie(latent=False).dynamics.train()
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    for _ in range(120):
        first, done = torch.randint(0, 5, (32, 1)), torch.randint(0, 2, (32, 1))
        codes = (first + F.pad((2 * done - 1).cumsum(1), (1, 0))) % 5
        ids = codes[:, :, None, None].expand(-1, -1, 2, 2)
        loss = ours.missed(ids, ours.led(done), hide_codes((32, 2, 2, 2), (1.0, 1.0)))[:, 1:].mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.2 < math.log(2)
    assert DynamicsConfig(transformer=worlds.transformer()).acts == "added"
