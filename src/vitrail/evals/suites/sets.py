"""The data sets of the suites: pictures with classes, and pictures with captions.

N pictures, M captions, K categories
"""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.data.formats import Sample, open_format
from vitrail.data.pictures import READERS, About, labelled, pictures
from vitrail.data.pictures.classes import Part
from vitrail.errors import ConfigError, DataError, nearest
from vitrail.evals.viewer import Picture

CLASSES = ("cifar10", "fashion-mnist")
NOTHING = -1  # the number of a picture, or of a name, that nothing is told of
UNTOLD = "no text"


class Classes(NamedTuple):
    pictures: Sequence[Picture]
    labels: Tensor  # (N,)
    names: tuple[str, ...]


class Gallery(NamedTuple):
    """Things to find and captions that tell of them; those with the same number belong together."""

    shown: Tensor  # (N,) of each picture
    captions: list[str]
    told: Tensor  # (M,) of each caption


class Names(NamedTuple):
    """Names to find by keywords, which belong to those with the same number."""

    phrases: list[str]
    names: list[str]
    held: Tensor  # of each name; the phrases' own are 0, 1, 2, …
    shown: Tensor  # (N,) of each picture


class Album:
    """Pictures, and what is known of each: names in some languages, keywords, a category; or else captions."""

    def __init__(self, name: str, pictures: Sequence[Picture], about: Sequence[About], captions: Gallery | None = None):
        self.name, self.pictures, self.about, self.captions = name, pictures, about, captions

    @property
    def languages(self) -> list[str]:
        """In which any picture has a name."""
        return sorted({language for about in self.about for language in about.labels})

    @property
    def categories(self) -> list[str]:
        return sorted({about.category for about in self.about if about.category})

    @property
    def kinds(self) -> Tensor:
        """(N, K) bool: which of `categories` each picture is of"""
        known = {category: k for k, category in enumerate(self.categories)}
        table = torch.zeros(len(self.pictures), len(known), dtype=torch.bool)
        for n, about in enumerate(self.about):
            if about.category:
                table[n, known[about.category]] = True
        return table

    def numbers(self, categories: Iterable[str]) -> list[int]:
        """Of these categories, in `categories`."""
        known = self.categories
        for category in categories:
            if category not in known:
                remedy = nearest(category, known) if known else "its pictures are of no category: leave it out"
                raise ConfigError(f"no picture of {self.name} is of the category {category!r}", remedy)
        return [known.index(category) for category in categories]

    def left_out(self, shown: Tensor, told: Tensor, without: Sequence[str] = ()) -> dict[str, int]:
        """Why pictures are not asked for, and how many: the category they are of, or that nothing is told of them."""
        untold = ~torch.isin(shown, told)
        numbers = zip(without, self.numbers(without), strict=True)
        counts = {category: int((self.kinds[:, k] & ~untold).sum()) for category, k in numbers}
        return {reason: n for reason, n in {**counts, UNTOLD: int(untold.sum())}.items() if n}

    def gallery(self, language: str | None = None) -> Gallery:
        """The captions, or the names, in another language than the source's own if one is given. Pictures of one name
        share it; one without a name in the language stays to be found, and is not asked for."""
        if self.captions is not None and language is None:
            return self.captions
        texts, owners = _distinct(self._names(language))
        return Gallery(torch.tensor(owners), texts, torch.arange(len(texts)))

    def keywords(self, language: str | None = None) -> Names:
        """All keywords of a name's pictures, joined, to find the name by. Names with the same keywords (an emoji's skin
        tones) belong to one phrase; one without any stays to be found, and is not asked for."""
        names, owners = _distinct(self._names(language))
        said: list[dict[str, None]] = [{} for _ in names]
        for about, owner in zip(self.about, owners, strict=True):
            if owner != NOTHING:
                said[owner].update(dict.fromkeys(about.keywords))
        phrases, held = _distinct(", ".join(words) or None for words in said)
        if not phrases:
            raise DataError(f"the pictures of {self.name} have no keywords", "leave --texts out")
        shown = [NOTHING if owner == NOTHING else held[owner] for owner in owners]
        return Names(phrases, names, torch.tensor(held), torch.tensor(shown))

    def _names(self, language: str | None) -> list[str | None]:
        if self.captions is not None:
            raise DataError(f"{self.name} holds captions, not names", "name a source of pictures: vitrail data list")
        if language is None:
            return [about.name.strip() or None for about in self.about]
        if language not in self.languages:
            remedy = nearest(language, self.languages) if self.languages else "leave the language out"
            raise ConfigError(f"no picture of {self.name} has a name in {language!r}", remedy)
        return [about.labels.get(language) or None for about in self.about]


def album(name: str, limit: int | None = None, side: int | None = None) -> Album:
    """Pictures with captions: a file in COCO's captions format, or a source or folder of pictures, whose captions are
    its names. `side` is what drawings are rasterised at."""
    path = Path(name)
    if path.suffix == ".json" and name not in READERS:
        samples = open_format("coco-captions", path)
        some = [samples[row] for row in some_of(len(samples), limit)]
        return Album(name, [sample.image for sample in some], [], _told(some, path))
    source = pictures(name)
    rows = some_of(len(source), limit)
    return Album(name, [partial(source.rgba, row, side) for row in rows], [source.about(row) for row in rows])


def classes(name: str, part: Part, limit: int | None = None, *, parted: bool = False) -> Classes:
    """A part of CIFAR-10 or Fashion-MNIST, or a folder with a sub-folder a class, of which the parts are folders
    `train` and `test` where it has such; one that is `parted` must have them."""
    if name in CLASSES:
        found = labelled(name, part)
        rows = some_of(len(found.labels), limit)
        return Classes(list(found.images[rows]), torch.from_numpy(found.labels)[rows], found.names)
    folder = Path(name)
    if not folder.is_dir():
        raise DataError(f"no data set with classes and no folder is called {name!r}", nearest(name, CLASSES))
    parts = [place for place in (folder / "train", folder / "test") if place.is_dir()]
    if parts and folder / part not in parts:
        raise DataError(f"{folder} has {parts[0].name}, and no {part}", f"make a folder {part} in it")
    if parted and not parts:
        raise DataError(f"{folder} has no folders train and test", "make both: a probe is tested on other pictures")
    samples = open_format("images", folder / part if parts else folder)
    if len(samples.names) < 2:
        raise DataError(f"{samples.path} holds {len(samples.names)} classes", "make a sub-folder for each class")
    number = {name: n for n, name in enumerate(samples.names)}
    chosen = [samples[row] for row in some_of(len(samples), limit)]
    loose = [sample.id for sample in chosen if sample.label is None]
    if loose:
        raise DataError(f"{samples.path}: {loose[0]} is of no class", "move it into the folder of its class")
    labels = torch.tensor([number[str(sample.label)] for sample in chosen])
    return Classes([sample.image for sample in chosen], labels, tuple(samples.names))


def some_of(n: int, limit: int | None, seed: int = 0) -> list[int]:
    """At most `limit` of n numbers, drawn alike from all of them: sets are often sorted by class."""
    if limit is not None and limit < 1:
        raise ConfigError(f"a limit of {limit}", "give at least 1")
    if limit is None or limit >= n:
        return list(range(n))
    return sorted(torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:limit].tolist())


def _told(samples: list[Sample], path: Path) -> Gallery:
    """A picture without a caption stays in the gallery, and belongs to nothing."""
    captions = [(n, text) for n, sample in enumerate(samples) for text in sample.captions]
    if not captions:
        raise DataError(f"{path} holds no captions", "is it the right file?")
    told = torch.tensor([n for n, _ in captions])
    return Gallery(torch.arange(len(samples)), [text for _, text in captions], told)


def _distinct(names: Iterable[str | None]) -> tuple[list[str], list[int]]:
    """Each name once, and for each item the number of its name, or NOTHING. "Tux" and "tux" are one name, as they are
    in training."""
    known: dict[str, int] = {}
    texts: list[str] = []
    rows = []
    for name in names:
        if name is None:
            rows.append(NOTHING)
            continue
        rows.append(known.setdefault(name.lower(), len(texts)))
        if rows[-1] == len(texts):
            texts.append(name)
    return texts, rows
