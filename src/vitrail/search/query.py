"""What is asked, as one vector, and the pictures that come nearest to it.

N pictures, E width of the embedding
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
from PIL import Image

from vitrail.errors import ConfigError, ImageError
from vitrail.processing.images import load_image
from vitrail.search.index import Index, endings
from vitrail.show.sheet import Tile, draw_sheet

if TYPE_CHECKING:
    from vitrail.search.eye import ContrastiveEye


class Hit(NamedTuple):
    """A picture that was found; `score` is the cosine between it and the query."""

    path: str
    score: float


class Query(NamedTuple):
    """Words, pictures, or both; `without` are words to keep away from."""

    words: str = ""
    pictures: tuple[Path, ...] = ()
    without: tuple[str, ...] = ()

    @classmethod
    def read(cls, terms: Sequence[str], without: Sequence[str] = ()) -> Self:
        """Of the terms, those that are files are pictures; the others are words, quoted or not."""
        pictures = [term for term in terms if _is_file(term)]
        for term in terms:
            if term not in pictures and " " not in term and Path(term).suffix.lower() in endings():
                raise ImageError(f"{term} does not exist", "check the spelling and the folder you are in")
        words = " ".join(" ".join(term for term in terms if term not in pictures).split())
        avoided = tuple(" ".join(text.split()) for text in without)
        if not words and not pictures:
            raise ConfigError(
                "nothing to search for", 'say it in words, or name a picture: vitrail search FOLDER "a cat"'
            )
        if not all(avoided):
            raise ConfigError("--without is empty", "give the words to keep away from, or leave it out")
        return cls(words, tuple(map(Path, pictures)), avoided)

    def __str__(self) -> str:
        wanted = [*([f"“{self.words}”"] if self.words else []), *(path.name for path in self.pictures)]
        return " ".join([" + ".join(wanted), *(f"− “{text}”" for text in self.without)])

    def vector(self, eye: ContrastiveEye) -> np.ndarray:
        """(E,) of length one: the sum of what is wanted, less what is not."""
        wanted = [*eye.words([self.words])] if self.words else []
        if self.pictures:
            wanted += [*eye.embed([eye.read(load_image(path, frame=0)) for path in self.pictures])]
        total = np.sum(wanted, axis=0)
        if self.without:
            total = total - eye.words(self.without).sum(axis=0)
        length = np.linalg.norm(total)
        if length < 1e-3:
            raise ConfigError(f"nothing is left of {self}", "search for something else than what is left out")
        return total / length


def find(index: Index, query: np.ndarray, count: int) -> list[Hit]:
    """The nearest `count` pictures to a vector (E,), best first; equals in order of path."""
    paths = index.paths
    if not paths:
        return []
    # Rounded where half precision ends, so that copies of one picture are equals.
    scores = np.round(index.vectors @ query.astype(np.float32), 5)  # (N,)
    best = np.argsort(-scores, kind="stable")[:count]
    return [Hit(paths[i], float(scores[i])) for i in best]


def draw_found(folder: Path, hits: Sequence[Hit], title: str, under: str = "", side: int = 176) -> Image.Image:
    """A contact sheet: pictures with rank, score and path."""
    return draw_sheet(
        [_tile(folder, rank, hit, side) for rank, hit in enumerate(hits, 1)], title, under=under, side=side
    )


def shown(path: str) -> str:
    """A path as text: a name need not be Unicode."""
    return path.encode(errors="replace").decode()


def _tile(folder: Path, rank: int, hit: Hit, side: int) -> Tile:
    words = [f"{rank}.  {hit.score:.3f}", shown(hit.path)]
    try:
        picture = load_image(folder / hit.path, frame=0)
    except ImageError:  # deleted or changed since the index was brought up to date
        return Tile(Image.new("RGB", (side, side), "white"), [*words, "cannot be read any more"])
    picture.thumbnail((2 * side, 2 * side))
    return Tile(picture, words)


def _is_file(term: str) -> bool:
    try:
        return Path(term).is_file()
    except (OSError, ValueError):  # a long sentence, or one with a null byte, is no name
        return False
