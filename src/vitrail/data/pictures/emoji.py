"""Emoji of several vendors, with names, keywords and groups from one place (emojibase), joined by codepoint."""

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from vitrail.data.pictures.files import read_json
from vitrail.data.pictures.pixels import read_rgba
from vitrail.data.pictures.record import About
from vitrail.errors import DataError

# Where each vendor's package keeps its pictures, named by codepoints; or icons.json, which `iconify` reads.
VENDORS = {
    "twemoji": "package/img/twitter/64/*.png",
    "noto": "package/img/google/64/*.png",
    "fluent": "package/assets/*.webp",
    "openmoji": "package/color/svg/*.svg",
    "fluent-flat": "package/assets/*.svg",
    "noto-v1": "package/icons.json",
    "emojione": "package/icons.json",
}
# Keys that are left out. Microsoft draws no flags of countries; its packages fill them in with Noto's, which must not
# count as another design. The flat bather of the medium-dark tone is the yellow one.
_FLAGS = "1f1[ef][0-9a-f]-.*|.*-e007f"
LEFT_OUT = {"fluent": _FLAGS, "fluent-flat": f"{_FLAGS}|1f6c0-1f3fe"}
_TONES = "bcdef"  # how skin tones end, from light to dark
SKIN_TONES = frozenset(f"1f3f{end}" for end in _TONES)
# Packages with drawings under the names of other tones: what is drawn, and the tones that its files for 1f3fb … 1f3ff
# show; the first row that fits counts. Both of Fluent's have medium-light and medium exchanged. In `fluent` those that
# are drawn with a laptop and those of two people are right, and a mountain biker has all five tones astray. The nightly
# tests measure every family.
MISNAMED: dict[str, tuple[tuple[str, str], ...]] = {
    "fluent": (
        (".*-1f4bb|1f46[bcd]|1f48f|1f491|.*-(?:2764|1f91d)-.*", "bcdef"),
        ("1f6b5", "fdecb"),
        (".*", "bdcef"),
    ),
    "fluent-flat": ((".*", "bdcef"),),
}


def codepoints(text: str) -> str:
    """A file's or a table's codepoints as all vendors share them: "1F468-200D-1F33E" → "1f468-200d-1f33e".

    The presentation mark fe0f, which some write and some do not, is left out; every codepoint has at least four digits;
    a sequence of tags (the flag of Wales) has its end mark.
    """
    points = [point.zfill(4) for point in re.split("[-_]", text.lower()) if point != "fe0f"]
    if len(points) > 1 and re.fullmatch("e00[2-7][0-9a-f]", points[-1]) and points[-1] != "e007f":
        points.append("e007f")
    return "-".join(points)


def without_tone(key: str) -> str:
    """The emoji that a key with skin tones is a variant of."""
    bare = [point for point in key.split("-") if point not in SKIN_TONES]
    return "-".join(bare) or key  # a tone by itself is a picture too


def shown(vendor: str, key: str) -> str:
    """The key of what a vendor's file shows, given the one that it is named by."""
    bare = without_tone(key)
    tones = next((tones for drawn, tones in MISNAMED.get(vendor, ()) if re.fullmatch(drawn, bare)), _TONES)
    points = [f"1f3f{tones[_TONES.index(p[-1])]}" if p in SKIN_TONES else p for p in key.split("-")]
    return "-".join(points)


class Words(NamedTuple):
    """What is known of one emoji, whoever draws it."""

    name: str
    keywords: tuple[str, ...]
    category: str
    labels: Mapping[str, str]


class _Skin(msgspec.Struct):
    hexcode: str
    label: str


class _Entry(msgspec.Struct):
    hexcode: str
    label: str
    tags: list[str] = []
    group: int | None = None
    skins: list[_Skin] = []


class _Group(msgspec.Struct):
    key: str
    order: int


class _Messages(msgspec.Struct):
    groups: list[_Group]


class _Sign(msgspec.Struct):
    """A row of OpenMoji's own table, for the signs that are no emoji."""

    hexcode: str
    annotation: str
    group: str
    tags: str
    openmoji_tags: str


class Emojibase:
    """Names of emoji by codepoint, in English and in the languages of the package."""

    def __init__(self, files: Path):
        self.root = files / "package"
        self.languages = sorted(path.parent.name for path in self.root.glob("*/compact.json"))
        if "en" not in self.languages:
            raise DataError(f"{files} holds no names of emoji", "fetch emojibase again")

    @cached_property
    def words(self) -> dict[str, Words]:
        """Codepoints → what is known."""
        groups = {group.order: group.key for group in read_json(self.root / "en" / "messages.json", _Messages).groups}
        labels: dict[str, dict[str, str]] = {}
        english: list[_Entry] = []
        for language in self.languages:
            entries = read_json(self.root / language / "compact.json", list[_Entry])
            english = entries if language == "en" else english
            for entry in entries:
                for sign in (entry, *entry.skins):
                    labels.setdefault(codepoints(sign.hexcode), {})[language] = sign.label
        words = {}
        for entry in english:
            category = "" if entry.group is None else groups[entry.group]
            for sign in (entry, *entry.skins):  # a skin tone has the keywords of its base
                key = codepoints(sign.hexcode)
                words[key] = Words(sign.label, tuple(entry.tags), category, labels[key])
        return words


class Emoji:
    """The pictures of one vendor."""

    def __init__(self, vendor: str, files: Path, names: Emojibase):
        self.vendor = vendor
        # Some vendors have a picture with and one without the presentation mark: the first is taken.
        self.files: dict[str, Path] = {}
        for path in sorted(files.glob(VENDORS[vendor])):
            key = shown(vendor, codepoints(path.stem))
            if vendor not in LEFT_OUT or not re.fullmatch(LEFT_OUT[vendor], key):
                self.files.setdefault(key, path)
        if not self.files:
            raise DataError(f"{files} holds no pictures of {vendor}", "fetch it again")
        self.keys = sorted(self.files)
        self._names = names
        self._table = files / "package" / "data" / "openmoji.json"

    def __len__(self) -> int:
        return len(self.keys)

    def about(self, item: int) -> About:
        key = self.keys[item]
        return About(f"{self.vendor}/{key}", self.vendor, key, *self._words[key])

    def rgba(self, item: int, side: int | None = None) -> np.ndarray:
        return read_rgba(self.files[self.keys[item]], side)

    @cached_property
    def _words(self) -> dict[str, Words]:
        words = self._names.words
        signs = read_json(self._table, list[_Sign]) if self._table.is_file() else []
        own = {codepoints(sign.hexcode): _own(sign) for sign in signs}
        nameless = [key for key in self.keys if key not in words and key not in own]
        if nameless:
            raise DataError(f"{self.vendor} draws {nameless[0]}, which has no name", "fetch emojibase again")
        for key, found in words.items():  # emojibase comes first; OpenMoji groups what it leaves without a group
            own[key] = found if found.category or key not in own else found._replace(category=own[key].category)
        return own


def _own(sign: _Sign) -> Words:
    tags = dict.fromkeys(tag.strip() for tag in f"{sign.tags},{sign.openmoji_tags}".split(","))
    return Words(sign.annotation, tuple(filter(None, tags)), sign.group, {"en": sign.annotation})
