"""All measures in one pass."""

import pytest
import torch
from torch import nn

from vitrail.encoders.vgg import LPIPS
from vitrail.errors import DataError
from vitrail.evals.metrics import compare, estimate, features, frechet_distance, lpips, psnr, ssim


class Eye(nn.Module):
    name, side = "eye", 16

    def forward(self, pixels):
        return nn.functional.avg_pool2d(pixels, 8).flatten(1)


def test_a_pass_in_batches_is_a_pass_over_all():
    x = torch.rand(30, 3, 32, 32) * 2 - 1
    y = (x + 0.2 * torch.randn_like(x)).clamp(-1, 1)
    perceptual, eye = LPIPS("alexnet"), Eye()
    found = compare(zip(x.split(7), y.split(7), strict=True), perceptual=perceptual, network=eye, frechet_rounds=3)
    wanted = [estimate(n, v) for n, v in (("PSNR", psnr(x, y)), ("SSIM", ssim(x, y)))]
    wanted.append(estimate("LPIPS-alexnet", lpips(x, y, perceptual)))
    wanted.append(frechet_distance(features(x, eye), features(y, eye), "eye", paired=True, rounds=3))
    assert list(found) == [each.name for each in wanted] == ["PSNR", "SSIM", "LPIPS-alexnet", "FD-eye"]
    for ours, each in zip(found.values(), wanted, strict=True):
        assert ours.of == 30
        assert ours.value == pytest.approx(each.value, rel=1e-4)
        assert ours.interval == pytest.approx(each.interval, rel=1e-3)
    assert list(compare([(x, y)])) == ["PSNR", "SSIM"]
    with pytest.raises(DataError, match="no pictures"):
        compare([])
