"""Sets of pictures with classes, read as arrays: CIFAR-10 and Fashion-MNIST.

Axes: N pictures, H, W pixels.
"""

from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from PIL import Image

from vitrail.data.pictures.files import read_json
from vitrail.data.pictures.pixels import fitted
from vitrail.data.pictures.record import About, Labelled
from vitrail.data.sources.progress import bar
from vitrail.errors import DataError, ImageError
from vitrail.processing.images import load_image

Part = Literal["train", "test"]
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FASHION = ("T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
HELD_OUT = 1000  # of each class of Fashion-MNIST


class Classes:
    """A labelled set as pictures, training part first."""

    def __init__(self, vendor: str, files: Path):
        self.vendor, self.files = vendor, files

    def part(self, part: Part) -> Labelled:
        return self._parts[part]

    def __len__(self) -> int:
        return sum(len(part.labels) for part in self._parts.values())

    def about(self, item: int) -> About:
        name, part, row = self._place(item)
        label = part.names[part.labels[row]]
        key = f"{name}-{row:05d}"
        return About(f"{self.vendor}/{key}", self.vendor, key, label, category=label)

    def rgba(self, item: int, side: int | None = None) -> np.ndarray:
        _, part, row = self._place(item)
        return fitted(Image.fromarray(part.images[row]).convert("RGBA"), side)

    def _place(self, item: int) -> tuple[str, Labelled, int]:
        train, test = self._parts["train"], self._parts["test"]
        if not 0 <= item < len(self):
            raise IndexError(item)
        seen = len(train.labels)
        return ("train", train, item) if item < seen else ("test", test, item - seen)

    @cached_property
    def _parts(self) -> dict[Part, Labelled]:
        try:
            return READERS[self.vendor](self.files)
        except (ImageError, ValueError, IndexError) as error:
            raise DataError(f"{self.vendor} in {self.files} cannot be read: {error}", "fetch it again") from None


def cifar10(files: Path) -> dict[Part, Labelled]:
    """Each picture of the package holds ten thousand, one a row: 32 × 32 pixels of RGB one behind the other."""
    batches: dict[Part, list[str]] = {
        "train": [f"data_batch_{n}.png" for n in range(1, 6)],
        "test": ["test_batch.png"],
    }
    parts = {}
    for part, names in batches.items():
        rows = [np.asarray(load_image(files / "package" / name)) for name in names]  # (10000, 1024, 3)
        labels = np.array(read_json(files / "package" / f"{part}_lables.json", list[int]))
        parts[part] = _checked(np.concatenate(rows).reshape(-1, 32, 32, 3), labels, CIFAR10)
    return parts


class _Class(msgspec.Struct):
    data: list[list[int]]


def fashion_mnist(files: Path) -> dict[Part, Labelled]:
    """The package has a file a class, seven thousand pictures each, in an order of its own. The first thousand of every
    class are the test part. That is not the published split: the first picture of the published training part lies
    among them. So results compare with each other, and not with published ones."""
    classes = []
    with bar("reading classes", len(FASHION), unit="class") as progress:
        for label in range(len(FASHION)):
            rows = read_json(files / "package" / "src" / "clothes" / f"{label}.json", _Class).data
            # Two rows of the package are empty, and vanish here.
            classes.append(np.frombuffer(b"".join(map(bytes, rows)), np.uint8).reshape(-1, 28, 28))
            progress.update()
    return {"train": _grey([rows[HELD_OUT:] for rows in classes]), "test": _grey([rows[:HELD_OUT] for rows in classes])}


def _grey(classes: list[np.ndarray]) -> Labelled:
    labels = np.repeat(np.arange(len(classes)), [len(rows) for rows in classes])
    return _checked(np.repeat(np.concatenate(classes)[..., None], 3, axis=-1), labels, FASHION)


READERS = {"cifar10": cifar10, "fashion-mnist": fashion_mnist}


def _checked(images: np.ndarray, labels: np.ndarray, names: tuple[str, ...]) -> Labelled:
    if len(images) != len(labels) or not len(images) or not 0 <= labels.min() <= labels.max() < len(names):
        raise ValueError(f"{len(images)} pictures do not go with {len(labels)} labels of {len(names)} classes")
    return Labelled(images, labels.astype(np.int64), names)
