"""Losses of pixels, and the tables of weights."""

import pytest
import torch

from vitrail.errors import ConfigError
from vitrail.objectives.reconstruction import WEIGHTS, Weights, l1, l2, weighed


def test_pixels():
    x, y = torch.tensor([[0.0, 1.0], [2.0, -1.0]]), torch.tensor([[0.0, 3.0], [1.0, -1.0]])
    assert l1(x, y) == 3 / 4 and l2(x, y) == 5 / 4
    for loss in (l1, l2):
        with pytest.raises(ConfigError, match="cannot be compared"):
            loss(torch.zeros(2, 3, 4, 4), torch.zeros(1, 3, 4, 4))


@pytest.mark.parametrize("loss", [l1, l2])
def test_gradients(loss):
    x, y = torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True), torch.randn(2, 3, 4, 4).double()
    assert torch.autograd.gradcheck(lambda x: loss(x, y), (x,))


def test_the_published_weights():
    gaia, qlip = WEIGHTS["gaia-1"].plain(), WEIGHTS["qlip-stage-2"].plain()
    zero = dict.fromkeys(gaia, 0.0)
    named = {"l1": 0.2, "l2": 2.0, "perceptual": 0.1, "gan": 1.0, "quantizer": 1.0, "distillation": 0.1}
    assert gaia == zero | named
    assert qlip == zero | {"l2": 1.0, "perceptual": 0.1, "gan": 0.1, "quantizer": 1.0}


def test_the_sum():
    losses = {"l1": torch.tensor(2.0, requires_grad=True), "gan": torch.tensor(-3.0, requires_grad=True)}
    total = weighed(losses, Weights(l1=0.5, gan=2.0))
    total.backward()
    assert total == -5 and losses["l1"].grad == 0.5 and losses["gan"].grad == 2.0


def test_nothing_is_left_out_silently():
    one = torch.tensor(1.0)
    with pytest.raises(ConfigError, match="'l2' has no weight"):
        weighed({"l1": one, "l2": one}, Weights(l1=1.0))
    with pytest.raises(ConfigError, match="weight of 'gan' has no loss"):
        weighed({"l1": one}, Weights(l1=1.0, gan=0.1))
    with pytest.raises(ConfigError, match="every weight is 0"):
        weighed({}, Weights())
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="the weight of gram"):
            Weights(gram=wrong)
