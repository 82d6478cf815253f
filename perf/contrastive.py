"""CLIP and SigLIP losses on a GPU, forward + backward: time and memory against plain torch.

    python perf/contrastive.py --out results.json       # needs a CUDA device

Inputs are bf16, normalized and unrelated, with the initial scale and bias of CLIP and SigLIP. Reference (`usual`): the
plain losses with all bf16 logits at once and the softmax in float32. It is left out where it does not fit into memory.
Lower bound: the required products (4 for CLIP, 3 for SigLIP) at the matrix rate of the same run. Memory is the peak
above the inputs. `errors` are |Δ| / |exact| of the loss and of gradients against float64 on the same bf16 inputs. The
gradients are those of SAMPLED_ROWS rows of u and of v, of the scale and of the bias. They are computed at the timed
scale, and at scale 100 with unrelated and aligned pairs.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from record import make_parser, write_record
from timing import measure_matrix_rate, measure_peak_mib, median_device_ms
from torch import Tensor

from vitrail.objectives import clip_loss, siglip_loss

SIZES = [(65536, 768), (16384, 768), (262144, 768), (65536, 512), (65536, 1024)]
INITIAL_SCALARS = {"clip": (1 / 0.07,), "siglip": (10.0, -10.0)}
LARGE_SCALARS = {"clip": (100.0,), "siglip": (100.0, -10.0)}
LOSSES = {"clip": clip_loss, "siglip": siglip_loss}
NUM_PRODUCTS = {"clip": 4, "siglip": 3}
MEASURED = (
    "vitrail.nn.kernels.contrastive_tiles_triton",
    "vitrail.objectives.contrastive_loss",
    "vitrail.objectives.tiled_contrastive",
    "vitrail.objectives.contrastive_tiles",
    "vitrail.objectives.contrastive_gradients",
)
SAMPLED_ROWS = 256


def plain_clip_loss(u: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    logits = (scale * u @ v.T).float()
    targets = torch.arange(len(u), device=u.device)
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


def plain_siglip_loss(u: Tensor, v: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    logits = scale * u @ v.T + bias
    labels = 2 * torch.eye(len(u), device=u.device, dtype=logits.dtype) - 1
    return -F.logsigmoid(labels * logits).sum() / len(u)


PLAIN_LOSSES = {"clip": plain_clip_loss, "siglip": plain_siglip_loss}


def make_inputs(N: int, D: int, scalars: tuple[float, ...], aligned: float = 0.0) -> list[Tensor]:
    """Make u, v, the scale and, for SigLIP, the bias. `aligned` adds so much of u to v."""
    generator = torch.Generator("cuda").manual_seed(0)
    u, v = (F.normalize(torch.randn(N, D, device="cuda", generator=generator), dim=1) for _ in range(2))
    if aligned:
        v = F.normalize(v + aligned * u, dim=1)
    leaves = [u.bfloat16(), v.bfloat16(), *(torch.tensor(x, device="cuda") for x in scalars)]
    return [x.requires_grad_() for x in leaves]


def measure_loss(loss: Callable[..., Tensor], inputs: list[Tensor], repeats: int) -> tuple[float, float]:
    """Return milliseconds of forward + backward, and MiB above the inputs."""

    def run() -> None:
        torch.autograd.grad(loss(*inputs), inputs)

    mib = measure_peak_mib(run)
    return median_device_ms(run, repeats), mib


@torch.no_grad()
def compute_exact(name: str, inputs: list[Tensor], rows: Tensor) -> list[Tensor]:
    """Compute in float64 the loss and the gradients of `rows` of u and v, of the scale and of the bias."""
    u, v, scale, *bias = (x.detach().double() for x in inputs)
    N, strip = len(u), 2048  # rows of logits at a time
    value, d_scale, d_bias = (torch.zeros((), dtype=torch.float64, device="cuda") for _ in range(3))
    positives = scale * (u * v).sum(1)
    if name == "clip":
        row_lse, column_lse = torch.empty_like(positives), torch.full_like(positives, -torch.inf)
        for i in range(0, N, strip):
            x = scale * u[i : i + strip] @ v.T
            row_lse[i : i + strip] = x.logsumexp(1)
            column_lse = torch.logaddexp(column_lse, x.logsumexp(0))
        value = ((row_lse + column_lse) / 2 - positives).mean()

    def differentiate_logits(x: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Return dloss/dlogit of rows i and columns j."""
        positive = i[:, None] == j
        if name == "siglip":
            return torch.where(positive, -torch.sigmoid(-x), torch.sigmoid(x)) / N
        p = (x - row_lse[i, None]).exp() + (x - column_lse[j]).exp()
        return (p - 2.0 * positive) / 2 / N

    columns = torch.arange(N, device="cuda")
    for i in columns.split(strip):
        z = u[i] @ v.T
        x = scale * z + (bias[0] if bias else 0)
        G = differentiate_logits(x, i, columns)
        d_scale += (G * z).sum()
        d_bias += G.sum()
        if name == "siglip":
            value += F.softplus(torch.where(i[:, None] == columns, -x, x), threshold=1e9).sum() / N
    shift = bias[0] if bias else 0
    d_u = scale * differentiate_logits(scale * u[rows] @ v.T + shift, rows, columns) @ v
    d_v = scale * differentiate_logits(scale * u @ v[rows].T + shift, columns, rows).T @ u
    return [value, d_u, d_v, d_scale, *([d_bias] if bias else [])]


def measure_errors(name: str, inputs: list[Tensor]) -> dict[str, float]:
    num_rows = len(inputs[0])
    rows = torch.arange(0, num_rows, num_rows // SAMPLED_ROWS, device="cuda")
    exact = compute_exact(name, inputs, rows)
    value = LOSSES[name](*inputs)
    u, v, *scalars = torch.autograd.grad(value, inputs)
    ours = [value, u[rows], v[rows], *scalars]
    names = ("loss", "u", "v", "scale", "bias")
    return {label: ((a.double() - b).norm() / b.norm()).item() for label, a, b in zip(names, ours, exact, strict=False)}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="measure only the first sizes")
    arguments = parser.parse_args()
    rate = measure_matrix_rate()
    figures: dict[str, object] = {"matrix_rate": rate}
    for N, D in SIZES[: arguments.sizes]:
        for name in LOSSES:
            row: dict[str, object] = {"floor_ms": 1000 * NUM_PRODUCTS[name] * 2 * N * N * D / rate}
            ms, row["mib"] = measure_loss(
                LOSSES[name], make_inputs(N, D, INITIAL_SCALARS[name]), 3 if N > 65536 else 10
            )
            row["ms"] = ms
            if N <= 65536 and D == 768:
                row["usual_ms"], row["usual_mib"] = usual = measure_loss(
                    PLAIN_LOSSES[name], make_inputs(N, D, INITIAL_SCALARS[name]), 3
                )
                row["speedup"] = usual[0] / ms
                row["errors"] = {
                    "start": measure_errors(name, make_inputs(N, D, INITIAL_SCALARS[name])),
                    "scale 100, unrelated": measure_errors(name, make_inputs(N, D, LARGE_SCALARS[name])),
                    "scale 100, aligned": measure_errors(name, make_inputs(N, D, LARGE_SCALARS[name], aligned=0.3)),
                }
            figures[f"{name} N={N} D={D}"] = row
            print(
                f"{name:6} {N:6} {D:4}",
                {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()},
                flush=True,
            )
            write_record(arguments.out, figures, MEASURED)


if __name__ == "__main__":
    main()
