"""Image classification sets as arrays: CIFAR-10 and Fashion-MNIST.

Shapes: N images, H and W pixels.
"""

from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from PIL import Image

from vitrail.data.image_readers.image_record import ImageRecord, LabelledImages
from vitrail.data.image_readers.reader_files import read_json
from vitrail.data.image_readers.rgba import resize_rgba
from vitrail.data.sources.progress_bar import progress_bar
from vitrail.errors import DataError, ImageError
from vitrail.processing.image_loading import load_image

SplitName = Literal["train", "test"]
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FASHION_MNIST_CLASSES = (
    "T-shirt",
    "trousers",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
TEST_IMAGES_PER_CLASS = 1000  # test images of each class of Fashion-MNIST


class ClassImagesReader:
    """A classification set as a reader of images, the training split first."""

    def __init__(self, vendor: str, files: Path):
        self.vendor, self.files = vendor, files

    def load_split(self, split: SplitName) -> LabelledImages:
        """Return one split as arrays."""
        return self._splits[split]

    def __len__(self) -> int:
        return sum(len(part.labels) for part in self._splits.values())

    def get_record(self, item: int) -> ImageRecord:
        name, part, row = self._locate(item)
        label = part.class_names[part.labels[row]]
        key = f"{name}-{row:05d}"
        return ImageRecord(f"{self.vendor}/{key}", self.vendor, key, label, category=label)

    def load_rgba(self, item: int, image_size: int | None = None) -> np.ndarray:
        _, part, row = self._locate(item)
        return resize_rgba(Image.fromarray(part.images[row]).convert("RGBA"), image_size)

    def _locate(self, item: int) -> tuple[str, LabelledImages, int]:
        train, test = self._splits["train"], self._splits["test"]
        if not 0 <= item < len(self):
            raise IndexError(item)
        num_train = len(train.labels)
        return ("train", train, item) if item < num_train else ("test", test, item - num_train)

    @cached_property
    def _splits(self) -> dict[SplitName, LabelledImages]:
        try:
            return READERS[self.vendor](self.files)
        except (ImageError, ValueError, IndexError) as error:
            raise DataError(f"{self.vendor} in {self.files} cannot be read: {error}", "fetch it again") from None


def read_cifar10(files: Path) -> dict[SplitName, LabelledImages]:
    """Read CIFAR-10. Each PNG of the package holds ten thousand images, one a row of 32 × 32 RGB pixels."""
    batches: dict[SplitName, list[str]] = {
        "train": [f"data_batch_{n}.png" for n in range(1, 6)],
        "test": ["test_batch.png"],
    }
    parts = {}
    for part, names in batches.items():
        rows = [np.asarray(load_image(files / "package" / name)) for name in names]  # (10000, 1024, 3)
        labels = np.array(read_json(files / "package" / f"{part}_lables.json", list[int]))
        parts[part] = _check(np.concatenate(rows).reshape(-1, 32, 32, 3), labels, CIFAR10_CLASSES)
    return parts


class _ClassFile(msgspec.Struct):
    data: list[list[int]]


def read_fashion_mnist(files: Path) -> dict[SplitName, LabelledImages]:
    """Read Fashion-MNIST. The package has one file for each class, with seven thousand images in an order of its own.

    The first thousand of every class are the test split. This is not the published split: the first published training
    image is among them. Results are comparable with each other, but not with published ones.
    """
    classes = []
    with progress_bar("reading classes", len(FASHION_MNIST_CLASSES), unit="class") as progress:
        for label in range(len(FASHION_MNIST_CLASSES)):
            rows = read_json(files / "package" / "src" / "clothes" / f"{label}.json", _ClassFile).data
            # Two rows of the package are empty, and disappear here.
            classes.append(np.frombuffer(b"".join(map(bytes, rows)), np.uint8).reshape(-1, 28, 28))
            progress.update()
    return {
        "train": _build_split([rows[TEST_IMAGES_PER_CLASS:] for rows in classes]),
        "test": _build_split([rows[:TEST_IMAGES_PER_CLASS] for rows in classes]),
    }


def _build_split(classes: list[np.ndarray]) -> LabelledImages:
    labels = np.repeat(np.arange(len(classes)), [len(rows) for rows in classes])
    return _check(np.repeat(np.concatenate(classes)[..., None], 3, axis=-1), labels, FASHION_MNIST_CLASSES)


READERS = {"cifar10": read_cifar10, "fashion-mnist": read_fashion_mnist}


def _check(images: np.ndarray, labels: np.ndarray, names: tuple[str, ...]) -> LabelledImages:
    if len(images) != len(labels) or not len(images) or not 0 <= labels.min() <= labels.max() < len(names):
        raise ValueError(f"{len(images)} images do not match {len(labels)} labels of {len(names)} classes")
    return LabelledImages(images, labels.astype(np.int64), names)
