"""Gymnasium environments of world models. Needs Gymnasium.

Axes: B worlds, C channels, H, W pixels.
"""

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor

from vitrail.control.imagined_world import ImaginedWorld
from vitrail.errors import ConfigError

SEED_LIMIT = 2**31  # exclusive limit of seeds

Info = dict[str, Any]


def _build_spaces(world: ImaginedWorld) -> tuple[gymnasium.spaces.Box, gymnasium.spaces.Discrete]:
    return gymnasium.spaces.Box(0, 255, world.frame_shape, np.uint8), gymnasium.spaces.Discrete(world.num_actions)


def _to_observation(frames: Tensor) -> np.ndarray:
    """(B, C, H, W) → (B, H, W, C)"""
    return frames.movedim(1, -1).cpu().numpy()


class WorldEnv(gymnasium.Env[np.ndarray, np.int64]):
    """A world as a Gymnasium environment with image observations uint8 (H, W, C) and discrete actions.

    `reset(options={"image": …})` starts from an image of your own. Episodes never terminate; they are truncated after
    `max_episode_steps`.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    render_mode = "rgb_array"

    def __init__(self, world: ImaginedWorld):
        self.world, self.rollout, self.step_count = world, world.create_rollout(), 0
        self.observation_space, self.action_space = _build_spaces(world)
        self._last_frames: Tensor | None = None

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[np.ndarray, Info]:
        super().reset(seed=seed)
        options = options or {}
        if unknown := set(options) - {"image"}:
            raise ConfigError(f"reset has no option {sorted(unknown)[0]!r}", "known: image")
        chosen = int(self.np_random.integers(len(self.world.start_images)))
        start = self.world.start_images[chosen][None]
        if "image" in options:
            start = self.world.check_start_images(torch.as_tensor(options["image"])[None])
        self.step_count, reset_options = 0, {} if "image" in options else {"start": chosen}
        self._last_frames = self.rollout.start(start, seed=int(self.np_random.integers(SEED_LIMIT)))
        return _to_observation(self._last_frames)[0], reset_options

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, Info]:
        if self._last_frames is None:
            raise ConfigError("the environment is not reset", "call reset first")
        before, self._last_frames = self._last_frames, self.rollout.step(torch.tensor([int(action)]))
        self.step_count += 1
        cut = self.world.max_episode_steps is not None and self.step_count >= self.world.max_episode_steps
        return (
            _to_observation(self._last_frames)[0],
            float(self.world.compute_reward(before, self._last_frames)[0]),
            False,
            cut,
            {},
        )

    def render(self) -> np.ndarray | None:  # type: ignore[override]
        return None if self._last_frames is None else _to_observation(self._last_frames)[0]


class WorldVectorEnv(VectorEnv):
    """Worlds of one batch as a Gymnasium vector environment.

    All worlds start together and are truncated together; the following step resets them.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_modes": ["rgb_array"], "render_fps": 10}
    render_mode = "rgb_array"

    def __init__(self, world: ImaginedWorld, num_envs: int):
        if num_envs < 1:
            raise ConfigError(f"num_envs is {num_envs}", "give at least 1")
        self.world, self.rollout, self.num_envs, self.step_count = world, world.create_rollout(), num_envs, 0
        self.single_observation_space, self.single_action_space = _build_spaces(world)
        batched = gymnasium.vector.utils.batch_space
        self.observation_space = batched(self.single_observation_space, num_envs)
        self.action_space = batched(self.single_action_space, num_envs)
        self._last_frames: Tensor | None = None

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[np.ndarray, Info]:  # type: ignore[override]
        """Reset all worlds. `options={"images": …}` starts from images uint8 (B, H, W, C)."""
        super().reset(seed=seed)
        options = options or {}
        if unknown := set(options) - {"images"}:
            raise ConfigError(f"reset has no option {sorted(unknown)[0]!r}", "known: images")
        chosen = self.np_random.integers(len(self.world.start_images), size=self.num_envs)
        start = self.world.start_images[torch.from_numpy(chosen)]
        if "images" in options:
            start = self.world.check_start_images(torch.as_tensor(options["images"]))
            if len(start) != self.num_envs:
                raise ConfigError(f"reset got {len(start)} images for {self.num_envs} worlds", "give one image a world")
        self.step_count, reset_options = 0, {} if "images" in options else {"start": chosen}
        self._last_frames = self.rollout.start(start, seed=int(self.np_random.integers(SEED_LIMIT)))
        return _to_observation(self._last_frames), reset_options

    def step(self, actions: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, Info]:  # type: ignore[override]
        if self._last_frames is None:
            raise ConfigError("the environment is not reset", "call reset first")
        nothing, never = np.zeros(self.num_envs), np.zeros(self.num_envs, bool)
        if self.world.max_episode_steps is not None and self.step_count >= self.world.max_episode_steps:
            observation, reset_options = self.reset()
            return observation, nothing, never, never, reset_options
        before, self._last_frames = self._last_frames, self.rollout.step(torch.as_tensor(np.asarray(actions)))
        self.step_count += 1
        cut = np.full(
            self.num_envs, self.world.max_episode_steps is not None and self.step_count >= self.world.max_episode_steps
        )
        return _to_observation(self._last_frames), self.world.compute_reward(before, self._last_frames), never, cut, {}

    def render(self) -> tuple[np.ndarray, ...] | None:  # type: ignore[override]
        return None if self._last_frames is None else tuple(_to_observation(self._last_frames))
