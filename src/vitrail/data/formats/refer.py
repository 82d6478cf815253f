"""Expressions that point at one thing in a picture: RefCOCO, RefCOCO+ and RefCOCOg in COCO's form.

The form is MDETR's (`finetune_refcoco_val.json`): an entry of `images` is an expression (`caption`) about a file.
"""

from functools import partial
from pathlib import Path

import msgspec

from vitrail.data.formats.files import Folder, Id, folder_for, read_json
from vitrail.data.formats.masks import Instance
from vitrail.data.formats.sample import Sample, Samples, asked, refuse_twins
from vitrail.errors import DataError


class _Said(msgspec.Struct):
    id: Id
    file_name: str
    caption: str
    height: int
    width: int


class _Meant(msgspec.Struct):
    image_id: Id
    bbox: tuple[float, float, float, float]


class _File(msgspec.Struct):
    images: list[_Said]
    annotations: list[_Meant]


def open_refcoco(path: Path, *, pictures: str | Path | None = None, anywhere: bool = False) -> Samples:
    """One sample an expression: it is what is asked, and the one instance is what it means."""
    folder, file = folder_for(path, pictures, anywhere), read_json(path, _File)
    refuse_twins([str(said.id) for said in file.images], path)
    boxes: dict[Id, list[_Meant]] = {}
    for meant in file.annotations:
        boxes.setdefault(meant.image_id, []).append(meant)
    rows = []
    for said in file.images:
        found = boxes.get(said.id, [])
        if len(found) != 1:
            raise DataError(f"{path}: expression {said.id} has {len(found)} boxes", "it must mean one thing")
        if min(said.height, said.width) < 1 or min(found[0].bbox[2:]) < 0:
            raise DataError(f"{path}: expression {said.id} has a picture or a box of no size", "mend the file")
        rows.append((said, found[0]))
    return Samples("refcoco", path, rows, partial(_sample, folder))


def _sample(folder: Folder, row: tuple[_Said, _Meant]) -> Sample:
    said, meant = row
    x, y, w, h = meant.bbox
    return Sample(
        id=str(said.id),
        pictures=(folder.find(said.file_name, str(said.id)),),
        turns=asked(said.caption),
        instances=(Instance(said.caption, (x, y, x + w, y + h)),),
        size=(said.height, said.width),
    )
