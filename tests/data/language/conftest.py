"""A small table of sprites without pixels, and scenes drawn at random from it, with all that makes words hard: twins,
names that hold other names, things without a singular, frames, written words, untinted things, scenes of nothing.
"""

import pytest
import torch

from data.language.oracle import Oracle
from vitrail.data.language import SceneLanguage
from vitrail.data.scenes import counter_rng
from vitrail.data.scenes.scene import COLOURS, GRID, SceneBatch, SpriteTable

THINGS = {
    "animal": ("dog", "dogs"), "animal2": ("dog face", "dog faces"), "animal3": ("cat", "cats"),
    "animal4": ("owl", "owls"), "animal5": ("fox", "foxes"), "animal6": ("sheep", "sheep"),
    "animal7": ("mouse", "mice"), "animal8": ("black horse", "black horses"), "animal9": ("elephant", "elephants"),
    "animal10": ("bird", "birds"),
    "food": ("green apple", "green apples"), "food0": ("red apple", "red apples"), "food2": ("hot dog", "hot dogs"),
    "food3": ("orange", "oranges"), "food4": ("pear", "pears"), "food5": ("egg", "eggs"), "food6": ("cake", "cakes"),
    "food7": ("onion", "onions"), "tool": ("scissors", "scissors"), "tool2": ("hammer", "hammers"),
    "tool3": ("umbrella", "umbrellas"), "tool4": ("hourglass", "hourglasses"), "tool5": ("unicycle", "unicycles"),
    "tool6": ("key", "keys"), "tool7": ("ball of yarn", "balls of yarn"), "tool8": ("X-ray", "X-rays"),
    "frame": ("window", "windows"), "frame2": ("mirror", "mirrors"),
    "word": ("stop", "stop"), "word2": ("hello", "hello"), "word3": ("cat", "cat"), "word4": ("7 up", "7 up"),
    "word5": ("exit!", "exit!"),
}  # fmt: skip


NAMESAKES = ("dog face", "red apple", "hot dog", "bird")  # have a name that may mean another


def make_table(skewed: bool = True) -> SpriteTable:
    """Skewed, concepts have one to three sprites, and so appear more or less often, and some are taken for others."""
    things = {sort: names for sort, names in THINGS.items() if skewed or names[0] not in NAMESAKES}
    names, plurals = zip(*things.values(), strict=True)
    category = tuple(sort.rstrip("0123456789") for sort in things)
    concept = [c for c in range(len(names)) for _ in range(1 + c % 3 if skewed else 1)]
    kinds = tuple(category[c] if category[c] in ("word", "frame") else "thing" for c in concept)
    ids = tuple(f"toy/{i}" for i in range(len(concept)))
    aspect = torch.full((len(ids), 2), GRID)
    return SpriteTable(ids, ("toy",) * len(ids), ids, kinds, torch.tensor(concept), names, plurals, category, aspect)


def make_scenes(table: SpriteTable, seed: int, index: torch.Tensor, slots: int = 8) -> SceneBatch:
    """Objects at random, each a copy of an earlier one's concept and often of its colour in two cases of five."""
    B = len(index)

    def draw(what, *shape, of):
        return counter_rng.random_integers(seed, index, what, *shape, high=of)

    many = draw("count", of=slots + 1)
    sprite, colour = draw("sprite", slots, of=len(table)), draw("colour", slots, of=len(COLOURS))
    copies, source, tint = draw("copy", slots, of=5), draw("source", slots, of=slots), draw("tint", slots, of=2)
    concept = table.concept[sprite]
    same = table.concept == concept[..., None]  # all sprites of each slot's concept
    for o in range(1, slots):
        copied = (copies[:, o] < 2) & (source[:, o] < o)
        from_ = source[:, o].clamp(max=o - 1)[:, None]
        twin = same.gather(1, from_[..., None].expand(-1, 1, len(table)))[:, 0].int().argmax(1)
        sprite[:, o] = torch.where(copied, twin, sprite[:, o])
        concept[:, o] = table.concept[sprite[:, o]]
        same[:, o] = table.concept == concept[:, o, None]
        colour[:, o] = torch.where(copied & (tint[:, o] > 0), colour.gather(1, from_)[:, 0], colour[:, o])
    side = GRID // 16 + draw("side", slots, 2, of=GRID // 3)
    low = draw("low", slots, 2, of=GRID - side)
    box = torch.cat([low, low + side], -1)
    frame = torch.tensor([kind == "frame" for kind in table.kind])[sprite]
    inside = torch.full((B, slots), -1)
    for o in range(1, slots):  # things behind a frame in the list may lie in it, at half its size
        held = frame[:, o - 1] & ~frame[:, o] & (draw(f"in{o}", of=2) > 0)
        outer = box[:, o - 1]
        quarter = (outer[:, 2:] - outer[:, :2]) // 4
        inner = torch.cat([outer[:, :2] + quarter, outer[:, 2:] - quarter], 1)
        box[:, o] = torch.where(held[:, None], inner, box[:, o])
        inside[:, o] = torch.where(held, o - 1, -1)
    filled = torch.arange(slots) < many[:, None]
    return SceneBatch(
        index=index,
        sprite=torch.where(filled, sprite, -1),
        colour=torch.where(filled, colour, 0),
        box=torch.where(filled[..., None], box, 0),
        frame_slot=torch.where(filled, inside, -1),
        background=draw("background", of=3),
    )


@pytest.fixture(scope="session")
def toy() -> SpriteTable:
    return make_table()


@pytest.fixture(scope="session")
def words(toy) -> SceneLanguage:
    return SceneLanguage.build(toy, max_objects=8)


@pytest.fixture(scope="session")
def many_words(toy) -> SceneLanguage:
    return SceneLanguage.build(toy, max_objects=8, extra_templates=True)


@pytest.fixture(scope="session")
def oracle(toy) -> Oracle:
    return Oracle(toy)


@pytest.fixture(scope="session")
def scenes(toy):
    """(seed, first, many) → scenes"""
    return lambda seed=0, first=0, many=256: make_scenes(toy, seed, torch.arange(first, first + many))


@pytest.fixture(scope="session")
def even_toy():
    """The table with all concepts equally common, and its scenes"""
    table = make_table(skewed=False)
    return table, lambda seed=0, many=256: make_scenes(table, seed, torch.arange(many))
