"""`vitrail scaling`: the law of scores over visual tokens, and what it says to spend."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from vitrail.cli.written import check_written, write_plain
from vitrail.errors import ConfigError, DataError, nearest

if TYPE_CHECKING:
    from vitrail.lab.scaling import Law
    from vitrail.lab.scores import Column
    from vitrail.show.figure import Figure

app = App(
    name="scaling",
    help="Fit the law of scores over visual tokens, plan by it, and measure the divergence behind it.",
    help_epilogue="Example: vitrail scaling fit paper",
)
Several = Annotated[tuple[str, ...], Parameter(negative="")]
Numbers = Annotated[tuple[float, ...], Parameter(negative="")]
FormChoice = Literal["power", "saturating", "regimes", "best"]


@app.command(help_epilogue="Example: vitrail scaling fit scores.csv --form best --at 1024 --out laws.svg")
def fit(
    scores: str,
    /,
    *,
    form: FormChoice = "power",
    task: Several = (),
    drop: Numbers = (),
    at: Numbers = (),
    json: Path | None = None,
    out: Path | None = None,
    clusters: Path | None = None,
    count: int = 4,
    against: str | None = None,
    differences: Path | None = None,
) -> None:
    """Fit S = c / n^α to every task of a table, or another form: a line a task, with intervals of 95 %.

    Parameters
    ----------
    scores
        A CSV file with a column n (visual tokens) and a column of scores for each task; or paper, paper-tuned,
        paper-queries: the tables of arXiv 2412.18387.
    form
        power: c / n^α. saturating: limit − a·n^−b. regimes: c·(n(n + n*)/(1 + n*))^(β/2). best: of these, the one with
        the least AICc.
    task
        Only columns whose names hold one of these words. May be repeated.
    drop
        Leave out what was measured at so many tokens. May be repeated.
    at
        Predict the score at so many tokens. May be repeated.
    json
        Write the laws to this file too.
    out
        Draw them (.svg, .png, …).
    clusters
        Draw curves that are alike, between their least and most, in one panel each.
    count
        How many such clusters.
    against
        Another table: what the first has over it, with --differences.
    differences
        Draw these.
    """
    from vitrail.lab import curves, laws_drawn

    check_figures(out, clusters, differences)
    check_written(json)
    if (against is None) != (differences is None):
        raise ConfigError("--against and --differences go together", "give both: another table, and a figure's path")
    columns = read_columns(scores, task, drop)
    laws = fit_columns(columns, form)
    print_table([("", "points", "form", "law", "", "outliers", *(f"at {n:g}" for n in at)), *_law_rows(laws, at)])
    if json is not None:
        write_plain(json, {"scores": scores, "laws": {name: law.plain() for name, law in laws.items()}})
    if out is not None:
        save_figure(laws_drawn.laws_figure(laws, scores), out)
    if clusters is not None:
        save_figure(laws_drawn.clusters_figure(columns, count, scores), clusters)
    if against is not None and differences is not None:
        gaps = curves.differences(columns, read_columns(against, task, drop))
        if missing := [name for name in columns if name not in gaps]:
            print(f"not in {against}: {', '.join(missing)}")
        save_figure(laws_drawn.differences_figure(gaps, scores, against), differences)


app.command(
    "vitrail.cli.plan:plan",
    name="plan",
    help="Say how many visual tokens to use within a budget: a line a task, and the prices they were read from.\n\n"
    "With --loss the fewest tokens that lose no more, otherwise the best that the limits allow. Times are floors, as "
    "in `vitrail ledger`.",
    help_epilogue="Example: vitrail scaling plan paper --system token-scaling --loss 0.05",
)
app.command(
    "vitrail.cli.scaling_run:run",
    name="run",
    help="Train models with few and many visual tokens, with the question and without, and fit the law of each kind."
    "\n\nThe token-scaling paper's protocol in miniature: one base, and runs behind it whose language model is frozen, "
    "tested on the same questions.",
    help_epilogue="Example: vitrail scaling run --out out/scaling --jobs 5",
)
app.command(
    "vitrail.cli.scaling_fewer:fewer",
    name="fewer",
    help="Ask a trained model with few and many of a picture's tokens, and fit the law of each kind of question.\n\n"
    "Nothing is trained: tokens are pruned, merged, averaged or left out by lot when the question is asked.",
    help_epilogue="Example: vitrail scaling fewer mini --preset few --names hundred --vendors twemoji --out out/fewer",
)
app.command(
    "vitrail.cli.diverge:diverge",
    name="diverge",
    help="Measure how far a decoder's hidden states drift apart over two continuations of one prefix.\n\n"
    "Pairs are places of real text where the same tokens go on in two ways. D grows as the root of Υ: by √n below the "
    "balance point n*, by n above it.",
    help_epilogue="Example: vitrail scaling diverge --model stories15M --length 128",
)


# ---- tables and figures -----------------------------------------------------------------------------------------


def read_columns(scores: str, tasks: Sequence[str], drop: Sequence[float]) -> "dict[str, Column]":
    from vitrail.lab.scores import read_scores

    columns = read_scores(scores)
    known = sorted({n for column in columns.values() for n in column.n})
    if unknown := [f"{n:g}" for n in drop if n not in known]:
        raise ConfigError(
            f"{scores} has nothing at {unknown[0]} tokens to drop", f"it has {', '.join(f'{n:g}' for n in known)}"
        )
    chosen = {k: v.without(tuple(drop)) for k, v in columns.items() if not tasks or any(word in k for word in tasks)}
    if not chosen:
        raise ConfigError(f"no column of {scores} holds {' or '.join(tasks)}", nearest(tasks[0], columns))
    return chosen


def fit_columns(columns: "dict[str, Column]", form: FormChoice) -> "dict[str, Law]":
    from vitrail.lab.scaling import fit

    laws = {}
    for name, column in columns.items():
        try:
            laws[name] = fit(*column, form)
        except DataError as error:
            raise DataError(f"{name}: {error.problem}", error.remedy) from None
    return laws


def _law_rows(laws: "dict[str, Law]", at: Sequence[float]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, law in laws.items():
        told = "  ".join(f"{key} {value:.4g}" for key, value in law.parameters.items())
        last = list(law.parameters)[-1]
        between = "bend at its bound" if law.bounded else "{} [{:.4g}, {:.4g}]".format(last, *law.intervals[last])
        far = ", ".join(f"{n:g}" for n in law.outliers)
        later = zip(*law.predict(at), strict=True) if at else ()
        cells = [f"{value:.4g} [{low:.4g}, {high:.4g}]" for value, low, high in later]
        rows.append((name, str(len(law.n)), law.form, told, between, far, *cells))
    return rows


def print_table(rows: Sequence[Sequence[str]]) -> None:
    for line in table_lines(rows):
        print(line)


def table_lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as they must be; names and words to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def check_figures(*paths: Path | None) -> None:
    from vitrail.show.figure import check_figure

    for path in filter(None, paths):
        check_figure(path)


def save_figure(figure: "Figure", path: Path) -> None:
    figure.save(path)
    print(f"→ {path}")
