"""Frame sprites: objects that can contain another object.

The centre of every frame (INNER_FRACTION of its width and height) is free of the rim.
"""

from collections.abc import Callable, Iterator

import numpy as np
from PIL import Image, ImageDraw

from vitrail.data.scenes.atlas import Sprite

INNER_FRACTION = 0.56
_SIDE, _SUPERSAMPLING = 128, 4  # supersampled by _FINE for smooth edges


def draw_frame_sprites() -> Iterator[Sprite]:
    """Yield one sprite per frame."""
    for name, draw in FRAMES.items():
        canvas = Image.new("RGBa", (_SIDE * _SUPERSAMPLING,) * 2)
        draw(_Pen(canvas))
        rgba = np.asarray(canvas.reduce(_SUPERSAMPLING).convert("RGBA"))
        yield Sprite(f"drawn/{name}", "drawn", name, "frame", name, "frame", rgba)


class _Pen:
    """Drawing helper with coordinates as fractions of the side."""

    def __init__(self, canvas: Image.Image):
        self.draw, self.side = ImageDraw.Draw(canvas), canvas.width

    def _inset(self, share: float) -> tuple[float, float, float, float]:
        return (share * self.side, share * self.side, (1 - share) * self.side - 1, (1 - share) * self.side - 1)

    def disc(self, inset: float, colour: tuple[int, ...]) -> None:
        self.draw.ellipse(self._inset(inset), colour)

    def square(self, inset: float, colour: tuple[int, ...], round: float = 0) -> None:
        self.draw.rounded_rectangle(self._inset(inset), round * self.side, colour)

    def polygon(self, corners: list[tuple[float, float]], colour: tuple[int, ...]) -> None:
        self.draw.polygon([(x * (self.side - 1), y * (self.side - 1)) for x, y in corners], colour)


TRANSPARENT = (0, 0, 0, 0)
_OCTAGON: list[tuple[float, float]] = [
    (0.29, 0),
    (0.71, 0),
    (1, 0.29),
    (1, 0.71),
    (0.71, 1),
    (0.29, 1),
    (0, 0.71),
    (0, 0.29),
]


def _box(pen: _Pen) -> None:
    pen.square(0, (120, 82, 48, 255), 0.04)
    pen.square(0.02, (186, 138, 88, 255), 0.03)
    pen.square(0.13, (120, 82, 48, 255))
    pen.square(0.15, (222, 188, 146, 255))


def _plate(pen: _Pen) -> None:
    pen.disc(0, (148, 156, 168, 255))
    pen.disc(0.015, (232, 236, 242, 255))
    pen.disc(0.07, (186, 194, 206, 255))
    pen.disc(0.085, (244, 246, 250, 255))


def _hoop(pen: _Pen) -> None:
    pen.disc(0, (64, 66, 74, 255))
    pen.disc(0.02, (128, 132, 142, 255))
    pen.disc(0.085, (64, 66, 74, 255))
    pen.disc(0.1, TRANSPARENT)


def _square(pen: _Pen) -> None:
    pen.square(0, (72, 74, 82, 255), 0.03)
    pen.square(0.09, TRANSPARENT)


def _tray(pen: _Pen) -> None:
    pen.square(0, (92, 100, 110, 255), 0.16)
    pen.square(0.03, (168, 178, 190, 255), 0.14)
    pen.square(0.09, (128, 138, 150, 255), 0.1)
    pen.square(0.105, (196, 204, 214, 255), 0.09)


def _octagon(pen: _Pen) -> None:
    def shrink(by: float) -> list[tuple[float, float]]:
        return [(by + (1 - 2 * by) * x, by + (1 - 2 * by) * y) for x, y in _OCTAGON]

    pen.polygon(_OCTAGON, (70, 72, 80, 255))
    pen.polygon(shrink(0.08), (214, 216, 222, 255))


FRAMES: dict[str, Callable[[_Pen], None]] = {
    "box": _box,
    "plate": _plate,
    "hoop": _hoop,
    "square": _square,
    "tray": _tray,
    "octagon": _octagon,
}
