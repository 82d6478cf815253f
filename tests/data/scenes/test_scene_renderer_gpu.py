"""Scenes have the same layouts and pixels on a GPU as on a CPU."""

import pytest
import torch

from vitrail.data.scenes.appearance import AppearanceSampler
from vitrail.data.scenes.config import PRESETS
from vitrail.data.scenes.scene_renderer import render_masks, render_scenes
from vitrail.data.scenes.scene_sampler import sample_scenes

MIXED = PRESETS["mixed"].replace(tint_probability=0.5)


@pytest.mark.gpu
def test_layouts_and_pixels_equal_those_on_a_cpu(atlas):
    index = torch.arange(256)
    scenes = sample_scenes(MIXED, atlas.table, 0, index)
    gpu_scenes = sample_scenes(MIXED, atlas.table, 0, index.cuda())
    assert gpu_scenes.box.is_cuda and torch.equal(gpu_scenes.box.cpu(), scenes.box)
    assert torch.equal(gpu_scenes.sprite.cpu(), scenes.sprite) and torch.equal(gpu_scenes.colour.cpu(), scenes.colour)
    expected, gpu_atlas = render_scenes(scenes, atlas, 64), atlas.to("cuda")
    for method in ("windows", "everywhere", "fused", None):
        assert torch.equal(render_scenes(gpu_scenes, gpu_atlas, 64, method).cpu(), expected)
    config = MIXED.replace(flip_probability=0.5, shape_jitter=0.4, colour_jitter=0.3)
    appearance, gpu_appearance = (
        AppearanceSampler(config, atlas.table, batch.box.device)(0, batch) for batch in (scenes, gpu_scenes)
    )
    for size in (1, (40, 13), (96, 131)):
        expected = render_scenes(scenes, atlas, size, opacity=0.3, appearance=appearance)
        for method in ("windows", "everywhere", "fused"):
            assert torch.equal(
                render_scenes(gpu_scenes, gpu_atlas, size, method, opacity=0.3, appearance=gpu_appearance).cpu(),
                expected,
            )
    for a, b in zip(render_masks(gpu_scenes[:16], gpu_atlas, 64), render_masks(scenes[:16], atlas, 64), strict=True):
        assert torch.equal(a.cpu(), b)
