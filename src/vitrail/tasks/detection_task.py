"""Object detection task on scenes.

B scenes, C concepts
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.augmentation import NO_AUGMENTATION
from vitrail.data.scenes.scene import SceneBatch
from vitrail.data.scenes.scene_source import SceneSource
from vitrail.errors import ConfigError
from vitrail.models.detector import Detector, normalize_images
from vitrail.nn import cost
from vitrail.objectives.detection_loss import build_detection_targets, compute_detection_losses
from vitrail.registry import TASKS
from vitrail.tasks.image_task import ImageTask
from vitrail.tasks.task_spec import TaskSpec
from vitrail.training.task import Batch


class DetectionTask(ImageTask):
    """Trains a detector on rendered scenes, degraded at random so that it also works on blurry generated images."""

    def __init__(self, model: Detector, sources: Mapping[str, SceneSource]):
        for name, source in sources.items():
            if source.config.augmentation != NO_AUGMENTATION:
                raise ConfigError(
                    f"source {name!r} has its own augmentation, which the detection task does not use",
                    "remove it: the task augments scenes itself",
                )
        names = model.config.concepts
        self.model = model
        self.sources = {name: source.with_things(names) for name, source in sources.items()}
        missing = set(names).difference(*(source.atlas.table.names for source in self.sources.values()))
        if missing:
            raise ConfigError(
                f"no source contains the concept {sorted(missing)[0]!r}; {len(missing)} concepts are missing in all",
                "remove it from model.config.concepts, or use a larger atlas",
            )
        self.loss_weights = {"present": 1.0, "box": 0.5, "concept": 1.0, "colour": 0.5}
        self.concept_of_sprite = {
            name: torch.tensor([names.index(n) if n in names else -100 for n in source.atlas.table.names])
            for name, source in self.sources.items()
        }  # sprites that are not objects (words, frames) are located but not classified

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = {}
        for name, index in batch.items():
            rendered = self.sources[name].render_indices(index)
            scenes = rendered.scenes
            pixels, boxes, colour = normalize_images(rendered.pixels), rendered.boxes, scenes.colour
            if self.model.training:
                pixels, boxes, colour = augment_scenes(pixels, boxes, colour)
            cells = self.model(pixels)
            cell_targets = build_detection_targets(boxes, scenes.is_filled, cells.grid)
            predictions = cells.objectness, cells.box, cells.concept, cells.colour
            losses = compute_detection_losses(*predictions, cell_targets, self._object_concepts(name, scenes), colour)
            sums = {key: sums.get(key, 0) + value for key, value in losses.items()}
        return sums

    def _object_concepts(self, source: str, scenes: SceneBatch) -> Tensor:
        """Concept index (B, O) of each object, in the detector's concepts."""
        of_sprite = self.concept_of_sprite[source][self.sources[source].atlas.table.concept]
        return of_sprite.to(scenes.sprite.device)[scenes.sprite.clamp(min=0)]

    def count_flops(self, batch: Batch) -> int:
        return sum(
            cost.count_flops(self.model, self.model.workload(len(index), self.sources[name].config.image_size))
            for name, index in batch.items()
        )


def augment_scenes(images: Tensor, boxes: Tensor, colour: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Augment scenes: flip, stretch, blur, add noise, and recolour half of them, so that shape decides.

    images (B, 3, H, W) in −1…1, boxes (B, O, 4), colour (B, O). Colours of recoloured images become −100.
    """
    B, H, W, device = len(images), *images.shape[2:], images.device
    mirror, repaint, blur, blur_strength, noise_strength = torch.rand(5, B, device=device)
    # Position p of the output samples 0.5 + (p − 0.5 − shift) / stretch of the input, flipped if mirrored.
    stretch = 0.85 + 0.3 * torch.rand(B, 2, device=device)
    shift = (torch.rand(B, 2, device=device) - 0.5) * 0.1
    sign = torch.where(mirror < 0.5, -1.0, 1.0)
    factor = torch.stack([sign, torch.ones_like(sign)], 1) / stretch  # (B, 2) x, y
    theta = torch.diag_embed(factor)
    theta = torch.cat([theta, (-2 * shift * factor)[..., None]], -1)  # (B, 2, 3), in −1…1
    images = F.grid_sample(
        images,
        F.affine_grid(theta, list(images.shape), align_corners=False),
        padding_mode="reflection",
        align_corners=False,
    )
    corners = (boxes.view(B, -1, 2, 2) - 0.5) / factor[:, None, None] + shift[:, None, None] + 0.5
    boxes = torch.cat([corners.amin(2), corners.amax(2)], -1)
    blurred = F.interpolate(F.avg_pool2d(images, 2, ceil_mode=True), size=(H, W), mode="bilinear")
    more_blurred = F.interpolate(F.avg_pool2d(images, 4, ceil_mode=True), size=(H, W), mode="bilinear")
    blur_strength, blur, noise_strength = (
        values[:, None, None, None] for values in (blur_strength, blur, noise_strength)
    )
    # Half of the images stay sharp.
    images = torch.lerp(images, torch.where(blur_strength < 0.3, more_blurred, blurred), (blur * 2 - 1).clamp(min=0))
    # New colours are a random linear mixture of the channels, which keeps edges in place.
    mixture = torch.randn(B, 3, 3, device=device)
    mixture = mixture / mixture.abs().sum(2, keepdim=True)
    recoloured = torch.einsum("bij,bjhw->bihw", mixture, images)
    is_recoloured = repaint < 0.5
    images = torch.where(is_recoloured[:, None, None, None], recoloured, images)
    return (
        images + 0.08 * noise_strength * torch.randn_like(images),
        boxes,
        torch.where(is_recoloured[:, None], -100, colour),
    )


TASKS.register(
    "detection",
    TaskSpec(lambda model, sources, _tokenizer, _settings: DetectionTask(model, sources), Detector, ("scenes",)),
)
