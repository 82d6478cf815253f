"""Emoji from Iconify's JSON files, which hold one SVG for each name. Codepoints are derived from the names.

A wrong name is worse than a missing image: icons that are not certainly one emoji are left out and listed.
"""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import numpy as np

from vitrail.data.image_readers.emoji import VENDORS, Emojibase
from vitrail.data.image_readers.image_record import ImageRecord
from vitrail.data.image_readers.reader_files import read_json
from vitrail.data.image_readers.rgba import render_svg
from vitrail.errors import DataError, ImageError

# Names of icon sets that differ from emojibase's: flags, and older Unicode names. Names whose drawing may differ are
# not here: `pistol` has become a water pistol, and `exclamation-mark` a red one.
RENAMED_ICONS = {
    r"flag-for-(.*-flags?)": r"\1",
    r"flag-for-(?:flag-)?(.*)": r"flag-\1",
    "flag-for-cocos-islands": "flag-cocos-keeling-islands",
    "flag-for-myanmar": "flag-myanmar-burma",
    "flag-for-turkey": "flag-turkiye",
    r"(a|ab|b|o)-button": r"\1-button-blood-type",
    r"blond-haired-(person|man|woman)(.*)": r"\1\2-blond-hair",
    r"(.*-)?cat-face(.*)": r"\1cat\2",
    r"bride-with-veil(.*)": r"person-with-veil\1",
    r"man-with-chinese-cap(.*)": r"person-with-skullcap\1",
    r"man-in-suit-levitating(.*)": r"person-in-suit-levitating\1",
    "man-and-woman-holding-hands": "woman-and-man-holding-hands",
    r"two-((?:wo)?men-holding-hands)": r"\1",
    "direct-hit": "bullseye",
    "dizzy-face": "face-with-crossed-out-eyes",
    "heavy-heart-exclamation": "heart-exclamation",
    "hugging-face": "smiling-face-with-open-hands",
    "pouting-face": "enraged-face",
    "robot-face": "robot",
    r"up-(?:text|exclamation)-button": "up-button",
}
_RENAMED = [(re.compile(old), new) for old, new in RENAMED_ICONS.items()]


def slugify(label: str) -> str:
    """Format a label like icon sets do: "flag: Côte d’Ivoire" → "flag-cote-divoire"."""
    text = re.sub("['’.]", "", label.lower()).replace("&", " and ").replace("#", " pound ").replace("*", " asterisk ")
    plain = "".join(letter for letter in unicodedata.normalize("NFKD", text) if not unicodedata.combining(letter))
    return re.sub("[^a-z0-9]+", "-", plain).strip("-")


def get_current_names(name: str) -> set[str]:
    """Return the current names of an icon's name."""
    return {found.expand(new) for old, new in _RENAMED if (found := old.fullmatch(name))}


def match_icons(icons: Mapping[str, Iterable[str]], labels: Mapping[str, str]) -> dict[str, str]:
    """Match icons to codepoints where the match is certain, and return codepoint → icon.

    An icon's own name counts first, then its current names, then its aliases. An alias may be an older name of one
    emoji and a newer name of another ("cricket"). Icons with several codepoints and codepoints with several icons are
    not matched.
    """
    slugs: dict[str, set[str]] = defaultdict(set)
    for key, label in labels.items():
        slugs[slugify(label)].add(key)
    matches: dict[str, str] = {}
    unmatched = set(icons)
    for get_names in (
        lambda icon: {icon},
        get_current_names,
        lambda icon: set().union(*({name} | get_current_names(name) for name in icons[icon])),
    ):
        keys = {icon: set().union(*(slugs.get(name, ()) for name in get_names(icon))) for icon in unmatched}
        unmatched -= {icon for icon, candidates in keys.items() if candidates}
        claims: dict[str, list[str]] = defaultdict(list)
        for icon, candidates in keys.items():
            if len(candidates) == 1:
                claims[candidates.pop()].append(icon)
        matches |= {
            key: candidates[0] for key, candidates in claims.items() if len(candidates) == 1 and key not in matches
        }
    return matches


class _Icon(msgspec.Struct):
    body: str
    left: float = 0
    top: float = 0
    width: float | None = None
    height: float | None = None
    hFlip: bool = False
    vFlip: bool = False
    rotate: int = 0


class _IconSet(msgspec.Struct):
    icons: dict[str, _Icon]
    aliases: dict[str, dict[str, object]] = {}
    width: float = 16  # the format's defaults
    height: float = 16


class IconifyReader:
    """Images of one vendor. `unnamed` are its icons that are not certainly one emoji."""

    def __init__(self, vendor: str, files: Path, names: Emojibase):
        self.vendor, self._metadata = vendor, names.metadata
        self._icon_set = read_json(files / VENDORS[vendor], _IconSet)
        known = _collect_aliases(self._icon_set)
        self.icons = match_icons(known, {key: words.name for key, words in self._metadata.items()})
        if not self.icons:
            raise DataError(f"{files} holds no images of {vendor}", f"fetch {vendor} again")
        self.keys = sorted(self.icons)
        self.unnamed = tuple(sorted(known.keys() - set(self.icons.values())))

    def __len__(self) -> int:
        return len(self.keys)

    def get_record(self, item: int) -> ImageRecord:
        key = self.keys[item]
        return ImageRecord(f"{self.vendor}/{key}", self.vendor, key, *self._metadata[key])

    def load_rgba(self, item: int, image_size: int | None = None) -> np.ndarray:
        name = self.icons[self.keys[item]]
        return render_svg(self._build_svg(name), image_size, f"{self.vendor}, {name}")

    def _build_svg(self, name: str) -> str:
        icon = self._icon_set.icons[name]
        width, height = icon.width or self._icon_set.width, icon.height or self._icon_set.height
        if (
            not 0 < max(width, height) <= 4 * min(width, height)
        ):  # an extreme aspect ratio would need an unbounded amount of memory
            raise ImageError(
                f"{self.vendor}, {name} has an invalid size: {width:g} × {height:g}", f"fetch {self.vendor} again"
            )
        spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
        box = f"{icon.left:g} {icon.top:g} {width:g} {height:g}"
        return f'<svg {spaces} width="{width:g}" height="{height:g}" viewBox="{box}">{icon.body}</svg>'


def _collect_aliases(icons: _IconSet) -> dict[str, list[str]]:
    """Collect each icon's aliases. Flipped or rotated variants are left out."""
    names: dict[str, list[str]] = {
        name: [] for name, icon in icons.icons.items() if not (icon.hFlip or icon.vFlip or icon.rotate % 4)
    }
    parents = {name: str(alias["parent"]) for name, alias in icons.aliases.items() if alias.keys() == {"parent"}}
    for name in parents.keys() - icons.icons.keys():
        parent, visited = parents[name], {name}
        while parent in parents and parent not in icons.icons and parent not in visited:
            visited.add(parent)
            parent = parents[parent]
        if parent in names:
            names[parent].append(name)
    return names
