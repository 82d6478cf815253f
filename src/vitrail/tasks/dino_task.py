"""Self-supervised training task with DINO's and iBOT's losses against an EMA teacher.

B images, V local views, M masked patches, S image size
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitrail.config import Config, NonNegativeFloat, NonNegativeInt, PositiveFloat
from vitrail.data.augmentation import NO_AUGMENTATION, AugmentationConfig, augment_images
from vitrail.errors import ConfigError
from vitrail.models.dino_model import DINOModel
from vitrail.nn import cost
from vitrail.objectives.dino_loss import dino_view_loss, ibot_patch_loss, sinkhorn_knopp, target_entropy
from vitrail.objectives.masking import count_masked_patches, sample_block_indices
from vitrail.registry import TASKS
from vitrail.tasks.image_task import ImageTask, count_images
from vitrail.tasks.task_spec import TaskSpec
from vitrail.training.task import Batch

GLOBAL_VIEWS = AugmentationConfig(
    crop_area=(0.4, 1.0),
    max_aspect_ratio=1.33,
    max_shift=0.5,
    flip_probability=0.5,
    colour_jitter=0.4,
    grayscale_probability=0.2,
)


class DinoSettings(Config):
    """Settings of the DINO task.

    temperatures     of the student and of the teacher
    ibot_weight      weight of the masked-patch loss (iBOT); 0 disables it
    mask_ratio       fraction of the patches of the first global view that is masked for the student, in rectangles
    num_local_views  local views: smaller crops at a smaller image size, for the student only
    global_views     augmentation of global views; their image size is the tower's by default
    local_views      augmentation of local views; their image size is half of the global one by default
    """

    temperatures: tuple[PositiveFloat, PositiveFloat] = (0.1, 0.03)
    ibot_weight: NonNegativeFloat = 1.0
    mask_ratio: float = 0.3
    num_local_views: NonNegativeInt = 4
    global_views: AugmentationConfig = GLOBAL_VIEWS
    local_views: AugmentationConfig = GLOBAL_VIEWS.replace(crop_area=(0.1, 0.4))


class DinoTask(ImageTask):
    """Trains with DINO's loss between views and iBOT's loss of masked patches; targets are balanced by Sinkhorn.

    `entropy` is a metric with weight 0. A value near the logarithm of the number of prototypes means that the teacher
    has collapsed to the same output for all images.
    """

    def __init__(self, model: DINOModel, sources: Mapping[str, Any], settings: DinoSettings | None = None):
        self.model, self.sources, self.settings = model, sources, settings or DinoSettings()
        for name, source in sources.items():
            if getattr(source.config, "augmentation", NO_AUGMENTATION) != NO_AUGMENTATION:
                raise ConfigError(
                    f"source {name!r} has its own augmentation, which the DINO task does not use",
                    "remove it; set global_views and local_views in the stage's settings instead",
                )
        tower, chosen = model.config.image, self.settings
        global_size = chosen.global_views.image_size or tower.image_size
        local_size = chosen.local_views.image_size or max(global_size // tower.patch_size // 2, 1) * tower.patch_size
        if global_size % tower.patch_size or local_size % tower.patch_size:
            raise ConfigError(
                f"view sizes {global_size} and {local_size} are not multiples of the patch size {tower.patch_size}",
                "change the image size of the views",
            )
        if chosen.ibot_weight and not tower.mask_token:
            raise ConfigError("the iBOT loss needs a mask token", "set model.config.image.mask, or ibot_weight = 0")
        self.global_views = chosen.global_views.replace(image_size=global_size)
        self.local_views = chosen.local_views.replace(image_size=local_size)
        self.grid = global_size // tower.patch_size, global_size // tower.patch_size
        self.num_masked = count_masked_patches(self.grid[0] ** 2, chosen.mask_ratio) if chosen.ibot_weight else 0
        self.loss_weights = (
            {"views": 1.0} | ({"patches": chosen.ibot_weight} if chosen.ibot_weight else {}) | {"entropy": 0.0}
        )

    def count_loss_terms(self, batch: Batch) -> dict[str, int]:
        """Count images for views and entropy, and masked patches."""
        found = {
            "views": count_images(batch),
            "patches": count_images(batch) * self.num_masked,
            "entropy": count_images(batch),
        }
        return {name: found[name] for name in self.loss_weights}

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        if self.model.training:
            self.model.update_teacher()
        global_views, local_views = self._views(batch)
        mask_positions = (
            sample_block_indices(global_views.shape[1], self.grid, self.num_masked, global_views.device)
            if self.num_masked
            else None
        )
        outputs = self.model(global_views, local_views, mask_positions)
        student_temperature, teacher_temperature = self.settings.temperatures
        targets = sinkhorn_knopp(outputs.teacher.flatten(0, 1), teacher_temperature).view_as(outputs.teacher)
        losses = {"views": dino_view_loss(targets, outputs.student, student_temperature)}
        if self.num_masked:
            losses["patches"] = ibot_patch_loss(
                sinkhorn_knopp(outputs.masked_teacher, teacher_temperature), outputs.masked_student, student_temperature
            )
        return losses | {"entropy": target_entropy(targets) / 2}

    @torch.no_grad()
    def _views(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Global views (2, B, 3, S, S) and local views (V, B, 3, s, s)."""
        images = [self.sources[name].pixels(index) for name, index in batch.items()]
        return _make_views(images, self.global_views, 2), _make_views(
            images, self.local_views, self.settings.num_local_views
        )

    def count_flops(self, batch: Batch) -> int:
        """FLOPs of a forward pass. The teacher counts a third: it has no backward pass."""
        model, B, V = self.model, count_images(batch), self.settings.num_local_views
        work = model.workload(2 * B, self.global_views.image_size)
        global_flops = cost.count_flops(model, work.replace(logit_tokens=B * (2 + self.num_masked)))
        local_flops = cost.count_flops(model, model.workload(V * B, self.local_views.image_size)) if V else 0
        return global_flops + local_flops + global_flops // 3


def _make_views(images: list[Tensor], config: AugmentationConfig, count: int) -> Tensor:
    """Make `count` independent views of each image: (count, B, 3, S, S)."""
    if not count:
        return torch.empty(0, device=images[0].device)
    parts = [
        augment_images(source_images.repeat(count, 1, 1, 1), config).unflatten(0, (count, -1))
        for source_images in images
    ]
    return torch.cat(parts, 1)


TASKS.register(
    "dino",
    TaskSpec(
        lambda model, sources, _tokenizer, settings: DinoTask(model, sources, settings),
        DINOModel,
        ("images",),
        DinoSettings,
    ),
)
