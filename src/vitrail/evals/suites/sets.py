"""The data sets of the suites: pictures with classes, and pictures with captions.

N pictures, M captions
"""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.data.formats import Sample, open_format
from vitrail.data.pictures import READERS, labelled, pictures
from vitrail.data.pictures.classes import Part
from vitrail.errors import DataError, nearest
from vitrail.evals.contrastive import Picture, some_of

CLASSES = ("cifar10", "fashion-mnist")


class Classes(NamedTuple):
    pictures: Sequence[Picture]
    labels: Tensor  # (N,)
    names: tuple[str, ...]


class Gallery(NamedTuple):
    """Pictures and captions; those with the same number belong together."""

    pictures: Sequence[Picture]
    shown: Tensor  # (N,)
    captions: list[str]
    told: Tensor  # (M,)


def classes(name: str, part: Part, limit: int | None = None) -> Classes:
    """A part of CIFAR-10 or Fashion-MNIST, or a folder with a sub-folder a class, of which the parts are folders
    `train` and `test` where it has such."""
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


def gallery(name: str, limit: int | None = None, side: int | None = None) -> Gallery:
    """Pictures with captions: a file in COCO's captions format, or a source or folder of pictures, whose captions are
    its names. `side` is what drawings are rasterised at."""
    path = Path(name)
    if path.suffix == ".json" and name not in READERS:
        samples = open_format("coco-captions", path)
        return _told([samples[row] for row in some_of(len(samples), limit)], path)
    source = pictures(name)
    rows = some_of(len(source), limit)
    texts, owners = _distinct(source.about(row).name for row in rows)
    shown = [partial(source.rgba, row, side) for row in rows]
    return Gallery(shown, torch.tensor(owners), texts, torch.arange(len(texts)))


def _told(samples: list[Sample], path: Path) -> Gallery:
    """A picture without a caption stays in the gallery, and belongs to nothing."""
    captions = [(n, text) for n, sample in enumerate(samples) for text in sample.captions]
    if not captions:
        raise DataError(f"{path} holds no captions", "is it the right file?")
    told = torch.tensor([n for n, _ in captions])
    return Gallery(
        [sample.image for sample in samples], torch.arange(len(samples)), [text for _, text in captions], told
    )


def _distinct(names: Iterable[str]) -> tuple[list[str], list[int]]:
    """Each name once, and for each item the number of its name: pictures of one name belong to one caption."""
    known: dict[str, int] = {}
    rows = [known.setdefault(name, len(known)) for name in names]
    return list(known), rows
