"""Ask a trained model about clips of the test split, as frames in memory and as mp4 files of an H.264 encoder."""

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from vitrail.data.clips.clip_questions import QUESTION_KINDS, get_piece_table
from vitrail.data.clips.clip_source import ClipLayout, ClipSource, ClipSourceConfig
from vitrail.data.episodes.frame_encoding import VideoEncoding, encode_frames
from vitrail.errors import ConfigError
from vitrail.evals.scores import Proportion, Score
from vitrail.models.video_inputs import Video
from vitrail.pipelines import ChatPipeline
from vitrail.recipe.sweep import SweepRow

FRAMES = "frames"
SCALE = 4  # pixels of the file for each pixel of a clip
MAX_ANSWER_TOKENS = 16
SAME, OPPOSITE, ALL = "same answer as for frames", "order, the opposite event", "all"


class ClipQuestion(NamedTuple):
    """A question about a clip. `opposite` is the last event where the question is about the first, and the reverse."""

    kind: str
    question: str
    reference: str
    opposite: str | None


class ClipExample(NamedTuple):
    """A clip with its questions."""

    frames: np.ndarray  # uint8 (T, H, W, 3)
    fps: float
    questions: list[ClipQuestion]

    def to_video(self) -> Video:
        return Video(self.frames, timestamps=[frame / self.fps for frame in range(len(self.frames))])

    def write_mp4(self, path: Path, crf: int) -> Path:
        """Write the clip, enlarged, as H.264 by libx264."""
        encoding = VideoEncoding("libx264", "yuv420p", {"crf": str(crf)})
        path.write_bytes(encode_frames(self.frames.repeat(SCALE, 1).repeat(SCALE, 2), self.fps, encoding, "mp4"))
        return path


def iter_clip_examples(count: int, num_frames: int = 16, fps: float = 2.0, seed: int = 3701) -> Iterator[ClipExample]:
    """Yield the first clips of the test split."""
    if count < 1:
        raise ConfigError(f"count is {count}", "give 1 or more clips")
    source, table = ClipSource(ClipSourceConfig(split="test", seed=seed)), get_piece_table()
    data = source.render_indices(torch.arange(count), ClipLayout(num_frames, fps))
    for n in range(count):
        kinds = [QUESTION_KINDS[kind] for kind in data.questions.kind[n].tolist()]
        questions, answers = (table.to_texts(rows[n]) for rows in (data.questions.question, data.questions.answer))
        opposites = {0: answers[1], 1: answers[0]} if kinds[:2] == ["order", "order"] else {}
        rows = zip(kinds, questions, answers, strict=True)
        asked = [ClipQuestion(*row, opposites.get(place)) for place, row in enumerate(rows)]
        yield ClipExample(data.frames[n].permute(0, 2, 3, 1).numpy(), fps, asked)


def score_clip_files(pipeline: ChatPipeline, count: int, crfs: tuple[int, ...]) -> dict[str, dict[str, Score]]:
    """Score answers about frames in memory and about mp4 files of each crf: form of the clip → name → score."""
    hits: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as folder:
        for clip in iter_clip_examples(count):
            files = {f"mp4, crf {crf}": clip.write_mp4(Path(folder) / f"crf-{crf}.mp4", crf) for crf in crfs}
            for one in clip.questions:
                answers = {
                    name: pipeline.ask(media, one.question, max_new_tokens=MAX_ANSWER_TOKENS)
                    for name, media in ({FRAMES: clip.to_video()} | files).items()
                }
                for name, answer in answers.items():
                    hits[name][one.kind].append(answer == one.reference)
                    hits[name][ALL].append(answer == one.reference)
                    hits[name][SAME].append(answer == answers[FRAMES])
                    if one.opposite is not None:
                        hits[name][OPPOSITE].append(answer == one.opposite)
    keys = (*QUESTION_KINDS, OPPOSITE, ALL, SAME)
    return {
        name: {key: Score.from_proportion(key, Proportion(sum(own[key]), len(own[key]))) for key in keys if own[key]}
        for name, own in hits.items()
    }


def build_files_table(scores: dict[str, dict[str, Score]], seed: int) -> list[dict[str, Any]]:
    """Build the rows of a results file, in the format of a sweep's table: a form of the clip is a variant."""
    return [
        SweepRow(form, "files", name, {seed: one.value}, {}, {seed: one.interval}).to_dict() | {"count": one.count}
        for form, kinds in scores.items()
        for name, one in kinds.items()
    ]
