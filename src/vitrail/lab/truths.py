"""Pictures whose truth is known, to ask bottlenecks about: scenes drawn here, or pictures with classes.

B pictures, S side
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.data.scenes.scene import COLOURS, GRID
from vitrail.data.scenes.source import ScenesConfig, SceneSource
from vitrail.data.scenes.sprites import Atlas
from vitrail.errors import ConfigError
from vitrail.evals.viewer import Picture
from vitrail.lab.information import Truth
from vitrail.processing.images import load_image
from vitrail.processing.resolution import Naive

THINGS, MOST = 10, 4
"""Different things to tell apart, and how many there are at most to be counted."""


class Shown(NamedTuple):
    """pictures uint8 (B, 3, S, S), and truths by name, each with the pictures that it is of."""

    pictures: Tensor
    truths: Mapping[str, tuple[slice, Truth]]


def scenes(atlas: Atlas, side: int, count: int, *, seed: int = 7171) -> Shown:
    """`count` pictures of one coloured thing, of which position, colour and identity are asked, and as many of one to
    four things, which are to be counted, before plain backgrounds. Things are the concepts that most sprites show."""
    if count < 40:
        raise ConfigError(f"{count} scenes of each kind", "give at least 40: a reading is fitted to most of them")
    table = atlas.table
    things = Counter(int(table.concept[row]) for row in table.rows("thing"))
    # Of equals the first by name, so that the order of an atlas does not matter.
    best = sorted(things, key=lambda concept: (-things[concept], table.names[concept]))[:THINGS]
    names = [table.names[concept] for concept in best]

    def source(objects: tuple[int, int], sizes: tuple[float, float]) -> SceneSource:
        scene: dict[str, object] = {"objects": objects, "sizes": sizes, "tint": 1.0, "names": names}
        scene |= {"combinations": "all", "backgrounds": ("flat", "gradient")}
        return SceneSource(ScenesConfig(atlas="", scene=scene, side=side, seed=seed), atlas)

    index = torch.arange(count)
    alone, several = source((1, 1), (0.25, 0.45)).draw(index), source((1, MOST), (0.15, 0.3)).draw(index)
    one, first = slice(0, count), alone.scenes
    rank = {concept: row for row, concept in enumerate(best)}
    thing = torch.tensor([rank[int(table.concept[row])] for row in first.sprite[:, 0]])
    return Shown(
        torch.cat([alone.pixels, several.pixels]),
        {
            "position": (one, Truth(first.centre[:, 0].float() / (2 * GRID))),
            "colour": (one, Truth(first.colour[:, 0] - 1, len(COLOURS) - 1)),
            "identity": (one, Truth(thing, len(best))),
            "count": (slice(count, 2 * count), Truth(several.scenes.count - 1, MOST)),
        },
    )


def classed(images: Sequence[Picture], labels: Tensor, classes: int, side: int) -> Shown:
    """Pictures with classes, of which only these are known, squashed to the side that a model reads. They are shuffled,
    always alike: sets are often sorted by class, and the last are those that readings are tested on."""
    fit = Naive(size=side, patch=1)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    shuffled = (images[row] for row in order.tolist())
    squashed = [np.asarray(fit.apply(load_image(image() if callable(image) else image))[0]) for image in shuffled]
    pictures = torch.from_numpy(np.stack(squashed)).permute(0, 3, 1, 2)
    return Shown(pictures, {"identity": (slice(0, len(labels)), Truth(labels[order], classes))})
