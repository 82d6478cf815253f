"""The mapping from keys to the actions of a world model and to the controls of its simulator.

Axes: B windows, T frames, C channels, H, W pixels, h × w codes of a frame, A actions of the model.
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from vitrail.config import Config
from vitrail.data.episodes import WORLDS, DiscreteActions, EpisodeDataset, EpisodesConfig, EpisodeSource
from vitrail.data.episodes.episode_source import TEST_EVERY
from vitrail.errors import ConfigError, DataError, suggest_name
from vitrail.generate.rollout import Rollout
from vitrail.models.genie_model import Genie

# Words in the names of controls → codes of keys, as `KeyboardEvent.code`.
KEY_OF_WORD = {"left": "ArrowLeft", "right": "ArrowRight", "up": "ArrowUp", "ahead": "ArrowUp", "down": "ArrowDown"}
NO_OP = "nothing"
MAX_DIGIT_KEYS = 9
WINDOWS, LENGTH = 24, 8  # windows of each control and frames of a window, to infer the action of a control
MAX_REPEATS = 100  # simulator steps an action; the player waits for all of them


class ControlMap(Config):
    """The mapping from the controls of a simulator to the actions of a model.

    world   name of the simulator, a key of `data.episodes.WORLDS`
    codes   name of a control → action of the model; other controls have no effect in the model
    repeat  simulator steps of one model action, 1 … 100
    """

    world: str
    codes: dict[str, int] = {}
    repeat: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.repeat <= MAX_REPEATS:
            raise ConfigError(f"controls.repeat is {self.repeat}", f"give 1 … {MAX_REPEATS}")
        names = list_control_names(self.world)
        for name in self.codes:
            if name not in names:
                raise ConfigError(f"{self.world} has no control {name!r}", suggest_name(name, names))


class PlayerAction(NamedTuple):
    """One action of a player.

    keys              held together; an empty tuple is the action while no key is held
    model_action      action of the model, or None
    simulator_action  control of the simulator, or None
    """

    name: str
    keys: tuple[str, ...]
    model_action: int | None
    simulator_action: int | None


def list_control_names(world: str) -> tuple[str, ...]:
    """List the controls of a world with discrete actions."""
    if world not in WORLDS:
        raise ConfigError(f"there is no world {world!r}", suggest_name(world, list_playable_worlds()))
    actions = WORLDS[world].action_space
    if not isinstance(actions, DiscreteActions):
        raise ConfigError(
            f"{world} has continuous actions, which keys cannot control", f"known: {', '.join(list_playable_worlds())}"
        )
    return actions.names


def list_playable_worlds() -> list[str]:
    """List the worlds with discrete actions."""
    return [name for name, world in WORLDS.items() if isinstance(world.action_space, DiscreteActions)]


def build_native_controls(model: Genie, world: str, repeat: int = 1) -> ControlMap:
    """Build the mapping of a model that is trained with the controls of the world, in the same order."""
    names = list_control_names(world)
    if model.latent is not None:
        return ControlMap(world=world, repeat=repeat)
    if len(names) != model.num_actions:
        raise ConfigError(
            f"the model has {model.num_actions} controls, but {world} has {len(names)}",
            "give the world of its training",
        )
    return ControlMap(world=world, codes={name: i for i, name in enumerate(names)}, repeat=repeat)


def check_action_codes(controls: ControlMap, model: Genie) -> None:
    """Refuse a mapping to actions that the model does not have."""
    for name, code in controls.codes.items():
        if not 0 <= code < model.num_actions:
            raise ConfigError(
                f"controls.codes maps {name!r} to action {code}", f"the model has actions 0 … {model.num_actions - 1}"
            )


def check_episodes(folder: str) -> None:
    """Refuse episodes that are too few or too short for start images and for `infer_controls`."""
    lengths = EpisodeDataset(folder).lengths
    if len(lengths) < TEST_EVERY or lengths.max() < LENGTH:
        raise DataError(
            f"{folder} contains {len(lengths)} episodes, the longest with {lengths.max(initial=0)} frames",
            f"record at least {TEST_EVERY} episodes of at least {LENGTH} frames: "
            f"vitrail data make WORLD -o FOLDER --episodes {TEST_EVERY}",
        )


def infer_controls(model: Genie, folder: str) -> ControlMap:
    """Infer for every control in the episodes the latent action under which the following frame is likeliest.

    This is not the action that the encoder infers most often: at a wall, running right has no effect and can look like
    another action. Two controls map to the same action if the model does not distinguish them.
    """
    config = EpisodesConfig(
        folder=folder, window_length=LENGTH, stride=LENGTH, split="all", fields=("actions",), cache_bytes=0
    )
    source = EpisodeSource(config)
    world, repeat = source.episodes.manifest.world, source.episodes.manifest.repeat
    if model.latent is None:
        return build_native_controls(model, world, repeat)
    names, last_controls = list_control_names(world), np.array([source[i]["actions"][-1] for i in range(len(source))])
    frame_source, codes = EpisodeSource(config.replace(fields=("frames",))), {}
    for control in tqdm(np.unique(last_controls).tolist(), desc="controls", delay=2, leave=False, disable=None):
        where = np.flatnonzero(last_controls == control)
        where = where[:: -(-len(where) // WINDOWS)]  # spread over all episodes
        video = torch.from_numpy(np.stack([frame_source[int(i)]["frames"] for i in where])).movedim(-1, 2)
        if tuple(video.shape[-2:]) != model.codec.image_size:
            H, W = model.codec.image_size
            raise ConfigError(
                f"{folder} has frames of {video.shape[-2]} × {video.shape[-1]} pixels, but the model needs {H} × {W}",
                "give episodes like those of its training",
            )
        codes[names[control]] = int(compute_action_nll(model, video).mean(0).argmin())
    return ControlMap(world=world, codes=codes, repeat=repeat)


@torch.no_grad()
def compute_action_nll(model: Genie, video: Tensor) -> Tensor:
    """Compute the mean −log p of the codes of the last frame under every action: uint8 (B, T, C, H, W) → (B, A)."""
    world = Rollout(model)
    world.start(video[:, :-1])
    ids = model.encode_frames(model.codec.to_pixels(video))[:, -1:]  # (B, 1, h, w)
    hidden = torch.ones_like(ids, dtype=torch.bool)
    missed = []
    for action in range(model.num_actions):
        logits = model.dynamics(ids, torch.full_like(ids[:, :, 0, 0], action), hidden, world.dynamics_cache).float()
        each = F.cross_entropy(logits.flatten(0, -2), ids.flatten(), reduction="none")
        missed.append(each.view(len(ids), -1).mean(1))
    return torch.stack(missed, 1).cpu()


def list_player_actions(model: Genie | None, controls: ControlMap | None, has_simulator: bool) -> list[PlayerAction]:
    """List the actions of a player: latent actions on digit keys, controls on arrow keys.

    Controls without an arrow key, such as keys of other games, are left out.
    """
    actions: list[PlayerAction] = []
    if model is not None and (model.latent is not None or controls is None):
        digit_keys = [(f"Digit{i + 1}",) if i < MAX_DIGIT_KEYS else () for i in range(model.num_actions)]
        actions += [PlayerAction(str(i + 1), digit_keys[i], i, None) for i in range(model.num_actions)]
    if controls is None:
        return actions
    for i, name in enumerate(list_control_names(controls.world)):
        words = name.split()
        code, control = None if model is None else controls.codes.get(name), i if has_simulator else None
        if (code, control) != (None, None) and (name == NO_OP or all(word in KEY_OF_WORD for word in words)):
            actions.append(
                PlayerAction(name, () if name == NO_OP else tuple(KEY_OF_WORD[word] for word in words), code, control)
            )
    return actions


def find_idle_action(actions: list[PlayerAction]) -> int | None:
    """Return the index of the action while no key is held, or None: then the world pauses."""
    return next((i for i, action in enumerate(actions) if action.name == NO_OP), None)
