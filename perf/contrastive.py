"""CLIP's and SigLIP's losses on one H200: forward + backward, time and memory, against plain torch and the GEMM floor.

    python perf/contrastive.py --out results.json       # needs a CUDA device

bf16 inputs, normalised, unrelated, at CLIP's and SigLIP's first scale and bias. Peer: the losses as they are usually
written, with bf16 logits, the softmax in float32, all at once; left out where it does not fit. Floor: the products
that must be (4 for CLIP, 3 for SigLIP) at the rate of an 8192³ product in the same run. Memory is the peak above the
inputs. `errors` are |Δ| / |exact| of the gradients of some rows of u, some of v, the scale and the bias against float64
on the same bf16 inputs: as timed, and at scale 100 with pairs unrelated and aligned.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from record import record
from torch import Tensor

from vitrail.objectives import clip_loss, siglip_loss

SIZES = [(65536, 768), (16384, 768), (262144, 768), (65536, 512), (65536, 1024)]
START = {"clip": (1 / 0.07,), "siglip": (10.0, -10.0)}
HARD = {"clip": (100.0,), "siglip": (100.0, -10.0)}
OURS = {"clip": clip_loss, "siglip": siglip_loss}
PRODUCTS = {"clip": 4, "siglip": 3}
MEASURED = (
    "vitrail.nn.kernels.contrastive",
    "vitrail.objectives.contrastive",
    "vitrail.objectives.sweep",
    "vitrail.objectives.tiles",
    "vitrail.objectives.whole",
)
SOME = 256  # rows and columns whose gradients are compared


def usual_clip(u: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    logits = (scale * u @ v.T).float()
    targets = torch.arange(len(u), device=u.device)
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


def usual_siglip(u: Tensor, v: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    logits = scale * u @ v.T + bias
    labels = 2 * torch.eye(len(u), device=u.device, dtype=logits.dtype) - 1
    return -F.logsigmoid(labels * logits).sum() / len(u)


USUAL = {"clip": usual_clip, "siglip": usual_siglip}


def ms(call: Callable[[], object], repeats: int) -> float:
    times = []
    for i in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def matrix_rate() -> float:
    """Operations a second of an 8192³ product in bf16."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / ms(lambda: a @ a, 10) * 1000


def inputs(N: int, D: int, numbers: tuple[float, ...], aligned: float = 0.0) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    u, v = (F.normalize(torch.randn(N, D, device="cuda", generator=generator), dim=1) for _ in range(2))
    if aligned:
        v = F.normalize(v + aligned * u, dim=1)
    leaves = [u.bfloat16(), v.bfloat16(), *(torch.tensor(x, device="cuda") for x in numbers)]
    return [x.requires_grad_() for x in leaves]


def measure(loss: Callable[..., Tensor], given: list[Tensor], repeats: int) -> tuple[float, float]:
    """Milliseconds of forward + backward, and MiB above the inputs."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    time = ms(lambda: torch.autograd.grad(loss(*given), given), repeats)
    return time, (torch.cuda.max_memory_allocated() - before) / 2**20


@torch.no_grad()
def exact(name: str, given: list[Tensor], rows: Tensor) -> list[Tensor]:
    """In float64, a strip of logits at a time: the loss; gradients of `rows` of u and v, of the scale and the bias."""
    u, v, scale, *bias = (x.detach().double() for x in given)
    N, strip = len(u), 2048
    value, d_scale, d_bias = (torch.zeros((), dtype=torch.float64, device="cuda") for _ in range(3))
    own = scale * (u * v).sum(1)
    if name == "clip":
        row_lse, column_lse = torch.empty_like(own), torch.full_like(own, -torch.inf)
        for i in range(0, N, strip):
            x = scale * u[i : i + strip] @ v.T
            row_lse[i : i + strip] = x.logsumexp(1)
            column_lse = torch.logaddexp(column_lse, x.logsumexp(0))
        value = ((row_lse + column_lse) / 2 - own).mean()

    def slopes(x: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """dloss/dlogit of rows i and columns j"""
        positive = i[:, None] == j
        if name == "siglip":
            return torch.where(positive, -torch.sigmoid(-x), torch.sigmoid(x)) / N
        p = (x - row_lse[i, None]).exp() + (x - column_lse[j]).exp()
        return (p - 2.0 * positive) / 2 / N

    every = torch.arange(N, device="cuda")
    for i in every.split(strip):
        z = u[i] @ v.T
        x = scale * z + (bias[0] if bias else 0)
        G = slopes(x, i, every)
        d_scale += (G * z).sum()
        d_bias += G.sum()
        if name == "siglip":
            value += F.softplus(torch.where(i[:, None] == every, -x, x), threshold=1e9).sum() / N
    shift = bias[0] if bias else 0
    d_u = scale * slopes(scale * u[rows] @ v.T + shift, rows, every) @ v
    d_v = scale * slopes(scale * u @ v[rows].T + shift, every, rows).T @ u
    return [value, d_u, d_v, d_scale, *([d_bias] if bias else [])]


def errors(name: str, given: list[Tensor]) -> dict[str, float]:
    rows = torch.arange(0, len(given[0]), len(given[0]) // SOME, device="cuda")
    wanted = exact(name, given, rows)
    value = OURS[name](*given)
    u, v, *numbers = torch.autograd.grad(value, given)
    ours = [value, u[rows], v[rows], *numbers]
    names = ("loss", "u", "v", "scale", "bias")
    return {
        label: ((a.double() - b).norm() / b.norm()).item() for label, a, b in zip(names, ours, wanted, strict=False)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="only the first so many")
    arguments = parser.parse_args()
    rate = matrix_rate()
    figures: dict[str, object] = {"matrix_rate": rate}
    for N, D in SIZES[: arguments.sizes]:
        for name in OURS:
            row: dict[str, object] = {"floor_ms": 1000 * PRODUCTS[name] * 2 * N * N * D / rate}
            row["ms"], row["mib"] = measure(OURS[name], inputs(N, D, START[name]), 3 if N > 65536 else 10)
            if N <= 65536 and D == 768:
                row["usual_ms"], row["usual_mib"] = measure(USUAL[name], inputs(N, D, START[name]), 3)
                row["speedup"] = row["usual_ms"] / row["ms"]
                row["errors"] = {
                    "start": errors(name, inputs(N, D, START[name])),
                    "scale 100, unrelated": errors(name, inputs(N, D, HARD[name])),
                    "scale 100, aligned": errors(name, inputs(N, D, HARD[name], aligned=0.3)),
                }
            figures[f"{name} N={N} D={D}"] = row
            print(
                f"{name:6} {N:6} {D:4}",
                {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()},
                flush=True,
            )
            record(arguments.out, figures, *MEASURED)


if __name__ == "__main__":
    main()
