"""PSNR, SSIM and LPIPS, compared with torchmetrics and scikit-image."""

import math

import numpy as np
import pytest
import torch

from vitrail.encoders.vgg import LPIPS
from vitrail.errors import ConfigError, ImageError
from vitrail.evals.metrics import image_similarity, lpips, psnr, ssim


def pair(shape=(3, 3, 40, 31), noise=0.2, dtype=torch.float32):
    x = torch.nn.functional.interpolate(torch.rand(*shape[:2], 9, 9), shape[2:], mode="bilinear") * 2 - 1
    return x.to(dtype), (x + noise * torch.randn_like(x)).clamp(-1, 1).to(dtype)


def to_uint8(x):
    return ((x + 1) * 127.5).round().to(torch.uint8)


@pytest.mark.parametrize("noise", [0.01, 0.3, 2.0])
def test_psnr_matches_torchmetrics(noise):
    reference = pytest.importorskip("torchmetrics.functional.image").peak_signal_noise_ratio
    x, y = pair(noise=noise)
    wanted = [reference(b, a, data_range=(-1.0, 1.0)) for a, b in zip(x, y, strict=True)]
    torch.testing.assert_close(psnr(x, y), torch.stack(wanted))
    x, y = to_uint8(x), to_uint8(y)
    wanted = [reference(b.float(), a.float(), data_range=255.0) for a, b in zip(x, y, strict=True)]
    torch.testing.assert_close(psnr(x, y), torch.stack(wanted))


def test_psnr_in_closed_form():
    x = torch.zeros(2, 1, 2, 2)
    y = torch.stack([torch.full((1, 2, 2), 0.2), torch.zeros(1, 2, 2)])  # an error of one tenth of the range
    torch.testing.assert_close(psnr(x, y), torch.tensor([20.0, math.inf]))


@pytest.mark.parametrize("shape", [(3, 3, 40, 31), (1, 1, 11, 11), (2, 4, 64, 12)])
@pytest.mark.parametrize("noise", [0.01, 0.3])
def test_ssim_matches_torchmetrics_and_scikit_image(shape, noise):
    reference = pytest.importorskip("torchmetrics.functional.image").structural_similarity_index_measure
    oracle = pytest.importorskip("skimage.metrics").structural_similarity
    x, y = pair(shape, noise, torch.float64)
    ours, valid = ssim(x, y), ssim(x, y, borders="left out")
    wanted = reference((y + 1) / 2, (x + 1) / 2, data_range=1.0, reduction="none").flatten()
    torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-6)
    for i in range(len(x)):
        arrays = [((each[i] + 1) / 2).numpy() for each in (x, y)]
        options = {"data_range": 1.0, "gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
        assert valid[i].item() == pytest.approx(oracle(*arrays, channel_axis=0, **options), abs=1e-6)
    assert (ssim(x.float(), y.float()) - ours).abs().max() < 1e-5
    torch.testing.assert_close(ssim(x, x), torch.ones(len(x)).double())


def test_float32_precision_of_flat_bright_images():
    x = torch.full((1, 3, 32, 32), 0.999, dtype=torch.float64) - 1e-3 * torch.rand(1, 3, 32, 32).double()
    y = (x + 1e-3 * torch.randn_like(x)).clamp(-1, 1)
    assert (ssim(x.float(), y.float()) - ssim(x, y)).abs().max() < 1e-4


def test_chunking_does_not_change_results(monkeypatch):
    x, y = pair((7, 3, 33, 34))
    network = LPIPS("alexnet")
    whole = psnr(x, y), ssim(x, y), lpips(x, y, network)
    monkeypatch.setattr(image_similarity, "CHUNK_ELEMENTS", 1)
    for ours, wanted in zip((psnr(x, y), ssim(x, y), lpips(x, y, network)), whole, strict=True):
        assert ours.shape == (7,)
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)


def test_lpips_accepts_uint8():
    x, y = (to_uint8(each) for each in pair((2, 3, 40, 40)))
    network = LPIPS("vgg16")
    torch.testing.assert_close(lpips(x, y, network), network(x / 127.5 - 1, y / 127.5 - 1), rtol=1e-4, atol=1e-6)
    assert torch.equal(lpips(x, x, network), torch.zeros(2))


def test_uint8_and_float_can_be_compared():
    x, _ = pair()
    rounded = to_uint8(x)
    assert (psnr(x, rounded) > 50).all() and (ssim(x.half(), rounded) > 0.99).all()


@pytest.mark.parametrize("measure", [psnr, ssim, lambda x, y: lpips(x, y, LPIPS("alexnet"))])
def test_wrong_ranges_and_shapes_raise(measure):
    x = torch.zeros(1, 3, 32, 32)
    for wrong in (x + 255, x - 1.01, x * math.nan, x + math.inf):
        with pytest.raises(ImageError, match="must be in −1…1"):
            measure(x, wrong)
        with pytest.raises(ImageError, match="must be in −1…1"):
            measure(wrong, x)
    with pytest.raises(ImageError, match="no known range"):
        measure(x.long(), x.long())
    for wrong in (torch.zeros(2, 3, 32, 32), torch.zeros(3, 32, 32), torch.zeros(0, 3, 32, 32)):
        with pytest.raises(ImageError, match="cannot be compared"):
            measure(x, wrong)
    with pytest.raises(ImageError, match="cannot be compared"):
        measure(x[0], x[0])


def test_images_smaller_than_the_window_raise():
    with pytest.raises(ConfigError, match="unknown borders 'mirror'"):
        ssim(torch.zeros(1, 3, 16, 16), torch.zeros(1, 3, 16, 16), borders="mirror")
    with pytest.raises(ImageError, match="10 × 40 pixels are smaller"):
        ssim(torch.zeros(1, 3, 10, 40), torch.zeros(1, 3, 10, 40))
    with pytest.raises(ImageError, match="at least 31 × 31"):
        lpips(torch.zeros(1, 3, 30, 40), torch.zeros(1, 3, 30, 40), LPIPS("alexnet"))


def test_metrics_order_distortions():
    x, _ = pair((1, 3, 64, 64))
    noise = torch.randn_like(x)
    worse = torch.cat([(x + s * noise).clamp(-1, 1) for s in np.linspace(0.05, 1, 6)])
    x = x.expand_as(worse)
    assert (psnr(x, worse).diff() < 0).all() and (ssim(x, worse).diff() < 0).all()
