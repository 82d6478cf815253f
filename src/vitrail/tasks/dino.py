"""Views of pictures, each to be told from the others by what a tower's own average makes of them.

B pictures, V local views, M masked patches, S side
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vitrail.config import Config
from vitrail.data.scenes.source import Asked, by_source
from vitrail.data.views import PLAIN, ViewsConfig, views
from vitrail.errors import ConfigError
from vitrail.models.dino import Dino
from vitrail.nn import cost
from vitrail.objectives.dino import entropy, patches_loss, sinkhorn, views_loss
from vitrail.objectives.masked import block_places, masked_count
from vitrail.tasks.pictures import size
from vitrail.train.task import Batch

GLOBAL = ViewsConfig(area=(0.4, 1.0), stretch=1.33, shift=0.5, mirror=0.5, colour=0.4, grey=0.2)


class DinoSettings(Config):
    """
    temperature  of the student, and of the teacher, which is the sharper one
    patches      weight of the masked patches' loss (iBOT); 0 for none
    ratio        how many patches of the first global view are masked for the student, in rectangles
    locals       local views: smaller cuts at a smaller side, which the student alone sees
    global_views, local_views
                 how views are made. The side is the tower's own for global ones and half of it for local ones unless
                 they say otherwise
    """

    temperature: tuple[float, float] = (0.1, 0.03)
    patches: float = 1.0
    ratio: float = 0.3
    locals: int = 4
    global_views: ViewsConfig = GLOBAL
    local_views: ViewsConfig = GLOBAL.with_(area=(0.1, 0.4))

    def __post_init__(self) -> None:
        if min(self.temperature) <= 0 or self.patches < 0 or self.locals < 0:
            raise ConfigError(
                f"temperatures {self.temperature}, patches {self.patches:g}, locals {self.locals}",
                "give temperatures above 0, and the others not below",
            )


class DinoTask:
    """DINO's loss between views and iBOT's of masked patches, against targets that Sinkhorn's rounds have spread.

    `entropy` weighs nothing and is there to be looked at: near the logarithm of the number of prototypes, the teacher
    says the same of everything and has collapsed.
    """

    def __init__(self, model: Dino, sources: Mapping[str, Any], settings: DinoSettings | None = None):
        self.model, self.sources, self.settings = model, sources, settings or DinoSettings()
        for name, source in sources.items():
            if getattr(source.config, "views", PLAIN) != PLAIN:
                raise ConfigError(
                    f"source {name!r} has views of its own, which are not used here",
                    "leave them out; global_views and local_views of the stage's settings say how pictures are varied",
                )
        tower, asked = model.config.image, self.settings
        side = asked.global_views.side or tower.image
        near = asked.local_views.side or max(side // tower.patch // 2, 1) * tower.patch
        if side % tower.patch or near % tower.patch:
            raise ConfigError(
                f"patches of {tower.patch} do not fill views of {side} and {near} pixels", "change a side"
            )
        if asked.patches and not tower.mask:
            raise ConfigError("masked patches need a mask token", "set model.config.image.mask, or patches = 0")
        self.wide, self.near = asked.global_views.with_(side=side), asked.local_views.with_(side=near)
        self.grid = side // tower.patch, side // tower.patch
        self.masked = masked_count(self.grid[0] ** 2, asked.ratio) if asked.patches else 0
        self.weights = {"views": 1.0} | ({"patches": asked.patches} if asked.patches else {}) | {"entropy": 0.0}

    def collate(self, samples: Sequence[Asked]) -> Batch:
        return by_source(samples)

    def counts(self, batch: Batch) -> dict[str, int]:
        """Pictures, masked patches, and pictures again."""
        found = {"views": size(batch), "patches": size(batch) * self.masked, "entropy": size(batch)}
        return {name: found[name] for name in self.weights}

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        if self.model.training:
            self.model.follow()
        wide, near = self._views(batch)
        places = block_places(wide.shape[1], self.grid, self.masked, wide.device) if self.masked else None
        seen = self.model(wide, near, places)
        warm, sharp = self.settings.temperature
        targets = sinkhorn(seen.teacher.flatten(0, 1), sharp).view_as(seen.teacher)
        losses = {"views": views_loss(targets, seen.student, warm)}
        if self.masked:
            losses["patches"] = patches_loss(sinkhorn(seen.hidden, sharp), seen.guessed, warm)
        return losses | {"entropy": entropy(targets) / 2}

    @torch.no_grad()
    def _views(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(2, B, 3, S, S) and (V, B, 3, s, s)"""
        shown = [self.sources[name].pixels(index) for name, index in batch.items()]
        return _views(shown, self.wide, 2), _views(shown, self.near, self.settings.locals)

    def flops(self, batch: Batch) -> int:
        """The teacher has a pass forward alone, where the student has three."""
        model, B, V = self.model, size(batch), self.settings.locals
        work = model.work(2 * B, self.wide.side)
        wide = cost.flops(model, work.with_(asked=B * (2 + self.masked)))
        near = cost.flops(model, model.work(V * B, self.near.side)) if V else 0
        return wide + near + wide // 3


def _views(shown: list[Tensor], config: ViewsConfig, count: int) -> Tensor:
    """(count, B, 3, S, S): all views of a picture in one go, each drawn for itself"""
    if not count:
        return torch.empty(0, device=shown[0].device)
    made = [views(one.repeat(count, 1, 1, 1), config).unflatten(0, (count, -1)) for one in shown]
    return torch.cat(made, 1)
