"""Scenes a second, drawn and told: layout, pixels by either way, masks, and whole samples with boxes and token ids.

    python perf/scenes.py --out results.json                    # 64 and 128 px; on a GPU if there is one
    python perf/scenes.py --atlas emoji.safetensors --batch 4096 --preset mixed

Without --atlas sprites are drawn at random. A sample is pixels (uint8), boxes (float) and the token ids of a question
and its answer, all on the device, for scenes that did not exist before. Peer: Pillow, which resizes and pastes the same
scenes one by one on the CPU, given their sprites. Each figure is the median of `--rounds`.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from record import record

from vitrail.data.scenes.backgrounds import backdrop
from vitrail.data.scenes.config import PRESETS
from vitrail.data.scenes.frames import frame_sprites
from vitrail.data.scenes.lanes import bytes_of
from vitrail.data.scenes.layout import Layout
from vitrail.data.scenes.letters import word_sprites
from vitrail.data.scenes.render import masks, render
from vitrail.data.scenes.scene import GRID, Scenes
from vitrail.data.scenes.sprites import Atlas, Sprite
from vitrail.data.words import Words, ask, longest, train_tokenizer

ASKED = "counting"
MEASURED = ("chance", "lanes", "backgrounds", "texture", "places", "layout", "render")


def random_sprites(count: int = 400) -> Iterator[Sprite]:
    chance = np.random.default_rng(0)
    for i in range(count):
        image = Image.new("RGBA", (128, 128))
        corners = [tuple(corner) for corner in chance.integers(4, 124, (6, 2)).tolist()]
        ImageDraw.Draw(image).polygon(corners, (*chance.integers(0, 256, 3).tolist(), 255), (0, 0, 0, 255))
        yield Sprite(f"drawn/{i}", "drawn", str(i), "thing", f"thing {i}", "thing", np.asarray(image))


def rate(call: Callable[[int], object], batch: int, rounds: int, device: torch.device) -> float:
    """Scenes a second; every call is given another start, so that nothing is drawn twice."""
    times = []
    for i in range(rounds + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call(i * batch)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return batch / statistics.median(times[2:])


def pasted(scenes: Scenes, pictures: list[Image.Image], side: int) -> np.ndarray:
    """The same scenes by Pillow; their backgrounds are given."""
    out = []
    for ground, sprites, boxes in zip(
        bytes_of(backdrop(scenes.background, side, side)).permute(0, 2, 3, 1).numpy(),
        scenes.sprite.tolist(),
        (scenes.box * side / GRID).round().long().tolist(),
        strict=True,
    ):
        canvas = Image.fromarray(np.ascontiguousarray(ground)).convert("RGBA")
        for sprite, (x0, y0, x1, y1) in zip(sprites, boxes, strict=True):
            if sprite >= 0:
                size = (max(x1 - x0, 1), max(y1 - y0, 1))
                canvas.alpha_composite(pictures[sprite].resize(size, Image.Resampling.BICUBIC), (x0, y0))
        out.append(np.asarray(canvas.convert("RGB")))
    return np.stack(out)


def pictures_of(atlas: Atlas) -> list[Image.Image]:
    """The largest level as Pillow's own pictures, cropped."""
    side = max(atlas.levels)
    sizes = (atlas.table.aspect * (side - 2) / GRID).ceil().long().tolist()
    cells = atlas.levels[side].permute(0, 2, 3, 1).cpu().numpy()
    return [
        Image.frombytes("RGBa", (w, h), np.ascontiguousarray(cell[1 : 1 + h, 1 : 1 + w]).tobytes()).convert("RGBA")
        for cell, (w, h) in zip(cells, sizes, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--atlas", type=Path)
    parser.add_argument("--preset", default="mixed", choices=list(PRESETS))
    parser.add_argument("--sides", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2, help="of the CPU, where there is no GPU")
    parser.add_argument(
        "--compile", action="store_true", help="the renderer that waits for nothing, compiled (minutes)"
    )
    arguments = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(arguments.threads)
    batch, rounds = arguments.batch or (8192 if device.type == "cuda" else 512), arguments.rounds
    atlas = Atlas.load(arguments.atlas) if arguments.atlas else None
    atlas = atlas or Atlas.build(chain(random_sprites(), frame_sprites(), word_sprites()))
    here = atlas.to(device)
    lay = Layout(PRESETS[arguments.preset], here.table, device)
    words = Words.of(atlas.table, objects=PRESETS[arguments.preset].objects[1])
    tokens = words.pieces.tokenized(train_tokenizer(words, 2000)).to(device)
    room, words = longest(words, tokens, [ASKED]), words.to(device)

    def index(start: int, count: int = batch) -> torch.Tensor:
        return torch.arange(start, start + count, device=device)

    def sample(start: int, side: int) -> tuple[torch.Tensor, ...]:
        scenes = lay(0, index(start))
        said = ask(words, scenes, 0, ASKED)
        told = [
            tokens.write(rows, n, check=False)[0] for rows, n in zip((said.question, said.answer), room, strict=True)
        ]
        return render(scenes, here, side), scenes.box.float() / GRID, *told

    figures: dict[str, dict[str, float] | str | int | float] = {
        "preset": arguments.preset,
        "batch": batch,
        "sprites": len(atlas),
        "objects": lay(0, index(0)).count.float().mean().item(),
        "layout": rate(lambda start: lay(0, index(start)), batch, rounds, device),
    }
    scenes, pictures = lay(0, index(0)), pictures_of(atlas)
    for side in arguments.sides:
        ways: dict[str, Callable[[int], object]] = {
            "windows": lambda _, side=side: render(scenes, here, side, way="windows"),
            "everywhere": lambda _, side=side: render(scenes, here, side, way="everywhere"),
            "masks": lambda _, side=side: masks(scenes[: batch // 8], here, side),
            "samples": lambda start, side=side: sample(start, side),
        }
        if device.type == "cuda":
            ways["fused"] = lambda _, side=side: render(scenes, here, side, way="fused")
        if arguments.compile:
            compiled = torch.compile(lambda scenes, side=side: render(scenes, here, side, way="everywhere"))
            ways["compiled"] = lambda _, compiled=compiled: compiled(scenes)
        row = {name: rate(call, batch, rounds, device) for name, call in ways.items()}
        row["masks"] /= 8
        few = scenes[:64].to("cpu")
        start = time.perf_counter()
        theirs = pasted(few, pictures, side)
        row["pillow"] = 64 / (time.perf_counter() - start)
        plain = (few.colour == 0).all(1)  # Pillow is not asked to tint
        ours = render(few, atlas, side).permute(0, 2, 3, 1).numpy()
        row["difference"] = float(np.abs(ours.astype(int) - theirs)[plain.numpy()].mean())
        figures[f"{side} px"] = row
    if device.type == "cuda":
        figures["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30

    for name, value in figures.items():
        shown = value if isinstance(value, dict) else {"": value}
        cells = (f"{k} {v:,.0f}" if isinstance(v, float) and v > 100 else f"{k} {v}" for k, v in shown.items())
        print(f"{name:>8}  " + "  ".join(cells))
    if arguments.out:
        told = ("vitrail.data.words.ask", "vitrail.data.words.frames", "vitrail.data.words.pieces")
        record(arguments.out, figures, *(f"vitrail.data.scenes.{name}" for name in MEASURED), *told)


if __name__ == "__main__":
    main()
