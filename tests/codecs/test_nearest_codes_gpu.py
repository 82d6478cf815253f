"""Nearest-code kernels on CUDA: ids equal float64, for all sizes and near ties."""

import pytest
import torch
import torch.nn.functional as F

from vitrail.codecs.quantizers import VQ, nearest_codes

pytestmark = pytest.mark.gpu


def search_exhaustively(x, table, product=False):
    return torch.cat([nearest_codes.find_nearest_exhaustive(part, table, product) for part in x.split(4096)])


def search_with_kernels(x, table, product=False):
    kernels = pytest.importorskip("vitrail.nn.kernels.nearest_code")
    assert kernels.is_supported(x, table)
    return kernels.search_nearest(x, table, product)


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
        (1000, 2**17 + 3, 16),  # more codes than one turn of the kernel
    ],
)
@pytest.mark.parametrize("product", [False, True])
def test_ids_match_float64(N, K, D, product):
    torch.manual_seed(0)
    x, table = torch.randn(N, D, device="cuda"), torch.randn(K, D, device="cuda")
    if product:
        table = F.normalize(table, dim=1)
    ids, unsure = search_with_kernels(x, table, product)
    assert torch.equal(ids, search_exhaustively(x, table, product))
    assert N < 100 or int(unsure) < N / 2


def test_a_million_tokens():
    torch.manual_seed(0)
    x, table = torch.randn(2**20, 32, device="cuda"), torch.randn(16384, 32, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ids, unsure = search_with_kernels(x, table)
    assert torch.cuda.max_memory_allocated() - before < 64 * 2**20  # ids, a list, two tables
    assert torch.equal(ids, search_exhaustively(x, table))
    assert int(unsure) < 2**20 / 20


@pytest.mark.parametrize("spread", [1.0, 1e-3, 1e-6, 0.0])
def test_near_ties(spread):
    torch.manual_seed(0)
    table = torch.randn(1, 16, device="cuda") * 100 + spread * torch.randn(3000, 16, device="cuda")
    x = table[torch.randint(0, 3000, (2500,), device="cuda")] + spread * torch.randn(2500, 16, device="cuda")
    assert torch.equal(search_with_kernels(x, table)[0], search_exhaustively(x, table))


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1e6])
def test_extreme_magnitudes(scale):
    torch.manual_seed(0)
    x, table = torch.randn(2000, 32, device="cuda") * scale, torch.randn(4096, 32, device="cuda") * scale
    assert torch.equal(search_with_kernels(x, table)[0], search_exhaustively(x, table))


def test_cpu_ids_and_training_without_synchronization():
    torch.manual_seed(0)
    q = VQ(codebook_size=512, dim=16, dead_code_threshold=0.05)
    x = torch.randn(8, 256, 16)
    q(x)
    gpu_module = VQ(codebook_size=512, dim=16, dead_code_threshold=0.05)
    gpu_module.load_state_dict(q.state_dict())
    gpu_module.cuda()
    assert torch.equal(gpu_module.eval()(x.cuda()).ids.cpu(), q.eval()(x).ids)
    gpu_module.train()
    x = x.cuda()
    gpu_module(x)
    torch.compile(gpu_module, fullgraph=True)(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gpu_module(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
