"""An answer, a drawing, and encoding and decoding of an image by a unified model, against its matrix products.

    python perf/unified.py --out results.json                # on a CUDA device if there is one, else on the CPU
    python perf/unified.py --out results.json --dtype float32
    python perf/unified.py --out results.json --recipe mini model.config.generation_order=raster

The model is built from a recipe with random weights. The default dtype is that of a `UnifiedPipeline` on this machine.
`floor` is the time of the matrix products alone, at the rate of products of the same shapes in the same run. `times` is
the time of a call over this lower bound. Answers have 24 tokens. Drawings use guidance, so they have two rows.
"""

from typing import Any

import torch
from record import make_parser, write_record
from timing import measure_block_rate, median_seconds

from vitrail import recipe
from vitrail.generate.image_generation import ImageGenerationConfig, generate_images
from vitrail.generate.masked_decoding import find_active_passes
from vitrail.generate.sampling import SamplingConfig
from vitrail.generate.unified_generation import UnifiedStepper
from vitrail.models.unified_model import UnifiedModel
from vitrail.nn import Workload, cost
from vitrail.pipelines import select_device

DEVICE, DEFAULT_DTYPE = select_device(None, prefer_half=True)
PROMPT_LENGTH, ANSWER_LENGTH, STEPS = 12, 24, ImageGenerationConfig().steps
MEASURED = (
    "vitrail.generate.unified_generation",
    "vitrail.generate.image_generation",
    "vitrail.models.unified_model",
    "vitrail.nn.attention",
    "vitrail.nn.block",
)


@torch.no_grad()
def measure_calls(model: UnifiedModel) -> dict[str, dict[str, float]]:
    (h, w), N = model.grid, model.grid[0] * model.grid[1]
    prompts = torch.randint(0, model.config.decoder.vocab_size, (1, PROMPT_LENGTH), device=DEVICE)
    counts = torch.tensor([PROMPT_LENGTH], device=DEVICE)
    size = [side * model.codec.downsample_factor for side in (h, w)]
    pixels = torch.rand(1, 3, *size, device=DEVICE, dtype=model.code_proj.weight.dtype) * 2 - 1
    features, ids = model.encode_images(pixels)

    def answer() -> None:
        stepper = UnifiedStepper(model, features, 1)
        token = stepper.prefill(prompts, counts).argmax(-1)
        for _ in range(ANSWER_LENGTH - 1):
            token = stepper.step(token).argmax(-1)

    raster = model.config.generation_order == "raster"
    # A pass has one token in raster order and in answers, else the whole sequence.
    block = model.decoder.blocks[0]
    token_rate, sequence_rate = measure_block_rate(block, 2), measure_block_rate(block, 2 * (PROMPT_LENGTH + 1 + N))
    num_passes = sum(find_active_passes(torch.tensor([N]), STEPS))  # passes that decode at least one code
    passes = (
        [Workload.causal_attention(PROMPT_LENGTH + 1 + N, 2)]
        if raster
        else [Workload.full_attention(PROMPT_LENGTH + 1 + N, 2)] * num_passes
    )
    answer_flops = (
        cost.count_flops(model, Workload.prefill(1 + N + PROMPT_LENGTH)),
        cost.count_flops(model, Workload.causal_attention(ANSWER_LENGTH - 1)),
    )
    floors = {
        "answer": answer_flops[0] / sequence_rate + answer_flops[1] / token_rate,
        "drawing": sum(cost.count_flops(model, work) for work in passes) / (token_rate if raster else sequence_rate),
    }
    calls = {
        "answer": answer,
        "drawing": lambda: generate_images(
            model, prompts, counts, ImageGenerationConfig(steps=STEPS, sampling=SamplingConfig(seed=0))
        ),
    }
    figures: dict[str, dict[str, float]] = {}
    for name, call in calls.items():
        seconds = median_seconds(call, 3)
        figures[name] = {"seconds": seconds, "floor": floors[name], "times": seconds / floors[name]}
    figures["look"] = {"seconds": median_seconds(lambda: model.encode_images(pixels), 3)}
    figures["decode"] = {"seconds": median_seconds(lambda: model.decode_pixels(ids), 3)}
    return figures


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--recipe", default="mini")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default=str(DEFAULT_DTYPE).removeprefix("torch."))
    parser.add_argument("changes", nargs="*", help="changes to the recipe, as KEY=VALUE")
    arguments = parser.parse_args()
    loaded = recipe.load_recipe(arguments.recipe, dict(change.split("=", 1) for change in arguments.changes))
    torch.manual_seed(0)
    config: Any = loaded.build_model_config()
    model = UnifiedModel(config).to(DEVICE, getattr(torch, arguments.dtype)).eval()
    figures = {
        "recipe": arguments.recipe,
        "order": config.generation_order,
        "dtype": arguments.dtype,
        "passes": STEPS,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": model.grid[0] * model.grid[1],
        **measure_calls(model),
    }
    for name, row in figures.items():
        print(f"{name:12}", row if not isinstance(row, dict) else {key: round(value, 4) for key, value in row.items()})
    write_record(arguments.out, figures, MEASURED)


if __name__ == "__main__":
    main()
