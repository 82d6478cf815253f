"""A room of 8 × 8 cells with a wall across it, a gap in the wall, a walker and a coin. It needs no package.

With the option `curtain` one hangs before the wall: the gap does not show, and who stands in it is out of sight.
"""

import numpy as np

CELLS = 8
FLOOR, WALL, WALKER, COIN, CURTAIN = range(5)
MOVES = ((0, -1), (0, 1), (-1, 0), (1, 0))  # left, right, up, down, as (row, column)


class Simulator:
    def __init__(self, side: int = 32, *options: str):
        self.curtain = "curtain" in options
        self.at = np.arange(side) * CELLS // side  # the cell of each pixel

    def reset(self, seed: int) -> dict[str, np.ndarray]:
        chance = np.random.default_rng(seed)
        self.room = np.full((CELLS, CELLS), WALL, np.uint8)
        self.room[1:-1, 1:-1] = FLOOR
        self.across = across = chance.integers(3, 5)
        gap = chance.integers(1, CELLS - 1)
        self.room[1:-1, across] = WALL
        self.room[gap, across] = FLOOR
        self.walker = np.array([chance.integers(1, CELLS - 1), chance.integers(1, across)])
        coin = chance.integers(1, CELLS - 1), chance.integers(across + 1, CELLS - 1)
        self.room[coin] = COIN
        hues = chance.integers(0, 96, (4, 3)) + np.array([[128, 128, 128], [0, 0, 0], [159, 0, 0], [140, 140, 0]])
        hangs = chance.integers(0, 96, (1, 3)) + np.array([[0, 0, 159]])
        self.colours = np.concatenate([hues, hangs]).astype(np.uint8)
        return self.seen()

    def step(self, action: int) -> tuple[dict[str, np.ndarray], float, bool]:
        to = self.walker + MOVES[action]
        if self.room[tuple(to)] != WALL:
            self.walker = to
        found = bool(self.room[tuple(self.walker)] == COIN)
        return self.seen(), float(found), found

    def seen(self) -> dict[str, np.ndarray]:
        cells = self.room.copy()
        cells[tuple(self.walker)] = WALKER
        if self.curtain:
            cells[1:-1, self.across] = CURTAIN
        labels = cells[self.at[:, None], self.at[None]]  # (side, side)
        state = self.walker[::-1].astype(np.float32)
        return {"frame": self.colours[labels], "labels": labels, "state": state}
