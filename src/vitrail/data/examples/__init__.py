"""Four example scenes with their ground truth, shipped with the package and drawn by `experiments.render_examples`."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.errors import DataError

FOLDER = Path(__file__).parent
GROUND_TRUTH_FILE = "truth.json"


class ExampleScene(NamedTuple):
    """An example: its image file, its caption, and its questions with kind and answer."""

    file: Path
    caption: str
    questions: tuple[dict[str, str], ...]

    @property
    def name(self) -> str:
        """Name of the example, from its file."""
        return self.file.stem


def load_examples(folder: Path = FOLDER) -> list[ExampleScene]:
    """Load the examples of a folder."""
    file = folder / GROUND_TRUTH_FILE
    try:
        rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["scenes"]
        return [ExampleScene(folder / f"{row['name']}.png", row["caption"], tuple(row["questions"])) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} cannot be read: {error}", "reinstall the package") from None
