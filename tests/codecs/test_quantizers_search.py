"""Nearest-code search in plain torch and in interpreted Triton kernels equals float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import interpreted
from vitrail.codecs.quantizers import nearest_codes


@given(st.integers(1, 40), st.integers(1, 300), st.integers(1, 9), st.booleans(), st.integers(0, 2**31))
@settings(max_examples=80)
def test_torch_search_sizes_and_ties(N, K, D, product, seed):
    """Coordinates with few values give many exact ties, in which the first code wins."""
    generator = torch.Generator().manual_seed(seed)
    x, table = (torch.randint(-2, 3, (n, D), generator=generator).float() / 2 for n in (N, K))
    ids = nearest_codes.find_nearest_codes(x, table, product)
    assert torch.equal(ids, nearest_codes.find_nearest_exhaustive(x, table, product))


@pytest.mark.parametrize("spread", [1.0, 1e-3, 1e-6, 0.0])
def test_torch_search_beyond_float32_precision(spread):
    """Codes are closer than float32 resolves: float32 distances give other ids."""
    torch.manual_seed(0)
    table = torch.randn(1, 16) * 100 + spread * torch.randn(3000, 16)
    x = table[torch.randint(0, 3000, (2500,))] + spread * torch.randn(2500, 16)
    ids = nearest_codes.find_nearest_codes(x, table)
    assert torch.equal(ids, nearest_codes.find_nearest_exhaustive(x, table))
    if spread == 1e-3:
        assert not torch.equal(ids, (x @ table.T - table.square().sum(1) / 2).argmax(1))


def test_ids_do_not_depend_on_the_batch():
    x, table = torch.randn(3000, 8), torch.randn(777, 8)
    ids = nearest_codes.find_nearest_codes(x, table)
    assert torch.equal(torch.cat([nearest_codes.find_nearest_codes(part, table) for part in x.split(701)]), ids)
    assert torch.equal(nearest_codes.find_nearest_codes(x.double(), table.double()), ids)


def test_no_full_score_matrix():
    """The largest tensor of a search is a tile, or the lines of a chunk."""
    x, table = torch.randn(20_000, 4), torch.randn(8192, 4)
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            out = function(*arguments, **(keywords or {}))
            sizes.extend(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor))
            return out

    with Watch():
        nearest_codes.find_nearest_tiled(x, table)
    assert max(sizes) <= 20_000 * 8192 // 100


SCRIPT = """
import sys
import numpy as np
import torch
from vitrail.codecs.quantizers.search import exhaustive, nearest
from vitrail.nn.kernels import nearest as kernels

np.seterr(all="ignore")
torch.manual_seed(0)

def compare(x, table, product=False):
    assert kernels.is_supported(x, table)
    ids, count = kernels.searched(x, table, product)
    assert torch.equal(ids, exhaustive(x, table, product)), (x.shape, table.shape, product)
    return int(count)

def few():
    assert nearest(torch.randn(1, 1), torch.randn(1, 1)) == 0
    table = torch.randn(30, 4)  # rows, codes and a width to be filled up
    table[20:] = table[:10] + 1e-7 * torch.randn(10, 4)  # told apart by float64 alone
    assert compare(table[20:] + 1e-7 * torch.randn(10, 4), table) == 10

def many():
    compare(torch.randn(18, 20), torch.randn(35, 20))
    ties = torch.randint(-1, 2, (20, 3)).float()
    assert compare(torch.randint(-1, 2, (16, 3)).float() / 2, ties) == 16
    assert compare(torch.randn(16, 8), torch.randn(50, 8), True) < 16
    compare(torch.randn(20, 4), torch.randn(16 * 256 + 100, 4))  # more codes than one turn of 256 tiles
    compare(torch.randn(20, 4) * 1e-6, torch.randn(200, 4) * 1e6)
    for N, K, D in ((33, 64, 33), (17, 100, 16), (5, 300, 40)):
        compare(torch.randn(N, D), torch.randn(K, D))
        compare(torch.randn(N, D), torch.randn(K, D), True)

few() if sys.argv[1] == "few" else many()
print("agreed")
"""


@pytest.mark.slow
@pytest.mark.parametrize("cases", ["few", "many"])
def test_kernels_match_float64(cases):
    pytest.importorskip("triton")
    interpreted(SCRIPT, cases)
