"""Hidden states of image pairs."""

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import randomize
from smoke_recipes import load_smoke_config
from vitrail.errors import ConfigError, DataError
from vitrail.lab.divergence import measure_divergence
from vitrail.lab.image_branches import compute_pair_hidden_states, sample_image_pairs
from vitrail.models.vlm import VLM
from vitrail.stream import build_stream, pack_streams, text_part


@pytest.fixture(scope="module")
def pictures() -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)) for _ in range(4)]


def model_of(name: str) -> VLM:
    config = load_smoke_config(name)
    if config.queries is not None:
        config = config.replace(queries=config.queries.replace(first_queries=5))
    return randomize(VLM(config), 3, 0.3).eval()


@pytest.mark.parametrize(("name", "tokens"), [("scaling-base", 16), ("scaling-queries", 5)])
def test_states_equal_those_of_each_image_alone(name, tokens, pictures):
    model, prefix, asked = model_of(name), [7, 8, 9], [8, 9]
    pairs = sample_image_pairs(4, 5)
    how = {"prefix_ids": prefix, "question_ids": asked}
    found = list(compute_pair_hidden_states(model, pictures, pairs, batch_size=2, **how))
    a, b = (torch.cat(side) for side in zip(*found, strict=True))
    assert a.shape == b.shape == (5, tokens, 32) and [len(left) for left, _ in found] == [2, 2, 1]
    for pair, states in zip(pairs, zip(a, b, strict=True), strict=True):
        for place, state in zip(pair, states, strict=True):
            shown = model.prepare_images([pictures[place]])
            if model.queries is not None:
                shown = shown._replace(questions=([torch.tensor(asked)],))
            stream = build_stream([text_part(prefix), *model.config.make_parts(shown.layouts[0])], model.config.rules)
            with torch.no_grad():
                want = model.forward_hidden(pack_streams([stream], len(stream)), shown)[0, 3:]
            torch.testing.assert_close(state, want, atol=1e-4, rtol=1e-4)


def test_length_and_empty_prefix(pictures):
    model = model_of("scaling-base")
    ((a, b),) = compute_pair_hidden_states(model, pictures, sample_image_pairs(2, 1), length=6)
    ((whole, _),) = compute_pair_hidden_states(model, pictures, sample_image_pairs(2, 1))
    assert torch.equal(a, whole[:, :6]) and measure_divergence(a, b).distance[0] > 0


def test_equal_images_have_no_divergence(pictures):
    ((a, b),) = compute_pair_hidden_states(model_of("scaling-base"), pictures, np.array([[1, 1]]))
    assert not measure_divergence(a, b).distance.any()


def test_sample_image_pairs():
    every = sample_image_pairs(5, 100)
    assert len(every) == 10 == len({tuple(pair) for pair in every.tolist()}) and (every[:, 0] < every[:, 1]).all()
    some = sample_image_pairs(5, 4, seed=1)
    assert len(some) == 4 and {tuple(p) for p in some.tolist()} < {tuple(p) for p in every.tolist()}
    for count, most in ((1, 3), (4, 0)):
        with pytest.raises(DataError, match="at least two"):
            sample_image_pairs(count, most)


def test_context_length_is_checked(pictures):
    with pytest.raises(ConfigError, match="context length of 320"):
        next(
            compute_pair_hidden_states(
                model_of("scaling-base"), pictures, sample_image_pairs(2, 1), prefix_ids=[5] * 312
            )
        )
