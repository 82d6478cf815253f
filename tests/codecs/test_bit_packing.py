"""Bit packing of ids, compared with Python integers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.codecs.bit_packing import compute_packed_size, pack_ids, unpack_ids
from vitrail.errors import ConfigError, DataError

ids_of_some_width = st.integers(1, 63).flatmap(
    lambda bits: st.tuples(st.just(bits), st.lists(st.integers(0, 2**bits - 1), max_size=200))
)


@given(ids_of_some_width)
@settings(max_examples=200)
def test_round_trip_of_every_width_and_count(given):
    bits, ids = given
    data = pack_ids(torch.tensor(ids, dtype=torch.int64), bits)
    stream = sum(value << bits * i for i, value in enumerate(ids))  # the format, as one integer
    assert data == stream.to_bytes(compute_packed_size(len(ids), bits), "little")
    assert unpack_ids(data, bits, len(ids)).tolist() == ids


@pytest.mark.parametrize("bits", [1, 7, 14, 16, 28, 33, 63])
def test_round_trip_of_several_blocks(bits):
    ids = torch.randint(0, 2**bits - 1, (3, 50_001), generator=torch.Generator().manual_seed(bits))
    data = pack_ids(ids, bits)
    assert len(data) == compute_packed_size(ids.numel(), bits)
    assert torch.equal(unpack_ids(memoryview(data), bits, ids.numel()).view(3, -1), ids)


def test_narrow_dtypes_and_empty_tensors():
    assert unpack_ids(pack_ids(torch.tensor([3, 0, 2], dtype=torch.uint8), 2), 2, 3).tolist() == [3, 0, 2]
    assert pack_ids(torch.empty(0, dtype=torch.int64), 5) == b""
    assert unpack_ids(b"", 5, 0).shape == (0,)


def test_ids_out_of_range_raise():
    with pytest.raises(DataError, match="1 of 3 ids do not fit 4 bits, for example 16"):
        pack_ids(torch.tensor([3, 16, 15]), 4)
    with pytest.raises(DataError, match="for example -1"):
        pack_ids(torch.tensor([3, -1]), 63)
    with pytest.raises(ConfigError, match="64 bits"):
        pack_ids(torch.tensor([3]), 64)
    with pytest.raises(ConfigError, match="not an integer type"):
        pack_ids(torch.tensor([3.0]), 4)


def test_truncated_or_corrupted_data_raises():
    data = pack_ids(torch.tensor([1, 2, 3]), 5)
    with pytest.raises(DataError, match="take 2 bytes; there are 1"):
        unpack_ids(data[:1], 5, 3)
    with pytest.raises(DataError, match="unused bits set"):
        unpack_ids(bytes([data[0], data[1] | 128]), 5, 3)
