"""The Fréchet distance, against closed forms and torchmetrics."""

import itertools
import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vitrail.errors import DataError, ImageError
from vitrail.evals.metrics import Moments, features, frechet, frechet_distance


def gaussian(mean, covariance, n=10):
    """Moments that are exactly these."""
    return Moments(n, mean.double(), covariance.double() * (n - 1))


def spread(D, seed, rank=None):
    made = torch.randn(D, rank or 2 * D, generator=torch.Generator().manual_seed(seed)).double()
    return made @ made.T / made.shape[1]


# ---- closed forms -----------------------------------------------------------------------------------------------


def test_diagonal_gaussians():
    a, b = torch.tensor([1.0, 4.0, 9.0, 0.0]), torch.tensor([4.0, 1.0, 9.0, 1.0])
    mean = torch.tensor([1.0, 0.0, -2.0, 0.0])
    distance = frechet(gaussian(mean, a.diag()), gaussian(torch.zeros(4), b.diag()))
    assert distance == pytest.approx(5 + ((a.sqrt() - b.sqrt()) ** 2).sum().item(), abs=1e-12)


def test_one_feature():
    x, y = torch.randn(50, 1) * 3 + 1, torch.randn(80, 1)
    wanted = (x.double().mean() - y.double().mean()) ** 2 + (x.double().std() - y.double().std()) ** 2
    assert frechet(Moments.of(x), Moments.of(y)) == pytest.approx(wanted.item(), rel=1e-10)


@pytest.mark.parametrize(("n", "D"), [(400, 20), (12, 30)])
def test_a_shift_and_a_stretch(n, D):
    x = torch.randn(n, D).double() @ torch.randn(D, D).double()
    moments, shift = Moments.of(x), torch.randn(D).double()
    scale = moments.covariance.trace().item()
    # The root of an eigenvalue that rounding left instead of a zero is what stays of the precision.
    assert frechet(moments, Moments.of(x + shift)) == pytest.approx(shift.square().sum().item(), abs=1e-6 * scale)
    stretched = (0.5 * moments.mean).square().sum() + 0.25 * moments.covariance.trace()
    assert frechet(moments, Moments.of(1.5 * x)) == pytest.approx(stretched.item(), abs=1e-6 * scale)
    assert frechet(moments, moments) < 1e-6 * scale


def test_covariances_that_do_not_commute():
    """tr (C₁C₂)^½ as the sum of the singular values of A₁A₂ᵀ, where C = AᵀA: no root is taken of a matrix."""
    for n, m, D in ((30, 50, 12), (8, 9, 25), (2, 40, 6)):
        x, y = torch.randn(n, D).double() * 2 + 1, torch.randn(m, D).double() @ torch.randn(D, D).double()
        a, b = ((z - z.mean(0)) / math.sqrt(len(z) - 1) for z in (x, y))
        cross = torch.linalg.svdvals(a @ b.T).sum()
        wanted = (x.mean(0) - y.mean(0)).square().sum() + a.square().sum() + b.square().sum() - 2 * cross
        assert frechet(Moments.of(x), Moments.of(y)) == pytest.approx(wanted.item(), rel=1e-6)
        assert frechet(Moments.of(y), Moments.of(x)) == pytest.approx(wanted.item(), rel=1e-6)


def test_it_is_that_of_torchmetrics():
    fid = pytest.importorskip("torchmetrics.image.fid")
    for seed in range(4):
        means, covariances = torch.randn(2, 16).double(), (spread(16, seed), spread(16, seed + 10))
        ours = frechet(*(gaussian(mean, cov) for mean, cov in zip(means, covariances, strict=True)))
        theirs = fid._compute_fid(means[0], covariances[0], means[1], covariances[1])
        assert ours == pytest.approx(theirs.item(), rel=1e-9)

    class Eye(nn.Module):
        name, side, num_features = "eye", 8, 12

        def forward(self, pixels):
            pixels = pixels.float() / 127.5 - 1 if pixels.dtype == torch.uint8 else pixels
            return nn.functional.avg_pool2d(pixels, 4).flatten(1)

    eye = Eye()
    x, y = (torch.randint(0, 256, (60, 3, 8, 8), dtype=torch.uint8) // k for k in (1, 2))
    metric = fid.FrechetInceptionDistance(feature=eye, input_img_size=(3, 8, 8)).set_dtype(torch.float64)
    metric.update(x, real=True)
    metric.update(y, real=False)
    ours = frechet_distance(features(x, eye, batch=7), features([y[:9], y[9:]], eye), "eye", rounds=0)
    assert ours.name == "FD-eye" and ours.of == 60
    assert ours.value == pytest.approx(metric.compute().item(), rel=1e-4)


# ---- moments ----------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(cuts=st.lists(st.integers(0, 40), max_size=4), seed=st.integers(0, 99), far=st.sampled_from([0.0, 1e4]))
def test_moments_of_parts_are_those_of_the_whole(cuts, seed, far):
    rows = torch.randn(40, 5, generator=torch.Generator().manual_seed(seed)).double() + far
    edges = [0, *sorted(cuts), 40]
    parts = [Moments.of(rows[a:b]) for a, b in itertools.pairwise(edges) if b > a]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    assert total.n == 40
    torch.testing.assert_close(total.mean, rows.mean(0))
    torch.testing.assert_close(total.covariance, rows.T.cov(), rtol=1e-6, atol=1e-9)


def test_counts_stand_for_rows():
    rows = torch.randn(5000, 4)  # more than are summed at a time
    counts = torch.randint(0, 3, (5000,))
    counts[:4200] = 0
    one, other = Moments.of(rows, counts), Moments.of(rows.repeat_interleave(counts, 0))
    assert one.n == other.n
    torch.testing.assert_close(one.mean, other.mean)
    torch.testing.assert_close(one.scatter, other.scatter)


# ---- the measure ------------------------------------------------------------------------------------------------


def test_few_pictures_are_warned_of():
    x, y = torch.randn(20, 8), torch.randn(20, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frechet_distance(x, y, "eye", rounds=0)
    with pytest.warns(UserWarning, match="FD-eye of 7 pictures: fewer than the 8 features"):
        frechet_distance(x[:7], y, "eye", rounds=0)


def test_the_interval():
    truth, spreads = 4.0, []
    for seed in range(12):
        chance = torch.Generator().manual_seed(seed)
        x, y = torch.randn(300, 2, generator=chance), torch.randn(300, 2, generator=chance)
        found = frechet_distance(x, y + math.sqrt(2), "eye", rounds=40, seed=seed)
        spreads.append(found.interval[0] <= truth <= found.interval[1])
        assert found.interval[0] < found.value < found.interval[1]
    assert sum(spreads) >= 9
    # Two numbers that belong together move together: the interval of pairs is the narrower.
    y = x + 0.3
    paired, apart = (frechet_distance(x, y, "eye", paired=way, rounds=40).interval for way in (True, False))
    assert paired[1] - paired[0] < 0.3 * (apart[1] - apart[0])
    assert frechet_distance(x, y, "eye", rounds=0).interval == (-math.inf, math.inf)


def test_what_has_no_distance():
    rows = torch.randn(5, 3)
    for x, y in ((rows[:1], rows), (rows, rows[:1]), (rows[:0], rows)):
        with pytest.raises(DataError, match="give at least two"):
            frechet_distance(x, y, "eye")
    with pytest.raises(DataError, match="paired"):
        frechet_distance(rows, rows[:4], "eye", paired=True)
    with pytest.raises(DataError, match="width 3 and 2"):
        frechet(Moments.of(rows), Moments.of(rows[:, :2]))
    with pytest.raises(DataError, match="no finite"):
        Moments.of(rows / 0)
    with pytest.raises(DataError, match="no moments"):
        Moments.of(rows[0])
    with pytest.raises(DataError, match="no covariance"):
        frechet(Moments.of(rows[:1]), Moments.of(rows))


def test_features_of_bad_pictures():
    class Eye(nn.Module):
        name, side = "eye", 8

        def forward(self, pixels):
            assert pixels.shape[1:] == (3, 8, 8) and pixels.abs().max() <= 1
            return pixels.mean((2, 3))

    assert features(torch.rand(5, 3, 20, 13) * 2 - 1, Eye(), batch=2).shape == (5, 3)
    with pytest.raises(ImageError, match="lie in −1…1"):
        features(torch.full((2, 3, 8, 8), 3.0), Eye())
    with pytest.raises(DataError, match="no pictures"):
        features([], Eye())
