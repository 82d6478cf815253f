"""Genie: masking, causality, training stages, and regression tests for bugs of public implementations."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import worlds
from helpers import randomize, relative
from vitrail.codecs.quantizers import IdentityQuantizerConfig
from vitrail.errors import ConfigError, DataError
from vitrail.models.genie_model import Genie, GenieConfig, GenieDynamicsConfig
from vitrail.nn import cost
from vitrail.objectives.masking import sample_code_mask

ACTS = ["added", "token"]


def dynamics(acts="added", **more):
    made = worlds.genie(acts=acts, latent=False, **more).dynamics
    randomize(made)
    return made


def batch(B=3, T=4, seed=0):
    torch.manual_seed(seed)
    ids, actions = torch.randint(0, 25, (B, T, 2, 2)), torch.randint(0, 2, (B, T - 1))
    return ids, actions, sample_code_mask((B, T, 2, 2), (0.5, 1.0))


@pytest.mark.parametrize("acts", ACTS)
def test_masked_ids_are_not_used(acts):
    ours, (ids, actions, hidden) = dynamics(acts), batch()
    other = torch.where(hidden, (ids + 7) % 25, ids)
    shifted_actions = ours.shift_actions(actions)
    assert torch.equal(ours(ids, shifted_actions, hidden), ours(other, shifted_actions, hidden))
    assert not torch.allclose(ours(ids, shifted_actions), ours(other, shifted_actions))


@pytest.mark.parametrize("acts", ACTS)
def test_targets_are_the_masked_ids(acts):
    """The targets are the original ids, not the masked ones."""
    ours, (ids, actions, hidden) = dynamics(acts), batch()
    shifted_actions = ours.shift_actions(actions)
    missed, output = (
        ours.compute_code_losses(ids, shifted_actions, hidden),
        ours(ids, shifted_actions, hidden).log_softmax(-1),
    )
    for b, t, h, w in hidden.nonzero().tolist():
        assert missed[b, t, h, w].item() == pytest.approx(-output[b, t, h, w, ids[b, t, h, w]].item(), rel=1e-5)
    elsewhere = torch.where(hidden, (ids + 1) % 25, ids)
    assert not torch.allclose(ours.compute_code_losses(elsewhere, shifted_actions, hidden)[hidden], missed[hidden])


@pytest.mark.parametrize("acts", ACTS)
def test_causality(acts):
    ours, (ids, actions, _) = dynamics(acts, layers=2), batch(T=5)
    other, done = ids.clone(), actions.clone()
    other[:, 3:], done[:, 2:] = (other[:, 3:] + 1) % 25, 1 - done[:, 2:]  # frame 3, and the action that leads to it
    a, b = ours(ids, ours.shift_actions(actions)), ours(other, ours.shift_actions(done))
    assert relative(a[:, :3], b[:, :3]) < 1e-6 and relative(a[:, 3:], b[:, 3:]) > 1e-3


@pytest.mark.parametrize("acts", ACTS)
def test_action_affects_its_frame(acts):
    ours, (ids, actions, hidden) = dynamics(acts), batch()
    done = actions.clone()
    done[:, 1] = 1 - done[:, 1]
    a, b = ours(ids, ours.shift_actions(actions), hidden), ours(ids, ours.shift_actions(done), hidden)
    moved = (a - b).abs().amax((0, 2, 3, 4)) > 1e-6
    assert moved.tolist() == [False, False, True, True]
    assert ours.shift_actions(actions)[:, 0].tolist() == [2, 2, 2]  # to the first frame nothing led


def test_mask_fractions():
    hidden = sample_code_mask((400, 5, 8, 8), (0.5, 1.0))
    assert not hidden[:, 0].any()
    share = hidden[:, 1:].float().mean((1, 2, 3))
    assert share.min() > 0.4 and share.max() > 0.98 and share.mean().item() == pytest.approx(0.75, abs=0.03)
    assert share.std().item() == pytest.approx(0.5 / math.sqrt(12), abs=0.03)  # uniform over videos, not a constant
    assert sample_code_mask((2, 3, 4, 4), (1.0, 1.0))[:, 1:].all()
    half = sample_code_mask((400, 5, 8, 8), (1.0, 1.0), unmasked_frame_rate=0.5)
    frames = half.flatten(2)
    assert torch.equal(frames.any(2), frames.all(2)) and not frames[:, 0].any()  # a frame is hidden, or it is not
    assert 0.45 < frames[:, 1:].float().mean() < 0.55
    with pytest.raises(ConfigError, match="unmasked_frame_rate"):
        sample_code_mask((1, 2, 1, 1), (0.5, 1.0), unmasked_frame_rate=1.0)
    with pytest.raises(ConfigError, match="rates"):
        sample_code_mask((1, 2, 1, 1), (0.8, 0.2))


def test_frozen_parts_do_not_change():
    ours, (video, _) = Genie(worlds.genie_config(codes=16)), worlds.dots(8)
    ours.codec.requires_grad_(False)
    ours.train()
    assert not ours.codec.training and ours.latent.training and ours.dynamics.training
    before = ours.codec.quantizer.codebook.clone()
    ours.encode_frames(video)
    assert torch.equal(ours.codec.quantizer.codebook, before)
    ours.requires_grad_(True).train()
    assert ours.codec.training
    ours.codec(video)
    assert not torch.equal(ours.codec.quantizer.codebook, before)


def test_actions_are_latent_or_known():
    ours, known, (video, actions) = worlds.genie(), worlds.genie(latent=False), worlds.dots(4)
    assert ours.num_actions == 8 and ours.infer_actions(video).shape == (4, 2)
    assert known.num_actions == 2 and known.latent is None
    known.check_actions(actions)
    with pytest.raises(DataError, match="no latent action model"):
        known.infer_actions(video)
    with pytest.raises(DataError, match=r"outside 0 … 1"):
        known.check_actions(actions + 1)
    plain = worlds.genie_config().to_dict()
    for wrong in ({"num_controls": 3}, {"latent": None}):
        with pytest.raises(ConfigError, match="latent and num_controls"):
            GenieConfig.from_dict(plain | wrong)
    with pytest.raises(ConfigError, match="predict one"):
        Genie(
            worlds.genie_config().replace(codec=worlds.codec_config().replace(quantizer=IdentityQuantizerConfig(dim=4)))
        )


@pytest.mark.parametrize("acts", ACTS)
def test_flops_match_torch_counter(acts):
    ours = worlds.genie(acts=acts)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        ours.dynamics(torch.zeros(2, 1, 2, 2, dtype=torch.long), torch.zeros(2, 1, dtype=torch.long))
    assert cost.count_flops(ours, ours.workload(1, 2)) == counter.get_total_flops()
    assert cost.count_bytes(ours, ours.workload(1, 2)).weights >= sum(p.numel() * 4 for p in ours.parameters())


def test_dynamics_learn_the_effect_of_actions():
    """Codes rotate with the action: they are predictable with it and random without it."""
    torch.manual_seed(0)
    ours = worlds.genie(latent=False).dynamics.train()
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    for _ in range(120):
        first, done = torch.randint(0, 5, (32, 1)), torch.randint(0, 2, (32, 1))
        codes = (first + F.pad((2 * done - 1).cumsum(1), (1, 0))) % 5
        ids = codes[:, :, None, None].expand(-1, -1, 2, 2)
        loss = ours.compute_code_losses(ids, ours.shift_actions(done), sample_code_mask((32, 2, 2, 2), (1.0, 1.0)))[
            :, 1:
        ].mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.2 < math.log(2)
    assert GenieDynamicsConfig(transformer=worlds.transformer()).action_conditioning == "added"
