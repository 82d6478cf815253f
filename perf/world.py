"""Frames per second of a world model for one player: Genie's published 11B shape, and a dynamics model of 1B.

    python perf/world.py --out results.json           # needs a CUDA device
    python perf/world.py --out results.json --tiny    # the same script with tiny models, on the CPU

Frames of 160 × 90 are padded to 160 × 92: 23 × 40 codes with a codebook of 1024, and a full context of 16 frames. A
frame takes 25 or 12 MaskGIT passes, one pass that adds it to the cache, and the codec's decoder. bf16, random weights,
batch size 1. The widths of MLPs are not published: 2,048 in the dynamics gives the published 10.1B (`vitrail ledger`),
and 0.4 of the width in the codec gives the published 200M.

`floor` is the lower bound: each pass takes the time of its products at the matrix rate of an H200 or of its bytes at
the copy bandwidth of the same run, whichever is longer. `recomputed` is a frame without a cache: one pass over all 16
frames is timed, and multiplied by the passes. If the cached logits differ from that pass, nothing is timed. Figures are
written after each measurement. `--seconds` limits the time of a shape: no further method starts after it.
"""

import gc
import json
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from record import make_parser, write_record
from timing import CUDA, DEVICE, H200_MATRIX_RATE, describe_error, limit_time, measure_bandwidth, median_ms

from vitrail.codecs.quantizers import VQConfig
from vitrail.codecs.video_codec import VideoCodecConfig
from vitrail.generate.cuda_graph_rollout import CUDAGraphRollout
from vitrail.generate.rollout import Rollout, RolloutConfig
from vitrail.models.genie_model import Genie, GenieConfig, GenieDynamicsConfig
from vitrail.nn import AttentionConfig, BlockConfig, PlainMLPConfig, SpaceTimeConfig, cost

MEASURED = (
    *("vitrail.generate.cuda_graph_rollout", "vitrail.generate.masked_decoding"),
    *("vitrail.generate.rollout", "vitrail.generate.sampling", "vitrail.models.genie_model"),
    *("vitrail.nn.attention_backends", "vitrail.nn.attention"),
    *("vitrail.nn.block", "vitrail.nn.spacetime_transformer"),
)
TOLERANCE = 0.1 if CUDA else 1e-4  # relative difference of logits
METHOD_SECONDS = 150.0  # time limit of one method


class NetShape(NamedTuple):
    layers: int
    width: int
    heads: int
    intermediate_size: int
    head_dim: int | None = None

    def build_config(self, context: int) -> SpaceTimeConfig:
        attention = AttentionConfig(heads=self.heads, head_dim=self.head_dim, qk_norm="rms")
        mlp = PlainMLPConfig(intermediate_size=self.intermediate_size, bias=False)
        block = BlockConfig(width=self.width, attention=attention, mlp=mlp)
        return SpaceTimeConfig(layers=self.layers, block=block, context_frames=context)


class ModelShape(NamedTuple):
    dynamics: NetShape
    encoder: NetShape = NetShape(12, 512, 8, 205)
    decoder: NetShape = NetShape(20, 1024, 16, 410)
    frame: tuple[int, int] = (92, 160)
    context: int = 16
    steps: tuple[int, ...] = (25, 12)

    def build_config(self) -> GenieConfig:
        encoder, decoder, dynamics = (
            net.build_config(self.context) for net in (self.encoder, self.decoder, self.dynamics)
        )
        quantizer = VQConfig(codebook_size=1024, dim=32)
        codec = VideoCodecConfig(
            image_size=self.frame, patch_size=4, encoder=encoder, decoder=decoder, quantizer=quantizer
        )
        return GenieConfig(codec=codec, dynamics=GenieDynamicsConfig(transformer=dynamics), num_controls=8)


SHAPES = {
    "1b": ModelShape(NetShape(24, 2048, 16, 2048)),
    "11b": ModelShape(NetShape(48, 5120, 36, 2048, 128)),
}
TINY_NET = NetShape(2, 32, 2, 48)
TINY_SHAPE = ModelShape(TINY_NET, TINY_NET, TINY_NET, (8, 12), 4, (3, 2))

METHODS: dict[str, Any] = {"cached": Rollout}
if CUDA:
    METHODS["captured"] = CUDAGraphRollout
    METHODS["captured, compiled"] = lambda model, config: CUDAGraphRollout(model, config, use_compile=True)


SaveFunction = Callable[[dict[str, Any]], object]


def build_model(shape: ModelShape) -> Genie:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = Genie(shape.build_config()).eval().requires_grad_(False)
    return model.bfloat16() if CUDA else model


def make_random_video(shape: ModelShape, frames: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a video and its actions."""
    video = torch.randint(0, 256, (1, frames, 3, *shape.frame), dtype=torch.uint8)
    return video, torch.randint(0, 8, (1, frames - 1))


def encode_video(model: Genie, video: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the code ids of the frames, and the action before each frame."""
    ids = model.encode_frames(model.codec.to_pixels(video))
    return ids, model.dynamics.shift_actions(actions.to(model.codec.device))


@torch.no_grad()
def compare_cached_logits(model: Genie, shape: ModelShape) -> float:
    """Return the relative difference of the logits of a masked frame with a full cache to a pass over all frames."""
    video, actions = make_random_video(shape, shape.context - 1)
    rollout = Rollout(model)
    rollout.start(video, actions, seed=0)
    ids, shifted_actions = encode_video(model, video, actions)
    frame, action = torch.zeros_like(ids[:, :1]), torch.ones_like(shifted_actions[:, :1])
    mask = torch.ones_like(frame, dtype=torch.bool)
    cached = model.dynamics(frame, action, mask, rollout.dynamics_cache).float()
    masks = torch.cat([torch.zeros_like(ids, dtype=torch.bool), mask], 1)
    full = model.dynamics(torch.cat([ids, frame], 1), torch.cat([shifted_actions, action], 1), masks)[:, -1:].float()
    return ((cached - full).norm() / full.norm()).item()


def compute_floors(model: Genie, shape: ModelShape, bandwidth: float) -> dict[str, float]:
    """Return the lower bounds of a pass, of the codec's decoder and of a frame in milliseconds."""

    def compute_floor(module: torch.nn.Module, workload: Any) -> float:
        flops, read = cost.count_flops(module, workload), cost.count_bytes(module, workload).read
        return 1000 * max(flops / H200_MATRIX_RATE, read / bandwidth)

    past, decoder = shape.context - 1, model.codec.decoder
    pass_ms = compute_floor(model.dynamics, model.workload(1, num_past_frames=past))
    decoder_ms = compute_floor(decoder, decoder.workload(1, past_frames=past))
    frames = {f"{steps} steps_ms": (steps + 1) * pass_ms + decoder_ms for steps in shape.steps}
    return {"pass_ms": pass_ms, "pixels_ms": decoder_ms} | frames


def time_frame(method: Any, model: Genie, shape: ModelShape, steps: int) -> float:
    """Return the milliseconds of a frame with a full cache."""
    rollout, action = method(model, RolloutConfig(steps=steps)), torch.tensor([3])
    rollout.start(*make_random_video(shape, shape.context), seed=0)
    return median_ms(lambda: rollout.step(action), 5, warmup=2)


@torch.no_grad()
def time_full_pass(model: Genie, shape: ModelShape) -> float:
    """Return the milliseconds of a pass over all frames of the context."""
    ids, shifted_actions = encode_video(model, *make_random_video(shape, shape.context))
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, -1] = True
    dynamics = model.dynamics
    return median_ms(
        lambda: dynamics.code_embed.compute_logits(dynamics.forward_hidden(ids, shifted_actions, mask)[:, -1:]), 3
    )


def measure_model(
    shape: ModelShape,
    bandwidth: float,
    seconds: float = float("inf"),
    save: SaveFunction = lambda _: None,
    methods: Collection[str] | None = None,
) -> dict[str, Any]:
    """Return the figures of a model, and save them after each measurement."""
    end = time.perf_counter() + seconds
    model = build_model(shape)
    sizes = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    result: dict[str, Any] = {"parameters": sizes, "difference": compare_cached_logits(model, shape)}
    print(f"model: {json.dumps(result)}", flush=True)
    if not result["difference"] <= TOLERANCE:
        return result | {"error": f"cached logits differ by more than {TOLERANCE:g}, so nothing was timed"}
    floors, full_ms = compute_floors(model, shape, bandwidth), time_full_pass(model, shape)
    result |= {"floor": floors, "recomputed": {"pass_ms": full_ms}}
    result["frames"] = {
        f"{steps} steps": {"floor_fps": 1000 / floors[f"{steps} steps_ms"], "recomputed_fps": 1000 / (steps * full_ms)}
        for steps in shape.steps
    }
    for name in methods or METHODS:
        for steps in shape.steps:
            start = time.perf_counter()
            figures: Any = try_time_frame(METHODS[name], model, shape, steps, end - start)
            if isinstance(figures, float):
                figures = {
                    "frame_ms": figures,
                    "fps": 1000 / figures,
                    "share_of_floor": floors[f"{steps} steps_ms"] / figures,
                    "speedup_on_recomputing": steps * full_ms / figures,
                }
            result["frames"][f"{steps} steps"][name] = figures
            print(f"{steps} steps, {name}, {time.perf_counter() - start:.0f} s: {json.dumps(figures)}", flush=True)
            save(result)
            gc.collect()
    return result


def try_time_frame(method: Any, model: Genie, shape: ModelShape, steps: int, seconds: float) -> float | str:
    """Return the milliseconds of a frame, or the error."""
    if seconds < 1:
        return "no time was left"
    try:
        with limit_time(min(METHOD_SECONDS, seconds)):
            return time_frame(method, model, shape, steps)
    except Exception as error:  # the other methods are still measured
        return describe_error(error)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", choices=SHAPES, help="one of the shapes")
    parser.add_argument("--steps", type=int, nargs="+", help="passes of a frame, instead of 25 and 12")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="some of the methods, instead of all")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time limit of each shape")
    arguments = parser.parse_args()
    if not (CUDA or arguments.tiny):
        parser.error("no CUDA device: --tiny runs on the CPU")
    shapes = {"tiny": TINY_SHAPE} if arguments.tiny else SHAPES
    bandwidth = measure_bandwidth()
    result: dict[str, Any] = {"copy_bytes_per_s": bandwidth}
    for name, shape in shapes.items():
        if arguments.only not in (None, name):
            continue
        shape = shape._replace(steps=tuple(arguments.steps or shape.steps))

        def save(figures: dict[str, Any], name: str = name) -> None:
            result[name] = figures
            write_record(arguments.out, result, MEASURED)

        try:
            save(measure_model(shape, bandwidth, arguments.seconds, save, arguments.methods))
        except Exception as error:  # the other shape is still measured
            save(result.get(name, {}) | {"error": describe_error(error)})
        print(json.dumps({name: result[name]}, indent=1), flush=True)
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
