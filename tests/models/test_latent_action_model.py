"""Latent action model: number of actions, causality, and learning of a simple world."""

import copy

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import worlds
from helpers import randomize, relative
from vitrail.codecs.quantizers import VQConfig
from vitrail.errors import DataError
from vitrail.models.latent_action_model import LatentActionModel
from vitrail.nn import cost


def model(**more) -> LatentActionModel:
    made = LatentActionModel(worlds.latent_config(**more))
    randomize(made)
    return made.eval()


def test_number_of_actions():
    """Eight codes, not eight bits."""
    ours = model()
    assert ours.num_actions == 8 and ours.quantizer.get_codebook().shape == (8, 32) and ours.quantizer.bits == 3
    ids = ours.infer_actions(torch.rand(40, 4, 3, 8, 8) * 2 - 1).ids
    assert ids.shape == (40, 3) and ids.min() >= 0 and ids.max() < 8


def test_actions_are_causal():
    ours, video = model(layers=2), torch.rand(3, 5, 3, 8, 8) * 2 - 1
    other = video.clone()
    other[:, 3:] = torch.rand(3, 2, 3, 8, 8) * 2 - 1
    a, b = ours.infer_actions(video), ours.infer_actions(other)
    assert torch.equal(a.ids[:, :2], b.ids[:, :2])
    assert not torch.allclose(ours.infer_actions(video).codes[:, 2:], b.codes[:, 2:]) or not torch.equal(a.ids, b.ids)


def test_predictions_use_past_frames_only():
    """The prediction of frame t + 1 depends on its pixels only through the action code."""
    ours, video = model(layers=2), torch.rand(2, 5, 3, 8, 8) * 2 - 1
    codes = torch.randn(2, 4, 32)
    other, output = video.clone(), ours.predict_next_frames(video[:, :-1], codes)
    other[:, 2:] = 0
    again = ours.predict_next_frames(other[:, :-1], codes)
    assert relative(again[:, :2], output[:, :2]) < 1e-6  # frames 1 and 2 (from 0), made of frames 0 and 1
    assert relative(again[:, 2:], output[:, 2:]) > 1e-3
    moved = codes.clone()
    moved[:, 2] += 1
    assert relative(ours.predict_next_frames(video[:, :-1], moved)[:, :2], output[:, :2]) < 1e-6
    assert relative(ours.predict_next_frames(video[:, :-1], moved)[:, 2:], output[:, 2:]) > 1e-3


def test_decoder_predicts_the_change():
    ours, video = model(), torch.rand(2, 4, 3, 8, 8) * 2 - 1
    with torch.no_grad():
        for weight in ours.last.parameters():
            weight.zero_()
    assert torch.equal(ours(video)[0], video[:, :-1])  # nothing: a world that does not move


def test_half_precision_gives_the_same_actions():
    """Changes between frames are small, and half precision loses small differences."""
    torch.manual_seed(0)
    ours, (video, _) = LatentActionModel(worlds.latent_config(layers=2)), worlds.dots(64, 6)
    ours.train()(video)  # k-means puts the codes where changes are
    ours.eval()
    exact = ours.infer_actions(video).ids
    again = ours.bfloat16().infer_actions(video.bfloat16()).ids
    assert exact.unique().numel() > 4 and (exact == again).float().mean() > 0.9


@pytest.mark.parametrize("how", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("frames", [5, 8])
def test_still_steps_have_one_action(how, frames):
    """Equal frames have one action, independent of rounding."""
    ours, still = model(layers=2), (torch.rand(6, 1, 3, 8, 8) * 2 - 1).expand(-1, frames, -1, -1, -1)
    if how == "bfloat16":
        ours, still = ours.bfloat16(), still.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        found = ours.infer_actions(still)
    assert not found.ids.any() and (found.codes.float() - ours.quantizer.get_codebook()[0]).abs().max() < 1e-2


def test_still_steps_after_motion():
    """Two layers with a memory of three frames reach four frames back."""
    ours, video = model(layers=2), (torch.rand(6, 10, 3, 8, 8) * 2 - 1)
    video[:, 3:] = video[:, 3:4]
    ids = ours.infer_actions(video).ids
    assert ids[:, :3].any() and not ids[:, 7:].any()


def test_still_steps_do_not_update_the_codebook():
    torch.manual_seed(0)
    moving, _ = worlds.dots(64, 6)
    still = moving[:, :1].expand(-1, 6, -1, -1, -1)
    ours = LatentActionModel(worlds.latent_config(layers=2)).train()
    ours(torch.cat([still, moving]))  # k-means, of which half are without a direction
    assert torch.allclose(ours.quantizer.get_codebook().norm(dim=1), torch.ones(8))
    alone = copy.deepcopy(ours)
    kept = still[:1].expand(64, -1, -1, -1, -1)  # as many again, so that each that moves stands in once
    mixed, found = ours(torch.cat([moving, kept]))
    alone(torch.cat([moving, moving]))
    assert torch.allclose(ours.quantizer.codebook, alone.quantizer.codebook, atol=1e-6)
    assert torch.equal(ours.quantizer.counts, alone.quantizer.counts)
    assert not found.ids[64:].any() and found.ids[:64].any()
    mixed.square().mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in ours.parameters())


def test_still_batches_do_not_change_the_codebook():
    torch.manual_seed(0)
    moving, _ = worlds.dots(64, 6)
    still = moving[:, :1].expand(-1, 6, -1, -1, -1)
    ours = LatentActionModel(worlds.latent_config(layers=2)).train()
    with torch.no_grad():
        for _ in range(10):
            ours(moving)
        kept, result = ours.quantizer.get_codebook().clone(), ours.eval().infer_actions(moving).ids
        ours.quantizer.train()
        for _ in range(200):  # long enough for running means to forget, and for codes that nobody uses to be drawn anew
            assert not ours.infer_actions(still).ids.any()
        assert torch.allclose(ours.quantizer.get_codebook(), kept, atol=1e-5)
        assert torch.equal(ours.eval().infer_actions(moving).ids, result)


def test_still_first_batch_keeps_distinct_codes():
    moving, _ = worlds.dots(64, 6)
    ours = LatentActionModel(worlds.latent_config(layers=2)).train()
    with torch.no_grad():
        ours(moving[:, :1].expand(-1, 6, -1, -1, -1))
    table = ours.quantizer.get_codebook()
    assert torch.allclose(table.norm(dim=1), torch.ones(8)) and len(table.unique(dim=0)) == 8


def test_single_frame_raises():
    with pytest.raises(DataError, match="no action"):
        model().infer_actions(torch.zeros(1, 1, 3, 8, 8))


def test_flops_match_torch_counter():
    config = worlds.latent_config().replace(quantizer=VQConfig(codebook_size=8, dim=32, kmeans_iters=0))
    ours = LatentActionModel(config).eval()
    work = ours.workload(2, 3)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        ours(torch.zeros(3, 2, 3, 8, 8))
    # torch counts the pair that a causal plan leaves out: in the encoder, one of four a place and head width.
    left_out = 3 * 4 * 1 * 4 * 16
    assert cost.count_flops(ours, work) == pytest.approx(counter.get_total_flops() - left_out, rel=0.01)
    assert cost.count_bytes(ours, work).weights >= sum(p.numel() * 4 for p in ours.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_learns_left_and_right_without_labels(seed):
    from vitrail.evals.metrics.world_metrics import code_purity

    torch.manual_seed(seed)
    video, _ = worlds.dots(512, seed=seed)
    config = worlds.latent_config(layers=2, memory=2, width=32)
    ours = LatentActionModel(config.replace(quantizer=config.quantizer.replace(dim=8)))
    optimizer = torch.optim.AdamW(ours.parameters(), lr=5e-3, betas=(0.9, 0.95))
    for _ in range(300):
        shown = video[torch.randint(0, 512, (32,))]
        output, found = ours(shown)
        ((output - shown[:, 1:]).square().mean() + 0.01 * found.losses["commit"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    unseen, done = worlds.dots(256, seed=seed + 100)
    found = code_purity(ours.eval().infer_actions(unseen).ids, done)
    assert found.value > 0.95 > 0.6 > found.majority
