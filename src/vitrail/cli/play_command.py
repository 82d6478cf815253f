"""`vitrail play`: play a world model or a simulator in the browser."""

import os
import threading
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from vitrail.cli.config_options import DeviceOption
from vitrail.errors import CheckpointError, ConfigError
from vitrail.thread_settings import HAS_USER_THREAD_COUNT

if TYPE_CHECKING:
    from vitrail.pipelines.world import WorldPipeline

SHIPPED_WORLD = "mini-world"  # the world model of vitrail-mini
TRAIN_COMMANDS = (
    "vitrail data make pocket-curtain -o out/episodes/curtain --episodes 1500 --steps 48 && "
    "vitrail train genie-pocket --out out/genie"
)
TRAIN_REMEDY = (
    f"train a world model ({TRAIN_COMMANDS}) and give out/genie/final, "
    "or play a simulator alone: vitrail play --world pocket"
)


def play_world(
    model: str | None = None,
    /,
    *,
    world: str | None = None,
    image: str | None = None,
    episodes: Path | None = None,
    steps: int = 2,
    temperature: float = 0.5,
    max_players: int = 4,
    port: int = 0,
    open: Annotated[bool, Parameter(negative="--no-open")] = True,
    device: DeviceOption = None,
) -> None:
    """Play a world model in the browser.

    Example: vitrail play

    Example: vitrail play out/genie/final --world coinrun --episodes out/episodes/coinrun

    The server listens on localhost only, and the page loads nothing from other hosts. Ctrl-C stops it.

    Parameters
    ----------
    model
        Folder of a world model. Without a model and without --world it is mini-world, which ships, together with its
        simulator if that is installed.
    world
        A simulator to play beside the model with the same keys, or alone: pocket, coinrun, doom, … If it needs
        packages, they are installed into a separate environment the first time.
    image
        A start image.
    episodes
        A folder of recorded episodes. They provide start images and the mapping from arrow keys to actions.
    steps
        Decoding steps of a frame.
    temperature
        Sampling temperature of the codes. 0 is greedy.
    max_players
        Number of pages that can play at the same time, each with its own world.
    port
        Port of the server. 0 chooses a free one.
    open
        Whether to open the page in a browser.
    """
    _limit_threads()
    try:
        from vitrail.serve.play.game_session import GameHost
        from vitrail.serve.play.play_server import bind_loopback_socket, build_server
    except ImportError as error:
        raise ConfigError(
            f"`vitrail play` needs {error.name}, which is not installed", "pip install 'vitrail[play]'"
        ) from None
    name, pipeline, world = _open_pipeline(model, world, image, episodes, device)
    host = GameHost(
        pipeline,
        world,
        title=name or f"{world} (simulator)",
        start_image=image,
        steps=steps,
        temperature=temperature,
        max_players=max_players,
    )
    host.check_simulator()
    with bind_loopback_socket(port) as link:
        address = f"http://127.0.0.1:{link.getsockname()[1]}/"
        print(f"{address}  (Ctrl-C stops the server)", flush=True)
        if open:
            # A terminal browser blocks the calling thread until it is closed.
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        try:
            build_server(host).run(sockets=[link])
        except KeyboardInterrupt:  # uvicorn has closed all connections
            print()
        finally:
            host.close()


def _limit_threads() -> None:
    """Use one thread, unless OMP_NUM_THREADS is set: the matrix products of a frame are too small to gain from two."""
    import torch

    if not HAS_USER_THREAD_COUNT:
        torch.set_num_threads(1)


def _open_pipeline(
    model: str | None, world: str | None, image: str | None, episodes: Path | None, device: str | None
) -> "tuple[str | None, WorldPipeline | None, str | None]":
    """Return the name of the model, its pipeline, and the simulator; the shipped model is the default."""
    from vitrail.data.episodes.simulators import is_installed
    from vitrail.hub.checkpoint_info import INSTALL_BUNDLED_MODELS, list_bundled_models
    from vitrail.pipelines.controls import list_control_names
    from vitrail.serve.play import WorldPipeline

    if world is not None:
        list_control_names(world)
    if model is None and world is None and SHIPPED_WORLD not in list_bundled_models():
        raise CheckpointError(f"the weights of {SHIPPED_WORLD} are not installed", INSTALL_BUNDLED_MODELS)
    name = model or (SHIPPED_WORLD if world is None else None)
    if name is None:
        if image is not None or episodes is not None:
            raise ConfigError("--image and --episodes need a model, but none is given", "give the folder of a model")
        return None, None, world
    _check_world_model(name)
    pipeline = WorldPipeline.load(name, device=device)
    if model is None and pipeline.controls is not None:
        simulator = pipeline.controls.world
        if is_installed(simulator):
            world = simulator
        else:
            print(f"to install its simulator and play both: vitrail play {name} --world {simulator}")
    return name, pipeline if episodes is None else pipeline.with_episodes(episodes), world


def _check_world_model(name: str) -> None:
    """Check that a folder contains a world model, before weights are read."""
    from vitrail.hub.checkpoint_info import list_bundled_models
    from vitrail.pipelines.loading import is_world_model

    instead = f"play {SHIPPED_WORLD}; {TRAIN_REMEDY}" if SHIPPED_WORLD in list_bundled_models() else TRAIN_REMEDY
    try:
        is_world = is_world_model(name)
    except CheckpointError as error:
        exists = os.path.exists(name)  # noqa: PTH110 (Path.exists raises for names that are too long)
        raise CheckpointError(error.problem, error.remedy if exists else instead) from None
    if not is_world:
        raise ConfigError(f"{name} is not a world model", instead)
