"""Compositional caption benchmarks: Winoground's two images with two captions, ARO's true and false captions."""

import io
from functools import partial
from pathlib import Path

import msgspec

from vitrail.data.formats.data_files import Id, MediaFolder, read_json_rows
from vitrail.data.formats.sample import Sample, SampleDataset, check_unique_ids
from vitrail.errors import DataError
from vitrail.processing.image_loading import load_image


class WinogroundRow(msgspec.Struct, kw_only=True):
    """A row of Winoground in the hubs' columns."""

    id: Id
    caption_0: str
    caption_1: str
    tag: str | None = None
    collapsed_tag: str | None = None

    def to_sample(self, images: tuple[Path | bytes, ...]) -> Sample:
        metadata = {"tag": self.collapsed_tag or self.tag or ""}
        return Sample(id=str(self.id), images=images, captions=(self.caption_0, self.caption_1), metadata=metadata)


class _WinogroundFileRow(WinogroundRow, kw_only=True):
    image_0: str
    image_1: str


def open_winoground(path: Path, folder: MediaFolder) -> SampleDataset:
    """Open `examples.jsonl`: two images and two captions; the first belong together, and so do the second."""
    rows = read_json_rows(path, _WinogroundFileRow)
    check_unique_ids([str(row.id) for row in rows], path)
    return SampleDataset("winoground", path, rows, partial(_to_winoground_sample, folder))


def _to_winoground_sample(folder: MediaFolder, row: _WinogroundFileRow) -> Sample:
    names = (name if "." in name else f"{name}.png" for name in (row.image_0, row.image_1))
    return row.to_sample(tuple(folder.find_file(name, str(row.id)) for name in names))


class _AroRow(msgspec.Struct):
    image_path: str
    true_caption: str
    false_caption: str
    relation_name: str = ""
    attributes: list[str] = []
    bbox_x: int | None = None
    bbox_y: int | None = None
    bbox_w: int | None = None
    bbox_h: int | None = None


def open_aro(path: Path, folder: MediaFolder) -> SampleDataset:
    """Open ARO's `visual_genome_relation.json` or `…_attribution.json`.

    The captions are the true one, then the false one. The image is cropped to the row's box.
    """
    rows = list(enumerate(read_json_rows(path, _AroRow)))
    return SampleDataset("aro", path, rows, partial(_to_aro_sample, folder))


def _to_aro_sample(folder: MediaFolder, numbered_row: tuple[int, _AroRow]) -> Sample:
    number, row = numbered_row
    file: Path | bytes = folder.find_file(row.image_path, str(number))
    x, y, w, h = row.bbox_x, row.bbox_y, row.bbox_w, row.bbox_h
    if x is not None and y is not None and w is not None and h is not None:
        image, buffer = load_image(file), io.BytesIO()
        right, bottom = min(x + w, image.width), min(y + h, image.height)
        if min(x, y) < 0 or right <= x or bottom <= y:
            raise DataError(
                f"sample {number}: the box of {w} × {h} pixels at {x}, {y} is outside of {file}", "correct that row"
            )
        image.crop((x, y, right, bottom)).save(buffer, "PNG")
        file = buffer.getvalue()
    return Sample(
        id=str(number),
        images=(file,),
        captions=(row.true_caption, row.false_caption),
        metadata={
            "part": "relation" if row.relation_name else "attribution",
            "kind": row.relation_name or "_".join(row.attributes),
        },
    )
