"""MaskGIT's schedule against its formula, and which codes stay hidden."""

import math

import pytest
import torch

from vitrail.generate.masked_decoding import count_hidden, find_active_passes, gumbel_noise, hide_least_confident


@pytest.mark.parametrize("steps", [1, 2, 8, 25])
def test_the_schedule_is_the_papers(steps):
    total = torch.tensor([64, 7])
    for step in range(steps):
        wanted = [math.ceil(math.cos(math.pi / 2 * (step + 1) / steps) * n - 1e-6) for n in total.tolist()]
        assert count_hidden(total, step, steps).tolist() == wanted
    assert count_hidden(total, steps - 1, steps).tolist() == [0, 0]


def test_find_active_passes():
    assert find_active_passes(torch.tensor([144]), 24) == [False] + [True] * 23
    assert find_active_passes(torch.tensor([64]), 8) == [True] * 8
    few = find_active_passes(torch.tensor([6, 0]), 24)
    assert sum(few) == 6 and few[-1]  # one code after another
    assert sum(find_active_passes(torch.tensor([6, 144]), 24)) == 23  # a row that goes on takes the others along
    assert find_active_passes(torch.tensor([0]), 4) == [False] * 4


def test_least_confident_codes_stay_masked():
    sure = torch.tensor([[0.1, 0.9, 0.5, 0.2], [0.4, 0.3, 0.2, 0.1]])
    hidden = torch.tensor([[False, True, True, True], [True] * 4])
    kept = hide_least_confident(sure, hidden, torch.tensor([1, 3]))
    assert kept.tolist() == [[False, False, False, True], [False, True, True, True]]


def test_noise_is_gumbels():
    noise = gumbel_noise(torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.03) and noise.isfinite().all()
