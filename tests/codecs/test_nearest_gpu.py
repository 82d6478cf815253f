"""The search kernels on CUDA: ids equal to float64's, at every size, near ties and not."""

import pytest
import torch
import torch.nn.functional as F

from vitrail.codecs.quantizers import VQ, search

pytestmark = pytest.mark.gpu


def exhaustive(x, table, product=False):
    return torch.cat([search.exhaustive(part, table, product) for part in x.split(4096)])


def searched(x, table, product=False):
    kernels = pytest.importorskip("vitrail.nn.kernels.nearest")
    assert kernels.fits(x, table)
    return kernels.searched(x, table, product)


@pytest.mark.parametrize(
    ("N", "K", "D"),
    [
        (1, 1, 1),
        (1000, 8, 32),
        (4099, 1000, 20),
        (4096, 16384, 32),
        (4096, 16384, 8),
        (4096, 16384, 4),
        (2000, 5000, 64),
        (2000, 3001, 100),
        (1000, 4096, 256),
        (1000, 2**17 + 3, 16),  # more codes than one turn
    ],
)
@pytest.mark.parametrize("product", [False, True])
def test_ids_are_those_of_float64(N, K, D, product):
    torch.manual_seed(0)
    x, table = torch.randn(N, D, device="cuda"), torch.randn(K, D, device="cuda")
    if product:
        table = F.normalize(table, dim=1)
    ids, unsure = searched(x, table, product)
    assert torch.equal(ids, exhaustive(x, table, product))
    assert N < 100 or int(unsure) < N / 2


def test_a_million_tokens():
    torch.manual_seed(0)
    x, table = torch.randn(2**20, 32, device="cuda"), torch.randn(16384, 32, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ids, unsure = searched(x, table)
    assert torch.cuda.max_memory_allocated() - before < 64 * 2**20  # ids, a list, two tables
    assert torch.equal(ids, exhaustive(x, table))
    assert int(unsure) < 2**20 / 20


@pytest.mark.parametrize("spread", [1.0, 1e-3, 1e-6, 0.0])
def test_near_ties(spread):
    torch.manual_seed(0)
    table = torch.randn(1, 16, device="cuda") * 100 + spread * torch.randn(3000, 16, device="cuda")
    x = table[torch.randint(0, 3000, (2500,), device="cuda")] + spread * torch.randn(2500, 16, device="cuda")
    assert torch.equal(searched(x, table)[0], exhaustive(x, table))


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1e6])
def test_any_size_of_numbers(scale):
    torch.manual_seed(0)
    x, table = torch.randn(2000, 32, device="cuda") * scale, torch.randn(4096, 32, device="cuda") * scale
    assert torch.equal(searched(x, table)[0], exhaustive(x, table))


def test_the_same_ids_as_the_cpu_and_training_without_a_wait():
    torch.manual_seed(0)
    q = VQ(codes=512, dim=16, revive=0.05)
    x = torch.randn(8, 256, 16)
    q(x)
    there = VQ(codes=512, dim=16, revive=0.05)
    there.load_state_dict(q.state_dict())
    there.cuda()
    assert torch.equal(there.eval()(x.cuda()).ids.cpu(), q.eval()(x).ids)
    there.train()
    x = x.cuda()
    there(x)
    torch.compile(there, fullgraph=True)(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        there(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
