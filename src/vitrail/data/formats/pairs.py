"""Captions that differ in who does what: Winoground's two with their two pictures, ARO's true and false one."""

import io
from functools import partial
from pathlib import Path

import msgspec

from vitrail.data.formats.files import Folder, Id, folder_for, read_rows
from vitrail.data.formats.sample import Sample, Samples, refuse_twins
from vitrail.errors import DataError
from vitrail.processing.images import load_image


class _Winoground(msgspec.Struct):
    id: Id
    image_0: str
    image_1: str
    caption_0: str
    caption_1: str
    tag: str = ""
    collapsed_tag: str = ""


def open_winoground(path: Path, *, pictures: str | Path | None = None, anywhere: bool = False) -> Samples:
    """`examples.jsonl`: two pictures and two captions, of which the first belong together and the second."""
    rows = read_rows(path, _Winoground)
    refuse_twins([str(row.id) for row in rows], path)
    return Samples("winoground", path, rows, partial(_two, folder_for(path, pictures, anywhere)))


def _two(folder: Folder, row: _Winoground) -> Sample:
    names = (name if "." in name else f"{name}.png" for name in (row.image_0, row.image_1))
    return Sample(
        id=str(row.id),
        pictures=tuple(folder.find(name, str(row.id)) for name in names),
        captions=(row.caption_0, row.caption_1),
        notes={"tag": row.collapsed_tag or row.tag},
    )


class _Aro(msgspec.Struct):
    image_path: str
    true_caption: str
    false_caption: str
    relation_name: str = ""
    attributes: list[str] = []
    bbox_x: int | None = None
    bbox_y: int | None = None
    bbox_w: int | None = None
    bbox_h: int | None = None


def open_aro(path: Path, *, pictures: str | Path | None = None, anywhere: bool = False) -> Samples:
    """ARO's `visual_genome_relation.json` or `…_attribution.json`: the true caption first, then the false one; of the
    picture what the row's box shows."""
    rows = list(enumerate(read_rows(path, _Aro)))
    return Samples("aro", path, rows, partial(_one, folder_for(path, pictures, anywhere)))


def _one(folder: Folder, numbered: tuple[int, _Aro]) -> Sample:
    number, row = numbered
    file: Path | bytes = folder.find(row.image_path, str(number))
    x, y, w, h = row.bbox_x, row.bbox_y, row.bbox_w, row.bbox_h
    if x is not None and y is not None and w is not None and h is not None:
        image, cut = load_image(file), io.BytesIO()
        right, bottom = min(x + w, image.width), min(y + h, image.height)
        if min(x, y) < 0 or right <= x or bottom <= y:
            raise DataError(f"sample {number}: no box of {w} × {h} pixels is at {x}, {y} of {file}", "mend that row")
        image.crop((x, y, right, bottom)).save(cut, "PNG")
        file = cut.getvalue()
    return Sample(
        id=str(number),
        pictures=(file,),
        captions=(row.true_caption, row.false_caption),
        notes={
            "part": "relation" if row.relation_name else "attribution",
            "kind": row.relation_name or "_".join(row.attributes),
        },
    )
