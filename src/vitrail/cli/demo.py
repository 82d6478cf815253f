"""`vitrail demo`: one page on which a unified model draws pictures and reads others, beside what is true."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitrail.cli.play import WORLD
from vitrail.cli.steps import steps
from vitrail.errors import ConfigError


def demo(
    *,
    model: str | None = None,
    image: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    out: Annotated[Path, Parameter(alias="-o")] = Path("out/demo"),
    results: Path | None = None,
    seed: int = 0,
    device: str | None = None,
) -> None:
    """Write a page, OUT/index.html, that shows a model reading pictures and drawing them.

    Example: vitrail demo --image photo.jpg -o out/demo

    The model draws, and a judge looks; it changes a drawing. Pictures become codes, and pictures again; the model says
    what it sees, beside the truth where that is known; and the world that ships is played in. The page needs no
    network, and no other file.

    Parameters
    ----------
    model
        A folder with a unified model; mini unless given, where the package came with its weights.
    image
        A picture of your own. May be repeated.
    out
        The folder to write to.
    results
        A JSON of measured results to show; results/mini.json, where there is one, for the model that ships.
    seed
        Another one has other prompts and other drawings.
    device
        cpu, cuda, …; a GPU if there is one.
    """
    from vitrail import tour
    from vitrail.hub.configs import shipped
    from vitrail.hub.files import read_json
    from vitrail.play import Playground
    from vitrail.show.measured import Measured
    from vitrail.show.page import page
    from vitrail.studio import MINI, TRAIN, Studio

    if seed < 0:
        raise ConfigError(f"a seed of {seed}", "give 0 or more")
    pictures = tour.shown(image)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be made: {error.strerror}", "give another folder") from None
    if model is None and MINI not in shipped():
        print(f"No weights came with this copy of Vitrail: the page shows scenes alone. To train some: {TRAIN}")
        title, lead = "Scenes whose truth is known", [f"There is no model here to read them. To train one: {TRAIN}"]
        sections = [tour.scenes(pictures)]
    else:
        kept = Path("results", f"{MINI}.json")
        results = results or (kept if model is None and kept.is_file() else None)
        measured = None if results is None else Measured(str(results), read_json(results))
        studio = Studio.load(model or MINI, device=device)
        with steps(tour.steps(pictures)) as step:
            sections = tour.tour(studio, pictures, seed, step, measured)
            if model is None and WORLD in shipped():
                sections.append(tour.played(Playground.load(WORLD, device=device), seed, step))
        sections += [] if measured is None else [measured.section()]
        title, lead = f"{Path(model or MINI).resolve().name} draws and reads", tour.lead(studio, measured)
    file, text = out / "index.html", page(title, lead, sections).encode("utf-8", "replace")
    try:
        file.write_bytes(text)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}", "give another folder") from None
    print(file)
