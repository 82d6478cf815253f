"""A world judged: the report of one that follows the truth, and of one that does not listen."""

import pytest
import torch

import worlds
from vitrail.errors import DataError
from vitrail.evals.metrics.worlds import SIDES
from vitrail.evals.suites import worlds as suite
from vitrail.generate.rollout import Rolling


def shown(count=6, frames=6):
    video, actions = worlds.dots(count, frames)
    return ((video + 1) * 127.5).round().to(torch.uint8), actions


def test_a_report_has_every_measure_and_is_the_same_again():
    model, (video, controls) = worlds.genie(), shown()
    one, two = (suite.judge_world(model, video, controls, Rolling(steps=2), names=SIDES) for _ in range(2))
    assert str(one) == str(two)
    assert [e.name for e in (one.codec, one.still, one.control)] == ["codec psnr", "still psnr@4", "Δpsnr@4"]
    assert len(one.drift) == 5 and one.purity.of == 30
    assert one.sides.of == 6 and "left from right" in str(one)
    assert "purity" in str(one) and suite.judge_world(model, video, controls, Rolling(steps=1)).sides is None
    assert suite.judge_world(model, video, None, Rolling(steps=1)).purity is None


def test_a_world_that_follows_the_truth_gains_by_it(monkeypatch):
    model, (video, controls) = worlds.genie(latent=False), shown()

    away = video[:, :1].roll(3, -2).expand(-1, 4, -1, -1, -1)

    def followed(_, start, actions, rolling, *, seed):
        return video[:, 1:] // 4 * 4 if actions.shape[1] == 5 else away

    monkeypatch.setattr(suite, "roll", followed)
    found = suite.judge_world(model, video, controls)
    assert found.control.value > 5 and found.drift[-1].value > 30 and found.purity is None
    monkeypatch.setattr(suite, "roll", lambda _, start, actions, *rest, seed: away[:, :1].expand(-1, 5, -1, -1, -1))
    assert suite.judge_world(model, video, controls).control.value == 0  # it does not listen


def test_a_world_in_which_nothing_moves_pays_for_its_codes_too():
    model, (video, _) = worlds.genie(), shown()
    still = video[:, :1].expand_as(video)
    found = suite.judge_world(model, still, None, Rolling(steps=1))
    assert (
        found.still.value == pytest.approx(found.codec.value, abs=1.5) and found.still.value < 40
    )  # not 60, of equals


def test_what_cannot_be_judged_is_refused():
    with pytest.raises(DataError, match="longer ones"):
        suite.judge_world(worlds.genie(), shown(frames=4)[0])
    with pytest.raises(DataError, match="none were given"):
        suite.judge_world(worlds.genie(latent=False), shown()[0])
