"""Draw eight prompts with the bundled model, and make a contact sheet of the drawings with its own captions.

python examples/draw_examples.py drawings.png
"""

import sys
from pathlib import Path

from PIL import Image

import vitrail
from vitrail.plots.contact_sheet import Tile, draw_contact_sheet

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


def draw_examples(name: str = "mini", seed: int = 1) -> Image.Image:
    """Draw and caption every prompt, and make a contact sheet."""
    model, tiles = vitrail.load(name), []
    for prompt in PROMPTS:
        image = model.draw(prompt, seed=seed)
        tiles.append(Tile(image, [f"“{prompt}”", f"Caption: {model.caption(image)}"]))
    commands = f"vitrail draw PROMPT --seed {seed}  ·  vitrail caption"
    return draw_contact_sheet(tiles, f"Drawings by {name} with its own captions", subtitle=commands, columns=4)


if __name__ == "__main__":
    draw_examples().save(Path(sys.argv[1] if len(sys.argv) > 1 else "drawings.png"))
