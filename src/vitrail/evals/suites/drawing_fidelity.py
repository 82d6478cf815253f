"""Fréchet distance between generated images and ground-truth images of the same prompts (gFID).

The distance is named after the feature network.

N images, D feature width
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from vitrail.data.formats.sample import show_progress
from vitrail.data.language import SceneLanguage
from vitrail.data.language.templates import DRAWING_PROMPT_KINDS
from vitrail.data.scenes.scene_source import SceneSource
from vitrail.errors import ConfigError
from vitrail.evals.drawing_judge import sample_prompted_scenes
from vitrail.evals.metrics.frechet_distance import (
    FeatureMoments,
    FeatureNetwork,
    extract_features,
    frechet_distance,
    gaussian_frechet_distance,
)
from vitrail.evals.scores import Score
from vitrail.evals.suites.scene_benchmarks import BATCH, DrawFn

OTHER_SCENES_START = 1 << 24  # index offset of the scenes of the second baseline
CODED_BASELINE, OTHER_IMAGES_BASELINE = "true images in its codes", "other true images"


def evaluate_drawing_fidelity(
    draw: DrawFn,
    reconstruct: Callable[[Tensor], Tensor],
    source: SceneSource,
    language: SceneLanguage,
    count: int,
    network: FeatureNetwork,
    *,
    held_out: bool = False,
    batch_size: int = BATCH,
) -> Score:
    """Fréchet distance between generated images and rendered scenes, for `count` prompts of each GenEval kind.

    Baselines: the same scenes after reconstruction by the codec, a lower bound for images generated with it; and other
    scenes, which measures the distance between two sets of this size.
    """
    if count < 1:
        raise ConfigError(f"{count} drawings of each kind", "set at least 1")
    prompted = [
        sample_prompted_scenes(language, source, kind, count, name_everything=True, held_out=held_out)
        for kind in DRAWING_PROMPT_KINDS
    ]
    others = [
        sample_prompted_scenes(language, source, kind, count, start=OTHER_SCENES_START, name_everything=True)[1].pixels
        for kind in DRAWING_PROMPT_KINDS
    ]

    def generate() -> Iterator[Tensor]:
        texts = [language.pieces.to_texts(prompt.text) for prompt, _ in prompted]
        parts = [(kind, first) for kind in range(len(prompted)) for first in range(0, count, batch_size)]
        for kind, first in show_progress(parts, "drawings"):
            yield draw(texts[kind][first : first + batch_size], kind * count + first)

    true = torch.cat([rendered.pixels for _, rendered in prompted])
    true_features, generated_features = extract_features(true, network), extract_features(generate(), network)
    coded = extract_features(
        (reconstruct(batch_images) for batch_images in show_progress(true.split(batch_size), "true images")), network
    )
    distance = frechet_distance(generated_features, true_features, network.name)  # warns if there are too few images
    true_moments = FeatureMoments.from_features(true_features)
    baselines = {
        CODED_BASELINE: gaussian_frechet_distance(FeatureMoments.from_features(coded), true_moments),
        OTHER_IMAGES_BASELINE: gaussian_frechet_distance(
            FeatureMoments.from_features(extract_features(torch.cat(others), network)), true_moments
        ),
    }
    return Score(
        distance.name,
        distance.value,
        distance.interval,
        distance.count,
        baselines,
        unit="distance",
        higher_is_better=False,
    )
