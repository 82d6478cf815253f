"""What can be done in a world that is played: by which keys, and what that is to the model and to the simulator.

B windows, T frames, C channels, H, W pixels, h × w codes of a frame, A actions of the model
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from vitrail.config import Config
from vitrail.data.episodes import WORLDS, Choices, Episodes, EpisodesConfig, EpisodeSource
from vitrail.data.episodes.source import HELD_OUT
from vitrail.errors import ConfigError, DataError, nearest
from vitrail.generate.rollout import Rollout
from vitrail.models.genie import Genie

# Words in the names of controls, and the keys they are on, as a browser calls them.
KEYS = {"left": "ArrowLeft", "right": "ArrowRight", "up": "ArrowUp", "ahead": "ArrowUp", "down": "ArrowDown"}
NOTHING = "nothing"
DIGITS = 9
WINDOWS, LENGTH = 24, 8  # of each control, and their frames: from how much it is learned what it is to a model
MOST_REPEATS = 100  # a player waits for all of them


class Controls(Config):
    """
    world   the simulator whose controls these are, a row of `data.episodes.WORLDS`
    codes   which action of the model each control is, by the control's name; the others do nothing in the model
    repeat  steps of the simulator that an action of the model lasts, 1 … 100
    """

    world: str
    codes: dict[str, int] = {}
    repeat: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.repeat <= MOST_REPEATS:
            raise ConfigError(f"actions that last {self.repeat} steps", f"repeat them 1 … {MOST_REPEATS} times")
        names = choices(self.world)
        for name in self.codes:
            if name not in names:
                raise ConfigError(f"{self.world} has no control {name!r}", nearest(name, names))


class Action(NamedTuple):
    """`keys` are held together; without any it is what happens while none is held. `code` is what it is to the model,
    `control` what it is to the simulator, where it is anything."""

    name: str
    keys: tuple[str, ...]
    code: int | None
    control: int | None


def choices(world: str) -> tuple[str, ...]:
    """The names of a world's controls, where there are a few to choose from."""
    if world not in WORLDS:
        raise ConfigError(f"there is no world {world!r}", nearest(world, playable()))
    actions = WORLDS[world].actions
    if not isinstance(actions, Choices):
        raise ConfigError(f"{world} is steered by dials, and keys are on or off", f"known: {', '.join(playable())}")
    return actions.names


def playable() -> list[str]:
    return [name for name, world in WORLDS.items() if isinstance(world.actions, Choices)]


def own_controls(model: Genie, world: str, repeat: int = 1) -> Controls:
    """Of a model that was trained on known controls: they are those of the world, in the same order."""
    names = choices(world)
    if model.latent is not None:
        return Controls(world=world, repeat=repeat)
    if len(names) != model.actions:
        raise ConfigError(f"the model has {model.actions} controls, and {world} {len(names)}", "name its own world")
    return Controls(world=world, codes={name: i for i, name in enumerate(names)}, repeat=repeat)


def check_codes(controls: Controls, model: Genie) -> None:
    for name, code in controls.codes.items():
        if not 0 <= code < model.actions:
            raise ConfigError(f"{name!r} is action {code} of the model", f"it has {model.actions}, from 0 on")


def check_episodes(folder: str) -> None:
    """Whether recorded episodes are enough to start from, and to learn controls from."""
    lengths = Episodes(folder).lengths
    if len(lengths) < HELD_OUT or lengths.max() < LENGTH:
        raise DataError(
            f"{folder} holds {len(lengths)} episodes, the longest of {lengths.max(initial=0)} frames",
            f"to play, record at least {HELD_OUT}, and {LENGTH} frames or more: "
            f"vitrail data make WORLD -o FOLDER --episodes {HELD_OUT}",
        )


def learn_controls(model: Genie, folder: str) -> Controls:
    """For every control that was used in recorded episodes, the latent action under which what followed is likeliest.
    That is not the one found most often: to run right may often look like one action, which at a wall, where the same
    key does nothing, would be a jump. A control is called by the same action as another where the model does not tell
    them apart."""
    cut = EpisodesConfig(folder=folder, length=LENGTH, stride=LENGTH, part="all", fields=("actions",), hold=0)
    source = EpisodeSource(cut)
    world, repeat = source.episodes.manifest.world, source.episodes.manifest.repeat
    if model.latent is None:
        return own_controls(model, world, repeat)
    names, used = choices(world), np.array([source[i]["actions"][-1] for i in range(len(source))])
    shown, codes = EpisodeSource(cut.with_(fields=("frames",))), {}
    for control in tqdm(np.unique(used).tolist(), desc="controls", delay=2, leave=False, disable=None):
        where = np.flatnonzero(used == control)
        where = where[:: -(-len(where) // WINDOWS)]  # from all over the episodes
        video = torch.from_numpy(np.stack([shown[int(i)]["frames"] for i in where])).movedim(-1, 2)
        if tuple(video.shape[-2:]) != model.codec.size:
            H, W = model.codec.size
            raise ConfigError(
                f"{folder} has frames of {video.shape[-2]} × {video.shape[-1]}, and the model reads {H} × {W}",
                "give the episodes that it was trained on",
            )
        codes[names[control]] = int(surprise(model, video).mean(0).argmin())
    return Controls(world=world, codes=codes, repeat=repeat)


@torch.no_grad()
def surprise(model: Genie, video: Tensor) -> Tensor:
    """uint8 (B, T, C, H, W) → (B, A): −log p of the last frame's codes, on average, had each action led to it"""
    world = Rollout(model)
    world.start(video[:, :-1])
    ids = model.look(model.codec.pixels(video))[:, -1:]  # (B, 1, h, w)
    hidden = torch.ones_like(ids, dtype=torch.bool)
    missed = []
    for action in range(model.actions):
        said = model.dynamics(ids, torch.full_like(ids[:, :, 0, 0], action), hidden, world.past).float()
        each = F.cross_entropy(said.flatten(0, -2), ids.flatten(), reduction="none")
        missed.append(each.view(len(ids), -1).mean(1))
    return torch.stack(missed, 1).cpu()


def offered(model: Genie | None, controls: Controls | None, simulator: bool) -> list[Action]:
    """All that can be done: latent actions on digits, controls on the arrows. Keys of other games are left out."""
    made: list[Action] = []
    if model is not None and (model.latent is not None or controls is None):
        on = [(f"Digit{i + 1}",) if i < DIGITS else () for i in range(model.actions)]
        made += [Action(str(i + 1), on[i], i, None) for i in range(model.actions)]
    if controls is None:
        return made
    for i, name in enumerate(choices(controls.world)):
        words = name.split()
        code, control = None if model is None else controls.codes.get(name), i if simulator else None
        if (code, control) != (None, None) and (name == NOTHING or all(word in KEYS for word in words)):
            made.append(Action(name, () if name == NOTHING else tuple(KEYS[word] for word in words), code, control))
    return made


def idle(actions: list[Action]) -> int | None:
    """The number of what is done while no key is held; without one, time stands still meanwhile."""
    return next((i for i, action in enumerate(actions) if action.name == NOTHING), None)
