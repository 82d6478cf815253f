"""A unified model at work: an answer, a drawing, there and back through the codec, against what the arithmetic takes.

    python perf/unified.py --out results.json                # on a CUDA device where there is one, else on the CPU
    python perf/unified.py --out results.json --dtype float32
    python perf/unified.py --out results.json --recipe mini model.config.order=raster

The model is a recipe's, with random weights, in the type that a `Studio` would choose here, or in another. `floor` is
the time that its matrix products would take at the rate of the products themselves, each as large as in the model,
measured in the same run; `times` is how many floors a call takes. Answers are cut at 24 tokens, and drawings are
guided, so that they take two rows.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import record

from vitrail import recipe
from vitrail.generate.answers import Reading
from vitrail.generate.masked import settles
from vitrail.generate.pictures import Drawing, draw
from vitrail.generate.sampling import Sampling
from vitrail.models.unified import Unified
from vitrail.nn import Work, cost
from vitrail.talker import home

CUDA = torch.cuda.is_available()
DEVICE, USUAL = home(None, half=True)
PROMPT, ANSWER, STEPS = 12, 24, Drawing().steps
MEASURED = (
    "vitrail.generate.answers",
    "vitrail.generate.pictures",
    "vitrail.models.unified",
    "vitrail.nn.attention",
    "vitrail.nn.block",
)


def seconds(call: Callable[[], object], repeats: int = 3) -> float:
    """The median of some calls after one that does not count."""
    times = []
    for i in range(repeats + 1):
        if CUDA:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if CUDA:
            torch.cuda.synchronize()
        if i:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def product_rate(block: torch.nn.Module, tokens: int) -> float:
    """Operations a second of products of so many tokens with a block's own matrices."""
    weights = [p.detach() for p in block.parameters() if p.ndim == 2]
    inputs = [torch.randn(tokens, w.shape[1], device=DEVICE, dtype=w.dtype) for w in weights]
    repeats = 20

    def call() -> None:
        for _ in range(repeats):
            for x, w in zip(inputs, weights, strict=True):
                torch.nn.functional.linear(x, w)

    return 2 * repeats * tokens * sum(w.numel() for w in weights) / seconds(call)


@torch.no_grad()
def measured(model: Unified) -> dict[str, dict[str, float]]:
    (h, w), N = model.grid, model.grid[0] * model.grid[1]
    prompts = torch.randint(0, model.config.decoder.vocab, (1, PROMPT), device=DEVICE)
    counts = torch.tensor([PROMPT], device=DEVICE)
    pixels = (
        torch.rand(1, 3, h * model.codec.factor, w * model.codec.factor, device=DEVICE, dtype=model.code.weight.dtype)
        * 2
        - 1
    )
    seen, ids = model.look(pixels)

    def answer() -> None:
        steps = Reading(model, seen, 1)
        token = steps.prefill(prompts, counts).argmax(-1)
        for _ in range(ANSWER - 1):
            token = steps.step(token).argmax(-1)

    raster = model.config.order == "raster"
    # In raster order and while an answer is written, one token a pass is read; otherwise the whole sequence.
    block = model.decoder.blocks[0]
    one, whole = product_rate(block, 2), product_rate(block, 2 * (PROMPT + 1 + N))
    made = sum(settles(torch.tensor([N]), STEPS))  # of the passes asked for, those that settle a code
    passes = [Work.causal(PROMPT + 1 + N, 2)] if raster else [Work.full(PROMPT + 1 + N, 2)] * made
    reading = cost.flops(model, Work.prefill(1 + N + PROMPT)), cost.flops(model, Work.causal(ANSWER - 1))
    floors = {
        "answer": reading[0] / whole + reading[1] / one,
        "drawing": sum(cost.flops(model, work) for work in passes) / (one if raster else whole),
    }
    calls = {
        "answer": answer,
        "drawing": lambda: draw(model, prompts, counts, Drawing(steps=STEPS, sampling=Sampling(seed=0))),
    }
    found: dict[str, dict[str, float]] = {}
    for name, call in calls.items():
        spent = seconds(call)
        found[name] = {"seconds": spent, "floor": floors[name], "times": spent / floors[name]}
    there, back = seconds(lambda: model.look(pixels)), seconds(lambda: model.pixels(ids))
    return found | {"look": {"seconds": there}, "decode": {"seconds": back}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default="mini")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default=str(USUAL).removeprefix("torch."))
    parser.add_argument("changes", nargs="*", help="of the recipe, as key=value")
    arguments = parser.parse_args()
    chosen = recipe.read(arguments.recipe, dict(change.split("=", 1) for change in arguments.changes))
    torch.manual_seed(0)
    config: Any = chosen.model_config()
    model = Unified(config).to(DEVICE, getattr(torch, arguments.dtype)).eval()
    figures = {
        "recipe": arguments.recipe,
        "order": config.order,
        "dtype": arguments.dtype,
        "passes": STEPS,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": model.grid[0] * model.grid[1],
        **measured(model),
    }
    for name, row in figures.items():
        print(f"{name:12}", row if not isinstance(row, dict) else {key: round(value, 4) for key, value in row.items()})
    record(arguments.out, figures, *MEASURED)


if __name__ == "__main__":
    main()
