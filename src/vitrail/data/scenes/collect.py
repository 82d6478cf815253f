"""Which pictures of the sources become sprites: things with short names that cannot be taken for one another."""

import hashlib
import re
from collections.abc import Collection, Iterator, Sequence

from vitrail.data.pictures.record import About, Pictures
from vitrail.data.scenes.scene import COLOURS
from vitrail.data.scenes.sprites import Sprite
from vitrail.errors import DataError, nearest

# Of the groups of emoji, those that show things; people differ by skin tone, and signs and flags are no things.
CATEGORIES = ("animals-nature", "food-drink", "objects", "activities", "travel-places")
_NAME = re.compile(r"[A-Za-z]+(?: [A-Za-z]+)?|T-Rex|yo-yo")  # one or two words
_MANY = re.compile(r".*(?<![suia])s")  # "books", "control knobs"; not "bus", "dress", "iris" or "Christmas"
_COLOURED = {colour.name for colour in COLOURS} | {"grey", "golden", "rainbow"}
# What shows a state, an event or a landscape rather than a thing, or has a name that nobody would use for it.
_STATES = (
    "badminton,bowling,building construction,camping,chart decreasing,chart increasing,cityscape,"
    "construction,cooked rice,cooking,curry rice,derelict house,desert,field hockey,fog,foggy,hamsa,"
    "high voltage,hourglass done,ice hockey,kaaba,lacrosse,light rail,locked,mate,milky way,motorway,"
    "mount fuji,national park,new moon,pine decoration,ping pong,pouring liquid,rosette,sauropod,sunrise,"
    "sunset,suspension railway,tanabata tree,tennis,Tokyo tower,unlocked,videocassette,water wave,"
    "wedding,wind face,wood"
)
_NO_THINGS = frozenset(_STATES.split(","))


def sprites_of(
    sets: Sequence[Pictures],
    *,
    categories: Collection[str] = CATEGORIES,
    names: Collection[str] | None = None,
    most: int | None = None,
    side: int = 128,
    shared: bool = True,
) -> Iterator[Sprite]:
    """The things in these sets of pictures, one sprite a vendor and name.

    `categories` are those that count, all if none is given. Names that could be taken for one another are left out,
    unless `names` says which are wanted. At most `most` are taken, those of one word first; with `shared` only those
    that every set has, so that each concept has as many designs as there are sets. Drawings are
    rasterised at `side`.
    """
    found = [_things(pictures, categories) for pictures in sets]  # name → item, for each set
    known = set.intersection(*map(set, found)) if shared else set().union(*found)
    missing = sorted(set(names or ()) - known)
    if missing:
        raise DataError(
            f"{missing[0]!r} is not the name of a picture of {'every' if shared else 'any'} set",
            nearest(missing[0], known, "leave it out"),
        )
    taken = unambiguous(known) if names is None else set(names)
    simplest = sorted(taken, key=lambda name: (name.count(" "), hashlib.sha256(name.encode()).digest()))
    for name in sorted(simplest[:most]):
        for pictures, items in zip(sets, found, strict=True):
            if name in items:
                about = pictures.about(items[name])
                rgba = pictures.rgba(items[name], side)
                yield Sprite(about.id, about.vendor, about.key, "thing", name, about.category, rgba)


def unambiguous(names: Collection[str]) -> set[str]:
    """Names of one or two words for one thing, without a colour, of which none has another as one of its words: "dog"
    stays, and "dog face", "guide dog", "dogs" and "black dog" go."""
    plain = {name for name in names if _NAME.fullmatch(name) and not _MANY.fullmatch(name) and name not in _NO_THINGS}
    words = {name: set(name.split()) for name in plain}
    return {name for name in plain if not words[name] & _COLOURED and not (words[name] - {name}) & plain}


def _things(pictures: Pictures, categories: Collection[str]) -> dict[str, int]:
    """Names → the first picture of that name."""
    items: dict[str, int] = {}
    for item in range(len(pictures)):
        about: About = pictures.about(item)
        if not categories or about.category in categories:
            items.setdefault(about.name, item)
    return items
