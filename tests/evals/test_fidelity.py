"""Drawings as a whole against true pictures: who draws what is asked is near, who draws noise is far."""

import pytest
import torch
from torch import nn

from evals.test_judge import shapes
from vitrail.data.scenes.source import ScenesConfig, SceneSource
from vitrail.data.words import Words, matches
from vitrail.data.words.templates import DRAWINGS
from vitrail.errors import ConfigError
from vitrail.evals.judge import wished
from vitrail.evals.metrics.frechet import Moments, features, frechet
from vitrail.evals.suites.fidelity import CODED, OTHERS, fidelity

N = 20


class Eye(nn.Sequential):
    """Six features, of few enough dimensions for so few pictures."""

    name, side = "Eye", 16

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Conv2d(3, 6, 5, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.fixture(scope="module")
def made():
    scene = {"objects": [1, 3], "repeat": 0.4, "tint": 0.6, "combinations": "all"}
    source = SceneSource(ScenesConfig(atlas="-", preset="plain", side=24, seed=5, scene=scene), shapes())
    return source, Words.of(source.atlas.table)


def test_prompts_are_told_of_their_pictures(made):
    source, words = made
    for kind in DRAWINGS:
        for whole in (False, True):
            asked, drawn = wished(words, source, kind, N, whole=whole)
            assert asked.valid.all() and len(asked.text) == len(drawn.pixels) == N
            assert matches(words, asked.spec, drawn.scenes).all()
        one, other = (wished(words, source, kind, N, held_out=unseen)[0] for unseen in (False, True))
        assert words.pieces.read(one.text) != words.pieces.read(other.text)


def test_the_nearer_the_drawings_the_smaller_the_distance(made):
    source, words = made
    asked = [wished(words, source, kind, N, whole=True) for kind in DRAWINGS]
    texts = [text for prompt, _ in asked for text in words.pieces.read(prompt.text)]
    true = torch.cat([drawn.pixels for _, drawn in asked])
    told, eye = [], Eye()

    def exact(prompts, first):
        told.extend(prompts)
        assert texts[first : first + len(prompts)] == prompts
        return true[first : first + len(prompts)]

    def darker(prompts, first):
        return exact(prompts, first) // 2

    same = fidelity(exact, lambda x: x, source, words, N, eye, batch=7)
    assert told == texts and (same.name, same.of, same.points) == ("FD-Eye", 6 * N, True)
    assert same.value == pytest.approx(0, abs=1e-8) and same.beside[CODED] == pytest.approx(0, abs=1e-8)
    assert same.beside[OTHERS] > 1e-6  # chance alone
    worse = fidelity(darker, lambda x: x // 2, source, words, N, eye, batch=7)
    assert worse.value > 10 * same.beside[OTHERS] and worse.interval[0] <= worse.value <= worse.interval[1]
    assert worse.beside[CODED] == pytest.approx(worse.value)
    moments = (Moments.of(features(pixels, eye)) for pixels in (true // 2, true))
    assert worse.value == pytest.approx(frechet(*moments))
    with pytest.raises(ConfigError, match="at least one"):
        fidelity(exact, lambda x: x, source, words, 0, eye)
