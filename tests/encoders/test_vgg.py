"""LPIPS trunks against torchvision's layout."""

import pytest
import torch
from torch import nn

from vitrail.encoders.vgg import LPIPS, TRUNK_SPECS, FeatureTrunk
from vitrail.errors import ConfigError, ImageError

# torchvision's `features`, and the number of them for each feature map of `lpips`.
LAYOUT = {
    "vgg16": ("CC2CC2CCC2CCC2CCC", (4, 9, 16, 23, 30)),
    "alexnet": ("C3C3CCC", (2, 5, 8, 10, 12)),
}


def reference(trunk: FeatureTrunk) -> nn.Sequential:
    letters, _ = LAYOUT[trunk.name]
    convs, layers = iter(trunk.convs), []
    for letter in letters:
        layers += [next(convs), nn.ReLU()] if letter == "C" else [nn.MaxPool2d(int(letter), 2)]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("name", TRUNK_SPECS)
def test_features_and_gradients_equal_torchvision(name):
    network = LPIPS(name)
    pixels = [(torch.rand(2, 3, 37, 33) * 2 - 1).requires_grad_() for _ in range(2)]
    layers, ends = reference(network.trunk), LAYOUT[name][1]
    shift, scale = (torch.tensor(v)[:, None, None] for v in ([-0.030, -0.088, -0.188], [0.458, 0.448, 0.450]))
    total, found = torch.zeros(2), []
    for end in ends:
        a, b = (layers[:end]((x - shift) / scale) for x in pixels)
        found.append(a)
        a, b = (m / (m.square().sum(1, keepdim=True).sqrt() + 1e-10) for m in (a, b))
        total = total + (a - b).square().mean((1, 2, 3))  # equal initial heads: a mean over channels
    for ours, theirs in zip(network.trunk(pixels[0]), found, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert network.trunk.widths == [m.shape[1] for m in found]
    torch.testing.assert_close(network(*pixels), total)
    wanted = torch.autograd.grad(total.sum(), pixels)
    for ours, theirs in zip(torch.autograd.grad(network(*pixels).sum(), pixels), wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_weights_are_frozen():
    network = LPIPS("alexnet")
    assert not any(p.requires_grad for p in network.parameters())
    x = torch.zeros(1, 3, 32, 32, requires_grad=True)
    network(x, torch.ones(1, 3, 32, 32)).sum().backward()
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize("name", TRUNK_SPECS)
def test_smallest_image(name):
    trunk, side = FeatureTrunk(name), TRUNK_SPECS[name].min_image_size
    assert min(trunk(torch.zeros(1, 3, side, side))[-1].shape[2:]) == 1
    for shape in ((1, 3, side - 1, side), (1, 3, side, side - 1), (1, 1, side, side), (3, side, side)):
        with pytest.raises(ImageError, match="have shape"):
            trunk(torch.zeros(shape))
    with pytest.raises(RuntimeError):  # a smaller image fails in torch too
        x = torch.zeros(1, 3, side - 1, side - 1)
        for layer in reference(trunk):
            x = layer(x)
    with pytest.raises(ImageError, match="in −1…1"):
        trunk(torch.zeros(1, 3, side, side, dtype=torch.uint8))


def test_unknown_names():
    with pytest.raises(ConfigError, match="'vgg19'"):
        FeatureTrunk("vgg19")
