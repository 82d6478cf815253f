"""Render the Markdown page of positions and timestamps of videos: scores by kind and length, and verdicts."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.claims.claims import MIN_SEEDS
from experiments.results_files import read_results_json
from experiments.systems.systems_page import format_origin, render_table, render_verdicts
from vitrail.data.clips.clip_questions import QUESTION_KINDS
from vitrail.errors import DataError
from vitrail.evals.scores import Score
from vitrail.plots.charts import COLOURS, chart_style, make_panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SWEEP = "video-time"
NEAR = "when, near"
CHART_KINDS = ("order", NEAR, "count", "needle")
TITLES = {NEAR: "when, within a tenth of the clip"}
INTRODUCTION = """# Time in videos

Ways to tell a decoder the time of a frame, with one tower, decoder, dataset, optimizer and number of samples.
`python -m experiments.video report` writes this page. The task and the clips are described in
[video input](vlm-video.md#questions-about-time).

- Training clips have 8 to 32 frames, at 1, 2 or 4 frames per second. Test clips have combinations of shapes, colours
  and background that training clips do not have. Clips of more than 32 frames are longer than all training clips.
- `seconds` and `h:m:s` write a timestamp before each frame; `absolute` has the time in the position ids. `interleaved`,
  `chunked` and `plain frames` do not know the frame rate, so they cannot know seconds.
- **Blind** is the best answer without the clip, from the question, the number of frames and the rate; **majority** is
  the most frequent answer. `shapes` needs no time and is a control.
- A clip with a question about order has three events: an answer with one of them at random is right in 33 %.
- Intervals are 95 %: Student's over seeds, or, for fewer than three seeds, over the questions. Intervals over questions
  do not contain the spread between seeds, which then stands beside them.
- `yarn`: YaRN extends the context of the decoder, without training.
"""

FILES_NOTE = """The model `seconds` of seed 1 ([results/starts/video-time](../results/starts/video-time)) answers
questions about test clips of 16 frames at 2 frames per second: frames in memory, and mp4 files by libx264 at several
qualities, with 4 × 4 pixels for each pixel of the clip. Intervals are Wilson's over questions. *Opposite event*: the
last event where the question is about the first, or the reverse.
"""


class Cell(NamedTuple):
    """The scores of a variant for one kind of question, number of frames and context extension."""

    values: tuple[float, ...]
    interval: tuple[float, float] | None
    baselines: dict[str, float]

    @property
    def text(self) -> str:
        each = ": " + ", ".join(f"{100 * value:.1f}" for value in self.values) if len(self.values) > 1 else ""
        seeds = f" ({len(self.values)} seed{'s' * bool(each)}{each})" if len(self.values) < MIN_SEEDS else ""
        ends = "" if self.interval is None else " [{:.1f}, {:.1f}]".format(*(100 * end for end in self.interval))
        return f"{100 * mean(self.values):.1f} %{ends}{seeds}"


class CellKey(NamedTuple):
    variant: str
    kind: str
    frames: int
    context: str


def read_cells(file: Path) -> dict[CellKey, Cell]:
    """Read the table of the sweep. Scores are named `KIND, frames N, context METHOD`."""
    data, cells = read_results_json(file), {}
    try:
        for row in data["table"]:
            kind, frames, context = _parse_score(row["score"])
            if not kind:
                continue
            values, interval = tuple(row["values"].values()), row.get("interval")
            if len(values) < MIN_SEEDS:
                items = list(row.get("item_intervals", {}).values())
                interval = [mean(ends) for ends in zip(*items, strict=True)] if items else None
            cell = Cell(values, None if interval is None else tuple(interval), row.get("baselines", {}))
            cells[CellKey(row["variant"], kind, frames, context)] = cell
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{file} is not the table of a sweep: {error!r}", "write it again with vitrail sweep") from None
    if not cells:
        raise DataError(f"{file} has no scores of the suite clips", f"run vitrail sweep {SWEEP}, and save its table")
    return cells


def _parse_score(name: str) -> tuple[str, int, str]:
    kind, _, rest = name.partition(", frames ")
    frames, _, context = rest.partition(", context ")
    return (kind, int(frames), context) if context else ("", 0, "")


def render_video_page(file: Path, chart: str) -> str:
    """Render the page. `chart` is the file name of the chart."""
    cells, data = read_cells(file), read_results_json(file)
    variants = list(dict.fromkeys(key.variant for key in cells))
    lengths = sorted({key.frames for key in cells})
    parts = [f"{INTRODUCTION}\n{format_origin(file, data.get('origin', {}))}\n", f"![accuracy by length]({chart})\n"]
    for kind in (*QUESTION_KINDS, NEAR):
        columns = [
            (frames, context)
            for frames in lengths
            for context in ("none", "yarn", "ntk")
            if any(key[1:] == (kind, frames, context) for key in cells)
        ]
        head = ["variant", *(_title_column(*column) for column in columns)]
        rows = [[name, *(_format(cells.get(CellKey(name, kind, *one))) for one in columns)] for name in variants]
        rows += [
            [f"*{name}*", *(_format_baseline(cells, kind, one, name) for one in columns)]
            for name in ("majority", "blind")
        ]
        parts.append(f"## {TITLES.get(kind, kind).capitalize()}\n\n{render_table(head, rows)}")
    parts += [render_verdicts(SWEEP, file), _render_files(file.with_name(f"{file.stem}-files.json"))]
    return "\n".join(part for part in parts if part)


def _render_files(file: Path) -> str:
    """Render the scores of clips in video files, if they were measured."""
    if not file.is_file():
        return ""
    data = read_results_json(file)
    try:
        forms, lines = list(dict.fromkeys(row["variant"] for row in data["table"])), defaultdict(list)
        for row in data["table"]:
            ((value,), (interval,)) = (row[key].values() for key in ("values", "item_intervals"))
            lines[row["score"]].append(str(Score(row["score"], value, tuple(interval), row["count"])))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{file} is not a file of `python -m experiments.video files`: {error!r}", "write it again"
        ) from None
    return (
        f"## Video files\n\n{FILES_NOTE}\n{format_origin(file, data.get('origin', {}))}\n\n"
        f"{render_table(('kind', *forms), [(name, *cells) for name, cells in lines.items()])}"
    )


def _title_column(frames: int, context: str) -> str:
    return f"{frames} frames" + ("" if context == "none" else f", {context}")


def _format(cell: Cell | None) -> str:
    return "–" if cell is None else cell.text


def _format_baseline(cells: dict[CellKey, Cell], kind: str, column: tuple[int, str], name: str) -> str:
    found = [one.baselines[name] for key, one in cells.items() if key[1:] == (kind, *column) and name in one.baselines]
    return f"{100 * max(found):.1f} %" if found else ""


@chart_style()
def draw_length_chart(file: Path) -> "Figure":
    """Draw the accuracy of each variant over the number of frames, with YaRN for clips longer than in training."""
    cells = read_cells(file)
    lengths = sorted({key.frames for key in cells})[::2]
    figure, axes = make_panels(len(CHART_KINDS), "Accuracy by number of frames", legend_height=24)
    for panel, kind in zip(axes, CHART_KINDS, strict=True):
        for name, colour in zip(dict.fromkeys(key.variant for key in cells), COLOURS, strict=False):
            points = _select_line(cells, name, kind)
            places = [frames for frames, _ in points], [100 * score for _, score in points]
            panel.plot(*places, marker="o", markersize=3, color=colour, label=name)
        panel.set(title=TITLES.get(kind, kind), xlabel="frames", ylabel="accuracy, %", ylim=(0, 102))
        panel.set_xscale("log", base=2)
        panel.set_xticks(lengths, map(str, lengths))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=6)
    return figure


def _select_line(cells: dict[CellKey, Cell], variant: str, kind: str) -> list[tuple[int, float]]:
    """Return (frames, score) of a variant: with YaRN where it was tested, else without an extension."""
    best: dict[int, float] = {}
    for context in ("none", "yarn"):
        own: Iterable[Any] = (
            (key.frames, one) for key, one in cells.items() if key[:2] == (variant, kind) and key.context == context
        )
        best |= {frames: mean(one.values) for frames, one in own}
    return sorted(best.items())
