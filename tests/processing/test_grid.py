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
    grid = Grid.of(rows * merge * patch, columns * merge * patch, patch, merge=merge, t=t)
    assert (grid.t, grid.h, grid.w) == (t, rows * merge, columns * merge)
    assert (grid.rows, grid.columns) == (rows, columns)
    assert grid.tokens == t * rows * columns
    assert grid.patches == grid.tokens * merge**2
    assert grid.pixels(patch) == (rows * merge * patch, columns * merge * patch)


def test_pins():
    assert Grid.of(336, 336, 14).tokens == 576
    assert Grid.of(1008, 672, 14, merge=2).tokens == 36 * 24
    assert Grid(t=4, h=6, w=8, merge=2).tokens == 48


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Grid(h=0, w=1), "Grid.h is 0"),
        (lambda: Grid(h=1, w=1, t=0), "Grid.t is 0"),
        (lambda: Grid(h=2, w=2, merge=0), "Grid.merge is 0"),
        (lambda: Grid(h=3, w=2, merge=2), "blocks of 2×2"),
        (lambda: Grid(h=2, w=3, merge=2), "blocks of 2×2"),
        (lambda: Grid.of(336, 336, 0), "patch of 0"),
        (lambda: Grid.of(100, 196, 14, merge=2), "such as 112×196"),
        (lambda: Grid.of(0, 14, 14), "Grid.h is 0"),
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
    code = "import sys, vitrail.processing.resolution, vitrail.processing.images; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
