"""Batches are fitted as single pictures are."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitrail.errors import ConfigError
from vitrail.processing.cut import RESAMPLE
from vitrail.processing.fit import fit, resized, squashes
from vitrail.processing.resolution import AnyRes, Crop, Framed, Letterbox, Naive

POLICIES = st.sampled_from(
    [
        Naive(size=24, patch=8),
        Naive(size=25, patch=8, unread=1, resample="bilinear"),
        Letterbox(size=24, patch=8, fill=(9, 200, 30)),
        Framed(size=24, patch=8, least=3, fine=29),
        Crop(size=24, patch=8),
        Crop(size=16, patch=8, edge=21, resample="bilinear"),
    ]
)


@given(policy=POLICIES, height=st.integers(9, 70), width=st.integers(9, 70), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_fitted_as_pil_does(policy, height, width, seed):
    # Of middle brightness: PIL cuts off what its filter makes too bright or too dark after each of two passes.
    pixels = np.random.default_rng(seed).integers(80, 176, (2, height, width, 3), dtype=np.uint8)
    ours = fit(torch.from_numpy(pixels).permute(0, 3, 1, 2), policy)
    for mine, one in zip(ours, pixels, strict=True):
        [view] = policy.apply(Image.fromarray(one))
        theirs = torch.from_numpy(np.array(view)).permute(2, 0, 1)
        assert mine.shape == theirs.shape and (mine.int() - theirs.int()).abs().max() <= 2


def test_what_is_added_is_opaque():
    pixels = torch.zeros(1, 4, 8, 16, dtype=torch.uint8)
    made = fit(pixels, Letterbox(size=16, patch=8, fill=(1, 2, 3)))
    assert made[0, :, 0, 0].tolist() == [1, 2, 3, 255] and made[0, :, 8, 8].tolist() == [0, 0, 0, 0]


def test_what_squashes():
    assert squashes(Naive(size=16, patch=8), 8, 30) and squashes(Letterbox(size=16, patch=8), 30, 30)
    assert not squashes(Letterbox(size=16, patch=8), 8, 30)
    assert not squashes(Crop(size=16, patch=8, edge=20), 30, 30)


def test_several_views_and_other_filters_are_refused():
    pixels = torch.zeros(1, 3, 500, 700, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="views"):
        fit(pixels, AnyRes())
    with pytest.raises(ConfigError, match="lanczos"):
        fit(pixels, Naive(size=16, patch=8, resample="lanczos"))


@settings(max_examples=300)
@given(st.integers(1, 70), st.integers(1, 70), st.sampled_from(["bilinear", "bicubic"]), st.integers(0, 99))
def test_squares_are_resized_as_pillow_does_it(before, after, resample, seed):
    noise = np.random.default_rng(seed).integers(0, 256, (before, before, 3), dtype=np.uint8)
    wanted = np.asarray(Image.fromarray(noise).resize((after, after), RESAMPLE[resample]))
    made = resized(torch.from_numpy(noise).movedim(-1, 0), after, resample)
    assert (made.movedim(0, -1).numpy() == wanted).all()
