import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.errors import ConfigError
from vitrail.processing.grid import Grid

small = st.integers(1, 40)


@given(small, small, small, st.integers(1, 4), st.integers(1, 20))
def test_counts(t, rows, columns, merge, patch):
    grid = Grid.from_pixels(rows * merge * patch, columns * merge * patch, patch, merge_size=merge, t=t)
    assert (grid.t, grid.h, grid.w) == (t, rows * merge, columns * merge)
    assert (grid.num_rows, grid.num_columns) == (rows, columns)
    assert grid.num_tokens == t * rows * columns
    assert grid.num_patches == grid.num_tokens * merge**2
    assert grid.pixel_size(patch) == (rows * merge * patch, columns * merge * patch)


def test_pins():
    assert Grid.from_pixels(336, 336, 14).num_tokens == 576
    assert Grid.from_pixels(1008, 672, 14, merge_size=2).num_tokens == 36 * 24
    assert Grid(t=4, h=6, w=8, merge_size=2).num_tokens == 48


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Grid(h=0, w=1), "Grid.h is 0"),
        (lambda: Grid(h=1, w=1, t=0), "Grid.t is 0"),
        (lambda: Grid(h=2, w=2, merge_size=0), "Grid.merge_size is 0"),
        (lambda: Grid(h=3, w=2, merge_size=2), "blocks of 2×2"),
        (lambda: Grid(h=2, w=3, merge_size=2), "blocks of 2×2"),
        (lambda: Grid.from_pixels(336, 336, 0), "patch_size is 0"),
        (lambda: Grid.from_pixels(100, 196, 14, merge_size=2), "such as 112×196"),
        (lambda: Grid.from_pixels(0, 14, 14), "Grid.h is 0"),
    ],
)
def test_refusals(make, words):
    with pytest.raises(ConfigError, match=words) as caught:
        make()
    assert caught.value.remedy


def test_frozen():
    with pytest.raises(AttributeError):
        Grid(h=1, w=1).h = 2


def test_counting_needs_no_torch():
    modules = "vitrail.processing.resolution_policies, vitrail.processing.image_loading"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
