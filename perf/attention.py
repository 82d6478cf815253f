"""Attention with an attention plan: the chosen backend against a dense mask.

    python perf/attention.py            # on the CPU
    python perf/attention.py --cuda     # on a CUDA device

Forward + backward. Reference: torch's scaled_dot_product_attention with a dense mask, which is what packed batches get
in transformers. Lower bound: the products of visible query–key pairs at the matrix rate of an H200. On a CPU only the
ratios are meaningful.
"""

import torch
from record import make_parser, write_record
from timing import H200_MATRIX_RATE, measure_peak_mib, median_ms

from vitrail.nn import AttentionPlan, Workload, attention_plan, compute_attention
from vitrail.nn.attention_backends import choose_backend

MEASURED = ("vitrail.nn.attention_backends", "vitrail.nn.attention_plans")


def make_cases(scale: int) -> dict[str, tuple[AttentionPlan, tuple[int, int, int, int]]]:
    """Return name → plan, (tokens, heads, key/value heads, head width)."""
    generator = torch.Generator().manual_seed(0)
    image_lengths = torch.randint(100, 400, (4 * scale,), generator=generator)
    images = torch.arange(len(image_lengths)).repeat_interleave(image_lengths)[None]
    lengths = torch.randint(100, 600, (4 * scale,), generator=generator)
    text = torch.arange(len(lengths)).repeat_interleave(lengths)[None]
    spans = torch.cat([(torch.arange(n) * 2 // n == 0).long() * (i + 1) for i, n in enumerate(lengths.tolist())])[None]
    one = torch.zeros(1, 1024 * scale, dtype=torch.long)
    alternating = torch.arange(1024 * scale)[None] // 64 * (torch.arange(1024 * scale)[None] // 64 % 2)
    return {
        "packed images (ViT)": (attention_plan(images), (images.shape[1], 12, 12, 64)),
        "packed text": (attention_plan(text, causal=True), (text.shape[1], 32, 8, 64)),
        "packed text with images": (attention_plan(text, spans, causal=True), (text.shape[1], 32, 8, 64)),
        "one stream with images, window": (
            attention_plan(one, alternating, causal=True, window=(64 * scale, -1)),
            (one.shape[1], 32, 8, 64),
        ),
    }


def measure_case(plan: AttentionPlan, shape: tuple[int, int, int, int], cuda: bool) -> dict[str, float | int | str]:
    tokens, heads, kv_heads, head_dim = shape
    pairs = Workload.from_plan(plan, tokens).attention_pairs
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    plan = plan.to(device)
    q, k, v = (
        torch.randn(1, tokens, h, head_dim, device=device, dtype=dtype, requires_grad=True)
        for h in (heads, kv_heads, kv_heads)
    )
    chosen = choose_backend(q, k, plan)
    row: dict[str, float | int | str] = {"tokens": tokens, "pairs": pairs, "route": chosen}
    milliseconds = {}
    for label, backend in (("ours", chosen), ("dense", "sdpa")):

        def run(backend: str = backend) -> None:
            torch.autograd.grad(compute_attention(q, k, v, plan, backend).sum(), (q, k, v))

        row[f"{label}_ms"] = milliseconds[label] = median_ms(run, 11 if cuda else 5, warmup=2)
        if cuda:
            row[f"{label}_mib"] = measure_peak_mib(run)
    if cuda:  # two products forward, five backward
        row["floor_ms"] = 1000 * 3.5 * 4 * pairs * heads * head_dim / H200_MATRIX_RATE
    return row | {"speedup": milliseconds["dense"] / milliseconds["ours"]}


def main() -> None:
    parser = make_parser(__doc__, require_out=False)
    parser.add_argument("--cuda", action="store_true", help="measure on a CUDA device")
    arguments = parser.parse_args()
    rows = {}
    for name, (plan, shape) in make_cases(scale=16 if arguments.cuda else 1).items():
        rows[name] = measure_case(plan, shape, arguments.cuda)
        print(f"{name:34}", *(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[name].items()))
    write_record(arguments.out, rows, MEASURED)


if __name__ == "__main__":
    main()
