"""Drawings and stamps out of Debian packages: files in folders, with words in the file or beside it."""

import html
import re
from collections import Counter
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from vitrail.data.pictures.files import read_lines, spoken
from vitrail.data.pictures.pixels import read_rgba
from vitrail.data.pictures.record import About
from vitrail.data.sources.progress import bar
from vitrail.errors import DataError

COMMON = 4  # a title that more drawings share is that of a collection: "Lemon SVG theme"
_DC = "{http://purl.org/dc/elements/1.1/}"
_RDF = "{http://www.w3.org/1999/02/22-rdf-syntax-ns#}"


class Clipart:
    """The Open Clip Art Library. A drawing's title, keywords and description stand inside its file."""

    vendor = "openclipart"

    def __init__(self, files: Path):
        self.root = files / "usr" / "share" / "openclipart" / "svg"
        self.paths = sorted(self.root.rglob("*.svg"))
        if not self.paths:
            raise DataError(f"{files} holds no clip art", "fetch openclipart again")

    def __len__(self) -> int:
        return len(self.paths)

    def about(self, item: int) -> About:
        path = self.paths[item]
        key = path.relative_to(self.root).with_suffix("").as_posix()
        title, keywords = self._described[item]
        name = title if title and self._titles[title] <= COMMON else spoken(path.stem)
        return About(f"{self.vendor}/{key}", self.vendor, key, name, keywords, category=key.split("/")[0])

    def rgba(self, item: int, side: int | None = None) -> np.ndarray:
        return read_rgba(self.paths[item], side)

    @cached_property
    def _described(self) -> list[tuple[str, tuple[str, ...]]]:
        with bar("reading titles", len(self.paths), unit="file") as progress:
            return [(progress.update(), described(path))[1] for path in self.paths]

    @cached_property
    def _titles(self) -> Counter[str]:
        return Counter(title for title, _ in self._described)


def described(path: Path) -> tuple[str, tuple[str, ...]]:
    """The title and the keywords that a drawing gives of itself."""
    title, keywords = None, {}
    with suppress(ElementTree.ParseError):  # what stands before the fault is read
        for _, element in ElementTree.iterparse(path, events=("end",)):
            text = " ".join(html.unescape(element.text or "").split())
            if element.tag == f"{_DC}title" and title is None:
                title = text  # the first is the drawing's; its makers' names follow
            elif element.tag == f"{_RDF}li" and text and text != "hash":  # a leftover of the library's own scripts
                keywords[text.lower()] = None
            elif element.tag.endswith("}metadata"):
                break
    return title or "", tuple(keywords)


class Stamps:
    """Tux Paint's stamps: each picture with a sentence, translated into many languages."""

    vendor = "tuxpaint"

    def __init__(self, files: Path):
        self.root = files / "usr" / "share" / "tuxpaint" / "stamps"
        # A picture without a sentence is the mirror image of another. A stamp may come as a raster and as a drawing.
        self.paths = [
            next(path.with_suffix(end) for end in (".svg", ".png") if path.with_suffix(end).exists())
            for path in sorted(self.root.rglob("*.txt"))
            if path.with_suffix(".svg").exists() or path.with_suffix(".png").exists()
        ]
        if not self.paths:
            raise DataError(f"{files} holds no stamps", "fetch tuxpaint again")

    def __len__(self) -> int:
        return len(self.paths)

    def about(self, item: int) -> About:
        path = self.paths[item]
        key = path.relative_to(self.root).with_suffix("").as_posix()
        labels = sentences(path.with_suffix(".txt"))
        category, *folders, _ = key.split("/")
        name = named(labels["en"]) or spoken(path.stem)
        return About(f"{self.vendor}/{key}", self.vendor, key, name, tuple(folders), category, labels)

    def rgba(self, item: int, side: int | None = None) -> np.ndarray:
        return read_rgba(self.paths[item], side)


def sentences(path: Path) -> dict[str, str]:
    """Language → sentence. The first line is English; the others begin with their language: "de.utf8=Ein Frosch."."""
    first, *others = read_lines(path) or [""]
    found = {"en": first.strip()}
    for line in others:
        language, mark, sentence = line.partition(".utf8=")
        if mark and sentence.strip():
            found[language.strip()] = sentence.strip()
    return found


def named(sentence: str) -> str:
    """What a sentence names: "A peacock (a male peafowl)." → "peacock"."""
    start = re.split(r"[—–(!:;]|\. ", sentence)[0].strip(" .")
    return re.sub(r"^(an?|the) ", "", start, flags=re.IGNORECASE)
