"""Perceptual losses against explicit formulas."""

import pytest
import torch

from vitrail.errors import ConfigError
from vitrail.objectives.perceptual_loss import cosine_distillation_loss, gram_loss, gram_matrix, lpips_distance

SHAPES = ((2, 3, 5, 4), (2, 7, 2, 2), (2, 4, 1, 1))


def maps(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def heads():
    return [torch.rand(shape[1], generator=torch.Generator().manual_seed(9)).double() for shape in SHAPES]


def published(x, y, heads):
    """Forward pass of the package `lpips` 0.1.4, with its square root."""
    total = 0
    for a, b, head in zip(x, y, heads, strict=True):
        a, b = (m / (torch.sqrt(torch.sum(m**2, dim=1, keepdim=True)) + 1e-10) for m in (a, b))
        weighed = torch.nn.functional.conv2d((a - b) ** 2, head.view(1, -1, 1, 1))
        total = total + weighed.mean([2, 3], keepdim=True)
    return total.flatten()


def test_lpips_equals_the_published_code():
    x, y = maps(0), maps(1)
    torch.testing.assert_close(lpips_distance(x, y, heads()), published(x, y, heads()))
    assert torch.equal(lpips_distance(x, x, heads()), torch.zeros(2).double())
    torch.testing.assert_close(lpips_distance(x, y, heads()), lpips_distance(y, x, heads()))


def test_half_precision_is_summed_in_float32():
    x, y = maps(0, torch.bfloat16), maps(1, torch.bfloat16)
    ours = lpips_distance(x, y, [head.bfloat16() for head in heads()])
    rounded = published([m.float() for m in x], [m.float() for m in y], [head.bfloat16().float() for head in heads()])
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, rounded)


def test_zero_features_have_finite_gradients():
    x = torch.zeros(1, 3, 2, 2, requires_grad=True)
    y = torch.randn(1, 3, 2, 2)
    lpips_distance([torch.relu(x)], [y], [torch.ones(3)]).sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
    x = torch.zeros(1, 3, 2, 2, requires_grad=True)
    lpips_distance([torch.relu(x)], [torch.zeros(1, 3, 2, 2)], [torch.ones(3)]).sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))


def test_gram():
    features = maps(0)[0]
    wanted = torch.zeros(2, 3, 3).double()
    for b in range(2):
        for i in range(3):
            for j in range(3):
                wanted[b, i, j] = (features[b, i] * features[b, j]).sum() / (3 * 5 * 4)
    torch.testing.assert_close(gram_matrix(features), wanted)
    # It does not depend on positions.
    torch.testing.assert_close(gram_matrix(features.flip(2, 3)), wanted)
    x, y = maps(0), maps(1)
    each = [(gram_matrix(a) - gram_matrix(b)).abs().mean() for a, b in zip(x, y, strict=True)]
    torch.testing.assert_close(gram_loss(x, y), sum(each) / 3)


def test_distillation():
    student = torch.tensor([[1.0, 0.0], [3.0, 4.0]], requires_grad=True)
    teacher = torch.tensor([[0.0, 2.0], [3.0, 4.0]], requires_grad=True)
    loss = cosine_distillation_loss(student, teacher)
    loss.backward()
    torch.testing.assert_close(loss, torch.tensor(0.5))
    assert teacher.grad is None and student.grad is not None
    with pytest.raises(ConfigError, match="student and teacher"):
        cosine_distillation_loss(student, teacher[:1])


@pytest.mark.parametrize(
    "loss",
    [lambda x, y: lpips_distance(x, y, heads()).sum(), gram_loss, lambda x, y: cosine_distillation_loss(x[0], y[0])],
)
def test_gradients(loss):
    y = maps(1)
    x = tuple(m.requires_grad_() for m in maps(0))
    assert torch.autograd.gradcheck(lambda *x: loss(x, y), x)


def test_mismatched_feature_maps_raise():
    with pytest.raises(ConfigError, match="and 2 heads"):
        lpips_distance(maps(0), maps(1), heads()[:2])
    with pytest.raises(ConfigError, match="feature maps have shapes"):
        lpips_distance(maps(0), [maps(1)[0][:1], *maps(1)[1:]], heads())
    with pytest.raises(ConfigError, match="feature maps have shapes"):
        gram_loss(maps(0), maps(1)[:2])
    with pytest.raises(ConfigError, match="no feature maps"):
        gram_loss([], [])
