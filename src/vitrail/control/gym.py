"""A `World` as Gymnasium's environments; needs Gymnasium.

B worlds side by side, C channels, H, W pixels
"""

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor

from vitrail.control.world import World
from vitrail.errors import ConfigError

BELOW = 2**31  # seeds of worlds

Told = dict[str, Any]


def _spaces(world: World) -> tuple[gymnasium.spaces.Box, gymnasium.spaces.Discrete]:
    return gymnasium.spaces.Box(0, 255, world.shape, np.uint8), gymnasium.spaces.Discrete(world.actions)


def _shown(frames: Tensor) -> np.ndarray:
    """(B, C, H, W) → (B, H, W, C)"""
    return frames.movedim(1, -1).cpu().numpy()


class WorldEnv(gymnasium.Env[np.ndarray, np.int64]):
    """Observations are pictures uint8 (H, W, C), actions numbers. `reset(options={"picture": …})` starts from a picture
    of one's own. Nothing ends but by the world's limit."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    render_mode = "rgb_array"

    def __init__(self, world: World):
        self.world, self.imagined, self.steps = world, world.imagine(), 0
        self.observation_space, self.action_space = _spaces(world)
        self._last: Tensor | None = None

    def reset(self, *, seed: int | None = None, options: Told | None = None) -> tuple[np.ndarray, Told]:
        super().reset(seed=seed)
        options = options or {}
        if unknown := set(options) - {"picture"}:
            raise ConfigError(f"reset has no option {sorted(unknown)[0]!r}", "known: picture")
        chosen = int(self.np_random.integers(len(self.world.starts)))
        start = self.world.starts[chosen][None]
        if "picture" in options:
            start = self.world.check(torch.as_tensor(options["picture"])[None])
        self.steps, told = 0, {} if "picture" in options else {"start": chosen}
        self._last = self.imagined.start(start, seed=int(self.np_random.integers(BELOW)))
        return _shown(self._last)[0], told

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, Told]:
        if self._last is None:
            raise ConfigError("a world that has not begun cannot go on", "call reset first")
        before, self._last = self._last, self.imagined.step(torch.tensor([int(action)]))
        self.steps += 1
        cut = self.world.limit is not None and self.steps >= self.world.limit
        return _shown(self._last)[0], float(self.world.worth(before, self._last)[0]), False, cut, {}

    def render(self) -> np.ndarray | None:  # type: ignore[override]
        return None if self._last is None else _shown(self._last)[0]


class WorldVectorEnv(VectorEnv):
    """All worlds are one batch, begin together and, by the limit, end together: the step after the last begins anew."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_modes": ["rgb_array"], "render_fps": 10}
    render_mode = "rgb_array"

    def __init__(self, world: World, count: int):
        if count < 1:
            raise ConfigError(f"{count} worlds side by side", "give at least one")
        self.world, self.imagined, self.num_envs, self.steps = world, world.imagine(), count, 0
        self.single_observation_space, self.single_action_space = _spaces(world)
        batched = gymnasium.vector.utils.batch_space
        self.observation_space = batched(self.single_observation_space, count)
        self.action_space = batched(self.single_action_space, count)
        self._last: Tensor | None = None

    def reset(self, *, seed: int | None = None, options: Told | None = None) -> tuple[np.ndarray, Told]:  # type: ignore[override]
        """`options={"pictures": …}` starts from pictures uint8 (B, H, W, C)."""
        super().reset(seed=seed)
        options = options or {}
        if unknown := set(options) - {"pictures"}:
            raise ConfigError(f"reset has no option {sorted(unknown)[0]!r}", "known: pictures")
        chosen = self.np_random.integers(len(self.world.starts), size=self.num_envs)
        start = self.world.starts[torch.from_numpy(chosen)]
        if "pictures" in options:
            start = self.world.check(torch.as_tensor(options["pictures"]))
            if len(start) != self.num_envs:
                raise ConfigError(f"{len(start)} pictures for {self.num_envs} worlds", "give one each")
        self.steps, told = 0, {} if "pictures" in options else {"start": chosen}
        self._last = self.imagined.start(start, seed=int(self.np_random.integers(BELOW)))
        return _shown(self._last), told

    def step(self, actions: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, Told]:  # type: ignore[override]
        if self._last is None:
            raise ConfigError("worlds that have not begun cannot go on", "call reset first")
        nothing, never = np.zeros(self.num_envs), np.zeros(self.num_envs, bool)
        if self.world.limit is not None and self.steps >= self.world.limit:
            shown, told = self.reset()
            return shown, nothing, never, never, told
        before, self._last = self._last, self.imagined.step(torch.as_tensor(np.asarray(actions)))
        self.steps += 1
        cut = np.full(self.num_envs, self.world.limit is not None and self.steps >= self.world.limit)
        return _shown(self._last), self.world.worth(before, self._last), never, cut, {}

    def render(self) -> tuple[np.ndarray, ...] | None:  # type: ignore[override]
        return None if self._last is None else tuple(_shown(self._last))
