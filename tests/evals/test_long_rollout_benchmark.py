"""Long rollouts: action consistency, distances, step counts and object permanence."""

import pytest
import torch

import worlds
from vitrail.errors import DataError
from vitrail.evals.metrics.world_metrics import MAX_PSNR, PixelFeatureNetwork, cap_psnr, extract_clip_features
from vitrail.evals.suites import long_rollout_benchmark as suite
from vitrail.generate.rollout import RolloutConfig


def shown(count=6, frames=17):
    video, actions = worlds.dots(count, frames)
    return ((video + 1) * 127.5).round().to(torch.uint8), actions


def test_equal_frames_have_finite_psnr():
    video, _ = shown(2)
    assert cap_psnr(video[:, 0], video[:, 0]).tolist() == [MAX_PSNR, MAX_PSNR]
    assert (cap_psnr(video[:, 0], video[:, 1]) < MAX_PSNR).all()


def test_clip_features_capture_content_and_motion():
    video, _ = shown(4)
    still = video[:, :1].expand_as(video)
    moving, frozen = (
        extract_clip_features(video, PixelFeatureNetwork()),
        extract_clip_features(still, PixelFeatureNetwork()),
    )
    assert moving.shape == (4, 96) and (frozen[:, 48:] == 0).all() and (moving[:, 48:].sum(1) > 0).all()
    with pytest.raises(DataError, match="two frames"):
        extract_clip_features(video[:, :1], PixelFeatureNetwork())


@pytest.mark.filterwarnings("ignore:FD-")
def test_rollouts_beyond_the_video():
    model, (video, actions) = worlds.genie(), shown()
    latent = model.infer_actions(model.codec.to_pixels(video))
    one, two = (
        suite.evaluate_long_rollout(model, video, latent, PixelFeatureNetwork(), RolloutConfig(steps=1), num_frames=20)
        for _ in range(2)
    )
    assert torch.equal(one.frames, two.frames) and one.frames.shape == (6, 20, 3, 8, 8)
    assert [stray.frame for stray in one.distances] == [8, 16, 20]
    assert [stray.psnr is None for stray in one.distances] == [False, False, True]
    assert (
        one.action_accuracy.count == 6
        and 0 <= one.action_accuracy.value <= 1
        and one.start_end_distance.name == "FD-pixels4"
    )
    assert (one.start_end_distance.count, one.split_half_baseline.count) == (6, 3) and all(
        (s.frechet_distance.count, s.split_half_distance.count) == (6, 3) for s in one.distances
    )
    known = worlds.genie(latent=False)
    assert (
        suite.evaluate_long_rollout(
            known, video, actions, PixelFeatureNetwork(), RolloutConfig(steps=1), num_frames=8
        ).action_accuracy
        is None
    )
    with pytest.raises(DataError, match="videos of"):
        suite.evaluate_long_rollout(model, video[:, :9], latent, PixelFeatureNetwork())
    with pytest.raises(DataError, match="at least 4"):
        suite.evaluate_long_rollout(model, video[:3], latent[:3], PixelFeatureNetwork())


@pytest.mark.filterwarnings("ignore:FD-")
def test_perfect_rollouts_are_at_the_baseline_distance(monkeypatch):
    """The paired distance is zero, and the split distance equals the baseline."""
    model, (video, actions) = worlds.genie(latent=False), shown(7)
    monkeypatch.setattr(suite, "rollout_frames", lambda _, start, *rest, **more: video[:, 1:])
    *_, last = (
        found := suite.evaluate_long_rollout(model, video, actions, PixelFeatureNetwork(), num_frames=16)
    ).distances
    assert (
        last.frechet_distance.value < 1e-3 * found.start_end_distance.value
        and last.frechet_distance.interval[1] < 1e-3 * found.start_end_distance.value
    )
    assert last.split_half_distance == found.split_half_baseline and found.split_half_baseline.value > 0


@pytest.mark.filterwarnings("ignore:FD-")
def test_actions_of_a_controllable_model_are_inferred_back(monkeypatch):
    model, (video, _) = worlds.genie(), shown()
    given = {}

    def remembered(_, start, actions, *rest, **more):
        given["actions"] = actions
        return start[:, None].expand(-1, actions.shape[1], -1, -1, -1)

    monkeypatch.setattr(suite, "rollout_frames", remembered)
    monkeypatch.setattr(model, "infer_actions", lambda pixels: given["actions"])
    assert suite._read_back_actions(model, video, None, 0).value == 1


def test_step_counts_trade_quality_for_speed():
    model, (video, actions) = worlds.genie(latent=False), shown()
    found = suite.evaluate_step_counts(model, video, actions, (1, 3))
    assert [one.steps for one in found] == [1, 3] and all(one.fps > 0 for one in found)
    assert found[0].psnr.count == 6 and found[0].delta_psnr.name == "Δpsnr@4"


def test_find_hidden_runs():
    seen = [1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 0]  # three visible frames before; only one; never visible again
    labels = torch.tensor(seen)[:, None, None].expand(-1, 2, 2) * 2
    assert suite.find_hidden_runs(labels, 2) == [(3, 2)]
    assert suite.find_hidden_runs(torch.zeros(9, 2, 2), 2) == []


def test_permanence_checks_the_object_region(monkeypatch):
    """A dot that is hidden for two frames and reappears at another corner, with a model that draws it and one that does
    not."""
    video = torch.zeros(1, 6, 3, 8, 8, dtype=torch.uint8)
    labels = torch.zeros(1, 6, 8, 8, dtype=torch.uint8)
    for t, at in enumerate((0, 0, 0, None, None, 4)):
        if at is not None:
            video[:, t, :, at : at + 4, at : at + 4], labels[:, t, at : at + 4, at : at + 4] = 255, 2
    model, done = worlds.genie(latent=False), torch.zeros(1, 5, dtype=torch.long)
    monkeypatch.setattr(suite, "rollout_frames", lambda _, start, actions, *rest, **more: video[:, -actions.shape[1] :])
    found = suite.evaluate_permanence(model, video, labels, done, 2)
    assert (found.remembered.hits, found.remembered.total, found.without_memory.hits) == (1, 1, 1)
    assert found.by_length.keys() == {2}
    monkeypatch.setattr(suite, "rollout_frames", lambda _, start, actions, *rest, **more: video[:, 3:5])
    assert suite.evaluate_permanence(model, video, labels, done, 2).remembered.hits == 0
    monkeypatch.undo()
    assert suite.evaluate_permanence(model, video, labels, done, 2).codec.total == 1  # with a separate rollout
    assert suite.evaluate_permanence(model, video, labels, done, 3) is None
