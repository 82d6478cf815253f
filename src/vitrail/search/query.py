"""Search queries, the nearest images of an index, and a contact sheet of the results.

Shapes: N images, E embedding width.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
from PIL import Image

from vitrail.errors import ConfigError, ImageError
from vitrail.plots.contact_sheet import Tile, draw_contact_sheet
from vitrail.processing.image_loading import load_image
from vitrail.search.image_index import ImageIndex, list_image_suffixes

if TYPE_CHECKING:
    from vitrail.search.embedder import ContrastiveEmbedder


class SearchHit(NamedTuple):
    """A found image; `score` is its cosine similarity with the query."""

    path: str
    score: float


class SearchQuery(NamedTuple):
    """A text, example images, or both; `excluded` are texts whose vectors are subtracted."""

    text: str = ""
    images: tuple[Path, ...] = ()
    excluded: tuple[str, ...] = ()

    @classmethod
    def parse(cls, terms: Sequence[str], excluded: Sequence[str] = ()) -> Self:
        """Parse command line terms: existing files are images, all other terms are words of the text."""
        pictures = [term for term in terms if _is_file(term)]
        for term in terms:
            if term not in pictures and " " not in term and Path(term).suffix.lower() in list_image_suffixes():
                raise ImageError(f"{term} does not exist", "check the spelling and the working directory")
        words = " ".join(" ".join(term for term in terms if term not in pictures).split())
        excluded = tuple(" ".join(text.split()) for text in excluded)
        if not words and not pictures:
            raise ConfigError("the query is empty", 'give a text or an image: vitrail search FOLDER "a cat"')
        if not all(excluded):
            raise ConfigError("--exclude is empty", "give a text to exclude, or remove the flag")
        return cls(words, tuple(map(Path, pictures)), excluded)

    def __str__(self) -> str:
        terms = [*([f"“{self.text}”"] if self.text else []), *(path.name for path in self.images)]
        return " ".join([" + ".join(terms), *(f"− “{text}”" for text in self.excluded)])

    def embed(self, embedder: ContrastiveEmbedder) -> np.ndarray:
        """Return the unit vector (E,): the sum of the query vectors minus those of the excluded texts."""
        vectors = [*embedder.embed_texts([self.text])] if self.text else []
        if self.images:
            vectors += [
                *embedder.embed_images([embedder.preprocess(load_image(path, frame=0)) for path in self.images])
            ]
        total = np.sum(vectors, axis=0)
        if self.excluded:
            total = total - embedder.embed_texts(self.excluded).sum(axis=0)
        length = np.linalg.norm(total)
        if length < 1e-3:
            raise ConfigError(f"the excluded texts cancel the query {self}", "exclude something else")
        return total / length


def find_nearest(index: ImageIndex, query: np.ndarray, count: int) -> list[SearchHit]:
    """Return the `count` images nearest to a vector (E,), best first. Ties are sorted by path."""
    paths = index.paths
    if not paths:
        return []
    # Round to half precision, so that copies of one image tie.
    scores = np.round(index.vectors @ query.astype(np.float32), 5)  # (N,)
    best = np.argsort(-scores, kind="stable")[:count]
    return [SearchHit(paths[i], float(scores[i])) for i in best]


def draw_search_results(
    folder: Path, hits: Sequence[SearchHit], title: str, subtitle: str = "", image_size: int = 176
) -> Image.Image:
    """Draw a contact sheet of the results with rank, score and path."""
    return draw_contact_sheet(
        [_build_tile(folder, rank, hit, image_size) for rank, hit in enumerate(hits, 1)],
        title,
        subtitle=subtitle,
        tile_size=image_size,
    )


def to_printable_path(path: str) -> str:
    """Return a path as printable text; a file name need not be valid Unicode."""
    return path.encode(errors="replace").decode()


def _build_tile(folder: Path, rank: int, hit: SearchHit, side: int) -> Tile:
    lines = [f"{rank}.  {hit.score:.3f}", to_printable_path(hit.path)]
    try:
        image = load_image(folder / hit.path, frame=0)
    except ImageError:  # deleted or changed since the update
        return Tile(Image.new("RGB", (side, side), "white"), [*lines, "cannot be read"])
    image.thumbnail((2 * side, 2 * side))
    return Tile(image, lines)


def _is_file(term: str) -> bool:
    try:
        return Path(term).is_file()
    except (OSError, ValueError):  # too long for a file name, or contains a null byte
        return False
