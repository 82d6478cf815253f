"""`vitrail caption` and `vitrail draw`: a unified model at work; `vitrail ship`: one packed, or a world."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from vitrail.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

AT_ONCE = 16  # drawings of one batch
Pictures = Annotated[list[str], Parameter(negative="")]


def caption(pictures: Pictures, /, *, model: str = "mini", device: str | None = None) -> None:
    """Say what pictures show.

    Example: vitrail caption scene.png photo.jpg

    Parameters
    ----------
    pictures
        Pictures' files.
    model
        A unified model (mini, unless given), or a vision-language model: mini-vlm, a folder or hub id.
    device
        cpu, cuda, …; a GPU if there is one.
    """
    from vitrail.studio import DESCRIBE, load

    loaded = load(model, device=device)
    for path in pictures:
        said = loaded.ask(path, DESCRIBE)
        print(f"{path}  {said}" if len(pictures) > 1 else said)


def draw(
    prompt: str,
    /,
    *,
    out: Annotated[Path, Parameter(alias="-o")],
    model: str = "mini",
    count: int = 1,
    tries: int = 1,
    negative: str | None = None,
    guidance: float = 3.0,
    steps: int = 24,
    temperature: float = 1.0,
    top_p: float | None = None,
    seed: int | None = None,
    over: str | None = None,
    box: Annotated[tuple[float, float, float, float] | None, Parameter(negative="")] = None,
    vary: float | None = None,
    draft: str | None = None,
    device: str | None = None,
) -> None:
    """Draw a picture.

    Example: vitrail draw "a red dog to the left of a cat" -o dog.png --seed 1

    Parameters
    ----------
    prompt
        What to draw; "" for anything.
    out
        The PNG to write; of several, -1, -2, … are put before its ending.
    model
        A unified model: a folder, or mini where the package came with its weights.
    count
        How many, each with a seed of its own.
    tries
        Draw each so many times, ask the model itself how many of each thing there are, in which colour and where, and
        keep the drawing about which it most surely says what the prompt says.
    negative
        What to lead away from.
    guidance
        How strongly to lead: 1 not at all.
    steps
        Passes of a model that draws all codes at once; others take one a code.
    temperature
        0 takes what is likeliest.
    top_p
        Only the likeliest codes that together reach this probability.
    seed
        The same seed gives the same picture.
    over
        A picture to start from: with --box its part is drawn anew, with --vary a share of its codes.
    box
        x0 y0 x1 y1 in 0 … 1 of the picture.
    vary
        0 … 1 of the codes.
    draft
        A smaller unified model of the same words and codes, for one that draws code after code: it draws a few ahead,
        and the large one looks at them in one pass. Pictures have the large one's chances all the same.
    device
        cpu, cuda, …; a GPU if there is one.
    """
    if (over is None) != (box is None and vary is None) or (box is not None and vary is not None):
        raise ConfigError("--over goes with --box or with --vary", "give a picture, and one of the two")
    if count < 1:
        raise ConfigError(f"{count} pictures", "draw at least one")
    if draft is not None and over is not None:
        raise ConfigError("a draft is of a whole picture", "leave --draft or --over out")
    check(out)
    from vitrail.studio import Studio

    studio = Studio.load(model, device=device)
    how: dict[str, Any] = {"guidance": guidance, "steps": steps, "temperature": temperature, "top_p": top_p}
    how |= {"tries": tries, "negative": negative}
    small = None if draft is None else Studio.load(draft, device=device)
    with bar() as progress:
        for start in range(0, count, AT_ONCE):  # written as they are done: who stops it keeps those
            some = min(AT_ONCE, count - start)

            def told(done: int, of: int, start: int = start, some: int = some) -> None:
                progress(start * of + some * done, count * of)

            how |= {"progress": told, "seed": None if seed is None else seed + start}
            if over is None:
                pictures = studio.draw([prompt] * some, draft=small, **how)
            elif vary is not None:
                pictures = studio.vary(over, prompt, share=vary, count=some, **how)
            else:
                assert box is not None
                pictures = studio.inpaint(over, [prompt] * some, box, **how)
            for number, picture in enumerate(pictures, start + 1):
                write(picture, out if count == 1 else out.with_name(f"{out.stem}-{number}{out.suffix}"))


def ship(
    model: str,
    /,
    *,
    out: Annotated[Path, Parameter(alias="-o")],
    base: str | None = None,
    episodes: Path | None = None,
) -> None:
    """Write a unified, vision-language or world model in 8 bits a weight, with all it needs, and say what that changes.

    Example: vitrail ship out/mini/final -o src/vitrail/weights/mini

    Example: vitrail ship out/mini-vlm/final -o src/vitrail/weights/mini-vlm --base stories15M

    Example: vitrail ship out/genie/final -o src/vitrail/weights/mini-world --episodes out/episodes/coinrun

    The largest difference of its logits, over the example scenes or the episodes, is given in standard deviations of
    the logits.

    Parameters
    ----------
    model
        A folder with a unified model, a vision-language model or a world model.
    out
        The folder to make. One below src/vitrail/weights ships with the package, and is loaded by its name.
    base
        The language model that a vision-language model was made of: a package (stories15M, smollm2-135m) or a folder.
        Only what differs from it is written, and whoever loads the model needs it too.
    episodes
        Of a world: recorded episodes, which give pictures to start from and tell what the controls are to the model.
    """
    if any(out.glob("*.safetensors")):
        raise ConfigError(f"{out} holds a model already", "remove it first, or give another folder")
    from vitrail.ready import plays
    from vitrail.studio import talks

    world = plays(model)
    talker = not world and talks(model)
    if base is not None and not talker:
        raise ConfigError(f"{model} is no vision-language model and stands on no other", "leave --base out")
    if (episodes is not None) != world:
        raise ConfigError("--episodes go with a world model, and a world model with them", "give both, or neither")
    try:
        if world:
            assert episodes is not None
            _ship_world(model, out, episodes)
        elif talker:
            _ship_talker(model, out, base)
        else:
            _ship_studio(model, out)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}", "give another folder") from None


def _ship_world(model: str, out: Path, episodes: Path) -> None:
    import torch

    from vitrail.play import Playground

    whole = Playground.load(model, device="cpu").with_episodes(episodes)
    whole.save(out, small=True)
    _size(model, out)
    starts = whole.starts.movedim(-1, 1)[:, None]  # (N, 1, C, H, W)
    ids, said = [], []
    for one in (whole, Playground.load(out, device="cpu")):
        with torch.no_grad():
            ids.append(one.model.look(one.model.codec.pixels(starts)))
            led = torch.full(ids[0].shape[:2], one.model.actions)
            said.append(one.model.dynamics(ids[0], led).float())
    print(f"logits of codes   differ by at most {(said[0] - said[1]).abs().max() / said[0].std():.3f} of their spread")
    print(f"codes of pictures {(ids[0] != ids[1]).float().mean():.1%} have another id")


def _ship_talker(model: str, out: Path, base: str | None) -> None:
    from vitrail import hub
    from vitrail.data.examples import examples
    from vitrail.studio import load, said_change

    whole, scenes = load(model, device="cpu"), examples()
    hub.save(whole.model, out, whole.words, small=True, base=base)
    files, asked = [scene.file for scene in scenes], [scene.questions[0]["question"] for scene in scenes]
    found = said_change(whole, load(out, device="cpu"), files, asked)
    _size(model, out, f" beside {base}" if base else "")
    print(f"logits of words   differ by at most {found:.3f} of their spread")


def _ship_studio(model: str, out: Path) -> None:
    import torch

    from vitrail import hub
    from vitrail.data.examples import examples
    from vitrail.studio import Studio, change

    whole, scenes = Studio.load(model, device="cpu", dtype=torch.float32), examples()
    hub.save(whole.model, out, whole.words, small=True)
    texts = [f"{scene.questions[0]['question']} {scene.questions[0]['answer']}" for scene in scenes]
    found = change(whole, Studio.load(out, device="cpu", dtype=torch.float32), [scene.file for scene in scenes], texts)
    _size(model, out)
    print(f"logits of words   differ by at most {found.words:.3f} of their spread")
    print(f"logits of codes   differ by at most {found.codes:.3f} of their spread")
    print(f"codes of pictures {found.ids:.1%} have another id")


def _size(model: str, out: Path, beside: str = "") -> None:
    from vitrail.hub.configs import resolve

    print(f"{out}: {_megabytes(out):.1f} MB{beside}, from {_megabytes(resolve(model)):.1f}")


def _megabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) / 1e6


@contextmanager
def bar() -> Iterator[Callable[[int, int], Any]]:
    """A progress bar that is told what is done, of how much."""
    from tqdm import tqdm

    with tqdm(total=1.0, file=sys.stderr, disable=None, bar_format="{percentage:3.0f}% {bar} {elapsed}") as bar:
        yield lambda done, of: bar.update(done / of - bar.n)


def check(path: Path) -> None:
    """Before anything is drawn."""
    if path.suffix.lower() != ".png":
        raise ConfigError(f"{path} is no name of a PNG", "let it end with .png")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent}", "make it first")


def write(picture: "Image", path: Path) -> None:
    try:
        picture.save(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}", "give another path") from None
    print(path)
