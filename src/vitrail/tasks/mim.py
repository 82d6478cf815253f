"""Masked-image modelling: pictures in part hidden, and what was there.

B pictures, N patches, M of them masked
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from vitrail.config import Config
from vitrail.data.scenes.source import Asked, by_source
from vitrail.data.views import PLAIN
from vitrail.models.masked import Masked
from vitrail.nn import cost
from vitrail.objectives.masked import block_places, feature_loss, masked_count, pixel_loss, random_places
from vitrail.tasks.pictures import size, viewed
from vitrail.train.task import Batch

PLACES = {"blocks": block_places, "random": random_places}


class MimSettings(Config):
    """
    ratio    how many of the patches are masked: of every picture as many
    places   in rectangles (BEiT) or anywhere (MAE)
    """

    ratio: float = 0.4
    places: Literal["blocks", "random"] = "blocks"


class MimTask:
    """Pictures, viewed as their source says (judged, as they are), with the same share of each masked."""

    def __init__(self, model: Masked, sources: Mapping[str, Any], settings: MimSettings | None = None):
        self.model, self.sources, self.settings = model, sources, settings or MimSettings()
        self.weights = {"masked": 1.0}
        tower = model.config.image
        self.grid = tower.side, tower.side
        self.masked = masked_count(tower.side**2, self.settings.ratio)
        self.plain = PLAIN.with_(side=tower.image)
        self.views = {n: getattr(s.config, "views", PLAIN).with_(side=tower.image) for n, s in sources.items()}

    def collate(self, samples: Sequence[Asked]) -> Batch:
        return by_source(samples)

    def counts(self, batch: Batch) -> dict[str, int]:
        """Masked patches."""
        return {"masked": size(batch) * self.masked}

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        how = self.views if self.model.training else dict.fromkeys(self.views, self.plain)
        shown = viewed(batch, self.sources, how)
        places = PLACES[self.settings.places](len(shown), self.grid, self.masked, shown.device)
        said, wanted = self.model(shown, places)
        return {"masked": pixel_loss(said, wanted) if self.model.teacher is None else feature_loss(said, wanted)}

    def flops(self, batch: Batch) -> int:
        """The teacher has a pass forward alone, where what trains has three."""
        model, B = self.model, size(batch)
        taught = 0
        if model.teacher is not None:
            taught = cost.flops(model.teacher, model.teacher.work(B, model.config.image.image))
        return cost.flops(model, model.work(B, self.masked)) + taught // 3
