import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitrail.errors import ConfigError
from vitrail.processing.grid import Grid
from vitrail.processing.patchify import pad_patches, patchify_blocks, patchify_rows, unpatchify_blocks, unpatchify_rows

few = st.integers(1, 4)


@given(few, few, few, few, few, few, st.integers(1, 3))
def test_blocks_and_back(t, rows, columns, merge, patch, channels, temporal):
    frames = torch.arange(t * temporal * channels * rows * merge * patch * columns * merge * patch).reshape(
        t * temporal, channels, rows * merge * patch, columns * merge * patch
    )
    patches, grid = patchify_blocks(frames, patch, merge_size=merge, temporal_patch_size=temporal)
    assert grid == Grid(t=t, h=rows * merge, w=columns * merge, merge_size=merge)
    assert patches.shape == (grid.num_patches, channels * temporal * patch * patch)
    assert torch.equal(unpatchify_blocks(patches, grid, patch, temporal_patch_size=temporal), frames)


@given(few, few, few, few)
def test_rows_and_back(rows, columns, patch, channels):
    pixels = torch.arange(channels * rows * patch * columns * patch).reshape(channels, rows * patch, columns * patch)
    patches, grid = patchify_rows(pixels, patch)
    assert torch.equal(unpatchify_rows(patches, grid, patch), pixels)
    padded, mask = pad_patches(patches, grid.num_patches + 3)
    assert torch.equal(padded[mask], patches)
    assert not padded[~mask].any() and int((~mask).sum()) == 3
    assert torch.equal(unpatchify_rows(padded, grid, patch), pixels)


def test_blocks_stand_together():
    """4 × 4 pixels, patch 1, merge 2: the four patches of a token are neighbours in the sequence."""
    patches, grid = patchify_blocks(torch.arange(16).reshape(1, 4, 4), 1, merge_size=2, temporal_patch_size=1)
    assert patches.flatten().tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    assert grid.num_tokens == 4


def test_frames_of_one_temporal_patch_stand_together():
    """Four frames of two channels, one pixel: rows are (channel, frame) of one temporal patch."""
    frames = torch.tensor([[[[10]], [[20]]], [[[11]], [[21]]], [[[12]], [[22]]], [[[13]], [[23]]]])
    patches, grid = patchify_blocks(frames, 1, merge_size=1, temporal_patch_size=2)
    assert patches.tolist() == [[10, 11, 20, 21], [12, 13, 22, 23]]
    assert grid.t == 2


def test_a_still_fills_its_temporal_patch():
    still = torch.arange(12.0).reshape(3, 2, 2)
    patches, grid = patchify_blocks(still, 2, merge_size=1)
    frames = unpatchify_blocks(patches, grid, 2)
    assert frames.shape == (2, 3, 2, 2)
    assert torch.equal(frames[0], still) and torch.equal(frames[1], still)


def test_channels_come_last_in_rows():
    patches, _ = patchify_rows(torch.tensor([[[1, 2]], [[10, 20]]]), 1)
    assert patches.tolist() == [[1, 10], [2, 20]]


def test_gradients_pass():
    pixels = torch.randn(3, 8, 8, requires_grad=True)
    patchify_blocks(pixels, 2)[0].sum().backward()
    assert torch.equal(pixels.grad, torch.full_like(pixels, 2.0))  # each pixel is read in both frames


@pytest.mark.parametrize(
    "call",
    [
        lambda: patchify_blocks(torch.zeros(3, 3, 28, 28), 14),
        lambda: patchify_blocks(torch.zeros(3, 14, 14), 14, merge_size=2),
        lambda: patchify_blocks(torch.zeros(3, 15, 28), 14),
        lambda: patchify_rows(torch.zeros(3, 15, 16), 16),
        lambda: unpatchify_rows(torch.zeros(3, 12), Grid(h=2, w=2), 2),
        lambda: unpatchify_rows(torch.zeros(4, 13), Grid(h=2, w=2), 2),
        lambda: unpatchify_blocks(torch.zeros(5, 24), Grid(h=2, w=2), 2),
        lambda: pad_patches(torch.zeros(4, 2), 3),
    ],
)
def test_what_does_not_fit(call):
    with pytest.raises(ConfigError) as caught:
        call()
    assert caught.value.remedy
