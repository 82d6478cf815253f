"""`python -m experiments.systems`: the table of vision-language systems under one decoder."""

from pathlib import Path

from cyclopts import App

from vitrail.cli import main
from vitrail.errors import ConfigError

app = App(
    name="python -m experiments.systems",
    help="Vision-language systems under one decoder, by kind of question. `vitrail sweep systems` trains them.",
    help_epilogue="Example: python -m experiments.systems report",
)


@app.command(name="report", help_epilogue="Example: python -m experiments.systems report")
def write_systems_page(*, results: Path = Path("results"), out: Path = Path("docs/vlm-systems.md")) -> None:
    """Write the page of all systems from the results.

    Parameters
    ----------
    results
        Folder of the results.
    out
        The page to write.
    """
    from experiments.systems.systems_page import render_systems_page

    text = render_systems_page(results)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}", "give another path with --out") from None
    print(out)


if __name__ == "__main__":
    main(app)
