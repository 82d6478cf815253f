"""`vitrail judge`: what a detector sees, and how far it can be trusted."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from vitrail.errors import CheckpointError, ImageError
from vitrail.evals.judge import SURE

app = App(
    name="judge",
    help="Look at pictures with a detector, and measure its error where the truth is known.",
    help_epilogue="Example: vitrail judge check out/judge/final --count 200",
)


@app.command(help_epilogue="Example: vitrail judge check out/judge/final --vendors twemoji")
def check(
    model: str,
    /,
    *,
    count: int = 200,
    vendors: Annotated[tuple[str, ...], Parameter(negative="")] = ("twemoji",),
    preset: str = "drawing",
    seed: int = 4242,
    threshold: float = SURE,
    atlas: str = "emoji",
) -> None:
    """Print how often a judge is wrong about labelled renders, by GenEval's six kinds of prompt.

    Every second picture is what its prompt asks for; the others are wrong in one thing. The judge takes a wrong one, or
    refuses a right one.

    Parameters
    ----------
    model
        A detector: a folder that `vitrail train judge` made.
    count
        Renders.
    vendors
        Whose sprites: name a design that the judge was not trained on. May be repeated.
    preset
        Scenes they are.
    seed
        Of the scenes: not one it was trained on.
    threshold
        How sure it must be of an object.
    atlas
        Sprites: emoji, or a .safetensors file.
    """
    from vitrail.data.scenes.library import open_atlas
    from vitrail.data.scenes.source import ScenesConfig, SceneSource
    from vitrail.data.words import Words
    from vitrail.evals import judge

    detector = _detector(model)
    scene: dict[str, object] = {
        "vendors": list(vendors),
        "objects": [1, 4],
        "repeat": 0.4,
        "tint": 0.5,
        "combinations": "all",
    }
    side = detector.config.image.image
    config = ScenesConfig(atlas=atlas, preset=preset, scene=scene, side=side, seed=seed)
    source = SceneSource(config, open_atlas(atlas)).only(detector.config.concepts)
    table = source.atlas.table
    errors = judge.check(judge.Judge(detector, Words.of(table), table, threshold=threshold), source, count)
    print(f"{'prompts':12}  {'wrong':34}  {'takes what is wrong':34}  refuses what is right")
    for kind, error in errors.items():
        print(f"{kind:12}  {error.all!s:34}  {error.taken!s:34}  {error.refused}")


@app.command(help_epilogue="Example: vitrail judge look out/judge/final drawing.png --out seen.png")
def look(
    model: str,
    images: Annotated[list[Path], Parameter(negative="")],
    /,
    *,
    threshold: float = SURE,
    out: Path | None = None,
) -> None:
    """Print what a detector sees in pictures, surest first, and draw its boxes.

    Parameters
    ----------
    model
        A detector: a folder that `vitrail train judge` made.
    images
        Picture files; each is looked at as a square of the detector's own size.
    threshold
        How sure it must be of an object.
    out
        A contact sheet with the boxes.
    """
    from PIL import Image

    from vitrail.processing.images import load_image
    from vitrail.show.sheet import Tile, draw_sheet
    from vitrail.show.style import check_picture, save_picture

    if not images:
        raise ImageError("no picture given", "name its file: vitrail judge look MODEL drawing.png")
    if out is not None:
        check_picture(out)
    detector, tiles = _detector(model), []
    side = detector.config.image.image
    for path in images:
        picture = load_image(path).resize((side, side), Image.Resampling.BICUBIC)
        things = _seen(detector, picture, threshold)
        print(f"{path}: {', '.join(f'{name} {score:.0%}' for name, score, _ in things) or 'nothing'}")
        tiles.append(Tile(picture, [path.name], [(box, name) for name, _, box in things]))
    if out is not None:
        save_picture(draw_sheet(tiles, model), out)
        print(out)


def _detector(name: str) -> Any:
    import torch

    from vitrail import hub
    from vitrail.models.detector import Detector

    detector = hub.load(name, dtype=torch.float32)
    if not isinstance(detector, Detector):
        raise CheckpointError(
            f"{name} is a {type(detector).__name__}, not a detector", "train one: vitrail train judge"
        )
    return detector


def _seen(detector: Any, picture: Any, threshold: float) -> list[tuple[str, float, Any]]:
    """name, score and box of what is found in a picture"""
    import numpy as np
    import torch

    from vitrail.models.detector import seen

    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None]
    found, config = detector.find(seen(pixels), threshold=threshold), detector.config
    return [
        (
            f"{config.colours[int(found.colour[0, i])]} {config.concepts[int(found.concept[0, i])]}".strip(),
            float(found.score[0, i]),
            tuple(found.box[0, i].clamp(0, 1).tolist()),
        )
        for i in range(int(found.count[0]))
    ]
