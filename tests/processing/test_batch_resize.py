"""Batches are fitted as single pictures are."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitrail.errors import ConfigError
from vitrail.processing.anyres import AnyResPolicy
from vitrail.processing.batch_resize import is_plain_resize, resize_batch, resize_like_pillow
from vitrail.processing.image_layout import PIL_RESAMPLING
from vitrail.processing.resolution_policies import CropPolicy, FramedPolicy, LetterboxPolicy, NaivePolicy

POLICIES = st.sampled_from(
    [
        NaivePolicy(image_size=24, patch_size=8),
        NaivePolicy(image_size=25, patch_size=8, unread_pixels=1, resample="bilinear"),
        LetterboxPolicy(image_size=24, patch_size=8, fill_colour=(9, 200, 30)),
        FramedPolicy(image_size=24, patch_size=8, min_size=3, high_res_size=29),
        CropPolicy(image_size=24, patch_size=8),
        CropPolicy(image_size=16, patch_size=8, shortest_edge=21, resample="bilinear"),
    ]
)


@given(policy=POLICIES, height=st.integers(9, 70), width=st.integers(9, 70), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_fitted_as_pil_does(policy, height, width, seed):
    # Of middle brightness: PIL cuts off what its filter makes too bright or too dark after each of two passes.
    pixels = np.random.default_rng(seed).integers(80, 176, (2, height, width, 3), dtype=np.uint8)
    ours = resize_batch(torch.from_numpy(pixels).permute(0, 3, 1, 2), policy)
    for mine, one in zip(ours, pixels, strict=True):
        [view] = policy.apply(Image.fromarray(one))
        theirs = torch.from_numpy(np.array(view)).permute(2, 0, 1)
        assert mine.shape == theirs.shape and (mine.int() - theirs.int()).abs().max() <= 2


def test_what_is_added_is_opaque():
    pixels = torch.zeros(1, 4, 8, 16, dtype=torch.uint8)
    made = resize_batch(pixels, LetterboxPolicy(image_size=16, patch_size=8, fill_colour=(1, 2, 3)))
    assert made[0, :, 0, 0].tolist() == [1, 2, 3, 255] and made[0, :, 8, 8].tolist() == [0, 0, 0, 0]


def test_what_squashes():
    assert is_plain_resize(NaivePolicy(image_size=16, patch_size=8), 8, 30) and is_plain_resize(
        LetterboxPolicy(image_size=16, patch_size=8), 30, 30
    )
    assert not is_plain_resize(LetterboxPolicy(image_size=16, patch_size=8), 8, 30)
    assert not is_plain_resize(CropPolicy(image_size=16, patch_size=8, shortest_edge=20), 30, 30)


def test_several_views_and_other_filters_are_refused():
    pixels = torch.zeros(1, 3, 500, 700, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="views"):
        resize_batch(pixels, AnyResPolicy())
    with pytest.raises(ConfigError, match="lanczos"):
        resize_batch(pixels, NaivePolicy(image_size=16, patch_size=8, resample="lanczos"))


@settings(max_examples=300)
@given(st.integers(1, 70), st.integers(1, 70), st.sampled_from(["bilinear", "bicubic"]), st.integers(0, 99))
def test_squares_are_resized_as_pillow_does_it(before, after, resample, seed):
    noise = np.random.default_rng(seed).integers(0, 256, (before, before, 3), dtype=np.uint8)
    wanted = np.asarray(Image.fromarray(noise).resize((after, after), PIL_RESAMPLING[resample]))
    made = resize_like_pillow(torch.from_numpy(noise).movedim(-1, 0), after, resample)
    assert (made.movedim(0, -1).numpy() == wanted).all()
