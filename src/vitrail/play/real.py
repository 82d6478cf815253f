"""The simulator's side of a game."""

from collections.abc import Callable

import numpy as np

from vitrail.data.episodes import WORLDS
from vitrail.data.episodes.remote import Remote, Simulator, open_simulator
from vitrail.errors import DataError


class Real:
    """A simulator and how its episode stands. It opens when it is first begun; `side` is for worlds of any size. When
    its player leaves, even in the middle of a step, it is over."""

    def __init__(self, world: str, side: int | None = None, repeat: int = 1):
        row = WORLDS[world]
        self.world, self.repeat, self.side = world, repeat, side if side is not None and row.any_side else row.side
        self.simulator: Simulator | None = None
        self.frame, self.reward, self.ended = np.zeros((1, 1, 3), np.uint8), 0.0, True
        self.left = False

    def begin(self, seed: int) -> None:
        if self.simulator is None:
            self.simulator = open_simulator(self.world, self.side)
        if self.left:  # while it opened
            self.close()
            return
        self._seen(lambda simulator: simulator.reset(seed))
        self.reward, self.ended = 0.0, False

    def step(self, control: int) -> None:
        """Behind the end nothing moves."""
        if self.ended:
            return

        def act(simulator: Simulator) -> dict[str, np.ndarray]:
            seen: dict[str, np.ndarray] = {}
            for _ in range(self.repeat):
                seen, reward, self.ended = simulator.step(control)
                self.reward += reward
                if self.ended or self.left:
                    break
            return seen

        self._seen(act)

    def _seen(self, ask: Callable[[Simulator], dict[str, np.ndarray]]) -> None:
        assert self.simulator is not None
        try:
            self.frame = ask(self.simulator).get("frame", self.frame)  # the last may never have been shown
        except DataError:  # it has stopped: the next beginning opens another
            self.close()
            raise

    def leave(self) -> None:
        self.left = True
        self.close()

    def close(self) -> None:
        if isinstance(self.simulator, Remote):
            self.simulator.close()
        self.simulator, self.ended = None, True
