"""COCO's captions and instances: one sample a picture, whatever is said or drawn of it gathered."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from vitrail.data.formats.files import Folder, Id, decode, folder_for, read_json
from vitrail.data.formats.masks import Instance, Polygons, Rle
from vitrail.data.formats.sample import Sample, Samples, progress, refuse_twins
from vitrail.errors import DataError


class _Picture(msgspec.Struct):
    id: Id
    file_name: str
    height: int | None = None
    width: int | None = None


class _Caption(msgspec.Struct):
    id: Id
    image_id: Id
    caption: str


class _Thing(msgspec.Struct):
    id: Id
    image_id: Id
    category_id: Id
    bbox: tuple[float, float, float, float]
    area: float = 0.0
    iscrowd: bool | int = 0
    segmentation: msgspec.Raw = msgspec.Raw(b"null")  # parsed when asked for: outlines are most of the file


class _Category(msgspec.Struct):
    id: Id
    name: str


class _Runs(msgspec.Struct):
    size: tuple[int, int]
    counts: list[int] | str


class _Captions(msgspec.Struct):
    images: list[_Picture]
    annotations: list[_Caption]


class _Instances(msgspec.Struct):
    images: list[_Picture]
    annotations: list[_Thing]
    categories: list[_Category]


class _Row(NamedTuple):
    picture: _Picture
    said: list[Any]  # its annotations


def open_captions(path: Path, *, pictures: str | Path | None = None, anywhere: bool = False) -> Samples:
    """`captions_*.json`: several captions a picture; a picture without one is kept, with none."""
    folder = folder_for(path, pictures, anywhere)
    rows = _gather(read_json(path, _Captions), path)
    return Samples("coco-captions", path, rows, partial(_captioned, folder))


def open_instances(path: Path, *, pictures: str | Path | None = None, anywhere: bool = False) -> Samples:
    """`instances_*.json`: boxes as (left, top, right, bottom), categories by name, outlines as kept."""
    folder = folder_for(path, pictures, anywhere)
    file = read_json(path, _Instances)
    refuse_twins([str(category.id) for category in file.categories], path)
    names = {category.id: category.name for category in file.categories}
    for thing in file.annotations:
        if thing.category_id not in names:
            raise DataError(
                f"{path}: annotation {thing.id} is of category {thing.category_id}, which is not listed",
                "add it to the file's categories",
            )
    rows = _gather(file, path)
    return Samples("coco-instances", path, rows, partial(_drawn, folder, names), names=tuple(names.values()))


def _gather(file: _Captions | _Instances, path: Path) -> list[_Row]:
    refuse_twins([str(picture.id) for picture in file.images], path)
    refuse_twins([str(note.id) for note in file.annotations], path)
    rows = {picture.id: _Row(picture, []) for picture in file.images}
    for note in progress(file.annotations, path.name):
        if note.image_id not in rows:
            raise DataError(
                f"{path}: annotation {note.id} is of picture {note.image_id}, which is not listed",
                "add it to the file's images",
            )
        rows[note.image_id].said.append(note)
    return list(rows.values())


def _captioned(folder: Folder, row: _Row) -> Sample:
    return Sample(**_shared(folder, row.picture), captions=tuple(note.caption for note in row.said))


def _drawn(folder: Folder, names: dict[Id, str], row: _Row) -> Sample:
    instances = tuple(_instance(thing, names[thing.category_id]) for thing in row.said)
    return Sample(**_shared(folder, row.picture), instances=instances)


def _shared(folder: Folder, picture: _Picture) -> dict[str, Any]:
    name = str(picture.id)
    size = None if picture.height is None or picture.width is None else (picture.height, picture.width)
    if size and min(size) < 1:
        raise DataError(f"sample {name:.80} claims {size[0]}×{size[1]} pixels", "sides are at least 1")
    return {"id": name, "pictures": (folder.find(picture.file_name, name),), "size": size}


def _instance(thing: _Thing, category: str) -> Instance:
    x, y, w, h = thing.bbox
    if w < 0 or h < 0:
        raise DataError(f"annotation {thing.id}: a box {w} wide and {h} high", "COCO's boxes are x, y, width, height")
    outline = decode(thing.segmentation, list[tuple[float, ...]] | _Runs | None, f"annotation {thing.id}, segmentation")
    if isinstance(outline, _Runs):
        counts = outline.counts
        outline = Rle(outline.size, counts if isinstance(counts, str) else tuple(counts))
    elif outline is not None:
        outline = Polygons(tuple(outline)) if outline else None
    return Instance(category, (x, y, x + w, y + h), bool(thing.iscrowd), thing.area, outline)
