"""Paint a stained-glass window: an image for the documentation.

python examples/window.py window.png
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

PALETTE = np.array([(196, 66, 48), (18, 92, 186), (202, 138, 30), (38, 134, 92), (118, 80, 168), (240, 226, 190)])


def paint_window(width: int = 900, height: int = 560, panes: int = 90, seed: int = 3) -> Image.Image:
    """Voronoi panes of coloured glass, darker towards their edges, joined by lead."""
    rng = np.random.default_rng(seed)
    seeds = rng.uniform((0, 0), (height, width), (panes, 2))
    colours = PALETTE[rng.integers(len(PALETTE), size=panes)] * rng.uniform(0.75, 1.1, (panes, 1))
    y, x = np.mgrid[:height, :width]
    distance = np.hypot(y[..., None] - seeds[:, 0], x[..., None] - seeds[:, 1])  # (H, W, panes)
    near, next_ = np.partition(distance, 1, axis=-1)[..., :2].transpose(2, 0, 1)
    light = 0.72 + 0.28 * np.clip((next_ - near) / 40, 0, 1) + rng.normal(0, 0.02, (height, width))
    glass = colours[distance.argmin(-1)] * light[..., None]
    glass[next_ - near < 5] = (28, 28, 32)
    return Image.fromarray(np.clip(glass, 0, 255).astype(np.uint8))


if __name__ == "__main__":
    paint_window().save(Path(sys.argv[1] if len(sys.argv) > 1 else "window.png"))
