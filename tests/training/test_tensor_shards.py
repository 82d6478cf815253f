"""Boxes of tensor shards: they agree with torch.chunk."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from vitrail.training.tensor_shards import box_numel, box_shape, full_box, intersect_boxes, relative_slices, shard_box

shapes = st.lists(st.integers(0, 7), min_size=1, max_size=3)


@given(shapes, st.data())
def test_shard_equals_chunk(shape, data):
    """Shard one axis, two axes, or one axis twice, also into more parts than rows."""
    x = torch.arange(math.prod(shape)).view(shape)
    cuts, expected = [], x
    for _ in range(data.draw(st.integers(1, 2))):
        axis, parts = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(1, 5))
        which = data.draw(st.integers(0, parts - 1))
        chunks = expected.chunk(parts, axis) if expected.shape[axis] else [expected] * parts
        # torch omits empty chunks
        expected = chunks[which] if which < len(chunks) else expected.narrow(axis, expected.shape[axis], 0)
        cuts.append((axis, parts, which))
    box = shard_box(shape, cuts)
    assert box_shape(box) == tuple(expected.shape)
    assert torch.equal(x[relative_slices(box, full_box(shape))], expected)


@given(st.lists(st.tuples(*[st.integers(0, 9)] * 4), max_size=3))
def test_intersection_of_boxes(edges):
    a = tuple(range(min(x, y), max(x, y)) for x, y, _, _ in edges)
    b = tuple(range(min(x, y), max(x, y)) for _, _, x, y in edges)
    both = intersect_boxes(a, b)
    assert all(set(rows) == set(x) & set(y) for rows, x, y in zip(both, a, b, strict=True))
    if box_numel(both):
        x = torch.arange(box_numel(a)).view(box_shape(a))
        assert tuple(x[relative_slices(both, a)].shape) == box_shape(both)


def test_box_of_a_scalar_is_empty():
    assert full_box(()) == ()
    assert box_numel(()) == 1
    assert torch.tensor(3)[relative_slices((), ())] == 3
