"""Have the model that ships draw eight prompts, and paint them with what it then says of its own drawings.

python examples/drawn.py drawn.png
"""

import sys
from pathlib import Path

from PIL import Image

import vitrail
from vitrail.show.sheet import Tile, draw_sheet

PROMPTS = (
    "a lion",
    "a red balloon",
    "two dogs",
    "a pineapple and a crab",
    "a green frog",
    "a blue house and a red bus",
    "a purple umbrella to the right of a yellow duck",
    "three fish",
)


def drawn(name: str = "mini", seed: int = 1) -> Image.Image:
    model, tiles = vitrail.load(name), []
    for prompt in PROMPTS:
        picture = model.draw(prompt, seed=seed)
        tiles.append(Tile(picture, [f"“{prompt}”", f"It reads: {model.caption(picture)}"]))
    under = f"vitrail draw PROMPT --seed {seed}  ·  vitrail caption"
    return draw_sheet(tiles, f"Drawn by {name}, and what it then says of its drawings", under=under, columns=4)


if __name__ == "__main__":
    drawn().save(Path(sys.argv[1] if len(sys.argv) > 1 else "drawn.png"))
