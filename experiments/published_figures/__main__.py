"""`python -m experiments.published_figures`: published figures and their recomputed values."""

from typing import Annotated

from cyclopts import App, Parameter

from vitrail.cli import main

app = App(
    name="python -m experiments.published_figures",
    help="List published figures and their recomputed values, with the reason where the two disagree.",
    help_epilogue="Example: python -m experiments.published_figures --inconsistent",
)


@app.default
def list_published_figures(*, inconsistent: Annotated[bool, Parameter(negative="")] = False) -> None:
    """List published figures and their recomputed values, with the reason where the two disagree.

    Parameters
    ----------
    inconsistent
        List only figures that contradict the published numbers they follow from.
    """
    from experiments.published_figures.figure_table import iter_figures

    for holding in (False,) if inconsistent else (True, False):
        for source, about, printed, ours, by, why in iter_figures(holding):
            print(f"{'✗' if why else '✓'} {about} ({source}): {printed}; recomputed {ours}, by {by}")
            if why:
                print(f"    {why}")


if __name__ == "__main__":
    main(app)
