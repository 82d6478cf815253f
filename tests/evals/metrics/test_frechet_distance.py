"""Fréchet distance, compared with closed forms and torchmetrics."""

import itertools
import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vitrail.errors import DataError, ImageError
from vitrail.evals.metrics import FeatureMoments, extract_features, frechet_distance, gaussian_frechet_distance


def gaussian(mean, covariance, n=10):
    """Features with exactly these moments."""
    return FeatureMoments(n, mean.double(), covariance.double() * (n - 1))


def spread(D, seed, rank=None):
    made = torch.randn(D, rank or 2 * D, generator=torch.Generator().manual_seed(seed)).double()
    return made @ made.T / made.shape[1]


# ---- closed forms -----------------------------------------------------------------------------------------------


def test_diagonal_gaussians():
    a, b = torch.tensor([1.0, 4.0, 9.0, 0.0]), torch.tensor([4.0, 1.0, 9.0, 1.0])
    mean = torch.tensor([1.0, 0.0, -2.0, 0.0])
    distance = gaussian_frechet_distance(gaussian(mean, a.diag()), gaussian(torch.zeros(4), b.diag()))
    assert distance == pytest.approx(5 + ((a.sqrt() - b.sqrt()) ** 2).sum().item(), abs=1e-12)


def test_one_feature():
    x, y = torch.randn(50, 1) * 3 + 1, torch.randn(80, 1)
    wanted = (x.double().mean() - y.double().mean()) ** 2 + (x.double().std() - y.double().std()) ** 2
    assert gaussian_frechet_distance(FeatureMoments.from_features(x), FeatureMoments.from_features(y)) == pytest.approx(
        wanted.item(), rel=1e-10
    )


@pytest.mark.parametrize(("n", "D"), [(400, 20), (12, 30)])
def test_shift_and_scale(n, D):
    x = torch.randn(n, D).double() @ torch.randn(D, D).double()
    moments, shift = FeatureMoments.from_features(x), torch.randn(D).double()
    scale = moments.covariance.trace().item()
    # The error is the square root of an eigenvalue that is zero up to rounding.
    assert gaussian_frechet_distance(moments, FeatureMoments.from_features(x + shift)) == pytest.approx(
        shift.square().sum().item(), abs=1e-6 * scale
    )
    stretched = (0.5 * moments.mean).square().sum() + 0.25 * moments.covariance.trace()
    assert gaussian_frechet_distance(moments, FeatureMoments.from_features(1.5 * x)) == pytest.approx(
        stretched.item(), abs=1e-6 * scale
    )
    assert gaussian_frechet_distance(moments, moments) < 1e-6 * scale


def test_covariances_that_do_not_commute():
    """tr (C₁C₂)^½ as sum of the singular values of A₁A₂ᵀ with C = AᵀA, without matrix roots."""
    for n, m, D in ((30, 50, 12), (8, 9, 25), (2, 40, 6)):
        x, y = torch.randn(n, D).double() * 2 + 1, torch.randn(m, D).double() @ torch.randn(D, D).double()
        a, b = ((z - z.mean(0)) / math.sqrt(len(z) - 1) for z in (x, y))
        cross = torch.linalg.svdvals(a @ b.T).sum()
        wanted = (x.mean(0) - y.mean(0)).square().sum() + a.square().sum() + b.square().sum() - 2 * cross
        assert gaussian_frechet_distance(
            FeatureMoments.from_features(x), FeatureMoments.from_features(y)
        ) == pytest.approx(wanted.item(), rel=1e-6)
        assert gaussian_frechet_distance(
            FeatureMoments.from_features(y), FeatureMoments.from_features(x)
        ) == pytest.approx(wanted.item(), rel=1e-6)


def test_matches_torchmetrics():
    fid = pytest.importorskip("torchmetrics.image.fid")
    for seed in range(4):
        means, covariances = torch.randn(2, 16).double(), (spread(16, seed), spread(16, seed + 10))
        ours = gaussian_frechet_distance(*(gaussian(mean, cov) for mean, cov in zip(means, covariances, strict=True)))
        theirs = fid._compute_fid(means[0], covariances[0], means[1], covariances[1])
        assert ours == pytest.approx(theirs.item(), rel=1e-9)

    class Eye(nn.Module):
        name, image_size, num_features = "eye", 8, 12

        def forward(self, pixels):
            pixels = pixels.float() / 127.5 - 1 if pixels.dtype == torch.uint8 else pixels
            return nn.functional.avg_pool2d(pixels, 4).flatten(1)

    image_embedder = Eye()
    x, y = (torch.randint(0, 256, (60, 3, 8, 8), dtype=torch.uint8) // k for k in (1, 2))
    metric = fid.FrechetInceptionDistance(feature=image_embedder, input_img_size=(3, 8, 8)).set_dtype(torch.float64)
    metric.update(x, real=True)
    metric.update(y, real=False)
    ours = frechet_distance(
        extract_features(x, image_embedder, batch_size=7),
        extract_features([y[:9], y[9:]], image_embedder),
        "eye",
        rounds=0,
    )
    assert ours.name == "FD-eye" and ours.count == 60
    assert ours.value == pytest.approx(metric.compute().item(), rel=1e-4)


# ---- moments ----------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(cuts=st.lists(st.integers(0, 40), max_size=4), seed=st.integers(0, 99), far=st.sampled_from([0.0, 1e4]))
def test_moments_of_parts_add_up(cuts, seed, far):
    rows = torch.randn(40, 5, generator=torch.Generator().manual_seed(seed)).double() + far
    edges = [0, *sorted(cuts), 40]
    parts = [FeatureMoments.from_features(rows[a:b]) for a, b in itertools.pairwise(edges) if b > a]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    assert total.count == 40
    torch.testing.assert_close(total.mean, rows.mean(0))
    torch.testing.assert_close(total.covariance, rows.T.cov(), rtol=1e-6, atol=1e-9)


def test_counts_repeat_rows():
    rows = torch.randn(5000, 4)  # more rows than one summation block
    counts = torch.randint(0, 3, (5000,))
    counts[:4200] = 0
    one, other = (
        FeatureMoments.from_features(rows, counts),
        FeatureMoments.from_features(rows.repeat_interleave(counts, 0)),
    )
    assert one.count == other.count
    torch.testing.assert_close(one.mean, other.mean)
    torch.testing.assert_close(one.scatter, other.scatter)


# ---- the distance -----------------------------------------------------------------------------------------------


def test_few_images_warn():
    x, y = torch.randn(20, 8), torch.randn(20, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frechet_distance(x, y, "eye", rounds=0)
    with pytest.warns(UserWarning, match="FD-eye of 7 images: fewer than 8 features"):
        frechet_distance(x[:7], y, "eye", rounds=0)


def test_interval_matches_the_bootstrap():
    truth, spreads = 4.0, []
    for seed in range(12):
        chance = torch.Generator().manual_seed(seed)
        x, y = torch.randn(300, 2, generator=chance), torch.randn(300, 2, generator=chance)
        found = frechet_distance(x, y + math.sqrt(2), "eye", rounds=40, seed=seed)
        spreads.append(found.interval[0] <= truth <= found.interval[1])
        assert found.interval[0] < found.value < found.interval[1]
    assert sum(spreads) >= 9
    # Paired samples vary together, so the paired interval is narrower.
    y = x + 0.3
    paired, apart = (frechet_distance(x, y, "eye", paired=way, rounds=40).interval for way in (True, False))
    assert paired[1] - paired[0] < 0.3 * (apart[1] - apart[0])
    assert frechet_distance(x, y, "eye", rounds=0).interval == (-math.inf, math.inf)


def test_too_few_images_raise():
    rows = torch.randn(5, 3)
    for x, y in ((rows[:1], rows), (rows, rows[:1]), (rows[:0], rows)):
        with pytest.raises(DataError, match="pass at least two"):
            frechet_distance(x, y, "eye")
    with pytest.raises(DataError, match="paired"):
        frechet_distance(rows, rows[:4], "eye", paired=True)
    with pytest.raises(DataError, match="widths 3 and 2"):
        gaussian_frechet_distance(FeatureMoments.from_features(rows), FeatureMoments.from_features(rows[:, :2]))
    with pytest.raises(DataError, match="not finite"):
        FeatureMoments.from_features(rows / 0)
    with pytest.raises(DataError, match="have shape"):
        FeatureMoments.from_features(rows[0])
    with pytest.raises(DataError, match="covariance of 1"):
        gaussian_frechet_distance(FeatureMoments.from_features(rows[:1]), FeatureMoments.from_features(rows))


def test_invalid_images_raise():
    class Eye(nn.Module):
        name, image_size = "eye", 8

        def forward(self, pixels):
            assert pixels.shape[1:] == (3, 8, 8) and pixels.abs().max() <= 1
            return pixels.mean((2, 3))

    assert extract_features(torch.rand(5, 3, 20, 13) * 2 - 1, Eye(), batch_size=2).shape == (5, 3)
    with pytest.raises(ImageError, match="must be in −1…1"):
        extract_features(torch.full((2, 3, 8, 8), 3.0), Eye())
    with pytest.raises(DataError, match="no images"):
        extract_features([], Eye())
