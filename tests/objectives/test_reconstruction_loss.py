"""Pixel losses and loss weights."""

import pytest
import torch

from vitrail.errors import ConfigError
from vitrail.objectives.reconstruction_loss import (
    PUBLISHED_WEIGHTS,
    ReconstructionWeights,
    l1_loss,
    l2_loss,
    sum_weighted_losses,
)


def test_pixels():
    x, y = torch.tensor([[0.0, 1.0], [2.0, -1.0]]), torch.tensor([[0.0, 3.0], [1.0, -1.0]])
    assert l1_loss(x, y) == 3 / 4 and l2_loss(x, y) == 5 / 4
    for loss in (l1_loss, l2_loss):
        with pytest.raises(ConfigError, match="the reconstruction has shape"):
            loss(torch.zeros(2, 3, 4, 4), torch.zeros(1, 3, 4, 4))


@pytest.mark.parametrize("loss", [l1_loss, l2_loss])
def test_gradients(loss):
    x, y = torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True), torch.randn(2, 3, 4, 4).double()
    assert torch.autograd.gradcheck(lambda x: loss(x, y), (x,))


def test_the_published_weights():
    gaia, qlip = PUBLISHED_WEIGHTS["gaia-1"].to_dict(), PUBLISHED_WEIGHTS["qlip-stage-2"].to_dict()
    zero = dict.fromkeys(gaia, 0.0)
    named = {"l1": 0.2, "l2": 2.0, "perceptual": 0.1, "gan": 1.0, "quantizer": 1.0, "distillation": 0.1}
    assert gaia == zero | named
    assert qlip == zero | {"l2": 1.0, "perceptual": 0.1, "gan": 0.1, "quantizer": 1.0}


def test_the_sum():
    losses = {"l1": torch.tensor(2.0, requires_grad=True), "gan": torch.tensor(-3.0, requires_grad=True)}
    total = sum_weighted_losses(losses, ReconstructionWeights(l1=0.5, gan=2.0))
    total.backward()
    assert total == -5 and losses["l1"].grad == 0.5 and losses["gan"].grad == 2.0


def test_missing_weights_and_losses_raise():
    one = torch.tensor(1.0)
    with pytest.raises(ConfigError, match="'l2' has no weight"):
        sum_weighted_losses({"l1": one, "l2": one}, ReconstructionWeights(l1=1.0))
    with pytest.raises(ConfigError, match="weight of 'gan' has no loss"):
        sum_weighted_losses({"l1": one}, ReconstructionWeights(l1=1.0, gan=0.1))
    with pytest.raises(ConfigError, match="all loss weights are 0"):
        sum_weighted_losses({}, ReconstructionWeights())
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="the weight of gram"):
            ReconstructionWeights(gram=wrong)
