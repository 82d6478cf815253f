"""Policies that act while episodes are recorded. Each episode gets a new policy with its own random generator.

Shape: A numbers of an action.
"""

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

import numpy as np

from vitrail.data.episodes.episode import ContinuousActions, DiscreteActions


class Policy(Protocol):
    """Interface of a recording policy."""

    def select_action(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        """Choose the next action for an observation: int64 () or float32 (A,)."""
        ...


PolicyFactory: TypeAlias = Callable[[np.random.Generator], Policy]


class StickyPolicy:
    """Samples actions by weight, and repeats the last one with a given probability, so that the agent moves
    consistently."""

    def __init__(
        self,
        rng: np.random.Generator,
        actions: DiscreteActions,
        weights: Mapping[str, float],
        repeat_probability: float,
    ) -> None:
        likely = np.array([weights.get(name, 0.0) for name in actions.names])
        self.rng, self.probabilities, self.repeat_probability = rng, likely / likely.sum(), repeat_probability
        self.last_action: int | None = None

    def select_action(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        if self.last_action is None or self.rng.random() >= self.repeat_probability:
            self.last_action = int(self.rng.choice(len(self.probabilities), p=self.probabilities))
        return np.array(self.last_action, np.int64)


def build_sticky_policy(
    actions: DiscreteActions, weights: Mapping[str, float] | None = None, repeat_probability: float = 0.75
) -> PolicyFactory:
    """Build a factory of sticky policies. Without weights, all actions are equally likely."""
    every = weights or dict.fromkeys(actions.names, 1.0)
    return lambda chance: StickyPolicy(chance, actions, every, repeat_probability)


class RandomWalkPolicy:
    """Random walk in a continuous action space: each step keeps most of the last offset. Also adds noise to other
    policies."""

    def __init__(self, rng: np.random.Generator, actions: ContinuousActions, spread: float, correlation: float) -> None:
        self.rng, self.correlation = rng, correlation
        self.low, self.high = np.array(actions.low), np.array(actions.high)
        self.spread = spread * (self.high - self.low) / 2
        self.offset = self.spread * rng.standard_normal(len(self.low))

    def select_action(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        return self.add_noise((self.low + self.high) / 2)

    def add_noise(self, action: np.ndarray) -> np.ndarray:
        """Return the action with correlated noise, clipped to its range."""
        noise = self.spread * self.rng.standard_normal(len(self.low))
        self.offset = self.correlation * self.offset + np.sqrt(1 - self.correlation**2) * noise
        return np.clip(action + self.offset, self.low, self.high).astype(np.float32)


def build_random_walk_policy(
    actions: ContinuousActions, spread: float = 0.6, correlation: float = 0.9
) -> PolicyFactory:
    """Build a factory of random-walk policies."""
    return lambda chance: RandomWalkPolicy(chance, actions, spread, correlation)


class PocketPolicy:
    """Pocket: follows the shortest path to the visible coin, with random errors."""

    CELLS, MOVES, WALL, WALKER, COIN = 8, ((0, -1), (0, 1), (-1, 0), (1, 0)), 1, 2, 3

    def __init__(self, rng: np.random.Generator, error_probability: float = 0.1) -> None:
        self.rng, self.error_probability = rng, error_probability

    def select_action(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        size = len(observation["labels"])
        centres = (2 * np.arange(self.CELLS) + 1) * size // (2 * self.CELLS)
        cells = observation["labels"][centres[:, None], centres[None]]
        distance = np.full(cells.shape, np.inf)
        distance[cells == self.COIN] = 0
        inner = distance[1:-1, 1:-1]
        for _ in range(cells.size):  # each iteration extends distances by one step
            neighbour_min = (
                np.min([distance[:-2, 1:-1], distance[2:, 1:-1], distance[1:-1, :-2], distance[1:-1, 2:]], 0) + 1
            )
            inner[:] = np.where(cells[1:-1, 1:-1] == self.WALL, np.inf, np.minimum(inner, neighbour_min))
        position = np.argwhere(cells == self.WALKER)
        is_random = not len(position) or self.rng.random() < self.error_probability
        if is_random or np.isinf(distance[tuple(position[0])]):
            return np.array(self.rng.integers(len(self.MOVES)), np.int64)
        return np.array(np.argmin([distance[tuple(position[0] + move)] for move in self.MOVES]), np.int64)


class PushTPolicy:
    """PushT: moves next to the block and pushes through it, half of the time towards the goal."""

    GOAL, REACH = np.array([256.0, 256.0]), 60.0  # pixels; about the distance that the disc moves in a step

    def __init__(self, rng: np.random.Generator, actions: ContinuousActions) -> None:
        self.rng, self.noise = rng, RandomWalkPolicy(rng, actions, 0.04, 0.7)
        self.steps_left = 0  # steps until the next push is planned
        self.direction, self.approaching = np.zeros(2), True

    def select_action(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        x, y, *_, angle = observation["state"].astype(np.float64)
        agent = np.array([x, y])
        block = observation["state"][2:4] + 45 * np.array([-np.sin(angle), np.cos(angle)])  # the block's centre of mass
        if self.steps_left == 0:
            self.steps_left, self.approaching = int(self.rng.integers(12, 30)), True
            angle_noise = self.rng.normal(0, 0.5) if self.rng.random() < 0.5 else self.rng.uniform(-np.pi, np.pi)
            push_angle = np.arctan2(*(self.GOAL - block)[::-1]) + angle_noise
            self.direction = np.array([np.cos(push_angle), np.sin(push_angle)])
        self.steps_left -= 1
        start = block - 110 * self.direction
        self.approaching = self.approaching and bool(np.linalg.norm(agent - np.clip(start, 20, 492)) > 25)
        delta = (start if self.approaching else block + 80 * self.direction) - agent
        delta *= min(1.0, self.REACH / max(np.linalg.norm(delta), 1e-6))
        return self.noise.add_noise(agent + delta)


class CarRacingPolicy:
    """CarRacing: follows the road, slows down in bends, with noise."""

    def __init__(self, rng: np.random.Generator, actions: ContinuousActions, spread: float) -> None:
        self.noise = RandomWalkPolicy(rng, actions, spread, 0.9)
        self.target_speed = rng.uniform(25, 55)

    def select_action(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        speed, _, offset, heading_error, curvature = observation["state"].astype(np.float64)
        steer = 0.06 * offset - 1.5 * heading_error - 0.8 * curvature  # left is negative
        target = self.target_speed / (1 + 1.5 * abs(curvature))
        return self.noise.add_noise(
            np.array([steer, np.clip(0.05 * (target - speed), 0, 1), 0.03 * max(speed - target, 0)])
        )
