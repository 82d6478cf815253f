"""Referring expressions for one object in an image: RefCOCO, RefCOCO+ and RefCOCOg in COCO's format.

The format is MDETR's (`finetune_refcoco_val.json`): an entry of `images` is an expression (`caption`) and its file.
"""

from functools import partial
from pathlib import Path

import msgspec

from vitrail.data.formats.data_files import Id, MediaFolder, read_json
from vitrail.data.formats.masks import Instance
from vitrail.data.formats.sample import Sample, SampleDataset, build_question_turns, check_unique_ids
from vitrail.errors import DataError


class _Expression(msgspec.Struct):
    id: Id
    file_name: str
    caption: str
    height: int
    width: int


class _BoxAnnotation(msgspec.Struct):
    image_id: Id
    bbox: tuple[float, float, float, float]


class _RefCocoFile(msgspec.Struct):
    images: list[_Expression]
    annotations: list[_BoxAnnotation]


def open_refcoco(path: Path, folder: MediaFolder) -> SampleDataset:
    """Open one sample for each expression: the expression is the question, and the instance is the object
    it refers to."""
    file = read_json(path, _RefCocoFile)
    check_unique_ids([str(expression.id) for expression in file.images], path)
    boxes: dict[Id, list[_BoxAnnotation]] = {}
    for annotation in file.annotations:
        boxes.setdefault(annotation.image_id, []).append(annotation)
    rows = []
    for expression in file.images:
        matching = boxes.get(expression.id, [])
        if len(matching) != 1:
            raise DataError(f"{path}: expression {expression.id} has {len(matching)} boxes", "give exactly one box")
        if min(expression.height, expression.width) < 1 or min(matching[0].bbox[2:]) < 0:
            raise DataError(
                f"{path}: expression {expression.id} has an image or a box without area", "correct the file"
            )
        rows.append((expression, matching[0]))
    return SampleDataset("refcoco", path, rows, partial(_sample, folder))


def _sample(folder: MediaFolder, row: tuple[_Expression, _BoxAnnotation]) -> Sample:
    expression, annotation = row
    x, y, w, h = annotation.bbox
    return Sample(
        id=str(expression.id),
        images=(folder.find_file(expression.file_name, str(expression.id)),),
        turns=build_question_turns(expression.caption),
        instances=(Instance(expression.caption, (x, y, x + w, y + h)),),
        size=(expression.height, expression.width),
    )
