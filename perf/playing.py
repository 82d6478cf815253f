"""Frames a second of the worlds of recipes, as `vitrail play` draws them for one player on a CPU.

    python perf/playing.py --out results.json                     # both recipes
    python perf/playing.py --out results.json --recipe genie-pocket --threads 2

Random weights, whose frames take as long; the memory is full; one thread unless told, as in `vitrail play`. A frame is
so many passes over its codes, one more that takes it into the memory, and the codec's decoder. `floor` is the time of
the matrix products alone at the rate of such products in the same run, and `times` how many floors a frame takes.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from record import record
from unified import product_rate, seconds

from vitrail import recipe
from vitrail.generate.rollout import Rolling, Rollout
from vitrail.generate.sampling import Sampling
from vitrail.models.genie import Genie
from vitrail.nn import cost

PASSES = (1, 2, 3)
FRAMES = 10  # timed together
MEASURED = (
    *(f"vitrail.generate.{name}" for name in ("masked", "rollout", "sampling")),
    "vitrail.models.genie",
    *(f"vitrail.nn.{name}" for name in ("attend", "attention", "block", "one_frame", "spacetime")),
)


@torch.no_grad()
def measured(model: Genie) -> dict[str, dict[str, float]]:
    h, w = model.config.codec.grid
    memory = model.config.dynamics.transformer.memory
    rates = [product_rate(net.blocks[0], h * w) for net in (model.dynamics.transformer, model.codec.decoder)]
    once = cost.flops(model, model.work(1, past=memory - 1)) / rates[0]
    shown = cost.flops(model.codec.decoder, model.codec.decoder.work(1, past=memory - 1)) / rates[1]
    found = {}
    for passes in PASSES:
        world = Rollout(model, Rolling(steps=passes, sampling=Sampling(temperature=0.5)))
        world.start(torch.randint(0, 256, (1, 3, *model.codec.size), dtype=torch.uint8), seed=0)
        for _ in range(memory):
            world.step(torch.zeros(1, dtype=torch.long))

        def play(world: Rollout = world) -> None:
            for action in range(FRAMES):
                world.step(torch.tensor([action % model.actions]))

        spent, floor = seconds(play, 5) / FRAMES, (passes + 1) * once + shown
        found[f"{passes} passes"] = {
            "fps": 1 / spent,
            "ms": 1e3 * spent,
            "floor_ms": 1e3 * floor,
            "times": spent / floor,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", nargs="*", default=["genie-pocket", "genie-coinrun"])
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    figures: dict[str, Any] = {}
    for name in arguments.recipe:
        torch.manual_seed(0)
        config: Any = recipe.read(name).model_config()
        model = Genie(config).eval()
        parts = {part: sum(p.numel() for p in getattr(model, part).parameters()) for part in ("codec", "dynamics")}
        grid = config.codec.grid
        figures[name] = {"parameters": parts, "codes": grid[0] * grid[1], **measured(model)}
        for key, row in figures[name].items():
            print(f"{name:24}{key:12}", row)
    record(arguments.out, figures, *MEASURED)


if __name__ == "__main__":
    main()
