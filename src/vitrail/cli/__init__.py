"""The command line: parse, call, show. Commands load when they are called, so help is quick."""

import sys

from cyclopts import App

from vitrail import __version__
from vitrail.errors import VitrailError

app = App(
    name="vitrail",
    help="Visual tokens: read, write and predict pictures, and see what each design costs and keeps.",
    version=__version__,
)
app.command(
    "vitrail.cli.grid:grid",
    name="grid",
    help="Show how a picture is cut into tokens under every resolution policy.",
)
app.command(
    "vitrail.cli.rotary:rotary",
    name="rotary",
    help="Draw the rotary layouts: which axis turns which channel.",
)


def main() -> None:
    """Run a command; what a person can mend is said in two lines, without a traceback."""
    try:
        app()
    except VitrailError as error:
        print(f"vitrail: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
