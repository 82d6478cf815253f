"""Tokenizers from bare vocabularies, as model files of other kinds carry them: pieces with scores, or with merges.

Both become a `tokenizers` BPE, so that everything `Tokenizer` offers holds for them too.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from vitrail.errors import CheckpointError
from vitrail.processing.text import Tokenizer

LONGEST = 1000  # characters of a piece; every way to halve it is looked at
BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class Kind(IntEnum):
    """What a piece is, numbered as in GGUF files."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER = 4
    UNUSED = 5
    BYTE = 6


class Vocabulary(NamedTuple):
    """What both sorts share. `add_bos` puts the bos token before each text encoded with specials."""

    pieces: Sequence[str]
    kinds: Sequence[int]
    named: Mapping[str, int]  # bos, eos, unk, pad → id
    add_bos: bool
    chat_template: str | None = None
    stops: Sequence[int] = ()


def scored(vocabulary: Vocabulary, scores: Sequence[float], *, space: str = "▁", prefix: bool = True) -> Tokenizer:
    """SentencePiece's BPE: of all neighbours that join to a piece, the pair with the best score joins first.

    `space` is how pieces write one; with `prefix` a text begins with one. What has no piece is spelled in bytes.
    Scores become ranks of merges, which settles ties by place in the vocabulary; files of this kind have none.
    """
    ids = _unique(vocabulary.pieces)
    normal = {piece for piece, kind in zip(vocabulary.pieces, vocabulary.kinds, strict=True) if kind == Kind.NORMAL}
    order = sorted(normal, key=lambda piece: (-scores[ids[piece]], ids[piece]))
    merges = [pair for piece in order for pair in _halves(piece) if pair[0] in normal and pair[1] in normal]
    unk = vocabulary.named.get("unk")
    model = models.BPE(
        ids, merges, byte_fallback=True, fuse_unk=True, unk_token=None if unk is None else vocabulary.pieces[unk]
    )
    rust = tokenizers.Tokenizer(model)
    steps: list[Any] = [normalizers.Prepend(space)] if prefix else []
    back: list[Any] = [decoders.ByteFallback(), decoders.Fuse()]
    if space != " ":
        steps.append(normalizers.Replace(" ", space))
        back.insert(0, decoders.Replace(space, " "))
    if prefix:
        back.append(decoders.Strip(" ", left=1))
    rust.normalizer = normalizers.Sequence(steps)
    rust.decoder = decoders.Sequence(back)
    return _finish(rust, vocabulary)


def _halves(piece: str) -> Iterator[tuple[str, str]]:
    """Every way to cut a piece in two, the longest left part first: texts are read from the left."""
    return ((piece[:at], piece[at:]) for at in range(len(piece) - 1, 0, -1))


class Split(NamedTuple):
    """How a byte-level BPE cuts a text into words before it merges; None keeps GPT-2's way."""

    before: Callable[[], Any] | None
    pattern: str | None
    nfc: bool = False
    whole_words: bool = False  # a word that is a piece stays one, whatever the merges say
    bos: bool = False  # where the file does not say


_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = Split(None, rf"{_LETTERS}|\p{{N}}{{1,3}}|{_REST}", whole_words=True, bos=True)

SPLITS: dict[str, Split] = {
    "gpt-2": Split(None, None),
    "smollm": Split(lambda: pre_tokenizers.Digits(individual_digits=True), None),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": Split(None, rf"{_LETTERS}|\p{{N}}|{_REST}", nfc=True),
}
"""`tokenizer.ggml.pre` → split"""


def merged(vocabulary: Vocabulary, merges: Sequence[str], split: Split) -> Tokenizer:
    """GPT-2's byte-level BPE: merges in order, within the words that `split` makes."""
    ids = _unique(vocabulary.pieces)
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    for merge, (left, right) in zip(merges, pairs, strict=True):
        if not {left, right, left + right} <= ids.keys():
            raise CheckpointError(f"merge {merge!r} does not join two pieces of the vocabulary", "fetch the file again")
    rust = tokenizers.Tokenizer(models.BPE(ids, pairs, ignore_merges=split.whole_words))
    steps: list[Any] = [] if split.before is None else [split.before()]
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    rust.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if split.nfc:
        rust.normalizer = normalizers.NFC()
    rust.decoder = decoders.ByteLevel()
    return _finish(rust, vocabulary)


def _unique(pieces: Sequence[str]) -> dict[str, int]:
    ids: dict[str, int] = {}
    for i, piece in enumerate(pieces):
        if not piece or len(piece) > LONGEST:
            raise CheckpointError(f"piece {i} of the vocabulary has {len(piece)} characters", "fetch the file again")
        if ids.setdefault(piece, i) != i:
            raise CheckpointError(f"piece {piece!r} stands twice in the vocabulary, as {ids[piece]} and {i}")
    return ids


def _finish(rust: tokenizers.Tokenizer, vocabulary: Vocabulary) -> Tokenizer:
    """Special tokens, bos, and the names of both."""
    pieces = vocabulary.pieces
    named = {role: pieces[id] for role, id in vocabulary.named.items()}
    for piece, kind in zip(pieces, vocabulary.kinds, strict=True):
        special = kind in (Kind.CONTROL, Kind.UNKNOWN) or piece in named.values()
        if special or kind == Kind.USER:
            rust.add_tokens([AddedToken(piece, special=special, normalized=False)])
    if vocabulary.add_bos and "bos" in named:
        bos = named["bos"]
        rust.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, vocabulary.named["bos"])]
        )
    return Tokenizer(rust, named, vocabulary.chat_template, vocabulary.stops)
