"""Names of things in scenes: named groups that many recipes use, and selection of sprites by name."""

from collections.abc import Iterable

from torch import Tensor

from vitrail.data.scenes.atlas import find_sprites
from vitrail.data.scenes.scene import SpriteTable
from vitrail.errors import DataError

HUNDRED_THINGS = (
    "airplane", "ambulance", "anchor", "ant", "avocado", "axe", "backpack", "balloon", "banana", "basketball",
    "bat", "bathtub", "bear", "bed", "bell", "bicycle", "bird", "bomb", "bread", "broccoli",
    "broom", "bus", "butterfly", "cactus", "camel", "camera", "candle", "carrot", "castle", "cat",
    "chair", "church", "cloud", "coat", "crab", "crown", "cupcake", "dog", "dolphin", "door",
    "doughnut", "dress", "drum", "duck", "elephant", "envelope", "fire", "fish", "flamingo", "fox",
    "frog", "giraffe", "crocodile", "eggplant", "guitar", "hamburger", "hammer", "hedgehog", "helicopter", "horse",
    "house", "key", "kite", "koala", "ladder", "lemon", "lion", "lobster", "magnet", "monkey",
    "mushroom", "octopus", "owl", "panda", "pear", "pencil", "penguin", "pig", "pineapple", "pizza",
    "rabbit", "ring", "rocket", "rose", "sailboat", "jellyfish", "shark", "snail", "snake", "snowman",
    "parrot", "spider", "star", "strawberry", "sunflower", "teapot", "tent", "tiger", "umbrella", "whale",
)  # fmt: skip
"""Concepts of the drawing judge and of the `mini` recipe. `eval drawing --concepts 30` uses the first thirty."""

THING_GROUPS: dict[str, tuple[str, ...]] = {"hundred": HUNDRED_THINGS, "thirty": HUNDRED_THINGS[:30]}


def find_things(table: SpriteTable, vendors: Iterable[str] = (), names: Iterable[str] = ()) -> Tensor:
    """Return the sprite rows of things with these vendors and names (empty: all).

    An unknown name raises an error. A group selects the names that the atlas has.
    """
    names, known, wanted = tuple(names), set(table.names), set[str]()
    for name in names:
        wanted |= known & set(THING_GROUPS[name]) if name in THING_GROUPS else {name}
    if names and not wanted:
        raise DataError(f"the atlas has no thing of the group {names[0]!r}", "give names that it has, or none for all")
    return find_sprites(table, ["thing"], tuple(vendors) or None, wanted or None)
