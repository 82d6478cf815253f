"""Text files as a source of token windows."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from vitrail.config import Config
from vitrail.data.source_spec import DataSourceSpec, SourceContext
from vitrail.errors import ConfigError, TextError
from vitrail.processing.tokenizer import Tokenizer
from vitrail.registry import DATA_SOURCES

JSONL_SUFFIX = ".jsonl"
TEST_EVERY = 10  # every tenth chunk of a long text, or every tenth short text, is in the test split


class TextSourceConfig(Config, tag="text", tag_field="kind"):
    """Text from files, or the Python language reference that ships with Python (`python-docs`).

    files          text files. A `.jsonl` file has one text a line: {"text": "Once upon a time, …"}. Any other file is
                   one long text
    package        a text that an installed package contains, instead of files
    window_length  number of tokens that a window predicts
    split          nine tenths for training, or one tenth for testing; no window crosses the two
    """

    files: tuple[str, ...] = ()
    package: Literal["python-docs"] | None = None
    window_length: int = 128
    split: Literal["train", "test"] = "train"

    def __post_init__(self) -> None:
        if bool(self.files) == (self.package is not None):
            raise ConfigError("a text source needs either files or a package", "give exactly one of the two")
        if self.window_length < 2:
            raise ConfigError(f"window_length is {self.window_length}", "use at least 2 tokens")


class TextSource:
    """Consecutive windows of window_length + 1 tokens: item → ids (window_length + 1,)."""

    def __init__(self, config: TextSourceConfig, tokenizer: Tokenizer):
        self.config = config
        long, short = _read_texts(config)
        chunks = _split_into_chunks("\n\n".join(long))
        encoded = [
            *_encode_with_eos(_select_split(chunks, config.split), tokenizer),
            *_encode_separately(_select_split(short, config.split), tokenizer),
        ]
        self.ids = np.concatenate([np.array([], dtype=np.int32), *encoded])

    @property
    def fingerprint(self) -> str:
        """Hash of all tokens."""
        return hashlib.sha256(self.ids.tobytes()).hexdigest()[:16]

    def __len__(self) -> int:
        return max(0, (len(self.ids) - 1) // self.config.window_length)

    def __getitem__(self, item: int) -> np.ndarray:
        if not 0 <= item < len(self):
            raise IndexError(item)
        start = item * self.config.window_length
        return self.ids[start : start + self.config.window_length + 1].astype(np.int64)


def _select_split(texts: Sequence[str], part: str) -> list[str]:
    return [text for i, text in enumerate(texts) if (i % TEST_EVERY == TEST_EVERY - 1) == (part == "test")]


def _encode_with_eos(stretches: Sequence[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Encode texts, each followed by the end-of-text token."""
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [np.array([*ids, *eos], dtype=np.int32) for ids in tokenizer.encode_batch(stretches)]


def _encode_separately(texts: Sequence[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Encode texts with the tokenizer's own begin-of-text token; if it adds none, with an end-of-text token
    after each."""
    rows = tokenizer.encode_batch(texts, add_special_tokens=True)
    if not rows or tokenizer.bos_token_id is None or rows[0][:1] != [tokenizer.bos_token_id]:
        return _encode_with_eos(texts, tokenizer)
    return [np.array(ids, dtype=np.int32) for ids in rows]


def read_text(config: TextSourceConfig) -> str:
    """Read the whole text of a source."""
    return "\n\n".join(text for texts in _read_texts(config) for text in texts)


def _read_texts(config: TextSourceConfig) -> tuple[list[str], list[str]]:
    """Read the long texts, which are joined and cut into chunks, and the short texts, which stay separate."""
    if config.package == "python-docs":
        from pydoc_data.topics import topics

        # Topics repeat whole sections of one another. Each paragraph counts once, otherwise test paragraphs would be in
        # the training split.
        paragraphs = dict.fromkeys(p.strip("\n") for name in sorted(topics) for p in topics[name].split("\n\n"))
        return [*filter(None, paragraphs)], []
    long = [_read_file(Path(name)) for name in config.files if not name.endswith(JSONL_SUFFIX)]
    return long, [text for name in config.files if name.endswith(JSONL_SUFFIX) for text in _read_jsonl(Path(name))]


def _read_jsonl(path: Path) -> list[str]:
    """Read a file with one text a line."""
    texts = []
    for number, line in enumerate(_read_file(path).split("\n"), 1):  # a JSON string may contain other line separators
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise TextError(
                f'{path}, line {number} is not {{"text": "…"}}', "write one JSON object with a text on each line"
            )
        texts.append(text)
    return texts


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        remedy = "create it first, as the comment at the top of the recipe describes, or give another text file"
        raise TextError(f"{path} does not exist", remedy) from None
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror}", "give a text file in UTF-8") from None
    except UnicodeDecodeError as error:
        raise TextError(f"{path} is not UTF-8: {error.reason} at byte {error.start}", "convert it to UTF-8") from None


def _split_into_chunks(text: str, size: int = 4000) -> Sequence[str]:
    """Split a text at line ends into chunks of about `size` characters."""
    pieces, start = [], 0
    while start < len(text):
        end = text.find("\n", start + size)
        end = len(text) if end < 0 else end + 1
        pieces.append(text[start:end])
        start = end
    return pieces


def _open_source(config: TextSourceConfig, context: SourceContext) -> TextSource:
    assert context.tokenizer is not None
    return TextSource(config, context.tokenizer)


DATA_SOURCES.register(
    "text",
    DataSourceSpec(
        TextSourceConfig,
        _open_source,
        ("text",),
        needs_tokenizer=lambda _config: True,
        read_texts=lambda config: [read_text(config)] if config.split == "train" else [],
    ),
)
