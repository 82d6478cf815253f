"""`vitrail play`: a world in the browser, under the keys."""

import os
import threading
import webbrowser
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from vitrail.errors import CheckpointError, ConfigError

WORLD = "mini-world"  # the world that ships with the package
TRAIN = (
    "vitrail data make pocket-curtain -o out/episodes/curtain --episodes 1500 --steps 48 && "
    "vitrail train genie-pocket --out out/genie"
)
INSTEAD = f"train a world ({TRAIN}) and give out/genie/final, or play a simulator alone: vitrail play --world pocket"


def play(
    model: str | None = None,
    /,
    *,
    world: str | None = None,
    picture: str | None = None,
    episodes: Path | None = None,
    steps: int = 2,
    temperature: float = 0.5,
    players: int = 4,
    port: int = 0,
    open: Annotated[bool, Parameter(negative="--no-open")] = True,
    device: str | None = None,
) -> None:
    """Play in a world model, in the browser.

    Example: vitrail play

    Example: vitrail play out/genie/final --world coinrun --episodes out/episodes/coinrun

    The page is served to this machine alone, and asks nothing of any other. Ctrl-C ends it.

    Parameters
    ----------
    model
        The folder of a world model. With neither this nor --world it is mini-world, which ships, beside the simulator
        that it learned from where that is installed.
    world
        A simulator to play beside the model under the same keys, or alone: pocket, coinrun, doom, … One that needs
        packages gets an environment of its own the first time.
    picture
        A picture to start from.
    episodes
        A folder of recorded episodes, which give pictures to start from, and tell what the arrows are to the model.
    steps
        Passes that draw a frame.
    temperature
        Below 1 likely codes are drawn more often; 0 takes what is likeliest.
    players
        Pages that may play at once, each in a world of its own.
    port
        0 is any that is free.
    open
        Whether to open the page.
    device
        cpu, cuda, …; a GPU if there is one.
    """
    # Threads of torch that wait for each other by spinning take the cores from the browser, and from each other. The
    # products of a frame are so small that a second one takes more than it gives.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        from vitrail.play.server import listen, make_server
    except ImportError as error:
        raise ConfigError(
            f"playing needs a server, and {error.name} is missing", "pip install 'vitrail[play]'"
        ) from None
    from vitrail.data.episodes.remote import installed
    from vitrail.hub.configs import shipped
    from vitrail.play import Playground
    from vitrail.play.controls import choices
    from vitrail.play.game import Arcade

    if world is not None:
        choices(world)
    if model is None and world is None and WORLD not in shipped():
        raise CheckpointError(f"no weights of {WORLD} came with this copy of Vitrail", INSTEAD)
    name = model or (WORLD if world is None else None)
    if name is None and (picture is not None or episodes is not None):
        raise ConfigError("--picture and --episodes are for a model, and there is none", "name a model's folder")
    if name is not None:
        _check(name)
    playground = None if name is None else Playground.load(name, device=device)
    if model is None and playground is not None and playground.controls is not None:
        learned = playground.controls.world
        if installed(learned):
            world = learned
        else:
            print(f"beside its simulator, for which an environment is made once: vitrail play {name} --world {learned}")
    if playground is not None and episodes is not None:
        playground = playground.with_episodes(episodes)
    arcade = Arcade(
        playground,
        world,
        title=name or f"{world}, the simulator",
        picture=picture,
        steps=steps,
        temperature=temperature,
        players=players,
    )
    arcade.check()
    with listen(port) as link:
        address = f"http://127.0.0.1:{link.getsockname()[1]}/"
        print(f"{address}  (Ctrl-C ends it)", flush=True)
        if open:
            # A browser in the terminal holds whoever opens it until it is closed, and the page needs the server.
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        try:
            make_server(arcade).run(sockets=[link])
        except KeyboardInterrupt:  # the server has said goodbye to everyone
            print()
        finally:
            arcade.close()


def _check(name: str) -> None:
    """Whether it is a world, before any weight is read."""
    from vitrail.hub.configs import shipped
    from vitrail.ready import plays

    instead = f"play {WORLD}, which ships; {INSTEAD}" if WORLD in shipped() else INSTEAD
    try:
        is_world = plays(name)
    except CheckpointError as error:
        there = os.path.exists(name)  # noqa: PTH110 (Path.exists fails on a name that is too long)
        raise CheckpointError(error.problem, error.remedy if there else instead) from None
    if not is_world:
        raise ConfigError(f"{name} is no world model", instead)
