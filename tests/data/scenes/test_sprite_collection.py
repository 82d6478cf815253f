import numpy as np
import pytest

from vitrail.data.image_readers.image_record import ImageRecord
from vitrail.data.scenes.sprite_collection import collect_sprites, select_unambiguous_names
from vitrail.errors import DataError


class Shown:
    """A vendor that draws a square for every name."""

    def __init__(self, vendor: str, names: dict[str, str]):
        self.vendor, self.names = vendor, list(names.items())

    def __len__(self) -> int:
        return len(self.names)

    def get_record(self, item: int) -> ImageRecord:
        name, category = self.names[item]
        return ImageRecord(f"{self.vendor}/{item}", self.vendor, str(item), name, category=category)

    def load_rgba(self, item: int, image_size: int | None = None) -> np.ndarray:
        return np.full((image_size, image_size, 4), 40 * item, np.uint8)


ANIMAL, SIGN = "animals-nature", "symbols"
ONE = Shown(
    "one",
    {"dog": ANIMAL, "dog face": ANIMAL, "guide dog": ANIMAL, "cat": ANIMAL, "stop": SIGN, "sea lion": ANIMAL},
)
TWO = Shown("two", {"cat": ANIMAL, "dog": ANIMAL, "owl": ANIMAL, "sea lion": ANIMAL})


def test_things_that_all_sets_have_become_sprites():
    sprites = list(collect_sprites([ONE, TWO], image_size=16))
    assert [(s.vendor, s.name) for s in sprites] == [
        (vendor, name) for name in ("cat", "dog", "sea lion") for vendor in ("one", "two")
    ]
    assert sprites[0].rgba.shape == (16, 16, 4) and sprites[1].id == "two/0"
    assert {s.name for s in collect_sprites([ONE, TWO], in_every_set=False)} == {"cat", "dog", "owl", "sea lion"}


def test_names_may_be_chosen_and_limited():
    assert {s.name for s in collect_sprites([ONE], names=["dog face"])} == {"dog face"}
    assert {s.name for s in collect_sprites([ONE, TWO], max_count=2)} == {"cat", "dog"}  # those of one word first
    assert {s.name for s in collect_sprites([ONE], categories=[SIGN])} == {"stop"}
    with pytest.raises(DataError, match="'owl' is not the name"):
        list(collect_sprites([ONE, TWO], names=["owl"]))


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
    assert select_unambiguous_names(names) == {"bus", "apple", "T-Rex", "police car", "dress"}
