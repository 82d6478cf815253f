"""A world model ready to hand: pictures and actions in, what follows out.

Beside the weights of a folder may lie `starts.png`, pictures to start from, one beside the other, and `controls.json`,
which says what the controls of a simulator are to the model.

B pictures, N to start from, C channels, H, W pixels, h × w codes
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail import hub
from vitrail.codecs.fit import Fit
from vitrail.control import World
from vitrail.control.world import Reward
from vitrail.data.episodes import EpisodesConfig, EpisodeSource
from vitrail.errors import CheckpointError, ConfigError, VitrailError
from vitrail.generate.rollout import Rolling, Rollout, roll
from vitrail.generate.sampling import Sampling
from vitrail.hub import configs
from vitrail.hub.files import read_json, write_json
from vitrail.models.genie import Genie
from vitrail.play.controls import Controls, check_codes, check_episodes, learn_controls
from vitrail.processing.images import Source, load_image
from vitrail.talker import home

if TYPE_CHECKING:
    from vitrail.control.gym import WorldEnv, WorldVectorEnv

STARTS, CONTROLS = "starts.png", "controls.json"
STEPS, TEMPERATURE = 2, 0.5  # passes that draw a frame, and how its codes are chosen, unless told


class Playground:
    """`vitrail.load(folder)`, where the folder holds a Genie. `starts` are pictures uint8 (N, H, W, 3)."""

    def __init__(self, model: Genie, starts: np.ndarray | Tensor | None = None, controls: Controls | None = None):
        if model.config.codec.channels != 3:
            raise ConfigError(f"frames of {model.config.codec.channels} channels", "only a world in RGB can be shown")
        self.model, self.controls = model.eval(), controls
        self.starts = torch.zeros(0, *self.size, 3, dtype=torch.uint8)
        if starts is not None:
            self.starts = self.world(starts=torch.as_tensor(starts)).starts.movedim(1, -1)
        if controls is not None:
            check_codes(controls, model)

    @classmethod
    def load(cls, name_or_path: str | Path, *, device: str | torch.device | None = None) -> "Playground":
        """On a GPU, if there is one; in half precision there, and on CPUs that multiply it."""
        where, dtype = home(device, half=True)
        folder = configs.resolve(name_or_path)
        model = hub.load(folder, dtype=dtype, device=where)
        if not isinstance(model, Genie):
            raise ConfigError(
                f"{name_or_path} is a {type(model).__name__}; only a world model can be played",
                'give the folder of one that was trained as kind = "genie"',
            )
        return cls(model, _read_starts(folder / STARTS, model), _read_controls(folder / CONTROLS, model))

    def save(self, folder: str | Path, *, small: bool = False) -> None:
        """Write a folder that `vitrail.load` reads; `small` keeps 8 bits a weight."""
        folder = Path(folder)
        hub.save(self.model, folder, small=small)
        for file in (STARTS, CONTROLS):  # of a world that was here before
            (folder / file).unlink(missing_ok=True)
        if len(self.starts):
            strip = self.starts.transpose(0, 1).flatten(1, 2)  # (H, N·W, 3)
            Image.fromarray(strip.contiguous().numpy()).save(folder / STARTS)
        if self.controls is not None:
            write_json(folder / CONTROLS, self.controls.plain())

    def with_episodes(self, folder: str | Path, count: int = 16) -> "Playground":
        """The same with what recorded episodes tell: beginnings of those not trained on to start from, and what the
        controls are to the model."""
        check_episodes(str(folder))
        source = EpisodeSource(EpisodesConfig(folder=str(folder), length=1, part="test", fields=("frames",), hold=0))
        numbers = source.wanted[:count].tolist()
        firsts = [source.episodes.window(number, 0, 1, ("frames",))["frames"][0] for number in numbers]
        starts = torch.stack([self.fit(first) for first in firsts])
        return Playground(self.model, starts, learn_controls(self.model, str(folder)))

    # ---- frames -------------------------------------------------------------------------------------------------

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of frames."""
        return self.model.codec.size

    def fit(self, picture: Source) -> Tensor:
        """Any picture as the model can be shown it: its middle, uint8 (H, W, 3)"""
        codec = self.model.codec
        return Fit(size=codec.size).apply(load_image(picture), codec.factor)[0].movedim(0, -1)

    def tokenize(self, pictures: Any) -> Tensor:
        """One picture or a list, each by itself → ids (B, h, w)"""
        several = list(pictures) if isinstance(pictures, list | tuple) else [pictures]
        if not several:
            raise ConfigError("no picture", "give at least one")
        shown = torch.stack([self.fit(one) for one in several]).movedim(-1, 1)[:, None]  # (B, 1, C, H, W)
        return self.model.look(self.model.codec.pixels(shown))[:, 0]

    @torch.no_grad()
    def detokenize(self, ids: Tensor) -> list[Image.Image]:
        """The pictures of ids (B, h, w)"""
        codec = self.model.codec
        return _pictures(codec.bytes(codec.decode(codec.lookup(ids.to(codec.device)[:, None]))[:, 0]))

    # ---- worlds -------------------------------------------------------------------------------------------------

    def rollout(self, steps: int = STEPS, temperature: float = TEMPERATURE) -> Rollout:
        """A world that has not begun."""
        return Rollout(self.model, _rolling(steps, temperature))

    def roll(
        self,
        actions: Sequence[int],
        picture: "Source | None" = None,
        *,
        seed: int | None = None,
        steps: int = STEPS,
        temperature: float = TEMPERATURE,
    ) -> list[Image.Image]:
        """The frames that follow a picture, or the first of `starts`, by actions."""
        if picture is None and not len(self.starts):
            raise ConfigError("this world has no pictures to start from", "give a picture")
        start = self.starts[0] if picture is None else self.fit(picture)
        done = torch.tensor(list(actions), dtype=torch.long)[None]
        frames = roll(self.model, start.movedim(-1, 0)[None], done, _rolling(steps, temperature), seed=seed)
        return _pictures(frames[0])

    def world(
        self,
        *,
        starts: np.ndarray | Tensor | None = None,
        steps: int = STEPS,
        temperature: float = TEMPERATURE,
        reward: Reward | None = None,
        limit: int | None = None,
    ) -> World:
        """What environments are made of. `starts` take the place of its own."""
        if starts is None and not len(self.starts):
            raise ConfigError("this world has no pictures to start from", "give `starts`, uint8 (N, H, W, 3)")
        starts = self.starts if starts is None else starts
        return World(lambda: self.rollout(steps, temperature), starts, reward=reward, limit=limit)

    def env(self, **how: Any) -> "WorldEnv":
        """A Gymnasium environment; `how` is what `world` takes."""
        return self.world(**how).env()

    def vector_env(self, count: int, **how: Any) -> "WorldVectorEnv":
        """So many worlds side by side in one batch."""
        return self.world(**how).vector_env(count)


def _rolling(steps: int, temperature: float) -> Rolling:
    return Rolling(steps=steps, sampling=Sampling(temperature=temperature))


def _pictures(frames: Tensor) -> list[Image.Image]:
    """uint8 (B, 3, H, W)"""
    return [Image.fromarray(one.permute(1, 2, 0).contiguous().numpy()) for one in frames.cpu()]


def _read_starts(file: Path, model: Genie) -> Tensor | None:
    """(N, H, W, 3) of a strip"""
    if not file.exists():
        return None
    strip = torch.from_numpy(np.array(load_image(file)))  # (H, N·W, 3)
    H, W = model.codec.size
    if strip.shape[0] != H or strip.shape[1] % W:
        raise CheckpointError(
            f"{file} is {strip.shape[0]} × {strip.shape[1]} pixels",
            f"frames of this model are {H} × {W}: give them side by side",
        )
    return strip.unflatten(1, (-1, W)).transpose(0, 1).contiguous()


def _read_controls(file: Path, model: Genie) -> Controls | None:
    if not file.exists():
        return None
    try:
        controls = Controls.read(read_json(file))
        check_codes(controls, model)
        return controls
    except VitrailError as error:
        raise CheckpointError(f"{file}: {error.problem}", error.remedy) from None
