"""Emoji of several vendors, joined by codepoint with names, keywords and groups from emojibase."""

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgspec

from vitrail.data.image_readers.image_record import ImageRecord
from vitrail.data.image_readers.reader_files import read_json
from vitrail.data.image_readers.rgba import ImageFileReader
from vitrail.errors import DataError

# Glob of each vendor's images, named by codepoints; or icons.json, which `iconify` reads.
VENDORS = {
    "twemoji": "package/img/twitter/64/*.png",
    "noto": "package/img/google/64/*.png",
    "fluent": "package/assets/*.webp",
    "openmoji": "package/color/svg/*.svg",
    "fluent-flat": "package/assets/*.svg",
    "noto-v1": "package/icons.json",
    "emojione": "package/icons.json",
}
# Keys to leave out. Microsoft draws no country flags; its packages use Noto's, which must not count as another design.
# The flat bather with the medium-dark tone is the yellow one.
_FLAGS = "1f1[ef][0-9a-f]-.*|.*-e007f"
EXCLUDED_KEYS = {"fluent": _FLAGS, "fluent-flat": f"{_FLAGS}|1f6c0-1f3fe"}
_TONES = "bcdef"  # last digit of skin tones, from light to dark
SKIN_TONES = frozenset(f"1f3f{end}" for end in _TONES)
# Packages whose files have the wrong skin tone: a pattern of keys, and the tones that the files for 1f3fb … 1f3ff show;
# the first match counts. Both Fluent sets swap medium-light and medium. In `fluent`, drawings with a laptop and of two
# people are correct, and all five tones of the mountain biker are shifted. Nightly tests measure every family.
MISNAMED_TONES: dict[str, tuple[tuple[str, str], ...]] = {
    "fluent": (
        (".*-1f4bb|1f46[bcd]|1f48f|1f491|.*-(?:2764|1f91d)-.*", "bcdef"),
        ("1f6b5", "fdecb"),
        (".*", "bdcef"),
    ),
    "fluent-flat": ((".*", "bdcef"),),
}


def normalize_codepoints(text: str) -> str:
    """Normalize codepoints of a file or table: "1F468-200D-1F33E" → "1f468-200d-1f33e".

    The presentation mark fe0f is removed, codepoints get at least four digits, and a tag sequence (the flag of Wales)
    gets its end mark.
    """
    points = [point.zfill(4) for point in re.split("[-_]", text.lower()) if point != "fe0f"]
    if len(points) > 1 and re.fullmatch("e00[2-7][0-9a-f]", points[-1]) and points[-1] != "e007f":
        points.append("e007f")
    return "-".join(points)


def remove_skin_tone(key: str) -> str:
    """Remove skin tones from a key."""
    bare = [point for point in key.split("-") if point not in SKIN_TONES]
    return "-".join(bare) or key  # a tone by itself is an emoji too


def get_depicted_key(vendor: str, key: str) -> str:
    """Return the key that a vendor's file depicts, given the key in its name."""
    base = remove_skin_tone(key)
    tones = next((tones for pattern, tones in MISNAMED_TONES.get(vendor, ()) if re.fullmatch(pattern, base)), _TONES)
    points = [f"1f3f{tones[_TONES.index(p[-1])]}" if p in SKIN_TONES else p for p in key.split("-")]
    return "-".join(points)


class EmojiMetadata(NamedTuple):
    """Metadata of one emoji, the same for all vendors."""

    name: str
    keywords: tuple[str, ...]
    category: str
    labels: Mapping[str, str]


class _SkinEntry(msgspec.Struct):
    hexcode: str
    label: str


class _Entry(msgspec.Struct):
    hexcode: str
    label: str
    tags: list[str] = []
    group: int | None = None
    skins: list[_SkinEntry] = []


class _Group(msgspec.Struct):
    key: str
    order: int


class _MessageFile(msgspec.Struct):
    groups: list[_Group]


class _OpenMojiEntry(msgspec.Struct):
    """A row of OpenMoji's own table, for signs that are not emoji."""

    hexcode: str
    annotation: str
    group: str
    tags: str
    openmoji_tags: str


class Emojibase:
    """Names of emoji by codepoint, in English and in the other languages of the package."""

    def __init__(self, files: Path):
        self.root = files / "package"
        self.languages = sorted(path.parent.name for path in self.root.glob("*/compact.json"))
        if "en" not in self.languages:
            raise DataError(f"{files} holds no emoji names", "fetch emojibase again")

    @cached_property
    def metadata(self) -> dict[str, EmojiMetadata]:
        """Metadata by codepoint."""
        groups = {
            group.order: group.key for group in read_json(self.root / "en" / "messages.json", _MessageFile).groups
        }
        labels: dict[str, dict[str, str]] = {}
        english: list[_Entry] = []
        for language in self.languages:
            entries = read_json(self.root / language / "compact.json", list[_Entry])
            english = entries if language == "en" else english
            for entry in entries:
                for variant in (entry, *entry.skins):
                    labels.setdefault(normalize_codepoints(variant.hexcode), {})[language] = variant.label
        metadata = {}
        for entry in english:
            category = "" if entry.group is None else groups[entry.group]
            for variant in (entry, *entry.skins):  # skin tones share the keywords of their base
                key = normalize_codepoints(variant.hexcode)
                metadata[key] = EmojiMetadata(variant.label, tuple(entry.tags), category, labels[key])
        return metadata


class EmojiReader(ImageFileReader):
    """Images of one vendor."""

    def __init__(self, vendor: str, files: Path, names: Emojibase):
        self.vendor = vendor
        # Some vendors have one image with and one without the presentation mark; the first is used.
        paths: dict[str, Path] = {}
        for path in sorted(files.glob(VENDORS[vendor])):
            key = get_depicted_key(vendor, normalize_codepoints(path.stem))
            if vendor not in EXCLUDED_KEYS or not re.fullmatch(EXCLUDED_KEYS[vendor], key):
                paths.setdefault(key, path)
        if not paths:
            raise DataError(f"{files} holds no images of {vendor}", f"fetch {vendor} again")
        self.keys = sorted(paths)
        self.paths = [paths[key] for key in self.keys]
        self._emojibase = names
        self._openmoji_path = files / "package" / "data" / "openmoji.json"

    def get_record(self, item: int) -> ImageRecord:
        key = self.keys[item]
        return ImageRecord(f"{self.vendor}/{key}", self.vendor, key, *self._metadata[key])

    @cached_property
    def _metadata(self) -> dict[str, EmojiMetadata]:
        emojibase = self._emojibase.metadata
        entries = read_json(self._openmoji_path, list[_OpenMojiEntry]) if self._openmoji_path.is_file() else []
        metadata = {normalize_codepoints(sign.hexcode): _to_metadata(sign) for sign in entries}
        unnamed = [key for key in self.keys if key not in emojibase and key not in metadata]
        if unnamed:
            raise DataError(f"{self.vendor} has {unnamed[0]}, which has no name", "fetch emojibase again")
        for key, found in emojibase.items():  # emojibase takes precedence; OpenMoji supplies missing groups
            metadata[key] = (
                found if found.category or key not in metadata else found._replace(category=metadata[key].category)
            )
        return metadata


def _to_metadata(sign: _OpenMojiEntry) -> EmojiMetadata:
    tags = dict.fromkeys(tag.strip() for tag in f"{sign.tags},{sign.openmoji_tags}".split(","))
    return EmojiMetadata(sign.annotation, tuple(filter(None, tags)), sign.group, {"en": sign.annotation})
