"""Two and three processes with unequal batches against one with all of it: losses, gradients, codebooks, revival."""

import pytest
import torch
import torch.distributed as dist

from train import ranks
from vitrail.codecs.quantizers import BSQ, IBQ, LFQ, VQ, GroupedVQ, ResidualVQ

pytestmark = pytest.mark.slow

MAKERS = {
    "vq": lambda: VQ(codes=12, dim=6, decay=0.8, start=4, revive=0.3),
    "vq gradient": lambda: VQ(codes=12, dim=6, decay=0.8, start=4, revive=0.3, learn="gradient"),
    "vq cosine": lambda: VQ(codes=12, dim=6, decay=0.8, start=4, metric="cosine"),
    "residual": lambda: ResidualVQ(codes=8, dim=6, layers=2, revive=0.2),
    "grouped": lambda: GroupedVQ(codes=8, dim=6, groups=2),
    "lfq": lambda: LFQ(bits=6, sharpness=1.0),
    "lfq group": lambda: LFQ(bits=6, sharpness=1.0, group=6),
    "bsq": lambda: BSQ(bits=6, sharpness=5.0, group=2),
    "ibq": lambda: IBQ(codes=12, dim=6, sharpness=2.0),
}


def steps(q, batches, own, chance):
    """A few steps → losses, gradients of inputs and weights, state; each rank's losses weighed by its share."""
    told = []
    for step, batch in enumerate(batches):
        torch.manual_seed(chance + step)
        x = batch[own].clone().requires_grad_()
        found = q(x)
        weights = [p for p in q.parameters() if p.requires_grad]
        share = len(x) / len(batch)
        losses = {name: loss * share for name, loss in found.losses.items()}
        gradients = torch.autograd.grad(sum(losses.values()), [x, *weights], allow_unused=True)
        told.append((found.ids, losses, gradients))
    return told


def alike(name, sizes, seed):
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


def all_alike(sizes):
    for name in MAKERS:
        for seed in (0, 1):
            alike(name, sizes, seed)


@pytest.mark.parametrize("sizes", [(40, 17), (5, 61, 23), (30, 0, 30)])
def test_ranks_equal_one_process(sizes):
    ranks.run(len(sizes), all_alike, sizes)
