"""A model that imagines frames as a world to act in, whatever model it is.

B worlds side by side, C channels, H, W pixels
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import ConfigError, DataError

if TYPE_CHECKING:
    from vitrail.control.gym import WorldEnv, WorldVectorEnv

Reward = Callable[[Tensor, Tensor], Tensor]
"""frames uint8 (B, C, H, W) before an action and after it → (B,)"""


class Imagined(Protocol):
    """What a world asks of a model: `vitrail.generate.rollout.Rollout` is one."""

    @property
    def actions(self) -> int: ...

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, C)"""
        ...

    def start(self, frames: Tensor, actions: Tensor | None = None, seed: int | None = None) -> Tensor:
        """uint8 (B, C, H, W) → what is seen first, of the same shape"""
        ...

    def step(self, actions: Tensor) -> Tensor:
        """(B,) → what is seen next, uint8 (B, C, H, W)"""
        ...


class World:
    """Where a world starts, what is worth something in it, and how long it lasts.

    starts   pictures uint8 (N, H, W, C), of which a reset takes one by chance
    reward   of a frame and the next; a model of pictures alone knows none, and without it everything is worth 0
    limit    steps after which an episode is cut off; none unless given
    """

    def __init__(
        self,
        imagine: Callable[[], Imagined],
        starts: np.ndarray | Tensor,
        *,
        reward: Reward | None = None,
        limit: int | None = None,
    ):
        self.imagine, self.reward, self.limit = imagine, reward, limit
        one = imagine()
        self.actions, self.shape = one.actions, one.shape
        self.starts = self.check(torch.as_tensor(starts))
        if limit is not None and limit < 1:
            raise ConfigError(f"episodes of {limit} steps", "give at least one, or no limit")

    def check(self, pictures: Tensor) -> Tensor:
        """(N, H, W, C) → (N, C, H, W), refused where they are not what the model reads"""
        if pictures.dtype != torch.uint8 or pictures.ndim != 4 or not len(pictures) or pictures.shape[1:] != self.shape:
            H, W, C = self.shape
            raise DataError(
                f"a world cannot start from {pictures.dtype} {tuple(pictures.shape)}",
                f"give uint8 (N, {H}, {W}, {C}), at least one picture",
            )
        return pictures.movedim(-1, 1)

    def worth(self, before: Tensor, after: Tensor) -> np.ndarray:
        """(B,) float64"""
        if self.reward is None:
            return np.zeros(len(after))
        return self.reward(before, after).double().cpu().numpy()

    def env(self) -> "WorldEnv":
        """A Gymnasium environment."""
        return self._gym().WorldEnv(self)

    def vector_env(self, count: int) -> "WorldVectorEnv":
        """So many worlds side by side in one batch, as a Gymnasium vector environment."""
        return self._gym().WorldVectorEnv(self, count)

    @staticmethod
    def _gym():
        try:
            from vitrail.control import gym
        except ImportError:
            raise ConfigError("an environment needs Gymnasium", "pip install 'vitrail[sim]'") from None
        return gym
