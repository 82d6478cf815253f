"""Check of an untrusted tokenizer.json in a limited process.

A tokenizer.json can crash the `tokenizers` library, expand a text to gigabytes, or contain a regular expression that
never ends. A file is therefore loaded and used on short texts in a process of its own first.
"""

import hashlib
import json
import string
from pathlib import Path
from typing import Any

import tokenizers

from vitrail.errors import TextError
from vitrail.limited_process import BYTES_VARIABLE, SECONDS_VARIABLE, LimitedProcess, LimitExceededError

MAX_GROWTH = 100  # largest number of characters or tokens that a tokenizer makes of one character
MAX_PROBE_CHARACTERS = 20_000
BYTES_OF_FULL_TIME = 5_000_000  # a larger file may take longer than the time limit, in proportion
_checker = LimitedProcess("vitrail.processing.tokenizer_check:find_defect")
_checked: set[bytes] = set()  # digests of files that passed


def check_tokenizer(file: Path, data: bytes) -> None:
    """Raise TextError if the content of a tokenizer.json cannot be loaded and used within the limits of a file."""
    digest = hashlib.sha256(data).digest()
    if digest in _checked:
        return
    try:
        defect = _checker.call(data, max(1.0, len(data) / BYTES_OF_FULL_TIME))
    except LimitExceededError as error:
        raise TextError(
            f"{file}: loading and using the tokenizer {error}",
            f"do not use this tokenizer, or raise the limit ({SECONDS_VARIABLE}, {BYTES_VARIABLE})",
        ) from None
    if defect:
        raise TextError(f"{file}: the tokenizer {defect}", "do not use this tokenizer")
    _checked.add(digest)


def find_defect(data: bytes) -> str:
    """Load and use a tokenizer. Return its defect, or an empty text if there is none or the library refuses it."""
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
    except Exception:  # the caller gets the same error, and reports it
        return ""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for text in _list_probes(tokenizer):
        allowed = MAX_GROWTH * (len(text) + 10)
        if tokenizer.normalizer is not None and len(tokenizer.normalizer.normalize_str(text)) > allowed:
            return f"expands a text of {len(text)} characters to more than {allowed:,}"
        try:
            ids = tokenizer.encode(text, add_special_tokens=True).ids
        except Exception:  # a text that the vocabulary does not cover; the caller reports it when it occurs
            continue
        if len(ids) > allowed:
            return f"encodes a text of {len(text)} characters to {len(ids):,} tokens"
        tokenizer.decode(ids)
    try:  # it must survive being saved, which lists all ids up to the largest, and loaded
        tokenizers.Tokenizer.from_str(tokenizer.to_str())
    except Exception as error:
        return f"cannot be saved and loaded again: {error!s:.200}"
    return ""


def _list_probes(tokenizer: tokenizers.Tokenizer) -> list[str]:
    """List texts that trigger costly expressions and expansions: runs of characters, also of the file's patterns."""
    parts = [part for part in (tokenizer.normalizer, tokenizer.pre_tokenizer) if part is not None]
    characters = "".join(_list_strings([json.loads(part.__getstate__()) for part in parts]))
    characters = "".join(sorted(set(characters + string.printable)))[:MAX_PROBE_CHARACTERS]
    runs = [character * 200 for character in ("a", "A", "0", " ", "\n", "_", "é", "漢", "\u200d", "ﷺ")]
    return ["", *runs, "a0 " * 70, "Aa" * 100 + "!", "\u0301" * 200, characters, characters * 2]


def _list_strings(tree: Any) -> list[str]:
    if isinstance(tree, str):
        return [tree]
    if isinstance(tree, dict):
        return [*tree, *(text for value in tree.values() for text in _list_strings(value))]
    return [text for value in tree for text in _list_strings(value)] if isinstance(tree, list) else []
