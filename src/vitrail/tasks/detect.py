"""Finding things in scenes.

B scenes, C concepts
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.scenes.scene import Scenes
from vitrail.data.scenes.source import Asked, SceneSource, by_source
from vitrail.data.views import PLAIN
from vitrail.errors import ConfigError
from vitrail.models.detector import Detector, seen
from vitrail.nn import cost
from vitrail.objectives.detection import detection_losses, targets
from vitrail.train.task import Batch


class DetectTask:
    """Scenes, drawn where the model is and worn a little, so that what a decoder blurs is still recognised."""

    def __init__(self, model: Detector, sources: Mapping[str, SceneSource]):
        for name, source in sources.items():
            if source.config.views != PLAIN:
                raise ConfigError(
                    f"source {name!r} has views of its own, which are not used here",
                    "leave them out: scenes are worn here anyhow",
                )
        names = model.config.concepts
        self.model = model
        self.sources = {name: source.only(names) for name, source in sources.items()}
        never = set(names).difference(*(source.atlas.table.names for source in self.sources.values()))
        if never:
            raise ConfigError(
                f"no source shows {sorted(never)[0]!r}, one of {len(never)} concepts nobody could learn",
                "leave it out of model.config.concepts, or take a larger atlas",
            )
        self.weights = {"present": 1.0, "box": 0.5, "concept": 1.0, "colour": 0.5}
        self.concept = {
            name: torch.tensor([names.index(n) if n in names else -100 for n in source.atlas.table.names])
            for name, source in self.sources.items()
        }  # what is no thing (a word, a frame) is somewhere, and is not named

    def collate(self, samples: Sequence[Asked]) -> Batch:
        return by_source(samples)

    def counts(self, batch: Batch) -> dict[str, int]:
        return dict.fromkeys(self.weights, sum(len(index) for index in batch.values()))

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = {}
        for name, index in batch.items():
            drawn = self.sources[name].draw(index)
            scenes = drawn.scenes
            pixels, boxes, colour = seen(drawn.pixels), drawn.boxes, scenes.colour
            if self.model.training:
                pixels, boxes, colour = worn(pixels, boxes, colour)
            cells = self.model(pixels)
            wanted = targets(boxes, scenes.filled, cells.grid)
            said = cells.present, cells.box, cells.concept, cells.colour
            found = detection_losses(*said, wanted, self._named(name, scenes), colour)
            sums = {key: sums.get(key, 0) + value for key, value in found.items()}
        return sums

    def _named(self, source: str, scenes: Scenes) -> Tensor:
        """(B, O) the detector's number of each object's concept"""
        of_sprite = self.concept[source][self.sources[source].atlas.table.concept]
        return of_sprite.to(scenes.sprite.device)[scenes.sprite.clamp(min=0)]

    def flops(self, batch: Batch) -> int:
        return sum(
            cost.flops(self.model, self.model.work(len(index), self.sources[name].config.side))
            for name, index in batch.items()
        )


def worn(x: Tensor, boxes: Tensor, colour: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pictures mirrored, stretched, blurred, roughened, and half of them in other colours: a thing is to be known by
    its shape, whoever drew it.

    x (B, 3, H, W) in −1…1, boxes (B, O, 4), colour (B, O), of which those that can no longer be told become −100
    """
    B, H, W, device = len(x), *x.shape[2:], x.device
    mirror, repaint, blur, far, rough = torch.rand(5, B, device=device)
    # A place p of the new picture shows 0.5 + (p − 0.5 − shift) / stretch of the old one, and turned where mirrored.
    stretch = 0.85 + 0.3 * torch.rand(B, 2, device=device)
    shift = (torch.rand(B, 2, device=device) - 0.5) * 0.1
    sign = torch.where(mirror < 0.5, -1.0, 1.0)
    factor = torch.stack([sign, torch.ones_like(sign)], 1) / stretch  # (B, 2) x, y
    theta = torch.diag_embed(factor)
    theta = torch.cat([theta, (-2 * shift * factor)[..., None]], -1)  # (B, 2, 3), in −1…1
    x = F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), padding_mode="reflection",
                      align_corners=False)  # fmt: skip
    corners = (boxes.view(B, -1, 2, 2) - 0.5) / factor[:, None, None] + shift[:, None, None] + 0.5
    boxes = torch.cat([corners.amin(2), corners.amax(2)], -1)
    soft = F.interpolate(F.avg_pool2d(x, 2, ceil_mode=True), size=(H, W), mode="bilinear")
    softer = F.interpolate(F.avg_pool2d(x, 4, ceil_mode=True), size=(H, W), mode="bilinear")
    far, blur, rough = (chance[:, None, None, None] for chance in (far, blur, rough))
    x = torch.lerp(x, torch.where(far < 0.3, softer, soft), (blur * 2 - 1).clamp(min=0))  # half of them stay sharp
    # Other colours are any mixture of the three; without a change of shade, edges stay where they are.
    mixture = torch.randn(B, 3, 3, device=device)
    mixture = mixture / mixture.abs().sum(2, keepdim=True)
    painted = torch.einsum("bij,bjhw->bihw", mixture, x)
    other = repaint < 0.5
    x = torch.where(other[:, None, None, None], painted, x)
    return x + 0.08 * rough * torch.randn_like(x), boxes, torch.where(other[:, None], -100, colour)
