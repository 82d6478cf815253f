"""CUDA graph functions on a CPU."""

import gc
from typing import NamedTuple

import pytest
import torch

from vitrail.errors import ConfigError
from vitrail.nn.cuda_graphs import CUDAGraphFunction, enable_cuda_graphs, pause_garbage_collection


class Made(NamedTuple):
    double: torch.Tensor
    table: tuple[torch.Tensor, ...]


def test_missing_rows_raise_on_a_cpu_too():
    """A graph runs with more indices and drops surplus rows, so every tensor needs one row per index."""
    index = torch.arange(5)
    whole = CUDAGraphFunction(lambda index: Made(2 * index, (index[:, None].expand(-1, 3),)))
    short = CUDAGraphFunction(lambda index: Made(2 * index, (torch.arange(3),)))
    single = CUDAGraphFunction(lambda index: index.sum())
    with enable_cuda_graphs():
        assert torch.equal(whole(index).double, 2 * index)
        for wrong in (short, single):
            with pytest.raises(ConfigError, match="one row for each"):
                wrong(index)


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_restored(enabled):
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(RuntimeError), pause_garbage_collection():
            assert not gc.isenabled()
            raise RuntimeError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
