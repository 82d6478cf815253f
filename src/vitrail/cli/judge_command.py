"""`vitrail judge`: detect objects in images, and measure the error of the drawing judge."""

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from vitrail.errors import ImageError

app = App(name="judge")


@app.command(name="check", help_epilogue="Example: vitrail judge check out/judge/final --vendors twemoji")
def check_judge(
    model: str,
    /,
    *,
    count: int = 200,
    vendors: Annotated[tuple[str, ...], Parameter(negative="")] = ("twemoji",),
    preset: str = "drawing",
    seed: int = 4242,
    threshold: float = 0.4,
    atlas: str = "emoji",
) -> None:
    """Measure the error of the judge on labelled scenes, by GenEval's six kinds of prompt.

    Every second image matches its prompt; the others differ in one property. The judge errs by accepting a wrong image
    or by rejecting a right one.

    Parameters
    ----------
    model
        A detector: a folder that `vitrail train judge` wrote.
    count
        Number of images.
    vendors
        Vendors of the sprites. Use a design that the judge is not trained on. May be repeated.
    preset
        Preset of the scenes.
    seed
        Seed of the scenes. Use one that the judge is not trained on.
    threshold
        Minimum score of a detected object.
    atlas
        Sprites: emoji, or a .safetensors file.
    """
    from vitrail.data.language import SceneLanguage
    from vitrail.evals.drawing_judge import DrawingJudge, measure_judge_error, open_judge_scenes
    from vitrail.pipelines import DetectorPipeline

    detector = DetectorPipeline.load(model, device="cpu").model
    source = open_judge_scenes(detector, preset=preset, vendors=vendors, atlas=atlas, seed=seed)
    table = source.atlas.table
    judge = DrawingJudge(detector, SceneLanguage.build(table), table, threshold=threshold)
    errors = measure_judge_error(judge, source, count)
    print(f"{'prompts':12}  {'error':34}  {'accepts wrong images':34}  rejects right images")
    for kind, error in errors.items():
        print(f"{kind:12}  {error.overall!s:34}  {error.false_accepts!s:34}  {error.false_rejects}")


@app.command(name="detect", help_epilogue="Example: vitrail judge detect out/judge/final drawing.png --out boxes.png")
def detect_objects(
    model: str,
    images: Annotated[list[Path], Parameter(negative="")],
    /,
    *,
    threshold: float = 0.4,
    out: Path | None = None,
) -> None:
    """Detect objects in images. Prints them by descending score and draws their boxes.

    Parameters
    ----------
    model
        A detector: a folder that `vitrail train judge` wrote.
    images
        Image files. Each is resized to the square image size of the detector.
    threshold
        Minimum score of a detected object.
    out
        A contact sheet with the boxes.
    """
    from vitrail.pipelines import DetectorPipeline
    from vitrail.plots.contact_sheet import Tile, draw_contact_sheet
    from vitrail.plots.style import check_image_path, save_image

    if not images:
        raise ImageError("no image is given", "add a file: vitrail judge detect MODEL drawing.png")
    if out is not None:
        check_image_path(out)
    pipeline, tiles = DetectorPipeline.load(model, device="cpu"), []
    for path in images:
        [found] = pipeline.detect(path, threshold=threshold)
        print(f"{path}: {', '.join(f'{each.name} {each.score:.0%}' for each in found) or 'nothing'}")
        tiles.append(Tile(pipeline.resize(path), [path.name], [(each.box, each.name) for each in found]))
    if out is not None:
        save_image(draw_contact_sheet(tiles, model), out)
        print(out)
