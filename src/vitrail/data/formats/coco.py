"""COCO captions and instances, with all annotations of an image in one sample."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from vitrail.data.formats.data_files import Id, MediaFolder, decode_json, read_json
from vitrail.data.formats.masks import Instance, Polygons, Rle
from vitrail.data.formats.sample import Sample, SampleDataset, check_unique_ids, show_progress
from vitrail.errors import DataError


class _ImageEntry(msgspec.Struct):
    id: Id
    file_name: str
    height: int | None = None
    width: int | None = None


class _CaptionAnnotation(msgspec.Struct):
    id: Id
    image_id: Id
    caption: str


class _InstanceAnnotation(msgspec.Struct):
    id: Id
    image_id: Id
    category_id: Id
    bbox: tuple[float, float, float, float]
    area: float = 0.0
    iscrowd: bool | int = 0
    segmentation: msgspec.Raw = msgspec.Raw(b"null")  # parsed on access: segmentations are most of the file


class _Category(msgspec.Struct):
    id: Id
    name: str


class _RunLengths(msgspec.Struct):
    size: tuple[int, int]
    counts: list[int] | str


class _CaptionFile(msgspec.Struct):
    images: list[_ImageEntry]
    annotations: list[_CaptionAnnotation]


class _InstanceFile(msgspec.Struct):
    images: list[_ImageEntry]
    annotations: list[_InstanceAnnotation]
    categories: list[_Category]


class _Row(NamedTuple):
    """An image and its annotations."""

    image: _ImageEntry
    annotations: list[Any]


def open_captions(path: Path, folder: MediaFolder) -> SampleDataset:
    """Open `captions_*.json`: several captions for each image. Images without captions are kept."""
    rows = _group_by_image(read_json(path, _CaptionFile), path)
    return SampleDataset("coco-captions", path, rows, partial(_to_caption_sample, folder))


def open_instances(path: Path, folder: MediaFolder) -> SampleDataset:
    """Open `instances_*.json`: boxes as (left, top, right, bottom), categories by name, segmentations as stored."""
    file = read_json(path, _InstanceFile)
    check_unique_ids([str(category.id) for category in file.categories], path)
    names = {category.id: category.name for category in file.categories}
    for annotation in file.annotations:
        if annotation.category_id not in names:
            raise DataError(
                f"{path}: annotation {annotation.id} has category {annotation.category_id}, which is not in categories",
                "add the category to the file",
            )
    rows = _group_by_image(file, path)
    return SampleDataset(
        "coco-instances", path, rows, partial(_to_instance_sample, folder, names), names=tuple(names.values())
    )


def _group_by_image(file: _CaptionFile | _InstanceFile, path: Path) -> list[_Row]:
    check_unique_ids([str(image.id) for image in file.images], path)
    check_unique_ids([str(annotation.id) for annotation in file.annotations], path)
    rows = {image.id: _Row(image, []) for image in file.images}
    for annotation in show_progress(file.annotations, path.name):
        if annotation.image_id not in rows:
            raise DataError(
                f"{path}: annotation {annotation.id} has image {annotation.image_id}, which is not in images",
                "add the image to the file",
            )
        rows[annotation.image_id].annotations.append(annotation)
    return list(rows.values())


def _to_caption_sample(folder: MediaFolder, row: _Row) -> Sample:
    return Sample(
        **_common_fields(folder, row.image), captions=tuple(annotation.caption for annotation in row.annotations)
    )


def _to_instance_sample(folder: MediaFolder, names: dict[Id, str], row: _Row) -> Sample:
    instances = tuple(_to_instance(annotation, names[annotation.category_id]) for annotation in row.annotations)
    return Sample(**_common_fields(folder, row.image), instances=instances)


def _common_fields(folder: MediaFolder, image: _ImageEntry) -> dict[str, Any]:
    name = str(image.id)
    size = None if image.height is None or image.width is None else (image.height, image.width)
    if size and min(size) < 1:
        raise DataError(f"sample {name:.80} has a size of {size[0]}×{size[1]} pixels", "give at least 1 for each side")
    return {"id": name, "images": (folder.find_file(image.file_name, name),), "size": size}


def _to_instance(annotation: _InstanceAnnotation, category: str) -> Instance:
    x, y, w, h = annotation.bbox
    if w < 0 or h < 0:
        raise DataError(
            f"annotation {annotation.id} has a box {w} wide and {h} high", "write boxes as x, y, width, height"
        )
    segmentation = decode_json(
        annotation.segmentation,
        list[tuple[float, ...]] | _RunLengths | None,
        f"annotation {annotation.id}, segmentation",
    )
    if isinstance(segmentation, _RunLengths):
        counts = segmentation.counts
        segmentation = Rle(segmentation.size, counts if isinstance(counts, str) else tuple(counts))
    elif segmentation is not None:
        segmentation = Polygons(tuple(segmentation)) if segmentation else None
    return Instance(category, (x, y, x + w, y + h), bool(annotation.iscrowd), annotation.area, segmentation)
