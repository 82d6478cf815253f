"""Latent actions: exactly as many as there should be, no future in the past, and left told from right."""

import copy

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import worlds
from helpers import randomize, relative
from vitrail.codecs.quantizers import VQConfig
from vitrail.errors import DataError
from vitrail.models.latent_actions import LatentActions
from vitrail.nn import cost


def model(**more) -> LatentActions:
    made = LatentActions(worlds.latent_config(**more))
    randomize(made)
    return made.eval()


def test_eight_actions_are_eight_codes():
    """Not eight bits, of which there would be 256."""
    ours = model()
    assert ours.actions == 8 and ours.quantizer.table().shape == (8, 32) and ours.quantizer.bits == 3
    ids = ours.infer(torch.rand(40, 4, 3, 8, 8) * 2 - 1).ids
    assert ids.shape == (40, 3) and ids.min() >= 0 and ids.max() < 8


def test_an_action_is_of_two_frames_and_those_before():
    ours, video = model(layers=2), torch.rand(3, 5, 3, 8, 8) * 2 - 1
    other = video.clone()
    other[:, 3:] = torch.rand(3, 2, 3, 8, 8) * 2 - 1
    a, b = ours.infer(video), ours.infer(other)
    assert torch.equal(a.ids[:, :2], b.ids[:, :2])
    assert not torch.allclose(ours.infer(video).codes[:, 2:], b.codes[:, 2:]) or not torch.equal(a.ids, b.ids)


def test_a_frame_is_predicted_from_those_before_it_alone():
    """But for its action, which is three bits: what is predicted of frame t + 1 does not move with its pixels."""
    ours, video = model(layers=2), torch.rand(2, 5, 3, 8, 8) * 2 - 1
    codes = torch.randn(2, 4, 32)
    other, said = video.clone(), ours.predict(video[:, :-1], codes)
    other[:, 2:] = 0
    again = ours.predict(other[:, :-1], codes)
    assert relative(again[:, :2], said[:, :2]) < 1e-6  # frames 1 and 2 (from 0), made of frames 0 and 1
    assert relative(again[:, 2:], said[:, 2:]) > 1e-3
    moved = codes.clone()
    moved[:, 2] += 1
    assert relative(ours.predict(video[:, :-1], moved)[:, :2], said[:, :2]) < 1e-6
    assert relative(ours.predict(video[:, :-1], moved)[:, 2:], said[:, 2:]) > 1e-3


def test_it_draws_what_changes():
    ours, video = model(), torch.rand(2, 4, 3, 8, 8) * 2 - 1
    with torch.no_grad():
        for weight in ours.last.parameters():
            weight.zero_()
    assert torch.equal(ours(video)[0], video[:, :-1])  # nothing: a world that does not move


def test_half_precision_finds_the_same_actions():
    """A view changes little from frame to frame, and half precision keeps little of small differences."""
    torch.manual_seed(0)
    ours, (video, _) = LatentActions(worlds.latent_config(layers=2)), worlds.dots(64, 6)
    ours.train()(video)  # k-means puts the codes where changes are
    ours.eval()
    exact = ours.infer(video).ids
    again = ours.bfloat16().infer(video.bfloat16()).ids
    assert exact.unique().numel() > 4 and (exact == again).float().mean() > 0.9


@pytest.mark.parametrize("how", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("frames", [5, 8])
def test_nothing_that_happens_is_one_action(how, frames):
    """Whatever rounding makes of equal frames."""
    ours, still = model(layers=2), (torch.rand(6, 1, 3, 8, 8) * 2 - 1).expand(-1, frames, -1, -1, -1)
    if how == "bfloat16":
        ours, still = ours.bfloat16(), still.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        found = ours.infer(still)
    assert not found.ids.any() and (found.codes.float() - ours.quantizer.table()[0]).abs().max() < 1e-2


def test_a_world_that_comes_to_rest_has_one_action_again():
    """Once no layer sees a frame from before: two layers with a memory of three frames reach four back."""
    ours, video = model(layers=2), (torch.rand(6, 10, 3, 8, 8) * 2 - 1)
    video[:, 3:] = video[:, 3:4]
    ids = ours.infer(video).ids
    assert ids[:, :3].any() and not ids[:, 7:].any()


def test_codes_learn_nothing_from_steps_in_which_nothing_happens():
    torch.manual_seed(0)
    moving, _ = worlds.dots(64, 6)
    still = moving[:, :1].expand(-1, 6, -1, -1, -1)
    ours = LatentActions(worlds.latent_config(layers=2)).train()
    ours(torch.cat([still, moving]))  # k-means, of which half are without a direction
    assert torch.allclose(ours.quantizer.table().norm(dim=1), torch.ones(8))
    alone = copy.deepcopy(ours)
    kept = still[:1].expand(64, -1, -1, -1, -1)  # as many again, so that each that moves stands in once
    mixed, found = ours(torch.cat([moving, kept]))
    alone(torch.cat([moving, moving]))
    assert torch.allclose(ours.quantizer.codebook, alone.quantizer.codebook, atol=1e-6)
    assert torch.equal(ours.quantizer.counts, alone.quantizer.counts)
    assert not found.ids[64:].any() and found.ids[:64].any()
    mixed.square().mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in ours.parameters())


def test_batches_in_which_nothing_happens_leave_the_codes_as_they_are():
    torch.manual_seed(0)
    moving, _ = worlds.dots(64, 6)
    still = moving[:, :1].expand(-1, 6, -1, -1, -1)
    ours = LatentActions(worlds.latent_config(layers=2)).train()
    with torch.no_grad():
        for _ in range(10):
            ours(moving)
        kept, told = ours.quantizer.table().clone(), ours.eval().infer(moving).ids
        ours.quantizer.train()
        for _ in range(200):  # long enough for running means to forget, and for codes that nobody uses to be drawn anew
            assert not ours.infer(still).ids.any()
        assert torch.allclose(ours.quantizer.table(), kept, atol=1e-5)
        assert torch.equal(ours.eval().infer(moving).ids, told)


def test_a_first_batch_in_which_nothing_happens_leaves_codes_that_can_be_told_apart():
    moving, _ = worlds.dots(64, 6)
    ours = LatentActions(worlds.latent_config(layers=2)).train()
    with torch.no_grad():
        ours(moving[:, :1].expand(-1, 6, -1, -1, -1))
    table = ours.quantizer.table()
    assert torch.allclose(table.norm(dim=1), torch.ones(8)) and len(table.unique(dim=0)) == 8


def test_one_frame_has_no_action():
    with pytest.raises(DataError, match="no action"):
        model().infer(torch.zeros(1, 1, 3, 8, 8))


def test_operations_are_those_that_run():
    config = worlds.latent_config().with_(quantizer=VQConfig(codes=8, dim=32, start=0))
    ours = LatentActions(config).eval()
    work = ours.work(2, 3)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        ours(torch.zeros(3, 2, 3, 8, 8))
    # torch counts the pair that a causal plan leaves out: in the encoder, one of four a place and head width.
    left_out = 3 * 4 * 1 * 4 * 16
    assert cost.flops(ours, work) == pytest.approx(counter.get_total_flops() - left_out, rel=0.01)
    assert cost.bytes(ours, work).weights >= sum(p.numel() * 4 for p in ours.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_left_is_told_from_right_by_codes_nobody_labelled(seed):
    from vitrail.evals.metrics.worlds import purity

    torch.manual_seed(seed)
    video, _ = worlds.dots(512, seed=seed)
    config = worlds.latent_config(layers=2, memory=2, width=32)
    ours = LatentActions(config.with_(quantizer=config.quantizer.with_(dim=8)))
    optimizer = torch.optim.AdamW(ours.parameters(), lr=5e-3, betas=(0.9, 0.95))
    for _ in range(300):
        shown = video[torch.randint(0, 512, (32,))]
        said, found = ours(shown)
        ((said - shown[:, 1:]).square().mean() + 0.01 * found.losses["commit"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    unseen, done = worlds.dots(256, seed=seed + 100)
    found = purity(ours.eval().infer(unseen).ids, done)
    assert found.value > 0.95 > 0.6 > found.majority
