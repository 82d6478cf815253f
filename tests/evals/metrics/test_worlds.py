"""What worlds are measured by, on videos whose answers are known."""

import math

import pytest
import torch

import worlds
from vitrail.errors import DataError
from vitrail.evals.metrics.worlds import delta_psnr, drift, purity


def frames(count, T):
    video, actions = worlds.dots(count, T)
    return ((video + 1) * 127.5).round().to(torch.uint8), actions


def test_control_is_what_the_right_action_gains():
    video, _ = frames(16, 2)
    other = video[:, 1].roll(2, -1)  # the dot elsewhere
    gained = delta_psnr(video[:, 1], (video[:, 1] // 2) * 2, other)
    assert gained.shape == (16,) and (gained > 10).all()
    assert torch.equal(delta_psnr(video[:, 1], other, other), torch.zeros(16))
    assert torch.equal(delta_psnr(video[:, 1], video[:, 1], video[:, 1]), torch.zeros(16))  # both without error
    assert (delta_psnr(video[:, 1], other, (video[:, 1] // 2) * 2) == -gained).all()


def test_it_is_the_difference_of_two_psnrs_by_hand():
    true, a, b = torch.zeros(1, 3, 2, 2), torch.full((1, 3, 2, 2), 0.2), torch.full((1, 3, 2, 2), 0.4)
    # In 0 … 1 the errors are 0.1 and 0.2: 20 dB, and 20 log₁₀ 2 less.
    assert delta_psnr(true, a, b).item() == pytest.approx(20 * math.log10(2), rel=1e-5)


def test_purity_by_hand():
    codes = torch.tensor([[0, 0, 0, 2], [2, 2, 2, 2]])
    controls = torch.tensor([[1, 1, 0, 3], [3, 3, 3, 0]])
    found = purity(codes, controls)
    assert (found.value, found.majority, found.of) == (6 / 8, 4 / 8, 8)
    assert found.counts.tolist() == [[1, 2, 0, 0], [0, 0, 0, 0], [1, 0, 0, 4]]
    assert found.meaning.tolist() == [1, -1, 3]
    assert str(found) == "purity 0.750 of 8 steps, majority 0.500"


def test_purity_of_the_truth_of_its_renaming_and_of_nothing():
    _, actions = frames(200, 4)
    assert purity(actions, actions).value == purity(7 - actions, actions).value == 1
    told_nothing = purity(torch.zeros_like(actions), actions)
    assert told_nothing.value == told_nothing.majority < 0.6
    by_chance = purity(torch.randint(0, 8, actions.shape, generator=torch.Generator().manual_seed(5)), actions)
    assert by_chance.majority <= by_chance.value < 0.65


def test_drift_falls_as_a_rollout_leaves_the_truth():
    video, _ = frames(32, 6)
    noise = torch.randn(video.shape) * torch.arange(1, 7).view(-1, 1, 1, 1) * 4
    found = drift(video, (video + noise).clamp(0, 255).to(torch.uint8))
    values = [each.value for each in found]
    assert [each.name for each in found] == [f"psnr@{t}" for t in range(1, 7)]
    assert values == sorted(values, reverse=True) and found[0].of == 32
    assert found[0].interval[0] < values[0] < found[0].interval[1]


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(DataError, match="one of each"):
        purity(torch.zeros(2, 3).long(), torch.zeros(2).long())
    with pytest.raises(DataError, match="controls are numbers"):
        purity(torch.zeros(2).long(), torch.zeros(2))
    with pytest.raises(DataError, match="codes are numbers"):
        purity(torch.full((2,), -1), torch.zeros(2).long())
    with pytest.raises(DataError, match="videos"):
        drift(torch.zeros(2, 3, 3, 4, 4), torch.zeros(2, 2, 3, 4, 4))
