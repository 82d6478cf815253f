"""Sentences about a moment of a video: Charades-STA, QVHighlights and ActivityNet Captions."""

import math
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from vitrail.data.formats.files import Folder, Id, folder_for, read_json, read_rows, read_text
from vitrail.data.formats.folders import VIDEOS
from vitrail.data.formats.sample import Part, Sample, Samples, Turn, refuse_twins
from vitrail.errors import DataError

CHARADES = re.compile(r"(?P<video>\S+) (?P<start>\S+) (?P<end>\S+?)##(?P<said>.*\S)\s*")
_ENDINGS = (".mp4", *sorted(VIDEOS - {".mp4"}))

Moments = tuple[tuple[float, float], ...]


class _Row(NamedTuple):
    id: str
    video: str
    said: str
    moments: Moments
    seconds: float | None = None


class _Highlight(msgspec.Struct):
    qid: Id
    query: str
    vid: str
    duration: float
    relevant_windows: list[tuple[float, float]] | None = None  # which the test split keeps to itself


class _Activity(msgspec.Struct):
    duration: float
    timestamps: list[tuple[float, float]]
    sentences: list[str]


def open_charades(path: Path, *, videos: str | Path | None = None, anywhere: bool = False) -> Samples:
    """`VIDEO start end##sentence`, a line each."""
    rows, seen = [], Counter[str]()
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        found = CHARADES.fullmatch(line)
        try:
            moment = (float(found["start"]), float(found["end"])) if found else None
        except ValueError:
            moment = None
        if found is None or moment is None:
            raise DataError(f"{path}, line {number}: {line!r:.120} is no moment", "write VIDEO start end##sentence")
        name = found["video"]
        seen[name] += 1
        rows.append(_Row(f"{name}/{seen[name]}", name, found["said"], (moment,)))
    return _samples("charades-sta", path, rows, folder_for(path, videos, anywhere, "videos"))


def open_qvhighlights(path: Path, *, videos: str | Path | None = None, anywhere: bool = False) -> Samples:
    """JSON lines, of which each may have several moments; `highlight_val_release.jsonl` and its like."""
    rows = []
    for row in read_rows(path, _Highlight):
        if not row.relevant_windows:
            raise DataError(f"{path}: query {row.qid} has no relevant_windows", "give a split whose moments are told")
        rows.append(_Row(str(row.qid), row.vid, row.query, tuple(row.relevant_windows), row.duration))
    return _samples("qvhighlights", path, rows, folder_for(path, videos, anywhere, "videos"))


def open_activitynet(path: Path, *, videos: str | Path | None = None, anywhere: bool = False) -> Samples:
    """One object, by video; `val_1.json` and its like."""
    rows = []
    for name, video in read_json(path, dict[str, _Activity]).items():
        if len(video.timestamps) != len(video.sentences):
            raise DataError(
                f"{path}: {name} has {len(video.timestamps)} timestamps and {len(video.sentences)} sentences",
                "give each sentence one",
            )
        pairs = zip(video.timestamps, video.sentences, strict=True)
        rows += [
            _Row(f"{name}/{n}", name, text.strip(), (at,), video.duration) for n, (at, text) in enumerate(pairs, 1)
        ]
    return _samples("activitynet-captions", path, rows, folder_for(path, videos, anywhere, "videos"))


def _samples(kind: str, path: Path, rows: list[_Row], folder: Folder) -> Samples:
    """Moments that end before they begin are in the published files too: they are left out, and counted."""
    refuse_twins([row.id for row in rows], path)
    for row in rows:
        times = (*(time for moment in row.moments for time in moment), 0.0 if row.seconds is None else row.seconds)
        if not all(math.isfinite(time) and time >= 0 for time in times):
            raise DataError(f"{path}: sample {row.id} has the times {times}", "give seconds from the video's start")
        if not row.said.strip():
            raise DataError(f"{path}: sample {row.id} says nothing", "give it a sentence, or leave it out")
    kept = [row for row in rows if all(start < end for start, end in row.moments)]
    skipped = {"moments without a length": len(rows) - len(kept)} if len(kept) < len(rows) else {}
    return Samples(kind, path, kept, partial(_sample, folder), skipped=skipped)


def _sample(folder: Folder, row: _Row) -> Sample:
    return Sample(
        id=row.id,
        videos=(_found(folder, row.video, row.id),),
        turns=(Turn("user", (Part("video"), Part("text", row.said))),),
        moments=row.moments,
        notes={} if row.seconds is None else {"seconds": row.seconds},
    )


def _found(folder: Folder, name: str, sample: str) -> Path:
    """The files say which video, and not in which container."""
    try:
        there = [ending for ending in _ENDINGS if (folder.root / f"{name}{ending}").is_file()]
    except (OSError, ValueError):  # no usable name, which is said below
        there = []
    ending = "" if Path(name).suffix.lower() in VIDEOS else (there or _ENDINGS)[0]
    return folder.find(f"{name}{ending}", sample, "video")
