"""Emoji out of one JSON file with a drawing under each name, as Iconify packs sets; the names give the codepoints.

A wrong name is worse than a missing picture: what is not surely one emoji is left out, and listed.
"""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import numpy as np

from vitrail.data.pictures.emoji import VENDORS, Emojibase
from vitrail.data.pictures.files import read_json
from vitrail.data.pictures.pixels import drawn
from vitrail.data.pictures.record import About
from vitrail.errors import DataError, ImageError

# How sets call what emojibase calls otherwise: flags, and older names of Unicode. Not here is what an older drawing
# need not be: `pistol` has become a water pistol, and `exclamation-mark` a red one.
RENAMED = {
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
_RENAMED = [(re.compile(old), new) for old, new in RENAMED.items()]


def slug(label: str) -> str:
    """A label as sets write it: "flag: Côte d’Ivoire" → "flag-cote-divoire"."""
    text = re.sub("['’.]", "", label.lower()).replace("&", " and ").replace("#", " pound ").replace("*", " asterisk ")
    plain = "".join(letter for letter in unicodedata.normalize("NFKD", text) if not unicodedata.combining(letter))
    return re.sub("[^a-z0-9]+", "-", plain).strip("-")


def renamed(name: str) -> set[str]:
    """What an icon's name may be called today."""
    return {found.expand(new) for old, new in _RENAMED if (found := old.fullmatch(name))}


def joined(icons: Mapping[str, Iterable[str]], labels: Mapping[str, str]) -> dict[str, str]:
    """Icons with their further names, codepoints with their labels → codepoints with their icons, where that is sure.

    An icon's own name counts first, then what that is called today, then its further names, which may be older names
    of one emoji and newer names of another ("cricket"). Neither an icon with two codepoints nor two icons with one
    are joined.
    """
    slugs: dict[str, set[str]] = defaultdict(set)
    for key, label in labels.items():
        slugs[slug(label)].add(key)
    found: dict[str, str] = {}
    left = set(icons)
    for called in (
        lambda icon: {icon},
        renamed,
        lambda icon: set().union(*({name} | renamed(name) for name in icons[icon])),
    ):
        keys = {icon: set().union(*(slugs.get(name, ()) for name in called(icon))) for icon in left}
        left -= {icon for icon, some in keys.items() if some}
        claims: dict[str, list[str]] = defaultdict(list)
        for icon, some in keys.items():
            if len(some) == 1:
                claims[some.pop()].append(icon)
        found |= {key: some[0] for key, some in claims.items() if len(some) == 1 and key not in found}
    return found


class _Icon(msgspec.Struct):
    body: str
    left: float = 0
    top: float = 0
    width: float | None = None
    height: float | None = None
    hFlip: bool = False
    vFlip: bool = False
    rotate: int = 0


class _Set(msgspec.Struct):
    icons: dict[str, _Icon]
    aliases: dict[str, dict[str, object]] = {}
    width: float = 16  # the format's defaults
    height: float = 16


class Icons:
    """The pictures of one vendor. `unnamed` are its drawings that are not surely one emoji."""

    def __init__(self, vendor: str, files: Path, names: Emojibase):
        self.vendor, self._words = vendor, names.words
        self._set = read_json(files / VENDORS[vendor], _Set)
        known = _names(self._set)
        self.icons = joined(known, {key: words.name for key, words in self._words.items()})
        if not self.icons:
            raise DataError(f"{files} holds no pictures of {vendor}", "fetch it again")
        self.keys = sorted(self.icons)
        self.unnamed = tuple(sorted(known.keys() - set(self.icons.values())))

    def __len__(self) -> int:
        return len(self.keys)

    def about(self, item: int) -> About:
        key = self.keys[item]
        return About(f"{self.vendor}/{key}", self.vendor, key, *self._words[key])

    def rgba(self, item: int, side: int | None = None) -> np.ndarray:
        name = self.icons[self.keys[item]]
        return drawn(self._drawing(name), side, f"{self.vendor}, {name}")

    def _drawing(self, name: str) -> str:
        icon = self._set.icons[name]
        width, height = icon.width or self._set.width, icon.height or self._set.height
        if (
            not 0 < max(width, height) <= 4 * min(width, height)
        ):  # a line without end would be drawn into no end of memory
            raise ImageError(f"{self.vendor}, {name}: a drawing of {width:g} × {height:g}", "fetch its source again")
        spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
        box = f"{icon.left:g} {icon.top:g} {width:g} {height:g}"
        return f'<svg {spaces} width="{width:g}" height="{height:g}" viewBox="{box}">{icon.body}</svg>'


def _names(icons: _Set) -> dict[str, list[str]]:
    """Drawings with their further names. What flips or turns another is no name for it, and is left out."""
    names: dict[str, list[str]] = {
        name: [] for name, icon in icons.icons.items() if not (icon.hFlip or icon.vFlip or icon.rotate % 4)
    }
    same = {name: str(alias["parent"]) for name, alias in icons.aliases.items() if alias.keys() == {"parent"}}
    for name in same.keys() - icons.icons.keys():
        parent, passed = same[name], {name}
        while parent in same and parent not in icons.icons and parent not in passed:
            passed.add(parent)
            parent = same[parent]
        if parent in names:
            names[parent].append(name)
    return names
