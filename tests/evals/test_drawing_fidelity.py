"""Drawing fidelity of perfect images, noise, and baselines."""

import pytest
import torch
from torch import nn

from evals.test_drawing_judge import shapes
from vitrail.data.language import SceneLanguage, matches_spec
from vitrail.data.language.templates import DRAWING_PROMPT_KINDS
from vitrail.data.scenes.scene_source import SceneSource, SceneSourceConfig
from vitrail.errors import ConfigError
from vitrail.evals.drawing_judge import sample_prompted_scenes
from vitrail.evals.metrics.frechet_distance import FeatureMoments, extract_features, gaussian_frechet_distance
from vitrail.evals.suites.drawing_fidelity import CODED_BASELINE, OTHER_IMAGES_BASELINE, evaluate_drawing_fidelity

N = 20


class Eye(nn.Sequential):
    """A network with six features, few enough for small image sets."""

    name, image_size = "Eye", 16

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Conv2d(3, 6, 5, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.fixture(scope="module")
def made():
    scene = {"objects": [1, 3], "repeat_probability": 0.4, "tint_probability": 0.6, "combinations": "all"}
    source = SceneSource(SceneSourceConfig(atlas="-", preset="plain", image_size=24, seed=5, scene=scene), shapes())
    return source, SceneLanguage.build(source.atlas.table)


def test_prompts_match_their_scenes(made):
    source, words = made
    for kind in DRAWING_PROMPT_KINDS:
        for whole in (False, True):
            asked, drawn = sample_prompted_scenes(words, source, kind, N, name_everything=whole)
            assert asked.valid.all() and len(asked.text) == len(drawn.pixels) == N
            assert matches_spec(words, asked.spec, drawn.scenes).all()
        one, other = (sample_prompted_scenes(words, source, kind, N, held_out=unseen)[0] for unseen in (False, True))
        assert words.pieces.to_texts(one.text) != words.pieces.to_texts(other.text)


def test_distance_decreases_with_image_quality(made):
    source, words = made
    asked = [sample_prompted_scenes(words, source, kind, N, name_everything=True) for kind in DRAWING_PROMPT_KINDS]
    texts = [text for prompt, _ in asked for text in words.pieces.to_texts(prompt.text)]
    true = torch.cat([drawn.pixels for _, drawn in asked])
    result, image_embedder = [], Eye()

    def exact(prompts, first):
        result.extend(prompts)
        assert texts[first : first + len(prompts)] == prompts
        return true[first : first + len(prompts)]

    def darker(prompts, first):
        return exact(prompts, first) // 2

    same = evaluate_drawing_fidelity(exact, lambda x: x, source, words, N, image_embedder, batch_size=7)
    assert result == texts and (same.name, same.count, same.unit) == ("FD-Eye", 6 * N, "distance")
    assert same.value == pytest.approx(0, abs=1e-8) and same.baselines[CODED_BASELINE] == pytest.approx(0, abs=1e-8)
    assert same.baselines[OTHER_IMAGES_BASELINE] > 1e-6  # sampling noise only
    worse = evaluate_drawing_fidelity(darker, lambda x: x // 2, source, words, N, image_embedder, batch_size=7)
    assert (
        worse.value > 10 * same.baselines[OTHER_IMAGES_BASELINE]
        and worse.interval[0] <= worse.value <= worse.interval[1]
    )
    assert worse.baselines[CODED_BASELINE] == pytest.approx(worse.value)
    moments = (FeatureMoments.from_features(extract_features(pixels, image_embedder)) for pixels in (true // 2, true))
    assert worse.value == pytest.approx(gaussian_frechet_distance(*moments))
    with pytest.raises(ConfigError, match="at least 1"):
        evaluate_drawing_fidelity(exact, lambda x: x, source, words, 0, image_embedder)
