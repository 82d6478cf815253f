"""Render the Markdown page of vision-language systems under one decoder: scores by kind of question, and verdicts."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch

from experiments.claims.claims import MIN_SEEDS, evaluate_claim, load_claims
from experiments.results_files import ORIGIN_LABELS, read_results_file, read_results_json
from vitrail.data.scenes.scene_source import SceneSourceConfig
from vitrail.errors import DataError
from vitrail.recipe import Recipe
from vitrail.recipe import sweep as sweeps
from vitrail.registry import MODELS
from vitrail.training.stage_config import set_trainable_parts

INTRODUCTION = """# Systems under one decoder

Ways to connect a vision tower to a language model, trained with one tower, decoder, dataset, optimizer and number of
samples. `python -m experiments.systems report` writes this page from the files in [results](../results).

- The tower is that of `qlip-scenes` and stays frozen. The decoder is stories15M. Both are small, and so is the budget:
  the order of large systems may differ.
- Scenes show up to five of a hundred things. Training contains the designs Noto, Fluent and OpenMoji; the unseen design
  is Twemoji.
- **Blind** is the best answer without the image, from the question alone; **majority** is the most frequent answer.
- Intervals are 95 %: Student's over seeds, or, for fewer than three seeds, over the questions of the tests.
"""
BASELINES = ("majority", "blind")


class Section(NamedTuple):
    """One sweep on the page."""

    sweep: str
    title: str
    notes: str


class ColumnSpec(NamedTuple):
    """One column of a table: a test of the sweep and its score."""

    title: str
    test: str
    score: str


class TableSpec(NamedTuple):
    """One table of a section. Only the first has costs and intervals."""

    title: str
    columns: tuple[ColumnSpec, ...]


SECTIONS = (
    Section(
        "systems",
        "Connectors and fusion",
        "Every system reads one view of 64 × 64 pixels, 64 patches. The Q-Former has a first stage of its own before "
        "(contrast, matching, captions), which the others do not have. `gated` keeps the language model frozen. "
        "`before training` is the projector after one step.",
    ),
    Section(
        "resolutions",
        "Resolution",
        "Wide scenes of 96 × 192 pixels; the connector has no position embedding. `tokens`: 48 to 66 visual tokens an "
        "image. `pixels`: the tower reads 12,000 to 17,000 pixels an image, and every feature is a token.",
    ),
)


def _make_kind_columns(test: str, *kinds: str) -> tuple[ColumnSpec, ...]:
    titles = {
        "existence_random": "presence",
        "existence_adversarial": "presence, adversarial",
        "what": "what is left of, above, …",
    }
    return tuple(ColumnSpec(titles.get(kind, kind), test, kind) for kind in kinds)


SHARED_KINDS = ("existence_random", "colour", "position", "what")
TEXT_LOSS = ColumnSpec("loss on text, nats", "tune", "validation/text-test/text")
TABLES = (
    TableSpec(
        "Unseen design",
        (
            *_make_kind_columns("unseen", "existence_random", "existence_adversarial"),
            *_make_kind_columns("unseen-counting", "counting"),
            *_make_kind_columns("unseen", "colour", "position", "what"),
            TEXT_LOSS,
        ),
    ),
    TableSpec("Design of the training data", _make_kind_columns("seen", *SHARED_KINDS)),
    TableSpec("Unseen design, held-out question templates", _make_kind_columns("held-out-templates", *SHARED_KINDS)),
)


def render_systems_page(results: Path) -> str:
    """Render the page from the results of all sections that exist."""
    parts = [INTRODUCTION]
    for section in SECTIONS:
        file = results / f"{section.sweep}.json"
        if file.is_file():
            parts += _render_section(section, file)
    if len(parts) == 1:
        names = ", ".join(f"{section.sweep}.json" for section in SECTIONS)
        raise DataError(f"{results} contains none of {names}", "run vitrail sweep first, and save its table there")
    return "\n".join(parts)


def _render_section(section: Section, file: Path) -> Iterable[str]:
    data = read_results_json(file)
    try:
        rows: dict[tuple[str, ...], Any] = {(row["variant"], row["test"], row["score"]): row for row in data["table"]}
    except (KeyError, TypeError) as error:
        raise DataError(f"{file} is not the table of a sweep: {error!r}", "write it again with vitrail sweep") from None
    sweep = sweeps.load_sweep(section.sweep)
    variants = [variant for variant in sweep.variants if any(key[0] == variant.name for key in rows)]
    yield f"## {section.title}\n\n{section.notes}\n\n{format_origin(file, data.get('origin', {}))}\n"
    costs = {variant.name: _describe_cost(sweep.load_recipe(variant, sweep.seeds[0])) for variant in variants}
    for table in TABLES:
        shown = [column for column in table.columns if any(key[1:] == column[1:] for key in rows)]
        if not shown:
            continue
        head = ("system", "visual tokens", "trained parameters", *(column.title for column in shown))
        lines = [
            (variant.name, *costs[variant.name], *_format_cells(variant.name, shown, rows)) for variant in variants
        ]
        lines += [(f"*{name}*", "", "", *_format_baselines(name, shown, rows)) for name in BASELINES]
        yield f"### {table.title}\n\n{render_table(head, lines)}"
    yield render_verdicts(section.sweep, file)


def _format_cells(variant: str, columns: Sequence[ColumnSpec], rows: dict[tuple[str, ...], Any]) -> list[str]:
    return [_format_cell(rows.get((variant, column.test, column.score)), column) for column in columns]


def _format_cell(row: dict[str, Any] | None, column: ColumnSpec) -> str:
    """Format the mean over seeds, with the interval and a note about missing seeds."""
    if row is None:
        return "–"
    values = list(row["values"].values())
    interval, seeds = row.get("interval"), len(values)
    if seeds < MIN_SEEDS:
        items = list(row.get("item_intervals", {}).values())
        interval = [mean(ends) for ends in zip(*items, strict=True)] if items else None
    is_loss = column is TEXT_LOSS
    numbers = [f"{value:.2f}" if is_loss else f"{100 * value:.1f}" for value in (mean(values), *(interval or ()))]
    text = numbers[0] + ("" if is_loss else " %") + (f" [{numbers[1]}, {numbers[2]}]" if interval else "")
    return text if seeds >= MIN_SEEDS else f"{text} ({seeds} seed{'s' * (seeds > 1)})"


def _format_baselines(name: str, columns: Sequence[ColumnSpec], rows: dict[tuple[str, ...], Any]) -> list[str]:
    """Format a baseline of each column: the highest of all variants, which answer the same questions."""
    cells = []
    for column in columns:
        found = [
            row["baselines"][name]
            for (_, *key), row in rows.items()
            if tuple(key) == column[1:] and name in row.get("baselines", {})
        ]
        cells.append(f"{100 * max(found):.1f} %" if found else "")
    return cells


def _describe_cost(recipe: Recipe) -> tuple[str, str]:
    """Return the visual tokens of an image and the trained parameters of the last stage, in millions."""
    config: Any = recipe.build_model_config()
    with torch.device("meta"):
        model = MODELS[recipe.model.kind](config)
    set_trainable_parts(model, recipe.stages[-1].trainable)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    scenes = recipe.sources["scenes"]
    assert isinstance(scenes, SceneSourceConfig)
    width, height = scenes.scene_config().aspect_ratio
    short = min(width, height)
    if recipe.model.kind == "vlm":
        layout = config.policy.layout(scenes.image_size * height // short, scenes.image_size * width // short)
        tokens = str(config.count_tokens(layout))
    else:
        tokens = "none (64 features)"
    return tokens, f"{trained / 1e6:.1f} M"


def render_verdicts(sweep: str, file: Path) -> str:
    """Render the claims of a sweep whose scores exist."""
    values, found = read_results_file(file).values, []
    for claim in load_claims().values():
        keys = {(variant, claim.test, claim.score) for variant in (claim.first, claim.second)}
        if claim.sweep == sweep and claim.result_files == (sweep,) and keys <= values.keys():
            found.append(evaluate_claim(claim, values))
    if not found:
        return ""
    lines = [(one.claim.description, one.mean_scores, str(one)) for one in found]
    return f"### Claims\n\n{render_table(('claim', 'scores', 'effect and verdict'), lines)}"


def format_origin(file: Path, origin: dict[str, Any]) -> str:
    command = [f"`{origin['command']}`"] if "command" in origin else []
    about = [*command, *(f"{label}{origin[key]}" for key, label in ORIGIN_LABELS.items() if key in origin)]
    note = f" Note: {origin['note']}." if "note" in origin else ""
    return f"[{file.name}](../results/{file.name}): {', '.join(about)}.{note}"


def render_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows) + "\n"
