"""GAN losses and regularizers against their formulas."""

import math

import pytest
import torch
from torch import nn

from vitrail.errors import ConfigError
from vitrail.objectives.adversarial import GAN_LOSSES, delay_weight, lecam_penalty, r1_penalty


def test_hinge():
    real, drawn = torch.tensor([2.0, 0.5, -1.0]), torch.tensor([-3.0, 0.0, 1.0])
    game = GAN_LOSSES["hinge"]
    torch.testing.assert_close(game.discriminator(real, drawn), torch.tensor((0 + 0.5 + 2 + 0 + 1 + 2) / 6))
    torch.testing.assert_close(game.generator(drawn), torch.tensor(2 / 3))


def test_non_saturating():
    real, drawn = torch.tensor([1.5]), torch.tensor([-0.5])
    game = GAN_LOSSES["non-saturating"]

    def softplus(x):
        return math.log1p(math.exp(x))

    torch.testing.assert_close(game.discriminator(real, drawn), torch.tensor((softplus(-1.5) + softplus(-0.5)) / 2))
    torch.testing.assert_close(game.generator(drawn), torch.tensor(softplus(0.5)))
    # A confident discriminator gives the generator the full gradient, without overflow.
    sure = torch.tensor([-1e4], requires_grad=True)
    game.generator(sure).backward()
    assert sure.grad == -1


@pytest.mark.parametrize("name", GAN_LOSSES)
def test_gradients_and_directions(name):
    game = GAN_LOSSES[name]
    real, drawn = (torch.randn(2, 1, 3, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(game.discriminator, (real, drawn))
    assert torch.autograd.gradcheck(game.generator, (drawn,))
    up, down = torch.autograd.grad(game.discriminator(real, drawn), (real, drawn))
    assert (up <= 0).all() and (down >= 0).all() and up.any() and down.any()
    assert (torch.autograd.grad(game.generator(drawn), drawn)[0] < 0).all()


def test_delayed_weight():
    assert [delay_weight(0.1, step, 3) for step in range(5)] == [0, 0, 0, 0.1, 0.1]
    assert delay_weight(0.1, 0, 0) == 0.1


def test_r1():
    pictures = torch.randn(4, 3, 2, 2, dtype=torch.float64).requires_grad_()
    weight = torch.randn(12, dtype=torch.float64, requires_grad=True)
    # The gradient of ½(w·x)² is (w·x)w, so its square is (w·x)²|w|².
    project = pictures.flatten(1) @ weight
    torch.testing.assert_close(r1_penalty(project**2 / 2, pictures), (project**2 * weight.square().sum()).mean() / 2)
    net = nn.Sequential(nn.Conv2d(3, 2, 2), nn.Softplus(), nn.Conv2d(2, 1, 1)).double()

    def penalty(*parameters):
        names = [name for name, _ in net.named_parameters()]
        logits = torch.func.functional_call(net, dict(zip(names, parameters, strict=True)), pictures)
        return r1_penalty(logits, pictures)

    assert torch.autograd.gradcheck(penalty, tuple(p.detach().requires_grad_() for p in net.parameters()))
    with pytest.raises(ConfigError, match="gradients of the images"):
        r1_penalty(net(pictures.detach()), pictures.detach())


def test_lecam():
    real, drawn = torch.tensor([1.0, 3.0]), torch.tensor([-1.0, 0.0])
    means = torch.tensor(2.0, requires_grad=True), torch.tensor(-0.5, requires_grad=True)
    value = lecam_penalty(real.requires_grad_(), drawn, *means)
    torch.testing.assert_close(value, torch.tensor((1.5**2 + 3.5**2) / 2 + (9 + 4) / 2))
    value.backward()
    assert means[0].grad is None and means[1].grad is None
