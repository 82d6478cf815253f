"""Texts as windows of tokens."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from vitrail.config import Config
from vitrail.errors import ConfigError, TextError
from vitrail.processing.text import Tokenizer

HELD_OUT = 10  # every tenth stretch of a text is kept for judging


class TextConfig(Config, tag="text", tag_field="kind"):
    """Text from files, or the reference of the Python language that lies in every Python (`python-docs`).

    `part` says which stretches are read: training reads nine of ten, judging the tenth; no window crosses from one to
    the other.
    """

    files: tuple[str, ...] = ()
    package: Literal["python-docs"] | None = None
    length: int = 128
    part: Literal["train", "test"] = "train"

    def __post_init__(self) -> None:
        if bool(self.files) == (self.package is not None):
            raise ConfigError("a text source reads files or a package", "give one of the two")
        if self.length < 2:
            raise ConfigError(f"windows of {self.length} tokens predict nothing", "use at least 2")


class TextWindows:
    """Windows of length + 1 tokens, one behind the other: item → ids (length + 1,)."""

    def __init__(self, config: TextConfig, tokenizer: Tokenizer):
        self.config = config
        stretches = [
            s
            for i, s in enumerate(_stretches(read_text(config)))
            if (i % HELD_OUT == HELD_OUT - 1) == (config.part == "test")
        ]
        eos = [] if tokenizer.eos is None else [tokenizer.eos]
        ids = [i for stretch in stretches for i in (*tokenizer.encode(stretch), *eos)]
        self.ids = np.array(ids, dtype=np.int32)

    @property
    def fingerprint(self) -> str:
        """Changes with any of its tokens."""
        return hashlib.sha256(self.ids.tobytes()).hexdigest()[:16]

    def __len__(self) -> int:
        return max(0, (len(self.ids) - 1) // self.config.length)

    def __getitem__(self, item: int) -> np.ndarray:
        if not 0 <= item < len(self):
            raise IndexError(item)
        start = item * self.config.length
        return self.ids[start : start + self.config.length + 1].astype(np.int64)


def read_text(config: TextConfig) -> str:
    """The whole text of a source."""
    if config.package == "python-docs":
        from pydoc_data.topics import topics

        # Topics quote whole sections of one another: each paragraph counts once, or the tenth would be learnt by heart.
        paragraphs = dict.fromkeys(p.strip("\n") for name in sorted(topics) for p in topics[name].split("\n\n"))
        return "\n\n".join(filter(None, paragraphs))
    return "\n\n".join(_read(Path(name)) for name in config.files)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror}", "give a text file in UTF-8") from None
    except UnicodeDecodeError as error:
        raise TextError(f"{path} is not UTF-8: {error.reason} at byte {error.start}", "convert it first") from None


def _stretches(text: str, size: int = 4000) -> Sequence[str]:
    """Pieces of about `size` characters, cut at line ends."""
    pieces, start = [], 0
    while start < len(text):
        end = text.find("\n", start + size)
        end = len(text) if end < 0 else end + 1
        pieces.append(text[start:end])
        start = end
    return pieces
