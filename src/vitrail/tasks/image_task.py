"""Base class of tasks on images. A batch holds sample indices by source name.

B images, H, W pixels
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vitrail.data.augmentation import AugmentationConfig, augment_images
from vitrail.data.scenes.scene_source import SceneSample, group_by_source
from vitrail.training.task import Batch


class ImageTask:
    """Task whose losses are sums over images, unless it counts their terms itself."""

    loss_weights: dict[str, float]

    def collate(self, samples: Sequence[SceneSample]) -> Batch:
        return group_by_source(samples)

    def count_loss_terms(self, batch: Batch) -> dict[str, int]:
        """Count images."""
        return dict.fromkeys(self.loss_weights, count_images(batch))


def count_images(batch: Batch) -> int:
    """Count the images of a batch."""
    return sum(len(index) for index in batch.values())


@torch.no_grad()
def make_views(
    batch: Batch,
    sources: Mapping[str, Any],
    view_configs: Mapping[str, AugmentationConfig],
    image_size: tuple[int, int] | None = None,
) -> Tensor:
    """Augment the images of each source with its own config: (B, 3, H, W) in −1 … 1, square unless a size is given."""
    return torch.cat(
        [augment_images(sources[name].pixels(index), view_configs[name], image_size) for name, index in batch.items()]
    )
