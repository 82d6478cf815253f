"""Readers of clip art and stamps from Debian packages, with metadata in the file or next to it."""

import html
import re
from collections import Counter
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from xml.etree import ElementTree

from vitrail.data.image_readers.image_record import ImageRecord
from vitrail.data.image_readers.reader_files import read_lines, stem_to_words
from vitrail.data.image_readers.rgba import ImageFileReader
from vitrail.data.sources.progress_bar import progress_bar
from vitrail.errors import DataError

MAX_SHARED_TITLE = 4  # a title shared by more drawings is that of a collection: "Lemon SVG theme"
_DC = "{http://purl.org/dc/elements/1.1/}"
_RDF = "{http://www.w3.org/1999/02/22-rdf-syntax-ns#}"


class OpenClipartReader(ImageFileReader):
    """The Open Clip Art Library. Title and keywords are stored inside each SVG file."""

    vendor = "openclipart"

    def __init__(self, files: Path):
        self.root = files / "usr" / "share" / "openclipart" / "svg"
        self.paths = sorted(self.root.rglob("*.svg"))
        if not self.paths:
            raise DataError(f"{files} holds no clip art", "fetch openclipart again")

    def get_record(self, item: int) -> ImageRecord:
        path = self.paths[item]
        key = path.relative_to(self.root).with_suffix("").as_posix()
        title, keywords = self._described[item]
        name = title if title and self._titles[title] <= MAX_SHARED_TITLE else stem_to_words(path.stem)
        return ImageRecord(f"{self.vendor}/{key}", self.vendor, key, name, keywords, category=key.split("/")[0])

    @cached_property
    def _described(self) -> list[tuple[str, tuple[str, ...]]]:
        with progress_bar("reading titles", len(self.paths), unit="file") as progress:
            return [(progress.update(), read_title_and_keywords(path))[1] for path in self.paths]

    @cached_property
    def _titles(self) -> Counter[str]:
        return Counter(title for title, _ in self._described)


def read_title_and_keywords(path: Path) -> tuple[str, tuple[str, ...]]:
    """Read the title and keywords of a drawing."""
    title, keywords = None, {}
    with suppress(ElementTree.ParseError):  # what precedes the error is used
        for _, element in ElementTree.iterparse(path, events=("end",)):
            text = " ".join(html.unescape(element.text or "").split())
            if element.tag == f"{_DC}title" and title is None:
                title = text  # the first is the drawing's title; names of its authors follow
            elif element.tag == f"{_RDF}li" and text and text != "hash":  # an artifact of the library's scripts
                keywords[text.lower()] = None
            elif element.tag.endswith("}metadata"):
                break
    return title or "", tuple(keywords)


class TuxPaintReader(ImageFileReader):
    """Tux Paint's stamps: images with a sentence in many languages."""

    vendor = "tuxpaint"

    def __init__(self, files: Path):
        self.root = files / "usr" / "share" / "tuxpaint" / "stamps"
        # An image without a sentence is the mirror image of another. A stamp may exist both as PNG and as SVG.
        self.paths = [
            next(path.with_suffix(end) for end in (".svg", ".png") if path.with_suffix(end).exists())
            for path in sorted(self.root.rglob("*.txt"))
            if path.with_suffix(".svg").exists() or path.with_suffix(".png").exists()
        ]
        if not self.paths:
            raise DataError(f"{files} holds no stamps", "fetch tuxpaint again")

    def get_record(self, item: int) -> ImageRecord:
        path = self.paths[item]
        key = path.relative_to(self.root).with_suffix("").as_posix()
        labels = read_sentences(path.with_suffix(".txt"))
        category, *folders, _ = key.split("/")
        name = extract_name(labels["en"]) or stem_to_words(path.stem)
        return ImageRecord(f"{self.vendor}/{key}", self.vendor, key, name, tuple(folders), category, labels)


def read_sentences(path: Path) -> dict[str, str]:
    """Read sentences by language. The first line is English; others start with their language: "de.utf8=Ein
    Frosch."."""
    first, *others = read_lines(path) or [""]
    sentences_ = {"en": first.strip()}
    for line in others:
        language, separator, sentence = line.partition(".utf8=")
        if separator and sentence.strip():
            sentences_[language.strip()] = sentence.strip()
    return sentences_


def extract_name(sentence: str) -> str:
    """Extract the name from a sentence: "A peacock (a male peafowl)." → "peacock"."""
    start = re.split(r"[—–(!:;]|\. ", sentence)[0].strip(" .")
    return re.sub(r"^(an?|the) ", "", start, flags=re.IGNORECASE)
