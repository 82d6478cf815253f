"""Ids packed as bits and back, against Python's integers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.codecs.packing import pack, packed_size, unpack
from vitrail.errors import ConfigError, DataError

ids_of_some_width = st.integers(1, 63).flatmap(
    lambda bits: st.tuples(st.just(bits), st.lists(st.integers(0, 2**bits - 1), max_size=200))
)


@given(ids_of_some_width)
@settings(max_examples=200)
def test_every_width_and_count_come_back(given):
    bits, ids = given
    data = pack(torch.tensor(ids, dtype=torch.int64), bits)
    stream = sum(value << bits * i for i, value in enumerate(ids))  # the format, as one integer
    assert data == stream.to_bytes(packed_size(len(ids), bits), "little")
    assert unpack(data, bits, len(ids)).tolist() == ids


@pytest.mark.parametrize("bits", [1, 7, 14, 16, 28, 33, 63])
def test_more_than_a_block(bits):
    ids = torch.randint(0, 2**bits - 1, (3, 50_001), generator=torch.Generator().manual_seed(bits))
    data = pack(ids, bits)
    assert len(data) == packed_size(ids.numel(), bits)
    assert torch.equal(unpack(memoryview(data), bits, ids.numel()).view(3, -1), ids)


def test_narrow_types_and_nothing():
    assert unpack(pack(torch.tensor([3, 0, 2], dtype=torch.uint8), 2), 2, 3).tolist() == [3, 0, 2]
    assert pack(torch.empty(0, dtype=torch.int64), 5) == b""
    assert unpack(b"", 5, 0).shape == (0,)


def test_what_does_not_fit_is_refused_by_name():
    with pytest.raises(DataError, match="1 of 3 ids do not fit 4 bits, such as 16"):
        pack(torch.tensor([3, 16, 15]), 4)
    with pytest.raises(DataError, match="such as -1"):
        pack(torch.tensor([3, -1]), 63)
    with pytest.raises(ConfigError, match="64 bits"):
        pack(torch.tensor([3]), 64)
    with pytest.raises(ConfigError, match="integers, not"):
        pack(torch.tensor([3.0]), 4)


def test_cut_or_altered_data_is_refused():
    data = pack(torch.tensor([1, 2, 3]), 5)
    with pytest.raises(DataError, match="take 2 bytes; there are 1"):
        unpack(data[:1], 5, 3)
    with pytest.raises(DataError, match="bits that no id has set"):
        unpack(bytes([data[0], data[1] | 128]), 5, 3)
