"""Datasets of the suites: images with classes, and images with captions, names and keywords.

N images, M captions, K categories
"""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.data.formats import Sample, open_dataset
from vitrail.data.image_readers import READERS, ImageRecord, load_labelled_images, open_images
from vitrail.data.image_readers.class_images import SplitName
from vitrail.errors import ConfigError, DataError, suggest_name
from vitrail.evals.image_feature_extractor import LazyImage

CLASSIFICATION_DATASETS = ("cifar10", "fashion-mnist")
NO_MATCH = -1  # id of an image or name without text
NO_TEXT = "no text"


class ImageClassificationSet(NamedTuple):
    """Images with class indices and class names."""

    images: Sequence[LazyImage]
    labels: Tensor  # (N,)
    names: tuple[str, ...]


class CaptionGallery(NamedTuple):
    """Image ids, captions and caption ids; equal ids match."""

    image_ids: Tensor  # (N,) id of each image
    captions: list[str]
    caption_ids: Tensor  # (M,) id of each caption


class NameGallery(NamedTuple):
    """Keyword phrases as queries and names as gallery; equal ids match."""

    phrases: list[str]
    names: list[str]
    name_ids: Tensor  # id of each name; phrases have the ids 0, 1, 2, …
    image_ids: Tensor  # (N,) id of each image


class ImageCollection:
    """Images with their records (names per language, keywords, category), or with captions."""

    def __init__(
        self,
        name: str,
        images: Sequence[LazyImage],
        records: Sequence[ImageRecord],
        captions: CaptionGallery | None = None,
    ):
        self.name, self.images, self.records, self.captions = name, images, records, captions

    @property
    def languages(self) -> list[str]:
        """Languages in which an image has a name."""
        return sorted({language for record in self.records for language in record.labels})

    @property
    def categories(self) -> list[str]:
        return sorted({record.category for record in self.records if record.category})

    @property
    def category_table(self) -> Tensor:
        """Category membership (N, K) bool of the images."""
        known = {category: k for k, category in enumerate(self.categories)}
        table = torch.zeros(len(self.images), len(known), dtype=torch.bool)
        for n, record in enumerate(self.records):
            if record.category:
                table[n, known[record.category]] = True
        return table

    def category_indices(self, categories: Iterable[str]) -> list[int]:
        """Indices of the given categories in `categories`."""
        known = self.categories
        for category in categories:
            if category not in known:
                remedy = suggest_name(category, known) if known else "its images have no categories: remove the option"
                raise ConfigError(f"no image of {self.name} has the category {category!r}", remedy)
        return [known.index(category) for category in categories]

    def count_excluded(self, image_ids: Tensor, text_ids: Tensor, excluded: Sequence[str] = ()) -> dict[str, int]:
        """Count images that are excluded from the queries, by reason: their category, or no text."""
        without_text = ~torch.isin(image_ids, text_ids)
        numbers = zip(excluded, self.category_indices(excluded), strict=True)
        counts = {category: int((self.category_table[:, k] & ~without_text).sum()) for category, k in numbers}
        return {reason: n for reason, n in {**counts, NO_TEXT: int(without_text.sum())}.items() if n}

    def gallery(self, language: str | None = None) -> CaptionGallery:
        """Gallery of captions, or of names in a language (default: the source's own).

        Images with equal names share one text. Images without a name in the language stay in the gallery, but have no
        query.
        """
        if self.captions is not None and language is None:
            return self.captions
        texts, owners = _number_names(self._names(language))
        return CaptionGallery(torch.tensor(owners), texts, torch.arange(len(texts)))

    def keywords(self, language: str | None = None) -> NameGallery:
        """Gallery of names with keyword phrases as queries: the joined keywords of all images of a name.

        Names with equal keywords (skin tones of an emoji) match the same phrase. Names without keywords stay in the
        gallery, but have no query.
        """
        names, owners = _number_names(self._names(language))
        keywords_of: list[dict[str, None]] = [{} for _ in names]
        for record, owner in zip(self.records, owners, strict=True):
            if owner != NO_MATCH:
                keywords_of[owner].update(dict.fromkeys(record.keywords))
        phrases, phrase_ids = _number_names(", ".join(words) or None for words in keywords_of)
        if not phrases:
            raise DataError(f"the images of {self.name} have no keywords", "remove --texts")
        image_ids = [NO_MATCH if owner == NO_MATCH else phrase_ids[owner] for owner in owners]
        return NameGallery(phrases, names, torch.tensor(phrase_ids), torch.tensor(image_ids))

    def _names(self, language: str | None) -> list[str | None]:
        if self.captions is not None:
            raise DataError(f"{self.name} has captions, not names", "use an image source: vitrail data list")
        if language is None:
            return [record.name.strip() or None for record in self.records]
        if language not in self.languages:
            remedy = suggest_name(language, self.languages) if self.languages else "remove the language"
            raise ConfigError(f"no image of {self.name} has a name in {language!r}", remedy)
        return [record.labels.get(language) or None for record in self.records]


def open_image_collection(name: str, limit: int | None = None, image_size: int | None = None) -> ImageCollection:
    """Open an image collection: a file in COCO's caption format, or an image source or folder with names as captions.

    `image_size` is the size at which vector images are rendered.
    """
    path = Path(name)
    if path.suffix == ".json" and name not in READERS:
        samples = open_dataset("coco-captions", path)
        selected = [samples[row] for row in sample_rows(len(samples), limit)]
        return ImageCollection(name, [sample.load_image for sample in selected], [], _build_gallery(selected, path))
    source = open_images(name)
    rows = sample_rows(len(source), limit)
    return ImageCollection(
        name, [partial(source.load_rgba, row, image_size) for row in rows], [source.get_record(row) for row in rows]
    )


def open_labelled_images(
    name: str, split: SplitName, limit: int | None = None, *, require_splits: bool = False
) -> ImageClassificationSet:
    """Open a split of CIFAR-10, of Fashion-MNIST, or of a folder with one sub-folder per class.

    A folder may contain `train` and `test` folders; `require_splits` makes them mandatory.
    """
    if name in CLASSIFICATION_DATASETS:
        dataset = load_labelled_images(name, split)
        rows = sample_rows(len(dataset.labels), limit)
        return ImageClassificationSet(
            list(dataset.images[rows]), torch.from_numpy(dataset.labels)[rows], dataset.class_names
        )
    folder = Path(name)
    if not folder.is_dir():
        raise DataError(
            f"{name!r} is neither a classification dataset nor a folder", suggest_name(name, CLASSIFICATION_DATASETS)
        )
    split_folders = [folder_path for folder_path in (folder / "train", folder / "test") if folder_path.is_dir()]
    if split_folders and folder / split not in split_folders:
        raise DataError(f"{folder} has {split_folders[0].name}, but not {split}", f"create a folder {split} in it")
    if require_splits and not split_folders:
        raise DataError(f"{folder} has no folders train and test", "create both: a probe needs separate test images")
    samples = open_dataset("images", folder / split if split_folders else folder)
    if len(samples.names) < 2:
        raise DataError(f"{samples.path} has {len(samples.names)} classes", "create a sub-folder for each class")
    class_index = {name: n for n, name in enumerate(samples.names)}
    selected = [samples[row] for row in sample_rows(len(samples), limit)]
    unlabelled = [sample.id for sample in selected if sample.label is None]
    if unlabelled:
        raise DataError(f"{samples.path}: {unlabelled[0]} has no class", "move it into the folder of its class")
    labels = torch.tensor([class_index[str(sample.label)] for sample in selected])
    return ImageClassificationSet([sample.load_image for sample in selected], labels, tuple(samples.names))


def sample_rows(count: int, limit: int | None, seed: int = 0) -> list[int]:
    """Draw at most `limit` of `count` row indices uniformly, since datasets are often sorted by class."""
    if limit is not None and limit < 1:
        raise ConfigError(f"limit = {limit}", "set at least 1")
    if limit is None or limit >= count:
        return list(range(count))
    return sorted(torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:limit].tolist())


def _build_gallery(samples: list[Sample], path: Path) -> CaptionGallery:
    """Build the gallery of captioned samples; images without captions stay in it without a match."""
    captions = [(n, text) for n, sample in enumerate(samples) for text in sample.captions]
    if not captions:
        raise DataError(f"{path} has no captions", "pass a COCO captions file")
    caption_ids = torch.tensor([n for n, _ in captions])
    return CaptionGallery(torch.arange(len(samples)), [text for _, text in captions], caption_ids)


def _number_names(names: Iterable[str | None]) -> tuple[list[str], list[int]]:
    """List the distinct names, and the index of each item's name, or NO_MATCH.

    Names are compared without case, as in training.
    """
    index_of: dict[str, int] = {}
    texts: list[str] = []
    rows = []
    for name in names:
        if name is None:
            rows.append(NO_MATCH)
            continue
        rows.append(index_of.setdefault(name.lower(), len(texts)))
        if rows[-1] == len(texts):
            texts.append(name)
    return texts, rows
