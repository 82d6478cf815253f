"""Texts as windows of tokens."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from vitrail.config import Config
from vitrail.errors import ConfigError, TextError
from vitrail.processing.text import Tokenizer

LINES = ".jsonl"
HELD_OUT = 10  # every tenth stretch of a text, or text, is kept for judging


class TextConfig(Config, tag="text", tag_field="kind"):
    """Text from files, or the reference of the Python language that lies in every Python (`python-docs`).

    A file is one long text, or, where it is called `.jsonl`, a text a line: {"text": "Once upon a time, …"}. `part`
    says what is read: training reads nine of ten stretches or texts, judging the tenth; no window crosses from one part
    to the other.
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
        long, short = _texts(config)
        stretches = _stretches("\n\n".join(long))
        found = [*_ended(_kept(stretches, config.part), tokenizer), *_apart(_kept(short, config.part), tokenizer)]
        self.ids = np.concatenate([np.array([], dtype=np.int32), *found])

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


def _kept(texts: Sequence[str], part: str) -> list[str]:
    return [text for i, text in enumerate(texts) if (i % HELD_OUT == HELD_OUT - 1) == (part == "test")]


def _ended(stretches: Sequence[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Ids of stretches, an end behind each."""
    eos = [] if tokenizer.eos is None else [tokenizer.eos]
    return [np.array([*ids, *eos], dtype=np.int32) for ids in tokenizer.encode_batch(stretches)]


def _apart(texts: Sequence[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Ids of texts as the tokenizer begins every text, which ends the one before; where it begins none, with ends."""
    rows = tokenizer.encode_batch(texts, specials=True)
    if not rows or tokenizer.bos is None or rows[0][:1] != [tokenizer.bos]:
        return _ended(texts, tokenizer)
    return [np.array(ids, dtype=np.int32) for ids in rows]


def read_text(config: TextConfig) -> str:
    """The whole text of a source."""
    return "\n\n".join(text for texts in _texts(config) for text in texts)


def _texts(config: TextConfig) -> tuple[list[str], list[str]]:
    """Long ones, which go on from one to the next, and those that stand for themselves."""
    if config.package == "python-docs":
        from pydoc_data.topics import topics

        # Topics quote whole sections of one another: each paragraph counts once, or the tenth would be learnt by heart.
        paragraphs = dict.fromkeys(p.strip("\n") for name in sorted(topics) for p in topics[name].split("\n\n"))
        return [*filter(None, paragraphs)], []
    long = [_read(Path(name)) for name in config.files if not name.endswith(LINES)]
    return long, [text for name in config.files if name.endswith(LINES) for text in _lines(Path(name))]


def _lines(path: Path) -> list[str]:
    """The texts of a file that has one a line."""
    found = []
    for number, line in enumerate(_read(path).split("\n"), 1):  # JSON leaves other ends of lines inside a text
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise TextError(f'{path}, line {number} is no {{"text": "…"}}', "write one such object a line, in JSON")
        found.append(text)
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        remedy = "make it first, as the head of its recipe says, or give another text file"
        raise TextError(f"{path} is not there", remedy) from None
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
