"""`vitrail scaling`: scaling laws of scores over the number of visual tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from vitrail.cli.output_files import check_writable, write_json_with_origin
from vitrail.cli.text_tables import align_columns
from vitrail.errors import ConfigError, DataError, suggest_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitrail.lab.scaling_law import ScalingLaw
    from vitrail.lab.score_tables import ScoreColumn

app = App(name="scaling")
Strings = Annotated[tuple[str, ...], Parameter(negative="")]
Floats = Annotated[tuple[float, ...], Parameter(negative="")]
FormChoice = Literal["power", "saturating", "regimes", "best"]


@app.command(
    name="fit", help_epilogue="Example: vitrail scaling fit scores.csv --form best --predict-at 1024 --out laws.svg"
)
def fit_laws(
    scores: str,
    /,
    *,
    form: FormChoice = "power",
    task: Strings = (),
    exclude_counts: Floats = (),
    predict_at: Floats = (),
    json: Path | None = None,
    out: Path | None = None,
    clusters: Path | None = None,
    num_clusters: int = 4,
    against: str | None = None,
    differences: Path | None = None,
) -> None:
    """Fit a law, such as S = c / n^α, to every task of a table. Prints one line a task with 95 % intervals.

    Parameters
    ----------
    scores
        A CSV file with a column n (visual tokens) and a column of scores for each task; or paper, paper-tuned,
        paper-queries: the tables of arXiv 2412.18387.
    form
        power: c / n^α. saturating: limit − a·n^−b. regimes: c·(n(n + n*)/(1 + n*))^(β/2). best: the form with the
        smallest AICc.
    task
        Use only columns whose names contain one of these words. May be repeated.
    exclude_counts
        Exclude scores at this number of tokens. May be repeated.
    predict_at
        Predict the score at this number of tokens. May be repeated.
    json
        A JSON file for the laws.
    out
        A plot of the laws (.svg, .png, …).
    clusters
        A plot with one panel for each cluster of similar curves, scaled to their minimum and maximum.
    num_clusters
        Number of clusters.
    against
        Another table to subtract from the first, for --differences.
    differences
        A plot of the differences of the two tables.
    """
    from vitrail.lab import law_figures, score_curves

    check_figures(out, clusters, differences)
    check_writable(json)
    if (against is None) != (differences is None):
        raise ConfigError("--against and --differences go together", "give both: another table, and a plot file")
    columns = read_columns(scores, task, exclude_counts)
    laws = fit_columns(columns, form)
    heads = ("", "points", "form", "law", "", "outliers", *(f"at {n:g}" for n in predict_at))
    print(align_columns([heads, *_format_law_rows(laws, predict_at)], numbers=False))
    if json is not None:
        write_json_with_origin(json, {"scores": scores, "laws": {name: law.to_dict() for name, law in laws.items()}})
    if out is not None:
        save_figure(law_figures.build_laws_figure(laws, scores), out)
    if clusters is not None:
        save_figure(law_figures.build_clusters_figure(columns, num_clusters, scores), clusters)
    if against is not None and differences is not None:
        gaps = score_curves.compute_differences(columns, read_columns(against, task, exclude_counts))
        if missing := [name for name in columns if name not in gaps]:
            print(f"not in {against}: {', '.join(missing)}")
        save_figure(law_figures.build_differences_figure(gaps, scores, against), differences)


app.command(
    "vitrail.cli.scaling_plan_command:plan_tokens",
    name="plan",
    help="Choose the number of visual tokens within a budget: one line a task, with the costs.\n\n"
    "With --max-score-loss the command chooses the fewest tokens within that loss, otherwise the best score within the "
    "limits. Times are rooflines, as in `vitrail ledger`.",
    help_epilogue="Example: vitrail scaling plan paper --system token-scaling --max-score-loss 0.05",
)
app.command(
    "vitrail.cli.scaling_diverge_command:measure_divergence",
    name="diverge",
    help="Measure the divergence of a decoder's hidden states over two continuations of the same prefix.\n\n"
    "Pairs come from text where the same tokens continue in two ways. D grows as the root of Υ: as √n below the "
    "balance point n*, and as n above it.",
    help_epilogue="Example: vitrail scaling diverge --model stories15M --length 128",
)


# ---- tables and figures -----------------------------------------------------------------------------------------


def read_columns(scores: str, tasks: Sequence[str], exclude_counts: Sequence[float]) -> "dict[str, ScoreColumn]":
    """Read the columns of a table of scores, filtered by task and number of tokens."""
    from vitrail.lab.score_tables import read_score_table

    columns = read_score_table(scores)
    known = sorted({n for column in columns.values() for n in column.n})
    if unknown := [f"{n:g}" for n in exclude_counts if n not in known]:
        raise ConfigError(
            f"{scores} has no scores at {unknown[0]} tokens", f"it has scores at {', '.join(f'{n:g}' for n in known)}"
        )
    chosen = {
        k: v.without(tuple(exclude_counts)) for k, v in columns.items() if not tasks or any(word in k for word in tasks)
    }
    if not chosen:
        raise ConfigError(f"no column name of {scores} contains {' or '.join(tasks)}", suggest_name(tasks[0], columns))
    return chosen


def fit_columns(columns: "dict[str, ScoreColumn]", form: FormChoice) -> "dict[str, ScalingLaw]":
    """Fit a law to every column."""
    from vitrail.lab.scaling_law import fit_law

    laws = {}
    for name, column in columns.items():
        try:
            laws[name] = fit_law(*column, form)
        except DataError as error:
            raise DataError(f"{name}: {error.problem}", error.remedy) from None
    return laws


def _format_law_rows(laws: "dict[str, ScalingLaw]", predict_at: Sequence[float]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, law in laws.items():
        parameter_text = "  ".join(f"{key} {value:.4g}" for key, value in law.parameters.items())
        last = list(law.parameters)[-1]
        between = "n* at its bound" if law.bounded else "{} [{:.4g}, {:.4g}]".format(last, *law.intervals[last])
        outliers = ", ".join(f"{n:g}" for n in law.outliers)
        predictions = zip(*law.predict(predict_at), strict=True) if predict_at else ()
        cells = [f"{value:.4g} [{low:.4g}, {high:.4g}]" for value, low, high in predictions]
        rows.append((name, str(len(law.n)), law.form, parameter_text, between, outliers, *cells))
    return rows


def check_figures(*paths: Path | None) -> None:
    """Refuse plot files that cannot be written."""
    from vitrail.plots.charts import check_chart_path

    for path in filter(None, paths):
        check_chart_path(path)


def save_figure(figure: "Figure", path: Path) -> None:
    """Save a plot and print its path."""
    from vitrail.plots.charts import save_chart

    save_chart(figure, path)
    print(f"→ {path}")
