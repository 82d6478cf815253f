"""Presets against published parameter counts, on the meta device."""

import pytest
import torch

from vitrail.encoders import TextTower, ViT
from vitrail.encoders.presets import TEXT_TOWER_PRESETS, VIT_PRESETS, VIT_SIZES
from vitrail.models.contrastive_model import CONTRASTIVE_PRESETS, ContrastiveModel
from vitrail.nn import cost


def millions(*modules: torch.nn.Module) -> float:
    return round(sum(p.numel() for module in modules for p in module.parameters()) / 1e6, 2)


PAIRS = {
    # OpenCLIP's model profile: all parameters, image parameters with projection, image GFLOPs.
    "clip-b16":          (149.62,   86.19,  35.13),
    "clip-l14":          (427.62,  303.97, 162.03),
    "clip-l14-336":      (427.94,  304.29, 381.92),
    "clip-h14":          (986.11,  632.08, 334.59),
    "clip-g14":          (1366.68, 1012.65, 534.06),
    "clip-bigg14":       (2539.57, 1844.91, 967.50),
    "siglip-b16-256":    (203.20,   92.93,  46.82),
    "siglip-l16-384":    (652.48,  316.28, 383.85),
    "siglip-so400m-384": (877.96,  428.23, 670.35),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_contrastive_pairs(name):
    total, picture, gflops = PAIRS[name]
    with torch.device("meta"):
        model = ContrastiveModel(CONTRASTIVE_PRESETS[name])
    assert millions(model) == total
    assert millions(model.image, model.image_projection) == picture
    flops = cost.count_flops(model, model.workload()) - cost.count_flops(model.text, model.text.workload())
    assert flops / 1e9 == pytest.approx(gflops, rel=2e-3)


TOWERS = {
    # timm's tables. Released EVA-02 models have a head for 1000 classes.
    "dinov2-s14":     (22.06, 0),
    "dinov2-b14":     (86.58, 0),
    "dinov2-l14":     (304.37, 0),
    "dinov2-l14-reg": (304.37, 0),
    "dinov2-g14":     (1136.48, 0),
    "eva02-ti14-336": (5.76, 1000),
    "eva02-s14-336":  (22.13, 1000),
    "eva02-b14-448":  (87.12, 1000),
    "eva02-l14-448":  (305.08, 1000),
    "eva02-l14-clip": (304.11, 768),
}  # fmt: skip


@pytest.mark.parametrize("name", TOWERS)
def test_towers(name):
    count, head = TOWERS[name]
    with torch.device("meta"):
        model = ViT(VIT_PRESETS[name].replace(head_width=head))
    assert millions(model) == count


SIZED = {
    # Usual sizes: width, layers, heads and millions of parameters.
    "clip-b16":          ("B", 768, 12, 12, 86),
    "clip-l14":          ("L", 1024, 24, 16, 304),
    "clip-h14":          ("H", 1280, 32, 16, 632),
    "clip-g14":          ("g", 1408, 40, 16, 1000),
    "clip-bigg14":       ("bigG", 1664, 48, 16, 1800),
    "siglip-so400m-224": ("So400M", 1152, 27, 16, 400),
}  # fmt: skip


@pytest.mark.parametrize("name", SIZED)
def test_sizes(name):
    size, width, layers, heads, called = SIZED[name]
    assert VIT_SIZES[size][:3] == (width, layers, heads)
    with torch.device("meta"):
        model = ViT(VIT_PRESETS[name].replace(pool="none", norm_last="tokens"))  # the tower without its head
    assert millions(model) == pytest.approx(called, rel=0.035)


def test_tokens():
    """With patch size 14, 224² pixels are 256 tokens and 336² are 576."""
    for name, patches in (("clip-l14", 256), ("clip-l14-336", 576), ("siglip-so400m-384", 729)):
        with torch.device("meta"):
            model = ViT(VIT_PRESETS[name])
            pixels = torch.empty(1, 3, model.config.image_size, model.config.image_size)
            assert model(pixels, layer=1).shape == (1, patches, model.config.block.width)


def test_presets_build():
    with torch.device("meta"):
        for config in VIT_PRESETS.values():
            ViT(config.replace(layers=1))
        for config in TEXT_TOWER_PRESETS.values():
            TextTower(config.replace(layers=1))
