"""World benchmark of a perfect model and of one that ignores actions."""

import pytest
import torch

import worlds
from vitrail.errors import DataError
from vitrail.evals.metrics.world_metrics import SIDE_WORDS
from vitrail.evals.suites import world_benchmark as suite
from vitrail.generate.rollout import RolloutConfig


def shown(count=6, frames=6):
    video, actions = worlds.dots(count, frames)
    return ((video + 1) * 127.5).round().to(torch.uint8), actions


def test_report_is_complete_and_reproducible():
    model, (video, controls) = worlds.genie(), shown()
    one, two = (
        suite.evaluate_world(model, video, controls, RolloutConfig(steps=2), names=SIDE_WORDS) for _ in range(2)
    )
    assert str(one) == str(two)
    assert [e.name for e in (one.codec_psnr, one.still_psnr, one.delta_psnr)] == [
        "codec psnr",
        "still psnr@4",
        "Δpsnr@4",
    ]
    assert len(one.rollout_psnr) == 5 and one.code_purity.num_steps == 30
    assert one.left_right_accuracy.count == 6 and "left from right" in str(one)
    assert (
        "purity" in str(one)
        and suite.evaluate_world(model, video, controls, RolloutConfig(steps=1)).left_right_accuracy is None
    )
    assert suite.evaluate_world(model, video, None, RolloutConfig(steps=1)).code_purity is None


def test_delta_psnr_of_a_perfect_model_is_positive(monkeypatch):
    model, (video, controls) = worlds.genie(latent=False), shown()

    away = video[:, :1].roll(3, -2).expand(-1, 4, -1, -1, -1)

    def followed(_, start, actions, rolling, *, seed):
        return video[:, 1:] // 4 * 4 if actions.shape[1] == 5 else away

    monkeypatch.setattr(suite, "rollout_frames", followed)
    found = suite.evaluate_world(model, video, controls)
    assert found.delta_psnr.value > 5 and found.rollout_psnr[-1].value > 30 and found.code_purity is None
    monkeypatch.setattr(
        suite, "rollout_frames", lambda _, start, actions, *rest, seed: away[:, :1].expand(-1, 5, -1, -1, -1)
    )
    assert suite.evaluate_world(model, video, controls).delta_psnr.value == 0  # it ignores actions


def test_still_baseline_includes_codec_error():
    model, (video, _) = worlds.genie(), shown()
    still = video[:, :1].expand_as(video)
    found = suite.evaluate_world(model, still, None, RolloutConfig(steps=1))
    assert (
        found.still_psnr.value == pytest.approx(found.codec_psnr.value, abs=1.5) and found.still_psnr.value < 40
    )  # below 60, the value of equal frames


def test_invalid_videos_raise():
    with pytest.raises(DataError, match="are too short"):
        suite.evaluate_world(worlds.genie(), shown(frames=4)[0])
    with pytest.raises(DataError, match="no controls are given"):
        suite.evaluate_world(worlds.genie(latent=False), shown()[0])
