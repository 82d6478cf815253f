"""A world model as an environment, for any model that implements `WorldRollout`.

Axes: B worlds, C channels, H, W pixels.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import ConfigError, DataError

if TYPE_CHECKING:
    from vitrail.control.gym_env import WorldEnv, WorldVectorEnv

RewardFn = Callable[[Tensor, Tensor], Tensor]
"""frames uint8 (B, C, H, W) before and after an action → rewards (B,)"""


class WorldRollout(Protocol):
    """The interface of a model rollout; `vitrail.generate.rollout.Rollout` implements it."""

    @property
    def num_actions(self) -> int: ...

    @property
    def frame_shape(self) -> tuple[int, int, int]:
        """(H, W, C)"""
        ...

    def start(self, frames: Tensor, actions: Tensor | None = None, seed: int | None = None) -> Tensor:
        """Start from frames uint8 (B, C, H, W) → the first observation, of the same shape"""
        ...

    def step(self, actions: Tensor) -> Tensor:
        """Take actions (B,) → the next frames, uint8 (B, C, H, W)"""
        ...


class ImaginedWorld:
    """A world model with start images, a reward function and a step limit.

    create_rollout     returns a new rollout of the model
    start_images       uint8 (N, H, W, C); a reset chooses one at random
    reward_fn          reward of a frame and the next; without it rewards are 0
    max_episode_steps  steps after which an episode is truncated; None is no limit
    """

    def __init__(
        self,
        create_rollout: Callable[[], WorldRollout],
        start_images: np.ndarray | Tensor,
        *,
        reward_fn: RewardFn | None = None,
        max_episode_steps: int | None = None,
    ):
        self.create_rollout, self.reward_fn, self.max_episode_steps = create_rollout, reward_fn, max_episode_steps
        one = create_rollout()
        self.num_actions, self.frame_shape = one.num_actions, one.frame_shape
        self.start_images = self.check_start_images(torch.as_tensor(start_images))
        if max_episode_steps is not None and max_episode_steps < 1:
            raise ConfigError(f"max_episode_steps is {max_episode_steps}", "give at least 1, or None")

    def check_start_images(self, images: Tensor) -> Tensor:
        """Check start images (N, H, W, C) and return them as (N, C, H, W)."""
        if images.dtype != torch.uint8 or images.ndim != 4 or not len(images) or images.shape[1:] != self.frame_shape:
            H, W, C = self.frame_shape
            raise DataError(
                f"the start images are {images.dtype} {tuple(images.shape)}",
                f"give uint8 (N, {H}, {W}, {C}) with at least one image",
            )
        return images.movedim(-1, 1)

    def compute_reward(self, before: Tensor, after: Tensor) -> np.ndarray:
        """Compute the rewards (B,) as float64."""
        if self.reward_fn is None:
            return np.zeros(len(after))
        return self.reward_fn(before, after).double().cpu().numpy()

    def create_env(self) -> "WorldEnv":
        """Create a Gymnasium environment."""
        return self._import_gym_env().WorldEnv(self)

    def create_vector_env(self, num_envs: int) -> "WorldVectorEnv":
        """Create a Gymnasium vector environment of worlds in one batch."""
        return self._import_gym_env().WorldVectorEnv(self, num_envs)

    @staticmethod
    def _import_gym_env():
        try:
            from vitrail.control import gym_env
        except ImportError:
            raise ConfigError(
                "environments need Gymnasium, which is not installed", "pip install 'vitrail[sim]'"
            ) from None
        return gym_env
