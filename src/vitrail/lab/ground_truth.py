"""Labelled images to probe bottlenecks with: rendered scenes, or images with classes.

Shapes: B images, S image size.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.data.scenes.atlas import Atlas
from vitrail.data.scenes.scene import COLOURS, GRID
from vitrail.data.scenes.scene_source import SceneSource, SceneSourceConfig
from vitrail.errors import ConfigError
from vitrail.evals.image_feature_extractor import LazyImage
from vitrail.lab.bottleneck_information import GroundTruth
from vitrail.processing.image_loading import load_image
from vitrail.processing.resolution_policies import NaivePolicy

NUM_CONCEPTS, MAX_OBJECTS = 10, 4
"""Number of concepts to identify, and maximum number of objects to count."""


class LabeledImages(NamedTuple):
    """Images uint8 (B, 3, S, S), and ground truths by name, each with the slice of images it is known for."""

    images: Tensor
    ground_truths: Mapping[str, tuple[slice, GroundTruth]]


def make_scene_images(atlas: Atlas, image_size: int, count: int, *, seed: int = 7171) -> LabeledImages:
    """Render `count` images of one coloured object, and as many of one to MAX_OBJECTS objects, on plain backgrounds.

    The first half has ground truth for position, colour and identity, the second half for the count. Objects are the
    concepts with the most sprites.
    """
    if count < 40:
        raise ConfigError(f"{count} scenes of each kind", "use at least 40, to fit and test a probe")
    table = atlas.table
    things = Counter(int(table.concept[row]) for row in table.rows_of_kind("thing"))
    # Break ties by name, so that the order of the atlas does not matter.
    best = sorted(things, key=lambda concept: (-things[concept], table.names[concept]))[:NUM_CONCEPTS]
    names = [table.names[concept] for concept in best]

    def source(objects: tuple[int, int], sizes: tuple[float, float]) -> SceneSource:
        scene: dict[str, object] = {"objects": objects, "sizes": sizes, "tint_probability": 1.0, "things": names}
        scene |= {"combinations": "all", "backgrounds": ("flat", "gradient")}
        return SceneSource(SceneSourceConfig(atlas="", scene=scene, image_size=image_size, seed=seed), atlas)

    index = torch.arange(count)
    alone = source((1, 1), (0.25, 0.45)).render_indices(index)
    several = source((1, MAX_OBJECTS), (0.15, 0.3)).render_indices(index)
    one, first = slice(0, count), alone.scenes
    rank = {concept: row for row, concept in enumerate(best)}
    thing = torch.tensor([rank[int(table.concept[row])] for row in first.sprite[:, 0]])
    return LabeledImages(
        torch.cat([alone.pixels, several.pixels]),
        {
            "position": (one, GroundTruth(first.doubled_centre[:, 0].float() / (2 * GRID))),
            "colour": (one, GroundTruth(first.colour[:, 0] - 1, len(COLOURS) - 1)),
            "identity": (one, GroundTruth(thing, len(best))),
            "count": (slice(count, 2 * count), GroundTruth(several.scenes.num_objects - 1, MAX_OBJECTS)),
        },
    )


def make_class_images(images: Sequence[LazyImage], labels: Tensor, num_classes: int, image_size: int) -> LabeledImages:
    """Resize images with class labels to the model's input size.

    Images are shuffled with a fixed seed, because datasets are often sorted by class and probes are tested on the last
    ones.
    """
    fit = NaivePolicy(image_size=image_size, patch_size=1)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    shuffled = (images[row] for row in order.tolist())
    squashed = [np.asarray(fit.apply(load_image(image() if callable(image) else image))[0]) for image in shuffled]
    pictures = torch.from_numpy(np.stack(squashed)).permute(0, 3, 1, 2)
    return LabeledImages(pictures, {"identity": (slice(0, len(labels)), GroundTruth(labels[order], num_classes))})
