"""A room of 8 × 8 cells with a wall, a gap in the wall, a walker and a coin. It needs no packages.

With the option `curtain`, a curtain covers the wall: the gap and a walker in it are hidden. With the option `plain`,
all rooms have the same colours.
"""

import numpy as np

CELLS = 8
FLOOR, WALL, WALKER, COIN, CURTAIN = range(5)
PLAIN_COLOURS = ((208, 208, 216), (48, 48, 64), (224, 32, 48), (232, 192, 32), (32, 96, 224))
MOVES = ((0, -1), (0, 1), (-1, 0), (1, 0))  # left, right, up, down, as (row, column)


class Simulator:
    """Pocket behind the `Simulator` interface."""

    def __init__(self, image_size: int = 32, *options: str):
        self.has_curtain, self.is_plain = "curtain" in options, "plain" in options
        self.cell_of_pixel = np.arange(image_size) * CELLS // image_size  # grid cell of each pixel

    def reset(self, seed: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        self.cells = np.full((CELLS, CELLS), WALL, np.uint8)
        self.cells[1:-1, 1:-1] = FLOOR
        wall_column = rng.integers(3, 5)
        self.wall_column = wall_column
        gap = rng.integers(1, CELLS - 1)
        self.cells[1:-1, wall_column] = WALL
        self.cells[gap, wall_column] = FLOOR
        self.walker = np.array([rng.integers(1, CELLS - 1), rng.integers(1, wall_column)])
        coin = rng.integers(1, CELLS - 1), rng.integers(wall_column + 1, CELLS - 1)
        self.cells[coin] = COIN
        base_colours = rng.integers(0, 96, (4, 3)) + np.array([[128, 128, 128], [0, 0, 0], [159, 0, 0], [140, 140, 0]])
        curtain_colour = rng.integers(0, 96, (1, 3)) + np.array([[0, 0, 159]])
        self.palette = np.concatenate([base_colours, curtain_colour]).astype(np.uint8)
        if self.is_plain:
            self.palette = np.array(PLAIN_COLOURS, np.uint8)
        return self.observe()

    def step(self, action: int) -> tuple[dict[str, np.ndarray], float, bool]:
        target = self.walker + MOVES[action]
        if self.cells[tuple(target)] != WALL:
            self.walker = target
        reached = bool(self.cells[tuple(self.walker)] == COIN)
        return self.observe(), float(reached), reached

    def observe(self) -> dict[str, np.ndarray]:
        """Render the frame, the labels and the walker's position."""
        cells = self.cells.copy()
        cells[tuple(self.walker)] = WALKER
        if self.has_curtain:
            cells[1:-1, self.wall_column] = CURTAIN
        labels = cells[self.cell_of_pixel[:, None], self.cell_of_pixel[None]]  # (side, side)
        state = self.walker[::-1].astype(np.float32)
        return {"frame": self.palette[labels], "labels": labels, "state": state}
