"""Named images as a source of training samples.

A sample is an index. Image tensors and captions are made on the device of the index tensor. Shapes: N images, B
samples, C channels, S pixels a side, K texts of an image, F forms of a name, T templates.
"""

import hashlib
import re
from dataclasses import replace
from typing import Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from vitrail.config import Config
from vitrail.data.augmentation import AugmentationConfig
from vitrail.data.image_collection import ImageCollection, load_collection
from vitrail.data.image_readers import ImageRecord
from vitrail.data.image_readers.class_images import READERS as CLASSES
from vitrail.data.language.english import with_indefinite_article
from vitrail.data.language.templates import NAMED_IMAGE_CAPTIONS
from vitrail.data.language.text_pieces import PieceTable, TokenTable
from vitrail.data.scenes.scene_source import SceneSample
from vitrail.data.source_spec import DataSourceSpec
from vitrail.data.sources import SOURCES
from vitrail.errors import ConfigError, DataError, suggest_name
from vitrail.registry import DATA_SOURCES

_SLOT = re.compile(r"\{a?\}")
# Forms of a name: first and after other words; without and with its article; before more words and before a full stop.
_FORMS = ("{0}", " {0}", "{1}", " {1}", "{0}.", " {0}.", "{1}.", " {1}.")


class NamedImagesConfig(Config, tag="named", tag_field="kind"):
    """Settings of a source of images with names.

    datasets              sources of images (`vitrail data list`) or folders
    image_size            size at which images are cached
    trim                  crop each image to its opaque part, so that all designs fill the frame alike
    split                 of sets with classes: train, test or all; other sources have no splits
    name_from             what an image is called by: its own name, or its category (in a folder: the sub-folder)
    include_categories    use only these categories; all if not given
    exclude_names         leave out images of these names
    templates             captions around an English name: {} is the name, {a} the name with its article
    keyword_probability   probability that keywords replace the name, for images that have keywords
    languages             languages besides English
    translation_probability  probability of a name in one of these languages
    augmentation          augmentation of the images in training
    """

    datasets: tuple[str, ...]
    image_size: int = 64
    trim: bool = False
    split: Literal["all", "train", "test"] = "all"
    name_from: Literal["own", "category"] = "own"
    include_categories: tuple[str, ...] = ()
    exclude_names: tuple[str, ...] = ()
    templates: tuple[str, ...] = NAMED_IMAGE_CAPTIONS
    keyword_probability: float = 0.0
    languages: tuple[str, ...] = ()
    translation_probability: float = 0.0
    augmentation: AugmentationConfig = AugmentationConfig()

    def __post_init__(self) -> None:
        if not self.datasets or not self.templates:
            raise ConfigError("datasets or templates are empty", "give at least one of each")
        for template in self.templates:
            parts = _SLOT.split(template)
            separate = parts[0][-1:] in ("", " ") and (parts[-1] in ("", ".") or parts[-1].startswith(" "))
            if len(parts) != 2 or not separate:
                raise ConfigError(
                    f"template {template!r} does not have exactly one separate place for the name",
                    'write "{}", or "{a}" for the name with its article, once, between spaces or at an end',
                )
        if not (
            0 <= self.keyword_probability
            and 0 <= self.translation_probability
            and self.keyword_probability + self.translation_probability <= 1
        ):
            raise ConfigError(
                f"keyword_probability is {self.keyword_probability} and "
                f"translation_probability is {self.translation_probability}",
                "give two values from 0 on that add up to at most 1",
            )
        if self.translation_probability and not self.languages:
            raise ConfigError(
                "translation_probability is set but languages is empty", 'give some, such as languages = ["de", "fr"]'
            )


class _Tables(NamedTuple):
    """Images, and their texts as indices of text pieces."""

    pixels: Tensor  # uint8 (N, C, S, S)
    names: Tensor  # (N, F) the English name in each form
    keywords: Tensor  # (N,) 0 if there are none
    foreign: Tensor  # (N, languages) 0 if there is none
    before: Tensor  # (T,)
    form: Tensor  # (T,)
    after: Tensor  # (T,)


class NamedImageSource:
    """Map an item to its `SceneSample`; `pixels` and `sample_texts` make the images and texts of a batch."""

    def __init__(self, config: NamedImagesConfig, name: str = "named"):
        self.config, self.name, self.pieces = config, name, PieceTable()
        collections = [
            _apply_names(load_collection(data, config.image_size, config.trim), data, config.name_from)
            for data in config.datasets
        ]
        _check_known([record for images in collections for record in images.records], config)
        rows = [
            [row for row, record in enumerate(images.records) if _is_selected(record, config)] for images in collections
        ]
        self.records = tuple(
            images.records[row] for images, selected in zip(collections, rows, strict=True) for row in selected
        )
        if not self.records:
            raise DataError(
                f"source {name!r} is empty: no image of {', '.join(config.datasets)} is selected",
                "relax include_categories, exclude_names or split",
            )
        channels = max(images.pixels.shape[1] for images in collections)
        pixels = [
            _match_channels(images.pixels[selected], channels)
            for images, selected in zip(collections, rows, strict=True)
        ]
        self._tables = {torch.device("cpu"): self._build_tables(torch.cat(pixels))}

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, item: int) -> SceneSample:
        if not 0 <= item < len(self):
            raise IndexError(item)
        return SceneSample(self.name, item)

    @property
    def fingerprint(self) -> str:
        """Hash of the images, their pixels and their records."""
        digest = hashlib.blake2b(msgspec.json.encode(self.records), digest_size=8)
        digest.update(self._tables_on(torch.device("cpu")).pixels.numpy().data)
        return digest.hexdigest()

    @property
    def concepts(self) -> list[str]:
        """Concept of each image (N): images of the same name share a concept."""
        return [record.name.lower() for record in self.records]

    def pixels(self, index: Tensor) -> Tensor:
        """Images as uint8 (B, C, S, S)."""
        return self._tables_on(index.device).pixels[index]

    def sample_texts(self, index: Tensor, *, randomize: bool = True) -> Tensor:
        """Texts as (B, 3) indices of `pieces`: before the name, the name, after the name.

        Without `randomize` the text is the name alone. With it, the text is the name in a random template, a
        translation, or keywords.
        """
        tables, empty, config = self._tables_on(index.device), torch.zeros_like(index), self.config
        if not randomize:
            return torch.stack([empty, tables.names[index, 0], empty], 1)
        uniform, language = torch.rand(2, len(index), device=index.device)
        template = torch.randint(len(config.templates), index.shape, device=index.device)
        name = tables.names[index, tables.form[template]]
        foreign = tables.foreign[index, (language * tables.foreign.shape[1]).long()]
        alternative = torch.where(uniform < config.keyword_probability, tables.keywords[index], foreign)
        alternative = torch.where(
            uniform < config.keyword_probability + config.translation_probability, alternative, empty
        )
        in_template = torch.stack([tables.before[template], name, tables.after[template]], 1)
        return torch.where((alternative > 0)[:, None], torch.stack([empty, alternative, empty], 1), in_template)

    def count_max_tokens(self, token_table: TokenTable) -> int:
        """Largest token count of any name in any template."""
        tables, length = self._tables_on(torch.device("cpu")), token_table.length
        around = length[tables.before] + length[tables.after]  # (T,)
        return int((length[tables.names].amax(0)[tables.form] + around).max())

    def _build_tables(self, pixels: Tensor) -> _Tables:
        rows, config = self.pieces.add_all, self.config
        parts = [_SLOT.split(template) for template in config.templates]
        form = [
            bool(before.strip()) + 2 * ("{a}" in template) + 4 * (after == ".")
            for template, (before, after) in zip(config.templates, parts, strict=True)
        ]
        plain_names = [record.name.strip() for record in self.records]
        names = [[form.format(name, with_indefinite_article(name)) for form in _FORMS] for name in plain_names]
        foreign = [
            rows(self._keep_unambiguous([a.labels.get(code, "") for a in self.records])) for code in config.languages
        ]
        return _Tables(
            pixels,
            torch.stack([rows(forms) for forms in names]),
            rows(self._keep_unambiguous([", ".join(record.keywords[:6]) for record in self.records])),
            torch.stack(foreign or [torch.zeros(len(self), dtype=torch.int64)], 1),
            rows([before.rstrip() for before, _ in parts]),
            torch.tensor(form),
            rows([after.rstrip() if after != "." else "" for _, after in parts]),
        )

    def _keep_unambiguous(self, texts: list[str]) -> list[str]:
        """Keep texts that belong to one concept only: a text shared by several concepts would make them each other's
        negatives."""
        concepts: dict[str, set[str]] = {}
        for text, concept in zip(texts, self.concepts, strict=True):
            concepts.setdefault(text.lower(), set()).add(concept)
        return [text if len(concepts[text.lower()]) == 1 else "" for text in texts]

    def _tables_on(self, device: torch.device) -> _Tables:
        if device not in self._tables:
            self._tables[device] = _Tables(*(table.to(device) for table in self._tables[torch.device("cpu")]))
        return self._tables[device]


def _apply_names(images: ImageCollection, data: str, names: str) -> ImageCollection:
    """Use categories as names if asked for, and refuse ambiguous names in folders."""
    if names == "category":
        image_records = tuple(replace(record, name=record.category) for record in images.records)
        return ImageCollection(image_records, images.pixels)
    if data not in SOURCES:  # folders of classes number their files, so names repeat across classes
        first_of_name: dict[str, ImageRecord] = {}
        for record in images.records:
            earlier = first_of_name.setdefault(record.name.lower(), record)
            if earlier.category != record.category:
                raise DataError(
                    f"{data}: {earlier.key} and {record.key} have the same name {record.name!r}",
                    'if sub-folders are classes, set name_from = "category"; otherwise rename one',
                )
    return images


def _check_known(image_records: list[ImageRecord], config: NamedImagesConfig) -> None:
    """Check that every excluded name, category and language exists."""
    known = {
        "exclude_names": {record.name.lower() for record in image_records},
        "include_categories": {record.category for record in image_records},
        "languages": {code for record in image_records for code in record.labels},
    }
    for key, available in known.items():
        for value in getattr(config, key):
            if (value.lower() if key == "exclude_names" else value) not in available:
                raise DataError(f"{key}: no image has {value!r}", suggest_name(value, sorted(available)))


def _is_selected(record: ImageRecord, config: NamedImagesConfig) -> bool:
    return (
        bool(record.name.strip())
        and record.name.lower() not in {name.lower() for name in config.exclude_names}
        and (config.split == "all" or record.vendor not in CLASSES or record.key.startswith(f"{config.split}-"))
        and (not config.include_categories or record.category in config.include_categories)
    )


def _match_channels(pixels: Tensor, channels: int) -> Tensor:
    """Add an opaque channel if the other collections have opacity."""
    if pixels.shape[1] == channels:
        return pixels
    return torch.cat([pixels, torch.full_like(pixels[:, :1], 255)], 1)


DATA_SOURCES.register(
    "named",
    DataSourceSpec(
        NamedImagesConfig,
        lambda config, context: NamedImageSource(config, context.name),
        ("images", "captions", "questions"),
    ),
)
