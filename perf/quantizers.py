"""Quantizers against vector-quantize-pytorch: ids, time and peak memory. Also nearest codes and bit packing.

    python perf/quantizers.py --out results.json            # on a CUDA device if there is one, else on the CPU
    python perf/quantizers.py --out results.json --tune     # also measures other tile shapes of the search kernel

Both sides get the same codebook and the same float32 vectors. `step` is forward and backward in training, with the
moving averages; `encode` is the forward pass in evaluation. Memory is the peak above the inputs and the modules. `same`
is the fraction of ids that agree, and `float64` the fraction of our ids that equal an exhaustive search in float64. The
reference computes all distances at once, so the sizes are those that fit. Our search alone is also measured with a
million vectors.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from record import make_parser, write_record
from timing import CUDA, DEVICE, measure_peak_mib, median_device_ms, median_ms
from torch import Tensor

from vitrail.codecs.bit_packing import pack_ids, unpack_ids
from vitrail.codecs.quantizers import BSQ, FSQ, LFQ, VQ, nearest_codes

MEASURED = (
    "vitrail.codecs.bit_packing",
    "vitrail.codecs.quantizers.binary_codes",
    "vitrail.codecs.quantizers.fsq",
    "vitrail.codecs.quantizers.nearest_codes",
    "vitrail.codecs.quantizers.vq",
    "vitrail.nn.kernels.nearest_code",
)


def compare_calls(ours: Callable[[], Any], reference: Callable[[], Any], repeats: int) -> dict[str, float]:
    row = {
        "mib": measure_peak_mib(ours),
        "peer_mib": measure_peak_mib(reference),
        "ms": median_ms(ours, repeats),
        "peer_ms": median_ms(reference, repeats),
    }
    return {**row, "faster": row["peer_ms"] / row["ms"], "leaner": row["peer_mib"] / max(row["mib"], 1)}


def run_step(module: torch.nn.Module, x: Tensor, list_terms: Callable[[Any], list[Tensor]]) -> None:
    """Run forward and backward of the summed terms of the output."""
    x = x.detach().requires_grad_()
    torch.autograd.grad(sum(term.sum() for term in list_terms(module(x))), x)


def measure_agreement(ids: Tensor, other: Tensor) -> float:
    """Return the fraction of equal ids."""
    return (ids.flatten() == other.flatten()).double().mean().item()


def search_exhaustively(x: Tensor, codebook: Tensor) -> Tensor:
    return torch.cat([nearest_codes.find_nearest_exhaustive(part, codebook) for part in x.split(2048)])


# ---- against vector-quantize-pytorch --------------------------------------------------------------------------------


def compare_vq(library: Any, N: int, K: int, D: int, metric: str, repeats: int) -> dict[str, Any]:
    ours = VQ(codebook_size=K, dim=D, kmeans_iters=0, metric=metric).to(DEVICE)
    peer = library.VectorQuantize(D, K, decay=0.99, rotation_trick=False, use_cosine_sim=metric == "cosine").to(DEVICE)
    peer._codebook.embed.copy_(ours.codebook)
    peer._codebook.embed_avg.copy_(ours.codebook)
    x = torch.randn(1, N, D, device=DEVICE)
    ours.eval(), peer.eval()
    with torch.no_grad():
        a, b = ours(x).ids, peer(x)[1]
        encode = compare_calls(lambda: ours(x), lambda: peer(x), repeats)
    row: dict[str, Any] = {"same": measure_agreement(a, b)}
    if metric == "euclid":
        row["float64"] = measure_agreement(a, search_exhaustively(x[0], ours.codebook))
    ours.train(), peer.train()
    # The batch is always the same, so the codebooks hardly change.
    train = compare_calls(
        lambda: run_step(ours, x, lambda q: [q.codes, q.losses["commit"]]),
        lambda: run_step(peer, x, lambda q: [q[0], q[2]]),
        repeats,
    )
    return {**row, "encode": encode, "step": train}


def compare_fsq(library: Any, N: int, repeats: int) -> dict[str, Any]:
    levels = (8, 8, 8, 5, 5, 5)
    ours, peer = FSQ(levels=levels).to(DEVICE), library.FSQ(list(levels)).to(DEVICE)
    x = torch.randn(1, N, 6, device=DEVICE)
    row = {"same": measure_agreement(ours(x).ids, peer(x)[1])}
    return {
        **row,
        "step": compare_calls(
            lambda: run_step(ours, x, lambda q: [q.codes]), lambda: run_step(peer, x, lambda q: [q[0]]), repeats
        ),
    }


def compare_lfq(library: Any, N: int, bits: int, group: int, repeats: int) -> dict[str, Any]:
    ours = LFQ(bits=bits, entropy_group_size=group).to(DEVICE)
    peer = library.LFQ(dim=bits, codebook_size=2**bits, entropy_loss_weight=1.0, commitment_loss_weight=1.0).to(DEVICE)
    x = torch.randn(1, N, bits, device=DEVICE) / 50
    output = ours(x)
    (_, ids, _), losses = peer(x, return_loss_breakdown=True)
    row: dict[str, Any] = {
        "same": measure_agreement(output.ids, ids),
        "entropy": output.losses["entropy"].item(),
        "peer_entropy": (losses.per_sample_entropy - losses.batch_entropy).item(),
    }
    return {
        **row,
        "step": compare_calls(
            lambda: run_step(ours, x, lambda q: [q.codes, *q.losses.values()]),
            lambda: run_step(peer, x, lambda q: [q[0], q[2]]),
            repeats,
        ),
    }


# ---- without a reference --------------------------------------------------------------------------------------------


def measure_bsq(N: int, repeats: int) -> dict[str, Any]:
    q, x = BSQ(bits=28).to(DEVICE), torch.randn(N, 28, device=DEVICE)

    def call() -> None:
        run_step(q, x, lambda out: [out.codes, *out.losses.values()])

    return {"ms": median_ms(call, repeats), "mib": measure_peak_mib(call)}


def measure_packing(N: int, bits: int, repeats: int) -> dict[str, float]:
    ids = torch.randint(0, 2**bits - 1, (N,))
    data = pack_ids(ids, bits)
    assert torch.equal(unpack_ids(data, bits, N), ids)
    pack_ms = median_ms(lambda: pack_ids(ids, bits), repeats)
    unpack_ms = median_ms(lambda: unpack_ids(data, bits, N), repeats)
    return {
        "pack_mb_s": len(data) / pack_ms / 1000, "unpack_mb_s": len(data) / unpack_ms / 1000,
        "pack_ids_s": N / pack_ms * 1000, "unpack_ids_s": N / unpack_ms * 1000,
    }  # fmt: skip


def measure_search(N: int, K: int, D: int, tune: bool) -> dict[str, Any]:
    """Compare the kernels with torch's product and argmax in chunks."""
    from vitrail.nn.kernels import nearest_code as kernels

    x, codebook = torch.randn(N, D, device="cuda"), torch.randn(K, D, device="cuda")
    half_norms = codebook.square().sum(1) / 2

    def search_with_torch() -> Tensor:
        return torch.cat([torch.addmm(-half_norms, part, codebook.T).argmax(1) for part in x.split(2**15)])

    ids, unsure = kernels.search_nearest(x, codebook, False)
    exact = search_exhaustively(x, codebook)
    row: dict[str, Any] = {
        "ms": median_device_ms(lambda: kernels.find_nearest(x, codebook), 10),
        "mib": measure_peak_mib(lambda: kernels.find_nearest(x, codebook)),
        "float64": measure_agreement(ids, exact),
        "unsure": int(unsure),
        "torch_ms": median_device_ms(search_with_torch, 3),
        "torch_mib": measure_peak_mib(search_with_torch),
        "torch_float64": measure_agreement(search_with_torch(), exact),
    }
    if tune:
        shapes = [
            kernels.TileShape(m=m, n=n, num_warps=w, num_stages=s, max_registers=r)
            for m, n, w, s, r in [
                (128, 64, 8, 3, 128), (128, 64, 8, 3, None), (128, 64, 8, 2, 128), (128, 64, 8, 4, 128),
                (64, 64, 4, 3, 128), (64, 64, 4, 3, None), (256, 64, 16, 3, 128), (128, 32, 8, 3, None),
                (128, 128, 8, 3, None), (128, 32, 4, 3, 128), (64, 128, 4, 3, None), (128, 128, 4, 3, None),
            ]
        ]  # fmt: skip
        times = {}
        for shape in shapes:
            with contextlib.suppress(Exception):  # a shape may exceed registers or shared memory
                if torch.equal(kernels.find_nearest(x, codebook, shape=shape), exact):
                    times[str(shape)] = median_device_ms(
                        lambda shape=shape: kernels.find_nearest(x, codebook, shape=shape), 5
                    )
        row["tuned"] = dict(sorted(times.items(), key=lambda item: item[1]))
    return row


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tune", action="store_true", help="measure other tile shapes of the search kernel")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    try:
        import vector_quantize_pytorch as library
    except ImportError:
        library = None
        print("vector-quantize-pytorch is not installed: without the comparison")
    figures: dict[str, Any] = {"device": DEVICE}

    def save(name: str, row: dict[str, Any]) -> None:
        figures[name] = row
        print(f"{name:32}", round_figures(row), flush=True)
        write_record(arguments.out, figures, MEASURED)

    if CUDA:
        save("search N=1048576 K=16384 D=32", measure_search(2**20, 16384, 32, arguments.tune))
        save("search N=1048576 K=16384 D=8", measure_search(2**20, 16384, 8, False))
        save("search N=262144 K=8192 D=256", measure_search(2**18, 8192, 256, arguments.tune))
    N, repeats = (65536, 10) if CUDA else (8192, 3)
    if library is not None:
        for metric in ("euclid", "cosine"):
            save(f"vq {metric} N={N} K=8192 D=32", compare_vq(library, N, 8192, 32, metric, repeats))
        save(f"fsq 8·8·8·5·5·5 N={16 * N}", compare_fsq(library, 16 * N, repeats))
        for group in (1, 12):
            save(f"lfq 12 bits, group {group} N={N}", compare_lfq(library, N, 12, group, repeats))
    save(f"bsq 28 bits N={16 * N}", measure_bsq(16 * N, repeats))
    for bits in (10, 14, 16, 18, 28, 63):
        save(f"packing {bits} bits", measure_packing(2**22, bits, 5))


def round_figures(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: round_figures(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
