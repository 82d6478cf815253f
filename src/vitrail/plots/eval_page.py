"""Render the results of an evaluation as a page: scores with baselines, example answers and settings."""

from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from vitrail.evals.examples import Example, Verdict
from vitrail.evals.scores import Score
from vitrail.plots.eval_results import SCORE_LABELS
from vitrail.plots.html_page import (
    Html,
    Section,
    render_code,
    render_heading,
    render_image,
    render_lines,
    render_page,
    render_row,
    render_table,
    render_tiles,
    render_verdict,
)

EXAMPLE_SIZE = 256  # longer side of an example image in pixels


def render_eval_page(
    suite: str,
    model: str,
    settings: Mapping[str, Any],
    scores: Sequence[Score],
    examples: Sequence[Example],
    extra_sections: Sequence[Section] = (),
) -> str:
    """Render the page. `settings` describe the run and may hold its command; `extra_sections` follow the scores."""
    labels = SCORE_LABELS.get(suite, {})
    rows = [(labels.get(score.title, score.title), str(score), score.baselines_text) for score in scores]
    score_section = Section(
        "Scores",
        [
            "Brackets: 95 % interval. Baselines: without the model, or with the model but without the image.",
            render_table(("", "measured", "baselines"), rows),
        ],
    )
    example_blocks: list[str] = []
    for group in dict.fromkeys(one.group for one in examples):
        example_blocks += [render_heading(labels.get(group, group)), _render_group(group, examples)]
    introduction = [Html(f"<p>{render_code(str(settings['command']))}</p>")] if "command" in settings else []
    setting_rows = [(key, _format_value(value)) for key, value in settings.items() if key != "command"]
    return render_page(
        f"{suite}: {model}",
        introduction,
        [
            score_section,
            *extra_sections,
            *([Section("Examples", example_blocks)] if example_blocks else []),
            Section("Settings", [render_table(("", ""), [("model", model), *setting_rows])]),
        ],
    )


def _render_group(group: str, examples: Sequence[Example]) -> Html:
    blocks = []
    for one in examples:
        if one.group == group:
            lines = (render_verdict(*line) if isinstance(line, Verdict) else line for line in one.lines)
            images = (render_image(_make_thumbnail(image), "") for image in one.images)
            blocks.append([render_row(*images), Html(f"<p>{render_lines(*lines)}</p>")])
    return render_tiles(*blocks)


def _make_thumbnail(image: Image.Image) -> Image.Image:
    thumbnail = image.convert("RGB")
    thumbnail.thumbnail((EXAMPLE_SIZE, EXAMPLE_SIZE))
    return thumbnail


def _format_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return "not set" if value is None else str(value)
