"""Pairs of pictures: what is measured is what the model reads behind each of their tokens."""

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import randomize
from lab.test_exact import config_of
from vitrail.errors import ConfigError, DataError
from vitrail.lab.divergence import measure
from vitrail.lab.pictured import couples, pictured
from vitrail.models.vlm import VLM
from vitrail.stream import build, pack, words


@pytest.fixture(scope="module")
def pictures() -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)) for _ in range(4)]


def model_of(name: str) -> VLM:
    config = config_of(name)
    if config.queries is not None:
        config = config.with_(queries=config.queries.with_(first=5))
    return randomize(VLM(config), 3, 0.3).eval()


@pytest.mark.parametrize(("name", "tokens"), [("scaling-base", 16), ("scaling-queries", 5)])
def test_states_are_those_of_reading_each_picture(name, tokens, pictures):
    model, prefix, asked = model_of(name), [7, 8, 9], [8, 9]
    pairs = couples(4, 5)
    how = {"prefix": prefix, "question": asked}
    found = list(pictured(model, pictures, pairs, batch=2, **how))
    a, b = (torch.cat(side) for side in zip(*found, strict=True))
    assert a.shape == b.shape == (5, tokens, 32) and [len(left) for left, _ in found] == [2, 2, 1]
    for pair, states in zip(pairs, zip(a, b, strict=True), strict=True):
        for place, state in zip(pair, states, strict=True):
            shown = model.prepare([pictures[place]])
            if model.queries is not None:
                shown = shown._replace(questions=([torch.tensor(asked)],))
            stream = build([words(prefix), *model.config.parts(shown.shapes[0])], model.config.rules)
            with torch.no_grad():
                want = model.hidden(pack([stream], len(stream)), shown)[0, 3:]
            torch.testing.assert_close(state, want, atol=1e-4, rtol=1e-4)


def test_the_first_tokens_alone_and_no_prefix(pictures):
    model = model_of("scaling-base")
    ((a, b),) = pictured(model, pictures, couples(2, 1), length=6)
    ((whole, _),) = pictured(model, pictures, couples(2, 1))
    assert torch.equal(a, whole[:, :6]) and measure(a, b).distance[0] > 0


def test_a_picture_does_not_part_from_itself(pictures):
    ((a, b),) = pictured(model_of("scaling-base"), pictures, np.array([[1, 1]]))
    assert not measure(a, b).distance.any()


def test_couples():
    every = couples(5, 100)
    assert len(every) == 10 == len({tuple(pair) for pair in every.tolist()}) and (every[:, 0] < every[:, 1]).all()
    some = couples(5, 4, seed=1)
    assert len(some) == 4 and {tuple(p) for p in some.tolist()} < {tuple(p) for p in every.tolist()}
    for count, most in ((1, 3), (4, 0)):
        with pytest.raises(DataError, match="at least two"):
            couples(count, most)


def test_what_has_no_room(pictures):
    with pytest.raises(ConfigError, match="context of 320"):
        next(pictured(model_of("scaling-base"), pictures, couples(2, 1), prefix=[5] * 312))
