"""The ledger's sheet draws what it is given."""

import numpy as np

from vitrail.show import style
from vitrail.show.ledger import Series, draw_ledger


def sheet(**cache: float) -> np.ndarray:
    series = {name: Series(10e9, {8192: held}, {1024: 1e-3, 8192: 2e-3}) for name, held in cache.items()}
    return np.asarray(draw_ledger(series, device="h200", memory=100e9)).astype(int)


def area(image: np.ndarray, colour: tuple[int, ...]) -> int:
    return int((abs(image - colour).max(-1) < 8).sum())


def test_bars_grow_with_the_cache():
    pale = tuple(round(c + (p - c) * 0.62) for c, p in zip(style.BLUE, style.PAPER, strict=True))
    small, large = (area(sheet(model=held), pale) for held in (20e9, 40e9))
    assert small > 0
    assert 1.8 < large / small < 2.2


def test_each_model_has_its_colour():
    image = sheet(one=1e9, two=2e9)
    assert area(image, style.BLUE) > 100 and area(image, style.RED) > 100
    assert area(image, style.GREEN) == 0


def test_names_that_would_touch_are_moved_apart():
    from vitrail.show.ledger import _apart

    placed = _apart({"a": 100.0, "b": 101.0, "c": 300.0}, 17)
    assert placed["b"] - placed["a"] >= 17 - 1e-9
    assert abs(placed["c"] - 300) < 17
