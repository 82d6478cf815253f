"""Needles for a haystack of frames, as LongVA's V-NIAH has them: a picture, and a question that only it answers."""

from functools import partial
from pathlib import Path

import msgspec

from vitrail.data.formats.files import Folder, folder_for, read_rows
from vitrail.data.formats.sample import Sample, Samples, asked
from vitrail.errors import DataError


class _Needle(msgspec.Struct):
    path: str
    prompt: str
    answer: str


def open_needles(path: Path, *, pictures: str | Path | None = None, anywhere: bool = False) -> Samples:
    """A JSON list: `path` of a picture, `prompt` and `answer`. The pictures of `dataset.json` lie in `images` beside
    it."""
    beside = path.parent / "images"
    folder = folder_for(path, beside if pictures is None and beside.is_dir() else pictures, anywhere)
    rows = read_rows(path, _Needle)
    for row in rows:
        if not row.prompt.strip() or not row.answer.strip():
            raise DataError(f"{path}: the needle {row.path!r:.80} has no prompt, or no answer", "give it both")
    names = [f"{n}/{row.path}" for n, row in enumerate(rows)]  # a picture may be asked about twice
    return Samples("v-niah", path, list(zip(names, rows, strict=True)), partial(_sample, folder))


def _sample(folder: Folder, named: tuple[str, _Needle]) -> Sample:
    name, row = named
    shown = (folder.find(row.path, name),)
    return Sample(id=name, pictures=shown, turns=asked(row.prompt.strip()), answers=(row.answer.strip(),))
