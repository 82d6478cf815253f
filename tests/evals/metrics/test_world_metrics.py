"""World metrics on videos with known results."""

import math

import pytest
import torch

import worlds
from vitrail.errors import DataError
from vitrail.evals.metrics.world_metrics import code_purity, delta_psnr, left_right_accuracy, rollout_psnr


def frames(count, T):
    video, actions = worlds.dots(count, T)
    return ((video + 1) * 127.5).round().to(torch.uint8), actions


def test_delta_psnr_is_the_gain_of_correct_actions():
    video, _ = frames(16, 2)
    other = video[:, 1].roll(2, -1)  # the dot at another position
    gained = delta_psnr(video[:, 1], (video[:, 1] // 2) * 2, other)
    assert gained.shape == (16,) and (gained > 10).all()
    assert torch.equal(delta_psnr(video[:, 1], other, other), torch.zeros(16))
    assert torch.equal(delta_psnr(video[:, 1], video[:, 1], video[:, 1]), torch.zeros(16))  # both without error
    assert (delta_psnr(video[:, 1], other, (video[:, 1] // 2) * 2) == -gained).all()


def test_delta_psnr_by_hand():
    true, a, b = torch.zeros(1, 3, 2, 2), torch.full((1, 3, 2, 2), 0.2), torch.full((1, 3, 2, 2), 0.4)
    # In 0 … 1 the errors are 0.1 and 0.2: 20 dB, and lower by 20 log₁₀ 2.
    assert delta_psnr(true, a, b).item() == pytest.approx(20 * math.log10(2), rel=1e-5)


def test_purity_by_hand():
    codes = torch.tensor([[0, 0, 0, 2], [2, 2, 2, 2]])
    controls = torch.tensor([[1, 1, 0, 3], [3, 3, 3, 0]])
    found = code_purity(codes, controls)
    assert (found.value, found.majority, found.num_steps) == (6 / 8, 4 / 8, 8)
    assert found.counts.tolist() == [[1, 2, 0, 0], [0, 0, 0, 0], [1, 0, 0, 4]]
    assert found.control_of_code.tolist() == [1, -1, 3]
    assert str(found) == "purity 0.750 of 8 steps, majority 0.500"


def test_purity_of_perfect_permuted_and_constant_codes():
    _, actions = frames(200, 4)
    assert code_purity(actions, actions).value == code_purity(7 - actions, actions).value == 1
    told_nothing = code_purity(torch.zeros_like(actions), actions)
    assert told_nothing.value == told_nothing.majority < 0.6
    by_chance = code_purity(torch.randint(0, 8, actions.shape, generator=torch.Generator().manual_seed(5)), actions)
    assert by_chance.majority <= by_chance.value < 0.65


NAMES = ("left", "nothing", "right up", "upright", "left up", "right")  # "left" must be a separate word


def walked(videos=64, steps=24, weights=(3, 1, 1, 1, 1, 6)):
    """Controls with more steps to the right than to the left, in runs"""
    chance = torch.Generator().manual_seed(0)
    fresh = torch.multinomial(torch.tensor(weights, dtype=torch.float), videos * steps // 2, True, generator=chance)
    return fresh.view(videos, steps // 2).repeat_interleave(2, 1)


def test_left_right_accuracy_of_permuted_controls_is_one():
    controls = walked()
    for codes in (controls, 5 - controls, torch.tensor([4, 0, 2, 2, 7, 2])[controls]):  # both are wrong for the last
        found = left_right_accuracy(codes, controls, NAMES)
        assert (found.value, found.interval, found.count) == (1.0, (1.0, 1.0), 64)


def test_uninformative_codes_have_left_right_accuracy_half():
    controls = walked()
    constant = left_right_accuracy(torch.zeros_like(controls), controls, NAMES)
    assert (constant.value, constant.interval) == (0.5, (0.5, 0.5))
    even = walked(weights=(3, 1, 3, 1, 3, 3))
    up = torch.tensor([0, 0, 1, 1, 1, 0])[even]
    assert code_purity(up, even).value > code_purity(up, even).majority + 0.1  # possible for informative codes
    assert left_right_accuracy(up, even, NAMES).value == pytest.approx(0.5, abs=0.05)
    for seed in range(3):
        codes = torch.randint(0, 8, controls.shape, generator=torch.Generator().manual_seed(seed))
        found = left_right_accuracy(codes, controls, NAMES)
        assert found.interval[0] < 0.5 < found.interval[1] and found.value == pytest.approx(0.5, abs=0.05)


def test_many_codes_do_not_raise_chance_accuracy():
    """Tested on its training steps, the accuracy would be nearly 1."""
    controls, values = walked(8, 8), []
    for seed in range(60):
        codes = torch.randint(0, 64, controls.shape, generator=torch.Generator().manual_seed(seed))
        values.append(left_right_accuracy(codes, controls, NAMES).value)
    assert torch.tensor(values).mean().item() == pytest.approx(0.5, abs=0.02)


def test_left_right_accuracy_by_hand():
    names = ("left", "right")
    controls = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    codes = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 2]])
    # By the second video code 0 is left (1 of 1 against 1 of 3), 1 and 2 are right: in the first, 1 of 2 and 2 of 2.
    # By the first code 0 is left, 1 is right, 2 is neither: in the second, 1 of 1 and 1 + 0 + ½ of 3.
    found = left_right_accuracy(codes, controls, names)
    assert found.value == pytest.approx(((1 + 1) / 3 + (2 + 1.5) / 5) / 2) and found.count == 2


def test_left_right_accuracy_is_none_without_sides():
    controls = walked()
    assert left_right_accuracy(controls, controls, ("a", "b", "c", "d", "e", "f")) is None
    assert left_right_accuracy(controls[:1], controls[:1], NAMES) is None  # no training steps
    onward = torch.full((4, 3), 5)
    assert left_right_accuracy(onward, onward, NAMES) is None


def test_rollout_psnr_decreases_with_drift():
    video, _ = frames(32, 6)
    noise = torch.randn(video.shape) * torch.arange(1, 7).view(-1, 1, 1, 1) * 4
    found = rollout_psnr(video, (video + noise).clamp(0, 255).to(torch.uint8))
    values = [each.value for each in found]
    assert [each.name for each in found] == [f"psnr@{t}" for t in range(1, 7)]
    assert values == sorted(values, reverse=True) and found[0].count == 32
    assert found[0].interval[0] < values[0] < found[0].interval[1]


def test_mismatched_videos_raise():
    with pytest.raises(DataError, match="one of each"):
        code_purity(torch.zeros(2, 3).long(), torch.zeros(2).long())
    with pytest.raises(DataError, match="controls have type"):
        code_purity(torch.zeros(2).long(), torch.zeros(2))
    with pytest.raises(DataError, match="codes have type"):
        code_purity(torch.full((2,), -1), torch.zeros(2).long())
    with pytest.raises(DataError, match="a name for every control"):
        left_right_accuracy(torch.zeros(2, 3).long(), torch.ones(2, 3).long(), ("left",))
    with pytest.raises(DataError, match="videos"):
        rollout_psnr(torch.zeros(2, 3, 3, 4, 4), torch.zeros(2, 2, 3, 4, 4))
