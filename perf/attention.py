"""Attention under a plan: our routes against the dense mask everybody starts with.

    python perf/attention.py            # the CPU at hand
    python perf/attention.py --cuda     # one CUDA device

Forward + backward. Peer: torch's scaled_dot_product_attention with the dense mask, which is what packed batches get in
transformers. Floor: the pairs that see each other, at the device's matrix rate. Ratios are of one run; absolute times
mean something on a GPU only.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from record import record

from vitrail.nn import Plan, Work, attend, attention_plan
from vitrail.nn.attend import choose_route

MATRIX_RATE = 790e12  # bf16 operations a second: an 8192³ product on an H200


def median_ms(call: Callable[[], None], cuda: bool) -> float:
    times = []
    for i in range(13 if cuda else 7):
        start = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize()
        if i >= 2:
            times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def cases(scale: int) -> dict[str, tuple[Plan, tuple[int, int, int, int]]]:
    """name → plan, (tokens, heads, key/value heads, head width)"""
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(100, 400, (4 * scale,), generator=generator)
    tower = torch.arange(len(pictures)).repeat_interleave(pictures)[None]
    samples = torch.randint(100, 600, (4 * scale,), generator=generator)
    text = torch.arange(len(samples)).repeat_interleave(samples)[None]
    spans = torch.cat([(torch.arange(n) * 2 // n == 0).long() * (i + 1) for i, n in enumerate(samples.tolist())])[None]
    one = torch.zeros(1, 1024 * scale, dtype=torch.long)
    alternating = torch.arange(1024 * scale)[None] // 64 * (torch.arange(1024 * scale)[None] // 64 % 2)
    return {
        "packed pictures (ViT)": (attention_plan(tower), (tower.shape[1], 12, 12, 64)),
        "packed text": (attention_plan(text, causal=True), (text.shape[1], 32, 8, 64)),
        "packed text with pictures": (attention_plan(text, spans, causal=True), (text.shape[1], 32, 8, 64)),
        "one stream with pictures, window": (
            attention_plan(one, alternating, causal=True, window=(64 * scale, -1)),
            (one.shape[1], 32, 8, 64),
        ),
    }


def measure(plan: Plan, shape: tuple[int, int, int, int], cuda: bool) -> dict[str, float | int | str]:
    tokens, heads, kv_heads, width = shape
    pairs = Work.planned(plan, tokens).pairs
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    plan = plan.to(device)
    q, k, v = (
        torch.randn(1, tokens, h, width, device=device, dtype=dtype, requires_grad=True)
        for h in (heads, kv_heads, kv_heads)
    )
    chosen = choose_route(q, k, plan)
    row: dict[str, float | int | str] = {"tokens": tokens, "pairs": pairs, "route": chosen}
    for label, route in (("ours", chosen), ("dense", "sdpa")):
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        row[f"{label}_ms"] = median_ms(
            lambda route=route: torch.autograd.grad(attend(q, k, v, plan, route).sum(), (q, k, v)), cuda
        )
        if cuda:
            row[f"{label}_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    if cuda:  # two products forward, five backward
        row["floor_ms"] = 1000 * 3.5 * 4 * pairs * heads * width / MATRIX_RATE
    return row | {"speedup": row["dense_ms"] / row["ours_ms"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()
    rows = {}
    for name, (plan, shape) in cases(scale=16 if arguments.cuda else 1).items():
        rows[name] = measure(plan, shape, arguments.cuda)
        print(f"{name:34}", *(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[name].items()))
    if arguments.out:
        record(arguments.out, rows, "vitrail.nn.attend", "vitrail.nn.plan")


if __name__ == "__main__":
    sys.exit(main())
