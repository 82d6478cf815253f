import numpy as np
import pytest

from vitrail.data.pictures.record import About
from vitrail.data.scenes.collect import sprites_of, unambiguous
from vitrail.errors import DataError


class Shown:
    """A vendor that draws a square for every name."""

    def __init__(self, vendor: str, names: dict[str, str]):
        self.vendor, self.names = vendor, list(names.items())

    def __len__(self) -> int:
        return len(self.names)

    def about(self, item: int) -> About:
        name, category = self.names[item]
        return About(f"{self.vendor}/{item}", self.vendor, str(item), name, category=category)

    def rgba(self, item: int, side: int | None = None) -> np.ndarray:
        return np.full((side, side, 4), 40 * item, np.uint8)


ANIMAL, SIGN = "animals-nature", "symbols"
ONE = Shown(
    "one",
    {"dog": ANIMAL, "dog face": ANIMAL, "guide dog": ANIMAL, "cat": ANIMAL, "stop": SIGN, "sea lion": ANIMAL},
)
TWO = Shown("two", {"cat": ANIMAL, "dog": ANIMAL, "owl": ANIMAL, "sea lion": ANIMAL})


def test_things_that_all_sets_have_become_sprites():
    sprites = list(sprites_of([ONE, TWO], side=16))
    assert [(s.vendor, s.name) for s in sprites] == [
        (vendor, name) for name in ("cat", "dog", "sea lion") for vendor in ("one", "two")
    ]
    assert sprites[0].rgba.shape == (16, 16, 4) and sprites[1].id == "two/0"
    assert {s.name for s in sprites_of([ONE, TWO], shared=False)} == {"cat", "dog", "owl", "sea lion"}


def test_names_may_be_chosen_and_limited():
    assert {s.name for s in sprites_of([ONE], names=["dog face"])} == {"dog face"}
    assert {s.name for s in sprites_of([ONE, TWO], most=2)} == {"cat", "dog"}  # those of one word first
    assert {s.name for s in sprites_of([ONE], categories=[SIGN])} == {"stop"}
    with pytest.raises(DataError, match="'owl' is not the name"):
        list(sprites_of([ONE, TWO], names=["owl"]))


def test_ambiguous_names_go():
    names = [
        "bus",
        "books",
        "red apple",
        "apple",
        "T-Rex",
        "keycap: 1",
        "eye in speech bubble",
        "fog",
        "police car",
        "dress",
    ]
    assert unambiguous(names) == {"bus", "apple", "T-Rex", "police car", "dress"}
