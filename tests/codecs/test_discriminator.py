"""PatchGAN discriminator, compared with a written-out VQGAN discriminator."""

import pytest
import torch
from torch import nn

from vitrail.codecs.discriminator import Discriminator, DiscriminatorConfig
from vitrail.errors import ConfigError, ImageError
from vitrail.objectives.adversarial import GAN_LOSSES


def vqgan(width, layers):
    rows = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2)]
    before = 1
    for n in range(1, layers):
        now = min(2**n, 8)
        rows += [nn.Conv2d(width * before, width * now, 4, 2, 1, bias=False), nn.BatchNorm2d(width * now)]
        rows += [nn.LeakyReLU(0.2)]
        before = now
    now = min(2**layers, 8)
    rows += [nn.Conv2d(width * before, width * now, 4, 1, 1, bias=False), nn.BatchNorm2d(width * now)]
    return nn.Sequential(*rows, nn.LeakyReLU(0.2), nn.Conv2d(width * now, 1, 4, 1, 1))


def ordered(network: Discriminator) -> list[nn.Module]:
    pairs = zip(network.convs, network.norms, strict=True)
    return [m for pair in pairs for m in pair if not isinstance(m, nn.Identity)] + [network.last]


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
@pytest.mark.parametrize("training", [True, False])
def test_matches_vqgan(layers, training):
    ours = Discriminator(DiscriminatorConfig(width=8, layers=layers)).train(training)
    theirs = vqgan(8, layers).train(training)
    named = [m for m in theirs if not isinstance(m, nn.LeakyReLU)]
    for mine, other in zip(ordered(ours), named, strict=True):
        other.load_state_dict(mine.state_dict())
    pixels = torch.rand(2, 3, 3 * 2**layers + 5, 100) * 2 - 1
    torch.testing.assert_close(ours(pixels), theirs(pixels))


def test_initialization():
    network = Discriminator()
    assert network(torch.zeros(2, 3, 256, 256)).shape == (2, 1, 30, 30)
    weights = torch.cat([conv.weight.flatten() for conv in network.convs])
    assert abs(weights.std() - 0.02) < 1e-3 and abs(weights.mean()) < 1e-3


def test_receptive_field_is_70_pixels():
    network = Discriminator(DiscriminatorConfig(width=4, norm="none")).eval()
    pixels = torch.rand(1, 3, 256, 256, requires_grad=True)
    network(pixels)[0, 0, 15, 15].backward()
    rows = pixels.grad.abs().sum((0, 1, 3)).nonzero().flatten()
    assert rows[-1] - rows[0] + 1 == 70


def test_group_norm_does_not_mix_images():
    network = Discriminator(DiscriminatorConfig(width=16, norm="group"))
    pixels = torch.rand(3, 3, 32, 32)
    torch.testing.assert_close(network(pixels)[1:2], network(pixels[1:2]))


def test_discriminator_learns():
    network = Discriminator(DiscriminatorConfig(width=8, layers=2))
    optimizer = torch.optim.Adam(network.parameters(), 2e-3)
    for _ in range(30):
        real, drawn = torch.rand(8, 3, 16, 16).round() * 2 - 1, torch.rand(8, 3, 16, 16) * 2 - 1
        loss = GAN_LOSSES["hinge"].discriminator(network(real), network(drawn))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.6  # 1 for one that knows nothing


def test_invalid_inputs_raise():
    network = Discriminator(DiscriminatorConfig(width=4))
    assert network(torch.zeros(2, 3, 24, 24)).shape == (2, 1, 1, 1)
    for shape in ((2, 3, 23, 24), (2, 1, 24, 24), (3, 24, 24)):
        with pytest.raises(ImageError, match="pixels have shape"):
            network(torch.zeros(shape))
    with pytest.raises(ConfigError, match="groups"):
        DiscriminatorConfig(width=8, norm="group")
    with pytest.raises(ConfigError, match="channels is 0"):
        DiscriminatorConfig(channels=0)
    with pytest.raises(ConfigError, match="layers is 0"):
        DiscriminatorConfig(layers=0)
