"""Scenes per second: layout, rendering by each method, masks, and whole samples with boxes and token ids.

    python perf/scenes.py --out results.json                    # 64 and 128 px; on a GPU if there is one
    python perf/scenes.py --atlas emoji.safetensors --batch 4096 --preset mixed

Without --atlas, the sprites are random polygons. A sample is pixels (uint8), boxes (float) and the token ids of a
question and its answer, all on the device and newly generated. Reference: Pillow resizes and pastes the sprites of the
same scenes one by one on the CPU. Each figure is the median of `--rounds`.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, count
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from record import make_parser, write_record
from timing import DEVICE, measure_seconds, median_seconds, read_peak_gib

from vitrail.data.language import SceneLanguage, generate_questions, max_question_tokens, train_tokenizer
from vitrail.data.scenes.atlas import Atlas, Sprite
from vitrail.data.scenes.backgrounds import render_backgrounds
from vitrail.data.scenes.config import PRESETS
from vitrail.data.scenes.frame_sprites import draw_frame_sprites
from vitrail.data.scenes.packed_pixels import to_rgb_bytes
from vitrail.data.scenes.scene import GRID, SceneBatch
from vitrail.data.scenes.scene_renderer import render_masks, render_scenes
from vitrail.data.scenes.scene_sampler import SceneSampler
from vitrail.data.scenes.word_sprites import draw_word_sprites

QUESTION_KIND = "counting"
MEASURED = (
    "vitrail.data.scenes.counter_rng", "vitrail.data.scenes.packed_pixels", "vitrail.data.scenes.backgrounds",
    "vitrail.data.scenes.sprite_textures", "vitrail.data.scenes.placement", "vitrail.data.scenes.scene_sampler",
    "vitrail.data.scenes.scene_renderer", "vitrail.data.language.question_generation",
    "vitrail.data.language.compiled_templates", "vitrail.data.language.text_pieces",
)  # fmt: skip


def make_random_sprites(num_sprites: int = 400) -> Iterator[Sprite]:
    rng = np.random.default_rng(0)
    for i in range(num_sprites):
        image = Image.new("RGBA", (128, 128))
        corners = [tuple(corner) for corner in rng.integers(4, 124, (6, 2)).tolist()]
        ImageDraw.Draw(image).polygon(corners, (*rng.integers(0, 256, 3).tolist(), 255), (0, 0, 0, 255))
        yield Sprite(f"drawn/{i}", "drawn", str(i), "thing", f"thing {i}", "thing", np.asarray(image))


def measure_rate(call: Callable[[int], object], batch: int, rounds: int) -> float:
    """Return scenes per second. Every call gets the first index of a new batch, so that all its scenes are new."""
    starts = count(0, batch)
    return batch / median_seconds(lambda: call(next(starts)), rounds, warmup=2)


def render_with_pillow(scenes: SceneBatch, sprite_images: list[Image.Image], side: int) -> np.ndarray:
    """Render scenes with Pillow on our backgrounds."""
    images = []
    for background, sprites, boxes in zip(
        to_rgb_bytes(render_backgrounds(scenes.background, side, side)).permute(0, 2, 3, 1).numpy(),
        scenes.sprite.tolist(),
        (scenes.box * side / GRID).round().long().tolist(),
        strict=True,
    ):
        canvas = Image.fromarray(np.ascontiguousarray(background)).convert("RGBA")
        for sprite, (x0, y0, x1, y1) in zip(sprites, boxes, strict=True):
            if sprite >= 0:
                size = (max(x1 - x0, 1), max(y1 - y0, 1))
                canvas.alpha_composite(sprite_images[sprite].resize(size, Image.Resampling.BICUBIC), (x0, y0))
        images.append(np.asarray(canvas.convert("RGB")))
    return np.stack(images)


def make_sprite_images(atlas: Atlas) -> list[Image.Image]:
    """Convert the largest level of the atlas to cropped Pillow images."""
    side = max(atlas.levels)
    sizes = (atlas.table.aspect * (side - 2) / GRID).ceil().long().tolist()
    cells = atlas.levels[side].permute(0, 2, 3, 1).cpu().numpy()
    return [
        Image.frombytes("RGBa", (w, h), np.ascontiguousarray(cell[1 : 1 + h, 1 : 1 + w]).tobytes()).convert("RGBA")
        for cell, (w, h) in zip(cells, sizes, strict=True)
    ]


def main() -> None:
    parser = make_parser(__doc__, require_out=False)
    parser.add_argument("--atlas", type=Path)
    parser.add_argument("--preset", default="mixed", choices=list(PRESETS))
    parser.add_argument("--sides", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2, help="threads of the CPU")
    parser.add_argument("--compile", action="store_true", help="also compile the method everywhere (minutes)")
    arguments = parser.parse_args()

    device = torch.device(DEVICE)
    torch.set_num_threads(arguments.threads)
    batch, rounds = arguments.batch or (8192 if device.type == "cuda" else 512), arguments.rounds
    atlas = Atlas.load(arguments.atlas) if arguments.atlas else None
    atlas = atlas or Atlas.build(chain(make_random_sprites(), draw_frame_sprites(), draw_word_sprites()))
    device_atlas = atlas.to(device)
    sample_scenes = SceneSampler(PRESETS[arguments.preset], device_atlas.table, device)
    language = SceneLanguage.build(atlas.table, max_objects=PRESETS[arguments.preset].objects[1])
    tokens = language.pieces.tokenize(train_tokenizer(language, 2000)).to(device)
    max_tokens, language = max_question_tokens(language, tokens, [QUESTION_KIND]), language.to(device)

    def make_index(start: int) -> torch.Tensor:
        return torch.arange(start, start + batch, device=device)

    def generate_samples(start: int, side: int) -> tuple[torch.Tensor, ...]:
        scenes = sample_scenes(0, make_index(start))
        questions = generate_questions(language, scenes, 0, QUESTION_KIND)
        token_ids = [
            tokens.to_ids(rows, n, check=False)[0]
            for rows, n in zip((questions.question, questions.answer), max_tokens, strict=True)
        ]
        return render_scenes(scenes, device_atlas, side), scenes.box.float() / GRID, *token_ids

    figures: dict[str, dict[str, float] | str | int | float] = {
        "preset": arguments.preset,
        "batch": batch,
        "sprites": len(atlas),
        "objects": sample_scenes(0, make_index(0)).num_objects.float().mean().item(),
        "layout": measure_rate(lambda start: sample_scenes(0, make_index(start)), batch, rounds),
    }
    scenes, sprite_images = sample_scenes(0, make_index(0)), make_sprite_images(atlas)
    for side in arguments.sides:
        methods: dict[str, Callable[[int], object]] = {
            "windows": lambda _, side=side: render_scenes(scenes, device_atlas, side, method="windows"),
            "everywhere": lambda _, side=side: render_scenes(scenes, device_atlas, side, method="everywhere"),
            "masks": lambda _, side=side: render_masks(scenes[: batch // 8], device_atlas, side),
            "samples": lambda start, side=side: generate_samples(start, side),
        }
        if device.type == "cuda":
            methods["fused"] = lambda _, side=side: render_scenes(scenes, device_atlas, side, method="fused")
        if arguments.compile:
            compiled = torch.compile(
                lambda scenes, side=side: render_scenes(scenes, device_atlas, side, method="everywhere")
            )
            methods["compiled"] = lambda _, compiled=compiled: compiled(scenes)
        row = {name: measure_rate(call, batch, rounds) for name, call in methods.items()}
        row["masks"] /= 8
        subset = scenes[:64].to("cpu")
        render_subset = partial(render_with_pillow, subset, sprite_images, side)
        row["pillow"] = 64 / measure_seconds(render_subset)
        untinted = (subset.colour == 0).all(1).numpy()  # the Pillow version does not tint
        reference = render_subset()
        ours = render_scenes(subset, atlas, side).permute(0, 2, 3, 1).numpy()
        row["difference"] = float(np.abs(ours.astype(int) - reference)[untinted].mean())
        figures[f"{side} px"] = row
    if device.type == "cuda":
        figures["peak GiB"] = read_peak_gib()

    for name, value in figures.items():
        row = value if isinstance(value, dict) else {"": value}
        cells = (f"{k} {v:,.0f}" if isinstance(v, float) and v > 100 else f"{k} {v}" for k, v in row.items())
        print(f"{name:>8}  " + "  ".join(cells))
    write_record(arguments.out, figures, MEASURED)


if __name__ == "__main__":
    main()
