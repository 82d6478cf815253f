"""Who acts while a world is recorded. A policy is made anew for every episode, with its own chance.

A numbers of an action
"""

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

import numpy as np

from vitrail.data.episodes.episode import Choices, Dials


class Policy(Protocol):
    def act(self, seen: Mapping[str, np.ndarray]) -> np.ndarray:
        """The next action, for what is seen: int64 () or float32 (A,)."""
        ...


Make: TypeAlias = Callable[[np.random.Generator], Policy]


class Sticky:
    """Any action, by weight, and then often the same again: whoever changes his mind at every step gets nowhere."""

    def __init__(
        self, chance: np.random.Generator, actions: Choices, weights: Mapping[str, float], again: float
    ) -> None:
        likely = np.array([weights.get(name, 0.0) for name in actions.names])
        self.chance, self.likely, self.again = chance, likely / likely.sum(), again
        self.last: int | None = None

    def act(self, seen: Mapping[str, np.ndarray]) -> np.ndarray:
        if self.last is None or self.chance.random() >= self.again:
            self.last = int(self.chance.choice(len(self.likely), p=self.likely))
        return np.array(self.last, np.int64)


def sticky(actions: Choices, weights: Mapping[str, float] | None = None, again: float = 0.75) -> Make:
    every = weights or dict.fromkeys(actions.names, 1.0)
    return lambda chance: Sticky(chance, actions, every, again)


class Wander:
    """Dials that drift: each step keeps most of where they were. Noise may be laid over another policy in this way."""

    def __init__(self, chance: np.random.Generator, dials: Dials, spread: float, keep: float) -> None:
        self.chance, self.keep = chance, keep
        self.low, self.high = np.array(dials.low), np.array(dials.high)
        self.spread = spread * (self.high - self.low) / 2
        self.off = self.spread * chance.standard_normal(len(self.low))

    def act(self, seen: Mapping[str, np.ndarray]) -> np.ndarray:
        return self.around((self.low + self.high) / 2)

    def around(self, middle: np.ndarray) -> np.ndarray:
        fresh = self.spread * self.chance.standard_normal(len(self.low))
        self.off = self.keep * self.off + np.sqrt(1 - self.keep**2) * fresh
        return np.clip(middle + self.off, self.low, self.high).astype(np.float32)


def wander(dials: Dials, spread: float = 0.6, keep: float = 0.9) -> Make:
    return lambda chance: Wander(chance, dials, spread, keep)


class Seeker:
    """Pocket: the shortest way to the coin, by what is shown, with a wrong step now and then."""

    CELLS, MOVES, WALL, WALKER, COIN = 8, ((0, -1), (0, 1), (-1, 0), (1, 0)), 1, 2, 3

    def __init__(self, chance: np.random.Generator, wrong: float = 0.1) -> None:
        self.chance, self.wrong = chance, wrong

    def act(self, seen: Mapping[str, np.ndarray]) -> np.ndarray:
        side = len(seen["labels"])
        middle = (2 * np.arange(self.CELLS) + 1) * side // (2 * self.CELLS)
        cells = seen["labels"][middle[:, None], middle[None]]
        far = np.full(cells.shape, np.inf)
        far[cells == self.COIN] = 0
        inside = far[1:-1, 1:-1]
        for _ in range(cells.size):  # one step further every time
            around = np.min([far[:-2, 1:-1], far[2:, 1:-1], far[1:-1, :-2], far[1:-1, 2:]], 0) + 1
            inside[:] = np.where(cells[1:-1, 1:-1] == self.WALL, np.inf, np.minimum(inside, around))
        here = np.argwhere(cells == self.WALKER)
        lost = not len(here) or self.chance.random() < self.wrong
        if lost or np.isinf(far[tuple(here[0])]):
            return np.array(self.chance.integers(len(self.MOVES)), np.int64)
        return np.array(np.argmin([far[tuple(here[0] + move)] for move in self.MOVES]), np.int64)


class Pusher:
    """PushT: walks to a place beside the block, and pushes through it, half the time towards the goal."""

    GOAL, REACH = np.array([256.0, 256.0]), 60.0  # pixels; the disc moves about as far in a step

    def __init__(self, chance: np.random.Generator, dials: Dials) -> None:
        self.chance, self.noise = chance, Wander(chance, dials, 0.04, 0.7)
        self.left = 0  # steps until another push is thought of
        self.way, self.behind = np.zeros(2), True

    def act(self, seen: Mapping[str, np.ndarray]) -> np.ndarray:
        x, y, *_, angle = seen["state"].astype(np.float64)
        agent = np.array([x, y])
        block = seen["state"][2:4] + 45 * np.array([-np.sin(angle), np.cos(angle)])  # the middle of its weight
        if self.left == 0:
            self.left, self.behind = int(self.chance.integers(12, 30)), True
            turn = self.chance.normal(0, 0.5) if self.chance.random() < 0.5 else self.chance.uniform(-np.pi, np.pi)
            towards = np.arctan2(*(self.GOAL - block)[::-1]) + turn
            self.way = np.array([np.cos(towards), np.sin(towards)])
        self.left -= 1
        start = block - 110 * self.way
        self.behind = self.behind and bool(np.linalg.norm(agent - np.clip(start, 20, 492)) > 25)
        step = (start if self.behind else block + 80 * self.way) - agent
        step *= min(1.0, self.REACH / max(np.linalg.norm(step), 1e-6))
        return self.noise.around(agent + step)


class Driver:
    """CarRacing: follows the road, slower in bends, with unsteady hands."""

    def __init__(self, chance: np.random.Generator, dials: Dials, spread: float) -> None:
        self.noise = Wander(chance, dials, spread, 0.9)
        self.pace = chance.uniform(25, 55)

    def act(self, seen: Mapping[str, np.ndarray]) -> np.ndarray:
        speed, _, offset, error, bend = seen["state"].astype(np.float64)
        steer = 0.06 * offset - 1.5 * error - 0.8 * bend  # left is negative here
        pace = self.pace / (1 + 1.5 * abs(bend))
        return self.noise.around(np.array([steer, np.clip(0.05 * (pace - speed), 0, 1), 0.03 * max(speed - pace, 0)]))
