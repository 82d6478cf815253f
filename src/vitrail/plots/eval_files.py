"""Files that show the result of an evaluation beside its scores: a page, a heat map, a contact sheet."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from vitrail.errors import ConfigError
from vitrail.evals.evaluation import EvaluationResult
from vitrail.plots.charts import check_chart_path, draw_heatmap, save_chart
from vitrail.plots.contact_sheet import Tile, draw_contact_sheet
from vitrail.plots.eval_page import render_eval_page
from vitrail.plots.html_page import Section, render_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHEET_FRAMES = (1, 2, 4, 8, 16, 64)  # frames of a rollout on a contact sheet, beside its last one
SHEET_VIDEOS = 4


def check_eval_file(option: str, path: Path) -> None:
    """Refuse a path that the file of an option cannot be written to, before the evaluation."""
    if option == "heatmap":
        check_chart_path(path)


def save_eval_file(option: str, result: EvaluationResult, path: Path, origin: Mapping[str, Any]) -> None:
    """Write the file of an option of `vitrail eval`, a key of `SAVERS`."""
    SAVERS[option](result, path, origin)


def save_page(result: EvaluationResult, path: Path, origin: Mapping[str, Any]) -> None:
    """Write the scores, the settings and examples as an HTML page. `origin` is that of `collect_origin`."""
    sections = []
    if result.suite == "needle":
        label = "Accuracy by depth and number of frames"
        sections.append(Section("Needle retrieval", [render_figure(draw_needle_heatmap(result), label, label)]))
    text = render_eval_page(
        result.suite, result.model, {**result.settings, **origin}, result.scores, result.load_examples(), sections
    )
    try:
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", "give another file with --page") from None


def draw_needle_heatmap(result: EvaluationResult) -> "Figure":
    """Draw the accuracy of a needle search as a heat map: rows are depths, columns are lengths."""
    trials = result.details.trials
    lengths = sorted({trial.num_frames for trial in trials})
    depths = sorted({trial.depth for trial in trials if trial.depth is not None})
    values = [[result.details.accuracy(length, depth) for length in lengths] for depth in depths]
    rows, columns = [f"{float(depth):.0%}" for depth in depths], [f"{length:,}" for length in lengths]
    title = f"Needles found by {Path(result.model).name or result.model}"
    return draw_heatmap(values, rows, columns, title=title, row_label="depth", column_label="frames of the haystack")


def save_heatmap(result: EvaluationResult, path: Path, _origin: Mapping[str, Any]) -> None:
    """Write the heat map of a needle search."""
    save_chart(draw_needle_heatmap(result), path)


def save_rollout_sheet(result: EvaluationResult, path: Path, _origin: Mapping[str, Any]) -> None:
    """Draw real frames of a few videos, and below each row the predicted frames."""
    real, predicted = result.details.real, result.details.predicted
    last = predicted.shape[1]
    times = sorted({t for t in (*SHEET_FRAMES, last) if t <= last})
    missing = Image.new("RGB", (real.shape[-1], real.shape[-2]), "white")
    tiles = []
    for video, rollout in zip(real[:SHEET_VIDEOS], predicted[:SHEET_VIDEOS], strict=True):
        for kind, frames, first in (("real", video, 0), ("predicted", rollout, 1)):
            for t in times:
                if t - first < len(frames):
                    image = Image.fromarray(frames[t - first].movedim(0, -1).contiguous().numpy())
                    tiles.append(Tile(image, [f"{kind}, frame {t}"]))
                else:
                    tiles.append(Tile(missing, ["not recorded"]))
    title = f"{result.model}: rollouts from frame 0 with the true actions"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draw_contact_sheet(tiles, title, columns=len(times)).save(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be written: {error}", "give another file, such as sheet.png") from None


SAVERS: dict[str, Callable[[EvaluationResult, Path, Mapping[str, Any]], None]] = {
    "page": save_page,
    "heatmap": save_heatmap,
    "contact_sheet": save_rollout_sheet,
}
"""Option of a suite (a key of `Suite.output_files`) → function that writes its file."""
