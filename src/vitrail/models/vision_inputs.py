"""Images and videos as the vision tower of a VLM takes them; preprocessing needs no weights.

Shapes: V views, C channels, H, W pixels, N patches, K values of a patch, T frames or tokens of a question.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from vitrail.encoders.packed_vit import PackedViTConfig
from vitrail.encoders.patch_tower import PatchTowerConfig
from vitrail.encoders.vit import ViTConfig, cut_patches
from vitrail.errors import ConfigError, ImageError
from vitrail.models.vlm_config import VisualLayout, VLMConfig
from vitrail.processing.patchify import patchify_blocks


class VisionInputs(NamedTuple):
    """Images or videos as the tower takes them, in the order of the stream parts they fill."""

    pixels: Tensor  # views (V, C, H, W) of one size; for packed towers and unequal views, patches (N, K)
    layouts: tuple[VisualLayout, ...]
    questions: tuple[Sequence[Tensor], ...] = ()  # ids (T,) of the questions about each image, for fused queries


def prepare_images(config: VLMConfig, images: Sequence[Image.Image], num_images: int | None = None) -> VisionInputs:
    """Preprocess RGB images for the tower of this config, in float32 on the CPU; no weights are needed.

    `num_images` is the number of images of the conversation, by default of these.
    """
    num_images = len(images) if num_images is None else num_images
    policy = config.policy.for_images(num_images)
    views = [view for image in images for view in policy.to_pixel_values(image, config.mean, config.std)]
    if not views:
        raise ImageError("there is no image", "give at least one image, or omit the images argument")
    if isinstance(config.tower, PackedViTConfig):
        return prepare_packed(config, views)
    layouts = get_image_layouts(config, [(image.height, image.width) for image in images], [num_images] * len(images))
    if config.has_unequal_views:
        assert isinstance(config.tower, ViTConfig | PatchTowerConfig)
        return VisionInputs(torch.cat([cut_patches(view[None], config.tower)[0][0] for view in views]), layouts)
    return VisionInputs(torch.stack(views), layouts)


def prepare_videos(config: VLMConfig, videos: Sequence[Tensor]) -> VisionInputs:
    """Convert normalized videos (T, C, H, W) to inputs of the tower of this config."""
    if isinstance(config.tower, PackedViTConfig):
        return prepare_packed(config, videos)
    return VisionInputs(torch.cat(list(videos)), tuple(config.policy.layout_video(len(item)) for item in videos))


def get_image_layouts(
    config: VLMConfig, image_sizes: Sequence[tuple[int, int]], image_counts: Sequence[int] | None = None
) -> tuple[VisualLayout, ...]:
    """Return the layouts of images with these sizes (height, width).

    `image_counts` are the numbers of images of their conversations; by default all are of one.
    """
    image_counts = [len(image_sizes)] * len(image_sizes) if image_counts is None else image_counts
    cuts = [
        config.policy.for_images(count).layout(*size) for size, count in zip(image_sizes, image_counts, strict=True)
    ]
    return tuple(cut.views[0].grid if isinstance(config.tower, PackedViTConfig) else cut for cut in cuts)


def prepare_packed(config: VLMConfig, items: Sequence[Tensor]) -> VisionInputs:
    """Cut normalized images (C, H, W) and videos (T, C, H, W) into patches for a packed tower."""
    tower = config.tower
    if not isinstance(tower, PackedViTConfig):
        raise ConfigError(f"{type(tower).__name__} takes views of one size, not patches", "use prepare_images")
    cut = [
        patchify_blocks(
            item, tower.patch_size, merge_size=tower.spatial_merge_size, temporal_patch_size=tower.temporal_patch_size
        )
        for item in items
    ]
    return VisionInputs(torch.cat([patches for patches, _ in cut]), tuple(grid for _, grid in cut))
