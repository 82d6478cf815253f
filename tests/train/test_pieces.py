"""Boxes: every number of a tensor lies in one piece, and where torch puts it."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from vitrail.train.pieces import cut, inside, shared, sizes, volume, whole

shapes = st.lists(st.integers(0, 7), min_size=1, max_size=3)


@given(shapes, st.data())
def test_a_cut_is_a_chunk(shape, data):
    """One axis over one mesh, two axes, or one axis twice; there may be more parts than rows."""
    x = torch.arange(math.prod(shape)).view(shape)
    cuts, expected = [], x
    for _ in range(data.draw(st.integers(1, 2))):
        axis, parts = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(1, 5))
        which = data.draw(st.integers(0, parts - 1))
        chunks = expected.chunk(parts, axis) if expected.shape[axis] else [expected] * parts
        # torch leaves empty chunks out
        expected = chunks[which] if which < len(chunks) else expected.narrow(axis, expected.shape[axis], 0)
        cuts.append((axis, parts, which))
    box = cut(shape, cuts)
    assert sizes(box) == tuple(expected.shape)
    assert torch.equal(x[inside(box, whole(shape))], expected)


@given(st.lists(st.tuples(*[st.integers(0, 9)] * 4), max_size=3))
def test_what_boxes_share(edges):
    a = tuple(range(min(x, y), max(x, y)) for x, y, _, _ in edges)
    b = tuple(range(min(x, y), max(x, y)) for _, _, x, y in edges)
    both = shared(a, b)
    assert all(set(rows) == set(x) & set(y) for rows, x, y in zip(both, a, b, strict=True))
    if volume(both):
        x = torch.arange(volume(a)).view(sizes(a))
        assert tuple(x[inside(both, a)].shape) == sizes(both)


def test_a_scalar_is_a_box_without_axes():
    assert whole(()) == ()
    assert volume(()) == 1
    assert torch.tensor(3)[inside((), ())] == 3
