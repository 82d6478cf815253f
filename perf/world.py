"""Frames a second of a world model, one player: Genie's published shape, 11B, and a dynamics of 1B.

    python perf/world.py --out results.json           # needs a CUDA device
    python perf/world.py --out results.json --tiny    # the same script with tiny models, on the CPU

Frames of 160 × 90, drawn as 160 × 92: 23 × 40 codes of 1024, 16 frames of memory, which is full. A frame is 25 or 12
passes of MaskGIT, one more that takes it into the memory, and the codec's decoder. bf16, random weights, batch 1. The
widths of MLPs were never told: 2,048 in the dynamics comes to the 10.1B that were (`vitrail ledger`), and 0.4 of the
width in the codec to its 200M.

`floor` is what the device allows: products at 790 TFLOP/s or bytes at the copy bandwidth of the same run, pass by pass,
whichever takes longer. `recomputed` is a frame without a cache: a pass over all 16 frames is timed, and taken `steps`
times. Nothing is timed where the cache says something else than such a pass does. Figures are written as they come,
what takes long to compile last, and after `--seconds` no other way is begun.
"""

import argparse
import gc
import json
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from record import record
from vlm import CUDA, RATE, Save, bandwidth, limit, milliseconds, show, told

from vitrail.codecs.quantizers import VQConfig
from vitrail.codecs.video import VideoCodecConfig
from vitrail.generate.captured_world import CapturedRollout
from vitrail.generate.rollout import Rolling, Rollout
from vitrail.models.genie import DynamicsConfig, Genie, GenieConfig
from vitrail.nn import AttentionConfig, BlockConfig, PlainConfig, SpaceTimeConfig, cost

MEASURED = (
    *(f"vitrail.generate.{name}" for name in ("captured_world", "masked", "rollout", "sampling")),
    "vitrail.models.genie",
    *(f"vitrail.nn.{name}" for name in ("attend", "attention", "block", "spacetime")),
)
DIFFERS = 0.1 if CUDA else 1e-4  # what rounding may do to logits, relative
LONGEST = 150.0  # seconds for one way of drawing


class Net(NamedTuple):
    layers: int
    width: int
    heads: int
    hidden: int
    head_dim: int | None = None

    def config(self, memory: int) -> SpaceTimeConfig:
        attention = AttentionConfig(heads=self.heads, head_dim=self.head_dim, qk_norm="rms")
        mlp = PlainConfig(hidden=self.hidden, bias=False)
        block = BlockConfig(width=self.width, attention=attention, mlp=mlp)
        return SpaceTimeConfig(layers=self.layers, block=block, memory=memory)


class Shape(NamedTuple):
    dynamics: Net
    encoder: Net = Net(12, 512, 8, 205)
    decoder: Net = Net(20, 1024, 16, 410)
    frame: tuple[int, int] = (92, 160)
    memory: int = 16
    steps: tuple[int, ...] = (25, 12)

    def config(self) -> GenieConfig:
        encoder, decoder, dynamics = (net.config(self.memory) for net in (self.encoder, self.decoder, self.dynamics))
        codes = VQConfig(codes=1024, dim=32)
        codec = VideoCodecConfig(image=self.frame, patch=4, encoder=encoder, decoder=decoder, quantizer=codes)
        return GenieConfig(codec=codec, dynamics=DynamicsConfig(transformer=dynamics), controls=8)


SHAPES = {
    "1b": Shape(Net(24, 2048, 16, 2048)),
    "11b": Shape(Net(48, 5120, 36, 2048, 128)),
}
SMALL = Net(2, 32, 2, 48)
TINY = Shape(SMALL, SMALL, SMALL, (8, 12), 4, (3, 2))

WAYS: dict[str, Any] = {"cached": Rollout}
if CUDA:
    WAYS["captured"] = CapturedRollout
    WAYS["captured, compiled"] = lambda model, rolling: CapturedRollout(model, rolling, compiled=True)


def built(shape: Shape) -> Genie:
    torch.manual_seed(0)
    with torch.device("cuda" if CUDA else "cpu"):
        model = Genie(shape.config()).eval().requires_grad_(False)
    return model.bfloat16() if CUDA else model


def noise(shape: Shape, frames: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A video, and what was done in it."""
    video = torch.randint(0, 256, (1, frames, 3, *shape.frame), dtype=torch.uint8)
    return video, torch.randint(0, 8, (1, frames - 1))


@torch.no_grad()
def difference(model: Genie, shape: Shape) -> float:
    """Of what is said of a hidden frame with the cache, full, to what is said by a pass over all frames."""
    video, actions = noise(shape, shape.memory - 1)
    world = Rollout(model)
    world.start(video, actions, seed=0)
    ids, led = model.look(model.codec.pixels(video)), model.dynamics.led(actions.to(model.codec.device))
    new, act = torch.zeros_like(ids[:, :1]), torch.ones_like(led[:, :1])
    hidden = torch.ones_like(new, dtype=torch.bool)
    cached = model.dynamics(new, act, hidden, world.past)
    seen = torch.cat([torch.zeros_like(ids, dtype=torch.bool), hidden], 1)
    whole = model.dynamics(torch.cat([ids, new], 1), torch.cat([led, act], 1), seen)[:, -1:].float()
    return ((cached.float() - whole).norm() / whole.norm()).item()


def floor(model: Genie, shape: Shape, copy: float) -> dict[str, float]:
    """Milliseconds of a pass and of the codec's decoder, at least, and so of a frame."""

    def at_least(part: torch.nn.Module, work: Any) -> float:
        return 1000 * max(cost.flops(part, work) / RATE, cost.bytes(part, work).read / copy)

    one = at_least(model.dynamics, model.work(1, past=shape.memory - 1))
    shown = at_least(model.codec.decoder, model.codec.decoder.work(1, past=shape.memory - 1))
    return {"pass_ms": one, "pixels_ms": shown} | {f"{n} steps_ms": (n + 1) * one + shown for n in shape.steps}


def drawn(way: Any, model: Genie, shape: Shape, steps: int) -> float:
    """Milliseconds of a frame, once the memory is full."""
    world, action = way(model, Rolling(steps=steps)), torch.tensor([3])
    world.start(*noise(shape, shape.memory), seed=0)
    return milliseconds(lambda: world.step(action), 5, rehearsed=2)


@torch.no_grad()
def recomputed(model: Genie, shape: Shape) -> float:
    """Milliseconds of a pass over all frames of the memory."""
    video, actions = noise(shape, shape.memory)
    ids, led = model.look(model.codec.pixels(video)), model.dynamics.led(actions.to(model.codec.device))
    hidden = torch.zeros_like(ids, dtype=torch.bool)
    hidden[:, -1] = True
    dynamics = model.dynamics
    return milliseconds(lambda: dynamics.code.logits(dynamics.hidden_states(ids, led, hidden)[:, -1:]), 3)


def row(
    shape: Shape,
    copy: float,
    seconds: float = float("inf"),
    save: Save = lambda _: None,
    ways: Collection[str] | None = None,
) -> dict[str, Any]:
    """The figures of a model, which are saved as they come."""
    end = time.perf_counter() + seconds
    model = built(shape)
    sizes = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    result: dict[str, Any] = {"parameters": sizes, "difference": difference(model, shape)}
    show("model", result)
    if not result["difference"] <= DIFFERS:
        return result | {"wrong": f"the cache differs by more than {DIFFERS:g}: nothing was timed"}
    least, whole = floor(model, shape, copy), recomputed(model, shape)
    result |= {"floor": least, "recomputed": {"pass_ms": whole}}
    result["frames"] = {
        f"{n} steps": {"floor_fps": 1000 / least[f"{n} steps_ms"], "recomputed_fps": 1000 / (n * whole)}
        for n in shape.steps
    }
    for name in ways or WAYS:
        way = WAYS[name]
        for steps in shape.steps:
            begun = time.perf_counter()
            found: Any = timed(way, model, shape, steps, end - begun)
            if isinstance(found, float):
                found = {
                    "frame_ms": found,
                    "fps": 1000 / found,
                    "share_of_floor": least[f"{steps} steps_ms"] / found,
                    "speedup_on_recomputing": steps * whole / found,
                }
            result["frames"][f"{steps} steps"][name] = found
            show(f"{steps} steps, {name}, {time.perf_counter() - begun:.0f} s", found)
            save(result)
            gc.collect()
    return result


def timed(way: Any, model: Genie, shape: Shape, steps: int, left: float) -> float | str:
    """Milliseconds of a frame, or why there are none: the other ways stand without it."""
    if left < 1:
        return "no time was left"
    try:
        with limit(min(LONGEST, left)):
            return drawn(way, model, shape, steps)
    except Exception as error:
        return told(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", choices=SHAPES, help="one of the shapes")
    parser.add_argument("--steps", type=int, nargs="+", help="passes a frame, instead of 25 and 12")
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="of drawing, instead of all")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for each shape")
    arguments = parser.parse_args()
    if not (CUDA or arguments.tiny):
        parser.error("no CUDA device: --tiny runs on the CPU")
    shapes = {"tiny": TINY} if arguments.tiny else SHAPES
    result: dict[str, Any] = {"copy_bytes_per_s": (copy := bandwidth())}
    for name, shape in shapes.items():
        if arguments.only not in (None, name):
            continue
        shape = shape._replace(steps=tuple(arguments.steps or shape.steps))

        def save(figures: dict[str, Any], name: str = name) -> None:
            result[name] = figures
            record(arguments.out, result, *MEASURED)

        try:
            save(row(shape, copy, arguments.seconds, save, arguments.ways))
        except Exception as error:  # the other shape is measured all the same
            save(result.get(name, {}) | {"wrong": told(error)})
        print(json.dumps({name: result[name]}, indent=1), flush=True)
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
