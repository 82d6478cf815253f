"""What is asked of a gallery: in which language, of which categories, by names or by keywords, at which widths."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vitrail.errors import ConfigError, DataError
from vitrail.evals.contrastive import Embedder, narrowed
from vitrail.evals.queried import QueryEmbedder
from vitrail.evals.shares import Score
from vitrail.evals.suites.retrieval import AT, Way, scored, spread, ways
from vitrail.evals.suites.sets import UNTOLD, Album

SIZES = ("pictures", "captions", "names", "phrases")


class Asking(NamedTuple):
    """`without` are categories that are not asked for; their pictures stay to be found."""

    texts: Literal["names", "keywords"] = "names"
    language: str | None = None
    all_languages: bool = False
    without: tuple[str, ...] = ()
    by_category: bool = False
    widths: tuple[int, ...] = ()


class Answers(NamedTuple):
    scores: list[Score]
    counts: dict[str, Any]  # of the gallery, and of who was asked for and left out; by language where there are several

    def __str__(self) -> str:
        """`a gallery of 20 pictures and 18 captions; pictures asked for: 15, left out: 5 of flags`"""
        if "languages" in self.counts:
            each = {language: sum(count["left_out"].values()) for language, count in self.counts["languages"].items()}
            left = ", ".join(f"{language} {n:,}" for language, n in each.items() if n)
            return f"{len(each)} languages" + (f"; pictures left out of the queries: {left}" if left else "")
        size = " and ".join(f"{self.counts[what]:,} {what}" for what in SIZES if what in self.counts)
        line = f"a gallery of {size}; pictures asked for: {self.counts['asked']:,}"
        left = self.counts["left_out"].items()
        why = [f"{n:,} {'without a text' if reason == UNTOLD else f'of {reason}'}" for reason, n in left]
        return f"{line}, left out: {', '.join(why)}" if why else line


def ask(embedder: Embedder | QueryEmbedder, album: Album, asking: Asking) -> Answers:
    """All languages share one look at the pictures; keywords need none."""
    languages = _languages(album, asking)
    leave = album.numbers(asking.without)
    if asking.by_category and not album.categories:
        raise DataError(f"the pictures of {album.name} are of no category", "leave --by-category out")
    many = asking.all_languages
    how: dict[str, Any] = {
        "widths": asking.widths,
        "leave": leave,
        "categories": album.categories if asking.by_category else None,
        "at": (1,) if many else AT,
        "median": not many,
    }
    scores: list[Score] = []
    counts, pictures = {}, None
    for language in languages:
        if asking.texts == "keywords":
            words = album.keywords(language)
            shown, told = words.shown, torch.arange(len(words.phrases))
            v, names = _checked(embedder.texts(words.phrases), asking.widths), embedder.texts(words.names)
            found = [Way("keywords→name", v, names, told, words.held, spread(album.kinds, shown, told))]
            size = {"names": len(names), "phrases": len(v)}
        else:
            captions = album.gallery(language)
            shown, told = captions.shown, captions.told
            v = _checked(embedder.texts(captions.captions), asking.widths)
            pictures = embedder.images(album.pictures) if pictures is None else pictures
            found = ways(pictures, v, shown, told, album.kinds)
            size = {"pictures": len(pictures), "captions": len(v)}
        scores += scored(found, part={"language": str(language)} if many else {}, **how)
        left = album.left_out(shown, told, asking.without)
        counts[language] = {**size, "asked": len(shown) - sum(left.values()), "left_out": left}
    return Answers(scores, {"languages": counts} if many else counts[asking.language])


def _languages(album: Album, asking: Asking) -> list[str | None]:
    if not asking.all_languages:
        return [asking.language]
    if asking.language is not None:
        raise ConfigError(f"all languages, and {asking.language!r} alone", "leave one of the two out")
    if not album.languages:
        raise DataError(f"the pictures of {album.name} have names in no other language", "leave --all-languages out")
    return list(album.languages)


def _checked(v: Tensor, widths: tuple[int, ...]) -> Tensor:
    """Widths that cannot be are said before the pictures are looked at."""
    for width in widths:
        narrowed(v[:1], width)
    return v
