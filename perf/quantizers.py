"""Quantizers against vector-quantize-pytorch, in one run: ids, time, peak memory; the search on a GPU; packing.

    python perf/quantizers.py --out results.json            # on a CUDA device where there is one, else on the CPU
    python perf/quantizers.py --out results.json --tune     # also tries other shapes of the search kernel

Both get the same codebook and the same vectors in float32. `step` is forward and backward in training, with the running
means; `encode` is the forward pass outside training. Memory is the peak above the inputs and the modules. `same` is the
share of ids that agree, `float64` the share of ours that equal an exhaustive search in float64. The peer holds all
distances, so that it is compared at sizes that fit; ours alone is also measured at a million vectors.
"""

import argparse
import contextlib
import ctypes
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import record
from torch import Tensor

from vitrail.codecs.packing import pack, unpack
from vitrail.codecs.quantizers import BSQ, FSQ, LFQ, VQ, search

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
MIB = 2**20
MEASURED = (
    "vitrail.codecs.packing",
    "vitrail.codecs.quantizers.bits",
    "vitrail.codecs.quantizers.fsq",
    "vitrail.codecs.quantizers.search",
    "vitrail.codecs.quantizers.vq",
    "vitrail.nn.kernels.nearest",
)


def ms(call: Callable[[], object], repeats: int) -> float:
    times = []
    for i in range(repeats + 1):
        if CUDA:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if CUDA:
            torch.cuda.synchronize()
        if i:
            times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def event_ms(call: Callable[[], object], repeats: int) -> float:
    """By the device's clock, without the launch."""
    times = []
    for i in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def peak(call: Callable[[], object]) -> float:
    """MiB above what was held before."""
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return (torch.cuda.max_memory_allocated() - before) / MIB
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed before is not there to be used again
    Path("/proc/self/clear_refs").write_text("5")  # the mark of the most memory held begins anew
    before = _status("VmRSS")
    call()
    return max(0, _status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def compare(ours: Callable[[], Any], peer: Callable[[], Any], repeats: int) -> dict[str, float]:
    row = {"mib": peak(ours), "peer_mib": peak(peer), "ms": ms(ours, repeats), "peer_ms": ms(peer, repeats)}
    return {**row, "faster": row["peer_ms"] / row["ms"], "leaner": row["peer_mib"] / max(row["mib"], 1)}


def step(module: torch.nn.Module, x: Tensor, losses: Callable[[Any], list[Tensor]]) -> Any:
    x = x.detach().requires_grad_()
    out = module(x)
    torch.autograd.grad(sum(part.sum() for part in losses(out)), x)
    return out


def shares(ids: Tensor, other: Tensor) -> float:
    return (ids.flatten() == other.flatten()).double().mean().item()


def exhaustive(x: Tensor, table: Tensor) -> Tensor:
    return torch.cat([search.exhaustive(part, table) for part in x.split(2048)])


# ---- side by side ---------------------------------------------------------------------------------------------------


def of_vq(theirs: Any, N: int, K: int, D: int, metric: str, repeats: int) -> dict[str, Any]:
    ours = VQ(codes=K, dim=D, start=0, metric=metric).to(DEVICE)
    peer = theirs.VectorQuantize(D, K, decay=0.99, rotation_trick=False, use_cosine_sim=metric == "cosine").to(DEVICE)
    peer._codebook.embed.copy_(ours.codebook)
    peer._codebook.embed_avg.copy_(ours.codebook)
    x = torch.randn(1, N, D, device=DEVICE)
    ours.eval(), peer.eval()
    with torch.no_grad():
        a, b = ours(x).ids, peer(x)[1]
        encode = compare(lambda: ours(x), lambda: peer(x), repeats)
    row: dict[str, Any] = {"same": shares(a, b)}
    if metric == "euclid":
        row["float64"] = shares(a, exhaustive(x[0], ours.codebook))
    ours.train(), peer.train()
    # With little to learn from one batch the codebooks stay what they are, nearly.
    train = compare(
        lambda: step(ours, x, lambda q: [q.codes, q.losses["commit"]]), lambda: step(peer, x, lambda q: [q[0], q[2]]),
        repeats,
    )  # fmt: skip
    return {**row, "encode": encode, "step": train}


def of_fsq(theirs: Any, N: int, repeats: int) -> dict[str, Any]:
    levels = (8, 8, 8, 5, 5, 5)
    ours, peer = FSQ(levels=levels).to(DEVICE), theirs.FSQ(list(levels)).to(DEVICE)
    x = torch.randn(1, N, 6, device=DEVICE)
    row = {"same": shares(ours(x).ids, peer(x)[1])}
    return {**row, "step": compare(lambda: step(ours, x, lambda q: [q.codes]),
                                   lambda: step(peer, x, lambda q: [q[0]]), repeats)}  # fmt: skip


def of_lfq(theirs: Any, N: int, bits: int, group: int, repeats: int) -> dict[str, Any]:
    ours = LFQ(bits=bits, group=group).to(DEVICE)
    peer = theirs.LFQ(dim=bits, codebook_size=2**bits, entropy_loss_weight=1.0, commitment_loss_weight=1.0).to(DEVICE)
    x = torch.randn(1, N, bits, device=DEVICE) / 50
    mine = ours(x)
    (_, ids, _), losses = peer(x, return_loss_breakdown=True)
    row: dict[str, Any] = {
        "same": shares(mine.ids, ids),
        "entropy": mine.losses["entropy"].item(),
        "peer_entropy": (losses.per_sample_entropy - losses.batch_entropy).item(),
    }
    return {**row, "step": compare(lambda: step(ours, x, lambda q: [q.codes, *q.losses.values()]),
                                   lambda: step(peer, x, lambda q: [q[0], q[2]]), repeats)}  # fmt: skip


# ---- ours alone -----------------------------------------------------------------------------------------------------


def of_bsq(N: int, repeats: int) -> dict[str, Any]:
    q, x = BSQ(bits=28).to(DEVICE), torch.randn(N, 28, device=DEVICE)
    call = lambda: step(q, x, lambda out: [out.codes, *out.losses.values()])  # noqa: E731
    return {"ms": ms(call, repeats), "mib": peak(call)}


def of_packing(N: int, bits: int, repeats: int) -> dict[str, float]:
    ids = torch.randint(0, 2**bits - 1, (N,))
    data = pack(ids, bits)
    assert torch.equal(unpack(data, bits, N), ids)
    there, back = ms(lambda: pack(ids, bits), repeats), ms(lambda: unpack(data, bits, N), repeats)
    return {
        "pack_mb_s": len(data) / there / 1000, "unpack_mb_s": len(data) / back / 1000,
        "pack_ids_s": N / there * 1000, "unpack_ids_s": N / back * 1000,
    }  # fmt: skip


def of_search(N: int, K: int, D: int, tune: bool) -> dict[str, Any]:
    """The kernels, against products and argmax by torch, a chunk at a time."""
    from vitrail.nn.kernels import nearest as kernels

    x, table = torch.randn(N, D, device="cuda"), torch.randn(K, D, device="cuda")
    half = table.square().sum(1) / 2

    def usual() -> Tensor:
        return torch.cat([torch.addmm(-half, part, table.T).argmax(1) for part in x.split(2**15)])

    ids, unsure = kernels.searched(x, table, False)
    wanted = exhaustive(x, table)
    row: dict[str, Any] = {
        "ms": event_ms(lambda: kernels.nearest(x, table), 10),
        "mib": peak(lambda: kernels.nearest(x, table)),
        "float64": shares(ids, wanted),
        "unsure": int(unsure),
        "torch_ms": event_ms(usual, 3),
        "torch_mib": peak(usual),
        "torch_float64": shares(usual(), wanted),
    }
    if tune:
        shapes = [
            kernels.Shape(m=m, n=n, warps=w, stages=s, registers=r)
            for m, n, w, s, r in [
                (128, 64, 8, 3, 128), (128, 64, 8, 3, None), (128, 64, 8, 2, 128), (128, 64, 8, 4, 128),
                (64, 64, 4, 3, 128), (64, 64, 4, 3, None), (256, 64, 16, 3, 128), (128, 32, 8, 3, None),
                (128, 128, 8, 3, None), (128, 32, 4, 3, 128), (64, 128, 4, 3, None), (128, 128, 4, 3, None),
            ]
        ]  # fmt: skip
        tried = {}
        for shape in shapes:
            with contextlib.suppress(Exception):  # one that does not fit is no candidate
                if torch.equal(kernels.nearest(x, table, shape=shape), wanted):
                    tried[str(shape)] = event_ms(lambda shape=shape: kernels.nearest(x, table, shape=shape), 5)
        row["tuned"] = dict(sorted(tried.items(), key=lambda item: item[1]))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tune", action="store_true", help="try other shapes of the search kernel")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    try:
        import vector_quantize_pytorch as theirs
    except ImportError:
        theirs = None
        print("vector-quantize-pytorch is not installed: ours alone")
    figures: dict[str, Any] = {"device": DEVICE}

    def keep(name: str, row: dict[str, Any]) -> None:
        figures[name] = row
        print(f"{name:32}", _rounded(row), flush=True)
        record(arguments.out, figures, *MEASURED)

    if CUDA:
        keep("search N=1048576 K=16384 D=32", of_search(2**20, 16384, 32, arguments.tune))
        keep("search N=1048576 K=16384 D=8", of_search(2**20, 16384, 8, False))
        keep("search N=262144 K=8192 D=256", of_search(2**18, 8192, 256, arguments.tune))
    N, repeats = (65536, 10) if CUDA else (8192, 3)
    if theirs is not None:
        for metric in ("euclid", "cosine"):
            keep(f"vq {metric} N={N} K=8192 D=32", of_vq(theirs, N, 8192, 32, metric, repeats))
        keep(f"fsq 8·8·8·5·5·5 N={16 * N}", of_fsq(theirs, 16 * N, repeats))
        for group in (1, 12):
            keep(f"lfq 12 bits, group {group} N={N}", of_lfq(theirs, N, 12, group, repeats))
    keep(f"bsq 28 bits N={16 * N}", of_bsq(16 * N, repeats))
    for bits in (10, 14, 16, 18, 28, 63):
        keep(f"packing {bits} bits", of_packing(2**22, bits, 5))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
