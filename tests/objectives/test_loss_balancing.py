"""VQGAN's adaptive weight with known gradients."""

import pytest
import torch

from vitrail.errors import ConfigError
from vitrail.objectives.loss_balancing import compute_adaptive_weight, compute_gradient_norms


def losses(slope_a, slope_b):
    weight = torch.ones(2, 2, requires_grad=True)
    return weight, (weight * slope_a).sum(), (weight * slope_b).sum()


def test_adaptive_weight_balances_gradients():
    weight, reconstruction, adversarial = losses(torch.tensor([[3.0, 4.0], [0, 0]]), torch.tensor([[0.0, 0], [0.5, 0]]))
    factor = compute_adaptive_weight(reconstruction, adversarial, weight)
    torch.testing.assert_close(factor, torch.tensor(5 / (0.5 + 1e-4)))
    assert not factor.requires_grad
    assert compute_gradient_norms({"a": reconstruction, "b": adversarial}, weight) == {"a": 5, "b": 0.5}
    (reconstruction + factor * adversarial).backward()  # the graph is retained
    torch.testing.assert_close(weight.grad[0].norm(), weight.grad[1].norm(), rtol=1e-3, atol=0)


def test_limits():
    weight, reconstruction, adversarial = losses(torch.full((2, 2), 100.0), torch.zeros(2, 2))
    assert compute_adaptive_weight(reconstruction, adversarial, weight) == 1e4
    weight, reconstruction, adversarial = losses(torch.zeros(2, 2), torch.ones(2, 2))
    assert compute_adaptive_weight(reconstruction, adversarial, weight) == 0


def test_independent_loss_is_named():
    weight, reconstruction, _ = losses(torch.ones(2, 2), torch.ones(2, 2))
    for other in (torch.tensor(1.0), torch.ones(2, requires_grad=True).sum()):
        with pytest.raises(ConfigError, match="'adversarial' does not depend"):
            compute_adaptive_weight(reconstruction, other, weight)
