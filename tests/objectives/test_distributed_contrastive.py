"""Distributed contrastive losses: two and three ranks against one process; losses, gradients and DDP training."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from training.ranks import TIMEOUT, open_store

pytestmark = pytest.mark.slow

SCRIPT = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from vitrail.objectives import clip_loss, siglip_loss
from vitrail.objectives.distributed_contrastive import GatherExchange, RingExchange

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
LOSSES = ((clip_loss, (8.0,)), (siglip_loss, (8.0, -2.0)))
EXCHANGES = (GatherExchange, RingExchange)

def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)

def numbers(values):
    return [torch.tensor(x, dtype=torch.double, requires_grad=True) for x in values]

for sizes in ([4, 4, 4][:world], [5, 2, 7][:world]):  # equal and unequal shares
    torch.manual_seed(0)
    N = sum(sizes)
    U, V = (F.normalize(torch.randn(N, 6, dtype=torch.double), dim=1) for _ in range(2))
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    ids = torch.randint(-1, 5, (N,)), torch.randint(-1, 5, (N,))
    table = torch.randint(-1, 2, (N, N)).to(torch.int8)
    bools = table > 0
    for whole, part in ((None, None), (ids, (ids[0][own], ids[1][own])), (table, table[own]), (bools, bools[own])):
        for compute_loss, values in LOSSES:
            inputs = [U.clone().requires_grad_(), V.clone().requires_grad_(), *numbers(values)]
            wanted = compute_loss(*inputs, labels=whole)
            gradients = torch.autograd.grad(wanted, inputs)
            for exchange in EXCHANGES:
                for reduce, weight in (("mean", world), ("sum", 1)):
                    inputs = [U[own].clone().requires_grad_(), V[own].clone().requires_grad_(), *numbers(values)]
                    loss = compute_loss(*inputs, labels=part, exchange=exchange(inputs[1], reduce), tile_size=3)
                    close(loss, wanted)
                    ours = [x / weight for x in torch.autograd.grad(loss, inputs)]
                    for x in ours[2:]:
                        dist.all_reduce(x)
                    for a, b in zip(ours, (gradients[0][own], gradients[1][own], *gradients[2:]), strict=True):
                        close(a, b)
                with torch.no_grad():  # no gradient, no second sweep
                    loss = compute_loss(U[own], V[own], *values, labels=part, exchange=exchange(V[own]))
                    close(loss, wanted.detach())

# Two towers and the numbers, as DDP trains them: its mean over the ranks is the gradient of the whole batch.
for compute_loss, values in LOSSES:
    for exchange in EXCHANGES:
        torch.manual_seed(1)
        model = torch.nn.ModuleDict({"u": torch.nn.Linear(5, 6), "v": torch.nn.Linear(4, 6)}).double()
        model.numbers = torch.nn.ParameterList(numbers(values))

        class Step(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.model = model

            def forward(self, x, y, shared=True):
                u, v = (F.normalize(model[k](z), dim=1) for k, z in (("u", x), ("v", y)))
                return compute_loss(u, v, *model.numbers, **({"exchange": exchange(v)} if shared else {}))

        x, y = torch.randn(4 * world, 5, dtype=torch.double), torch.randn(4 * world, 4, dtype=torch.double)
        own = slice(4 * rank, 4 * rank + 4)
        wanted = torch.autograd.grad(Step()(x, y, shared=False), list(model.parameters()))
        trained = DistributedDataParallel(Step())
        trained(x[own], y[own]).backward()
        for p, b in zip(model.parameters(), wanted, strict=True):
            close(p.grad, b)
            p.grad = None
dist.barrier()
print("agreed")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_equal_one_process(ranks):
    store = open_store()
    common = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(ranks),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    for process in processes:
        out, err = process.communicate(timeout=TIMEOUT)
        assert "agreed" in out, err[-2000:]
