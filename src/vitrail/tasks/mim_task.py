"""Masked-image-modelling task: predict masked patches, as pixels or as features of a teacher.

B images, N patches, M masked patches
"""

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from vitrail.config import Config
from vitrail.data.augmentation import NO_AUGMENTATION
from vitrail.models.masked_image_model import MaskedImageModel
from vitrail.nn import cost
from vitrail.objectives.masking import (
    count_masked_patches,
    feature_loss,
    pixel_loss,
    sample_block_indices,
    sample_random_indices,
)
from vitrail.registry import TASKS
from vitrail.tasks.image_task import ImageTask, count_images, make_views
from vitrail.tasks.task_spec import TaskSpec
from vitrail.training.task import Batch

MASK_STRATEGIES = {"blocks": sample_block_indices, "random": sample_random_indices}


class MimSettings(Config):
    """Settings of the masked-image-modelling task.

    mask_ratio     fraction of patches that is masked, the same in every image
    mask_strategy  "blocks": rectangles (BEiT); "random": independent patches (MAE)
    """

    mask_ratio: float = 0.4
    mask_strategy: Literal["blocks", "random"] = "blocks"


class MimTask(ImageTask):
    """Trains a model to predict masked patches. Sources define the augmentation; validation uses images unchanged."""

    def __init__(self, model: MaskedImageModel, sources: Mapping[str, Any], settings: MimSettings | None = None):
        self.model, self.sources, self.settings = model, sources, settings or MimSettings()
        self.loss_weights = {"masked": 1.0}
        tower = model.config.image
        self.grid = tower.grid_size, tower.grid_size
        self.num_masked = count_masked_patches(tower.grid_size**2, self.settings.mask_ratio)
        self.plain_view = NO_AUGMENTATION.replace(image_size=tower.image_size)
        self.views = {
            n: getattr(s.config, "augmentation", NO_AUGMENTATION).replace(image_size=tower.image_size)
            for n, s in sources.items()
        }

    def count_loss_terms(self, batch: Batch) -> dict[str, int]:
        """Count masked patches."""
        return {"masked": count_images(batch) * self.num_masked}

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        view_configs = self.views if self.model.training else dict.fromkeys(self.views, self.plain_view)
        images = make_views(batch, self.sources, view_configs)
        positions = MASK_STRATEGIES[self.settings.mask_strategy](len(images), self.grid, self.num_masked, images.device)
        predictions, targets = self.model(images, positions)
        return {
            "masked": pixel_loss(predictions, targets)
            if self.model.teacher is None
            else feature_loss(predictions, targets)
        }

    def count_flops(self, batch: Batch) -> int:
        """FLOPs of a forward pass. The teacher counts a third: it has no backward pass."""
        model, B = self.model, count_images(batch)
        teacher_flops = 0
        if model.teacher is not None:
            teacher_flops = cost.count_flops(model.teacher, model.teacher.workload(B, model.config.image.image_size))
        return cost.count_flops(model, model.workload(B, self.num_masked)) + teacher_flops // 3


TASKS.register(
    "mim",
    TaskSpec(
        lambda model, sources, _tokenizer, settings: MimTask(model, sources, settings),
        MaskedImageModel,
        ("images",),
        MimSettings,
    ),
)
