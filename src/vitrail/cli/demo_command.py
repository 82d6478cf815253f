"""`vitrail demo`: an HTML page that demonstrates a unified model and the shipped world model."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitrail.cli.config_options import DeviceOption
from vitrail.cli.play_command import SHIPPED_WORLD
from vitrail.cli.step_progress import progress_over_steps
from vitrail.errors import ConfigError


def write_demo_page(
    *,
    model: str | None = None,
    image: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    out: Annotated[Path, Parameter(alias="-o")] = Path("out/demo"),
    results: Path | None = None,
    seed: int = 0,
    device: DeviceOption = None,
) -> None:
    """Write an HTML page, OUT/index.html, that demonstrates a model.

    Example: vitrail demo --image photo.jpg -o out/demo

    The page shows drawings with the verdict of a judge, edits of a drawing, reconstructions of images, answers beside
    the ground truth, and frames of the shipped world model. It is a single file that loads nothing from the network.

    Parameters
    ----------
    model
        Folder of a unified model. Default: mini, which ships.
    image
        An image of your own. May be repeated.
    out
        The folder to write to.
    results
        A JSON file of measured results to show. Default for the shipped model: results/mini.json if it exists.
    seed
        Seed of the prompts and the drawings.
    """
    from vitrail import demo
    from vitrail.hub.checkpoint_info import INSTALL_BUNDLED_MODELS, list_bundled_models
    from vitrail.hub.safetensors_files import read_json
    from vitrail.pipelines.base import MINI
    from vitrail.pipelines.unified import UnifiedPipeline
    from vitrail.plots.eval_results import EvalResults
    from vitrail.plots.html_page import render_page
    from vitrail.serve.play import WorldPipeline

    if seed < 0:
        raise ConfigError(f"--seed is {seed}", "give 0 or more")
    pictures = demo.load_demo_images(image)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be created: {error.strerror}", "give another folder") from None
    if model is None and MINI not in list_bundled_models():
        print(f"no weights are installed, so the page shows scenes only: {INSTALL_BUNDLED_MODELS}")
        title, lead = "Annotated scenes", [f"No model is installed: {INSTALL_BUNDLED_MODELS}"]
        sections = [demo.build_scenes_section(pictures)]
    else:
        kept = Path("results", f"{MINI}.json")
        results = results or (kept if model is None and kept.is_file() else None)
        measured = None if results is None else EvalResults(str(results), read_json(results))
        pipeline = UnifiedPipeline.load(model or MINI, device=device)
        with progress_over_steps(demo.count_steps(pictures)) as step:
            sections = demo.build_demo(pipeline, pictures, seed, step, measured)
            if model is None and SHIPPED_WORLD in list_bundled_models():
                sections.append(demo.build_world_section(WorldPipeline.load(SHIPPED_WORLD, device=device), seed, step))
        sections += [] if measured is None else [measured.to_section()]
        title = f"Demonstration of {Path(model or MINI).resolve().name}"
        lead = demo.build_introduction(pipeline, measured)
    file, text = out / "index.html", render_page(title, lead, sections).encode("utf-8", "replace")
    try:
        file.write_bytes(text)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}", "give another folder") from None
    print(file)
