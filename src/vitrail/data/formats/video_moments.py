"""Temporal grounding: sentences about moments of videos, from Charades-STA, QVHighlights and ActivityNet Captions."""

import math
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from vitrail.data.formats.data_files import Id, MediaFolder, read_json, read_json_rows, read_text
from vitrail.data.formats.media_folders import VIDEO_SUFFIXES
from vitrail.data.formats.sample import ContentPart, Sample, SampleDataset, Turn, check_unique_ids
from vitrail.errors import DataError

CHARADES_LINE = re.compile(r"(?P<video>\S+) (?P<start>\S+) (?P<end>\S+?)##(?P<said>.*\S)\s*")
_SUFFIXES = (".mp4", *sorted(VIDEO_SUFFIXES - {".mp4"}))

Moments = tuple[tuple[float, float], ...]


class _Row(NamedTuple):
    id: str
    video: str
    sentence: str
    moments: Moments
    seconds: float | None = None


class _HighlightRow(msgspec.Struct):
    qid: Id
    query: str
    vid: str
    duration: float
    relevant_windows: list[tuple[float, float]] | None = None  # absent from the test split


class _ActivityRow(msgspec.Struct):
    duration: float
    timestamps: list[tuple[float, float]]
    sentences: list[str]


def open_charades(path: Path, folder: MediaFolder) -> SampleDataset:
    """Open lines of `VIDEO start end##sentence`."""
    rows, seen = [], Counter[str]()
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        found = CHARADES_LINE.fullmatch(line)
        try:
            moment = (float(found["start"]), float(found["end"])) if found else None
        except ValueError:
            moment = None
        if found is None or moment is None:
            raise DataError(f"{path}, line {number}: {line!r:.120} is not a moment", "write VIDEO start end##sentence")
        name = found["video"]
        seen[name] += 1
        rows.append(_Row(f"{name}/{seen[name]}", name, found["said"], (moment,)))
    return _build_dataset("charades-sta", path, rows, folder)


def open_qvhighlights(path: Path, folder: MediaFolder) -> SampleDataset:
    """Open JSON lines such as `highlight_val_release.jsonl`, with one or more moments each."""
    rows = []
    for row in read_json_rows(path, _HighlightRow):
        if not row.relevant_windows:
            raise DataError(f"{path}: query {row.qid} has no relevant_windows", "use a split with ground truth")
        rows.append(_Row(str(row.qid), row.vid, row.query, tuple(row.relevant_windows), row.duration))
    return _build_dataset("qvhighlights", path, rows, folder)


def open_activitynet(path: Path, folder: MediaFolder) -> SampleDataset:
    """Open an object with an entry for each video, such as `val_1.json`."""
    rows = []
    for name, video in read_json(path, dict[str, _ActivityRow]).items():
        if len(video.timestamps) != len(video.sentences):
            raise DataError(
                f"{path}: {name} has {len(video.timestamps)} timestamps and {len(video.sentences)} sentences",
                "give one timestamp for each sentence",
            )
        pairs = zip(video.timestamps, video.sentences, strict=True)
        rows += [
            _Row(f"{name}/{n}", name, text.strip(), (at,), video.duration) for n, (at, text) in enumerate(pairs, 1)
        ]
    return _build_dataset("activitynet-captions", path, rows, folder)


def _build_dataset(kind: str, path: Path, rows: list[_Row], folder: MediaFolder) -> SampleDataset:
    """Check the rows, and skip moments that end before they begin, which occur in the published files."""
    check_unique_ids([row.id for row in rows], path)
    for row in rows:
        times = (*(time for moment in row.moments for time in moment), 0.0 if row.seconds is None else row.seconds)
        if not all(math.isfinite(time) and time >= 0 for time in times):
            raise DataError(
                f"{path}: sample {row.id} has invalid times {times}", "give seconds from the start of the video"
            )
        if not row.sentence.strip():
            raise DataError(f"{path}: sample {row.id} has no sentence", "add one, or remove the sample")
    valid = [row for row in rows if all(start < end for start, end in row.moments)]
    skipped = {"moments without a length": len(rows) - len(valid)} if len(valid) < len(rows) else {}
    return SampleDataset(kind, path, valid, partial(_sample, folder), skipped=skipped)


def _sample(folder: MediaFolder, row: _Row) -> Sample:
    return Sample(
        id=row.id,
        videos=(_find_video(folder, row.video, row.id),),
        turns=(Turn("user", (ContentPart("video"), ContentPart("text", row.sentence))),),
        moments=row.moments,
        metadata={} if row.seconds is None else {"seconds": row.seconds},
    )


def _find_video(folder: MediaFolder, name: str, sample: str) -> Path:
    """Find a video by its name without suffix."""
    try:
        existing = [suffix for suffix in _SUFFIXES if (folder.root / f"{name}{suffix}").is_file()]
    except (OSError, ValueError):  # an invalid name, which is reported below
        existing = []
    suffix = "" if Path(name).suffix.lower() in VIDEO_SUFFIXES else (existing or _SUFFIXES)[0]
    return folder.find_file(f"{name}{suffix}", sample, "video")
