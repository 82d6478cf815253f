"""Four scenes that ship with the package, with all that is true of them. `vitrail.data.examples.make` drew them."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.errors import DataError

FOLDER = Path(__file__).parent
TRUTH = "truth.json"


class Example(NamedTuple):
    """A picture's file; its caption, and questions with their kind and their answer."""

    file: Path
    caption: str
    questions: tuple[dict[str, str], ...]

    @property
    def name(self) -> str:
        return self.file.stem


def examples(folder: Path = FOLDER) -> list[Example]:
    file = folder / TRUTH
    try:
        rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["scenes"]
        return [Example(folder / f"{row['name']}.png", row["caption"], tuple(row["questions"])) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} does not tell the example scenes: {error}", "install the package again") from None
