"""Select images that become sprites: things with short, unambiguous names."""

import hashlib
import re
from collections.abc import Collection, Iterator, Sequence

from vitrail.data.image_readers.image_record import ImageReader, ImageRecord
from vitrail.data.scenes.atlas import Sprite
from vitrail.data.scenes.scene import COLOURS
from vitrail.errors import DataError, suggest_name

# Emoji groups that show things. People vary by skin tone, and symbols and flags are not things.
CATEGORIES = ("animals-nature", "food-drink", "objects", "activities", "travel-places")
_NAME_PATTERN = re.compile(r"[A-Za-z]+(?: [A-Za-z]+)?|T-Rex|yo-yo")  # one or two words
_PLURAL_PATTERN = re.compile(r".*(?<![suia])s")  # "books", "control knobs"; not "bus", "dress", "iris" or "Christmas"
_COLOUR_WORDS = {colour.name for colour in COLOURS} | {"grey", "golden", "rainbow"}
# Names of states, events and landscapes, and names that nobody would use.
_EXCLUDED_NAMES = (
    "badminton,bowling,building construction,camping,chart decreasing,chart increasing,cityscape,"
    "construction,cooked rice,cooking,curry rice,derelict house,desert,field hockey,fog,foggy,hamsa,"
    "high voltage,hourglass done,ice hockey,kaaba,lacrosse,light rail,locked,mate,milky way,motorway,"
    "mount fuji,national park,new moon,pine decoration,ping pong,pouring liquid,rosette,sauropod,sunrise,"
    "sunset,suspension railway,tanabata tree,tennis,Tokyo tower,unlocked,videocassette,water wave,"
    "wedding,wind face,wood"
)
_EXCLUDED = frozenset(_EXCLUDED_NAMES.split(","))


def collect_sprites(
    image_sets: Sequence[ImageReader],
    *,
    categories: Collection[str] = CATEGORIES,
    names: Collection[str] | None = None,
    max_count: int | None = None,
    image_size: int = 128,
    in_every_set: bool = True,
) -> Iterator[Sprite]:
    """Yield the things of several image sets as sprites, one per vendor and name.

    categories    categories to include; empty: all
    names         names to include; default: all unambiguous names
    max_count     maximum number of names, single words first
    in_every_set  only names in every set, so that each concept has as many designs as there are sets
    image_size    size at which vector images are rasterized
    """
    found = [_index_by_name(pictures, categories) for pictures in image_sets]  # name → item, for each set
    known = set.intersection(*map(set, found)) if in_every_set else set().union(*found)
    missing = sorted(set(names or ()) - known)
    if missing:
        raise DataError(
            f"{missing[0]!r} is not the name of an image of {'every' if in_every_set else 'any'} set",
            suggest_name(missing[0], known, "remove it"),
        )
    selected = select_unambiguous_names(known) if names is None else set(names)
    simplest = sorted(selected, key=lambda name: (name.count(" "), hashlib.sha256(name.encode()).digest()))
    for name in sorted(simplest[:max_count]):
        for pictures, items in zip(image_sets, found, strict=True):
            if name in items:
                record = pictures.get_record(items[name])
                rgba = pictures.load_rgba(items[name], image_size)
                yield Sprite(record.id, record.vendor, record.key, "thing", name, record.category, rgba)


def select_unambiguous_names(names: Collection[str]) -> set[str]:
    """Return the unambiguous names: one or two words for a single thing, without colours, none containing another.

    For example, "dog" is kept; "dog face", "guide dog", "dogs" and "black dog" are removed.
    """
    plain = {
        name
        for name in names
        if _NAME_PATTERN.fullmatch(name) and not _PLURAL_PATTERN.fullmatch(name) and name not in _EXCLUDED
    }
    words = {name: set(name.split()) for name in plain}
    return {name for name in plain if not words[name] & _COLOUR_WORDS and not (words[name] - {name}) & plain}


def _index_by_name(pictures: ImageReader, categories: Collection[str]) -> dict[str, int]:
    """Return the index of the first image of each name."""
    items: dict[str, int] = {}
    for item in range(len(pictures)):
        record: ImageRecord = pictures.get_record(item)
        if not categories or record.category in categories:
            items.setdefault(record.name, item)
    return items
