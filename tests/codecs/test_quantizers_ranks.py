"""Several processes with unequal batches equal one process with the whole batch: losses, gradients, codebooks."""

import pytest
import torch
import torch.distributed as dist

from training import ranks
from vitrail.codecs.quantizers import BSQ, IBQ, LFQ, VQ, GroupedVQ, ResidualVQ

pytestmark = pytest.mark.slow

MAKERS = {
    "vq": lambda: VQ(codebook_size=12, dim=6, ema_decay=0.8, kmeans_iters=4, dead_code_threshold=0.3),
    "vq gradient": lambda: VQ(
        codebook_size=12, dim=6, ema_decay=0.8, kmeans_iters=4, dead_code_threshold=0.3, codebook_update="gradient"
    ),
    "vq cosine": lambda: VQ(codebook_size=12, dim=6, ema_decay=0.8, kmeans_iters=4, metric="cosine"),
    "residual": lambda: ResidualVQ(codebook_size=8, dim=6, layers=2, dead_code_threshold=0.2),
    "grouped": lambda: GroupedVQ(codebook_size=8, dim=6, groups=2),
    "lfq": lambda: LFQ(bits=6, inv_temperature=1.0),
    "lfq group": lambda: LFQ(bits=6, inv_temperature=1.0, entropy_group_size=6),
    "bsq": lambda: BSQ(bits=6, inv_temperature=5.0, entropy_group_size=2),
    "ibq": lambda: IBQ(codebook_size=12, dim=6, inv_temperature=2.0),
}


def steps(q, batches, own, chance):
    """Run a few steps; return losses, gradients of inputs and weights, and state. Losses are weighted by batch size."""
    result = []
    for step, batch in enumerate(batches):
        torch.manual_seed(chance + step)
        x = batch[own].clone().requires_grad_()
        found = q(x)
        weights = [p for p in q.parameters() if p.requires_grad]
        share = len(x) / len(batch)
        losses = {name: loss * share for name, loss in found.losses.items()}
        gradients = torch.autograd.grad(sum(losses.values()), [x, *weights], allow_unused=True)
        result.append((found.ids, losses, gradients))
    return result


def assert_close(name, sizes, seed):
    rank = dist.get_rank()
    torch.manual_seed(seed)
    batches = [torch.randn(sum(sizes), 6, dtype=torch.double) for _ in range(4)]
    starts = [sum(sizes[:r]) for r in range(len(sizes))]
    own = slice(starts[rank], starts[rank] + sizes[rank])
    torch.manual_seed(seed)
    shared = MAKERS[name]()
    # Other ranks' own chance must not matter.
    mine = steps(shared, batches, own, chance=100 if rank == 0 else 900 + rank)
    kept = dist.get_world_size
    dist.get_world_size = lambda *_: 1  # alone, with all of it
    try:
        torch.manual_seed(seed)
        alone = MAKERS[name]()
        wanted = steps(alone, batches, slice(None), chance=100)
    finally:
        dist.get_world_size = kept
    close = lambda a, b: torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # noqa: E731
    for (ids, losses, gradients), (all_ids, all_losses, all_gradients) in zip(mine, wanted, strict=True):
        assert torch.equal(ids, all_ids[own])
        for key, loss in losses.items():
            summed = loss.detach().clone()
            dist.all_reduce(summed)
            close(summed, all_losses[key].detach())
        close(gradients[0], all_gradients[0][own])
        for a, b in zip(gradients[1:], all_gradients[1:], strict=True):
            if b is not None:
                dist.all_reduce(a)
                close(a, b)
    for a, b in zip(shared.state_dict().values(), alone.state_dict().values(), strict=True):
        close(a, b)


def assert_all_close(sizes):
    for name in MAKERS:
        for seed in (0, 1):
            assert_close(name, sizes, seed)


@pytest.mark.parametrize("sizes", [(40, 17), (5, 61, 23), (30, 0, 30)])
def test_ranks_match_one_process(sizes):
    ranks.run(len(sizes), assert_all_close, sizes)
