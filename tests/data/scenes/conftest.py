"""An atlas of shapes drawn here, with two vendors, words and frames: no network, no files."""

from itertools import chain

import numpy as np
import pytest
from PIL import Image, ImageDraw

from vitrail.data.scenes.atlas import Atlas, Sprite
from vitrail.data.scenes.frame_sprites import draw_frame_sprites
from vitrail.data.scenes.word_sprites import BUILT_IN_FONTS, draw_word_sprites

SIDE = 128
SHAPES = {
    "square": lambda d, c: d.rectangle((14, 14, 113, 113), c),
    "bar": lambda d, c: d.rectangle((4, 40, 123, 79), c),
    "tower": lambda d, c: d.rectangle((50, 4, 80, 123), c),
    "ball": lambda d, c: d.ellipse((10, 10, 117, 117), c),
    "egg": lambda d, c: d.ellipse((30, 6, 97, 121), c, (20, 20, 20, 255), 6),
    "tent": lambda d, c: d.polygon([(4, 110), (64, 10), (123, 110)], c),
    "cross": lambda d, c: (d.rectangle((50, 4, 77, 123), c), d.rectangle((4, 50, 123, 77), c)),
    "ring": lambda d, c: (d.ellipse((6, 6, 121, 121), c), d.ellipse((36, 36, 91, 91), (0, 0, 0, 0))),
    "moon": lambda d, c: (d.ellipse((6, 6, 121, 121), c), d.ellipse((46, 0, 150, 100), (0, 0, 0, 0))),
    "step": lambda d, c: (d.rectangle((10, 60, 117, 117), c), d.rectangle((60, 10, 117, 117), c)),
    "house": lambda d, c: (d.rectangle((20, 60, 107, 119), c), d.polygon([(6, 62), (64, 8), (121, 62)], (90, 40, 30))),
    "stripe": lambda d, c: (d.rectangle((8, 8, 119, 60), c), d.rectangle((8, 61, 119, 119), (240, 240, 240, 255))),
}  # fmt: skip


def drawn() -> list[Sprite]:
    """Every shape by two vendors, who differ in colour."""
    sprites = []
    for number, (name, draw) in enumerate(SHAPES.items()):
        for vendor, start in (("left", 40), ("right", 120)):
            image = Image.new("RGBA", (SIDE, SIDE))
            draw(ImageDraw.Draw(image), (start, (37 * number) % 200 + 20, 250 - 15 * number, 255))
            sprites.append(Sprite(f"{vendor}/{name}", vendor, name, "thing", name, "shape", np.asarray(image)))
    return sprites


@pytest.fixture(scope="session")
def sprites() -> list[Sprite]:
    words = draw_word_sprites(["tea", "red", "ten", "sun", "map", "fox", "two", "ice", "bird"], BUILT_IN_FONTS[:3])
    return list(chain(drawn(), draw_frame_sprites(), words))


@pytest.fixture(scope="session")
def atlas(sprites: list[Sprite]) -> Atlas:
    return Atlas.build(sprites)
