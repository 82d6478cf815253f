"""Frames per second of small world models for one player on a CPU, as in `vitrail play`.

    python perf/playing.py --out results.json                     # both recipes
    python perf/playing.py --out results.json --recipe genie-pocket --threads 2

Random weights, full context, and one thread by default, as in `vitrail play`. A frame takes 1 to 3 decoding passes over
its codes, one pass that adds it to the cache, and the codec's decoder. `floor_ms` is the time of the matrix products
alone, at their rate in the same run. `times` is the time of a frame over this lower bound.
"""

from typing import Any

import torch
from record import make_parser, write_record
from timing import measure_block_rate, median_seconds

from vitrail import recipe
from vitrail.generate.rollout import Rollout, RolloutConfig
from vitrail.generate.sampling import SamplingConfig
from vitrail.models.genie_model import Genie
from vitrail.nn import cost

PASSES = (1, 2, 3)
FRAMES = 10  # of one timed call
MEASURED = (
    *("vitrail.generate.masked_decoding", "vitrail.generate.rollout", "vitrail.generate.sampling"),
    "vitrail.models.genie_model",
    *("vitrail.nn.attention_backends", "vitrail.nn.attention", "vitrail.nn.block"),
    *("vitrail.nn.single_frame", "vitrail.nn.spacetime_transformer"),
)


@torch.no_grad()
def measure_frames(model: Genie) -> dict[str, dict[str, float]]:
    h, w = model.config.codec.grid
    context = model.config.dynamics.transformer.context_frames
    decoder = model.codec.decoder
    rates = [measure_block_rate(net.blocks[0], h * w) for net in (model.dynamics.transformer, decoder)]
    pass_s = cost.count_flops(model, model.workload(1, num_past_frames=context - 1)) / rates[0]
    decoder_s = cost.count_flops(decoder, decoder.workload(1, past_frames=context - 1)) / rates[1]
    figures = {}
    for passes in PASSES:
        rollout = Rollout(model, RolloutConfig(steps=passes, sampling=SamplingConfig(temperature=0.5)))
        rollout.start(torch.randint(0, 256, (1, 3, *model.codec.image_size), dtype=torch.uint8), seed=0)
        for _ in range(context):
            rollout.step(torch.zeros(1, dtype=torch.long))

        def generate_frames(rollout: Rollout = rollout) -> None:
            for action in range(FRAMES):
                rollout.step(torch.tensor([action % model.num_actions]))

        seconds, floor = median_seconds(generate_frames, 5) / FRAMES, (passes + 1) * pass_s + decoder_s
        figures[f"{passes} passes"] = {
            "fps": 1 / seconds,
            "ms": 1e3 * seconds,
            "floor_ms": 1e3 * floor,
            "times": seconds / floor,
        }
    return figures


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--recipe", nargs="*", default=["genie-pocket", "genie-coinrun"])
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    figures: dict[str, Any] = {}
    for name in arguments.recipe:
        torch.manual_seed(0)
        config: Any = recipe.load_recipe(name).build_model_config()
        model = Genie(config).eval()
        parts = {part: sum(p.numel() for p in getattr(model, part).parameters()) for part in ("codec", "dynamics")}
        grid = config.codec.grid
        figures[name] = {"parameters": parts, "codes": grid[0] * grid[1], **measure_frames(model)}
        for key, row in figures[name].items():
            print(f"{name:24}{key:12}", row)
    write_record(arguments.out, figures, MEASURED)


if __name__ == "__main__":
    main()
