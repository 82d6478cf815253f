"""Comparison with all metrics in one pass."""

import pytest
import torch
from torch import nn

from vitrail.encoders.vgg import LPIPS
from vitrail.errors import DataError
from vitrail.evals.metrics import compare_images, estimate_mean, extract_features, frechet_distance, lpips, psnr, ssim


class Eye(nn.Module):
    name, image_size = "eye", 16

    def forward(self, pixels):
        return nn.functional.avg_pool2d(pixels, 8).flatten(1)


def test_batched_comparison_matches_one_batch():
    x = torch.rand(30, 3, 32, 32) * 2 - 1
    y = (x + 0.2 * torch.randn_like(x)).clamp(-1, 1)
    perceptual, image_embedder = LPIPS("alexnet"), Eye()
    found = compare_images(
        zip(x.split(7), y.split(7), strict=True), perceptual=perceptual, network=image_embedder, frechet_rounds=3
    )
    wanted = [estimate_mean(n, v) for n, v in (("PSNR", psnr(x, y)), ("SSIM", ssim(x, y)))]
    wanted.append(estimate_mean("LPIPS-alexnet", lpips(x, y, perceptual)))
    wanted.append(
        frechet_distance(
            extract_features(x, image_embedder), extract_features(y, image_embedder), "eye", paired=True, rounds=3
        )
    )
    assert list(found) == [each.name for each in wanted] == ["PSNR", "SSIM", "LPIPS-alexnet", "FD-eye"]
    for ours, each in zip(found.values(), wanted, strict=True):
        assert ours.count == 30
        assert ours.value == pytest.approx(each.value, rel=1e-4)
        assert ours.interval == pytest.approx(each.interval, rel=1e-3)
    assert list(compare_images([(x, y)])) == ["PSNR", "SSIM"]
    with pytest.raises(DataError, match="no images"):
        compare_images([])
