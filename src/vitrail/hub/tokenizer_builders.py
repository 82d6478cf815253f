"""Build tokenizers from vocabularies of GGUF and llama2.c files: pieces with scores, or pieces with merges.

Both become a BPE of the `tokenizers` library.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from vitrail.errors import CheckpointError
from vitrail.processing.tokenizer import Tokenizer

MAX_PIECE_LENGTH = 1000  # characters; all splits of a piece are enumerated
BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")


class PieceType(IntEnum):
    """Type of a piece, numbered as in GGUF files."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER = 4
    UNUSED = 5
    BYTE = 6


class Vocabulary(NamedTuple):
    """Pieces and special tokens. With `add_bos`, texts that are encoded with special tokens start with bos."""

    pieces: Sequence[str]
    piece_types: Sequence[int]
    special_ids: Mapping[str, int]  # bos, eos, unk, pad → id
    add_bos: bool
    chat_template: str | None = None
    stop_ids: Sequence[int] = ()


def build_sentencepiece_bpe(
    vocabulary: Vocabulary, scores: Sequence[float], *, space_symbol: str = "▁", add_prefix_space: bool = True
) -> Tokenizer:
    """Build a SentencePiece BPE: the pair with the best score is merged first.

    space_symbol      how pieces write a space
    add_prefix_space  whether a text starts with a space

    Characters without a piece are encoded as bytes. Scores are converted to merge ranks; ties are ordered by id.
    """
    ids = _index_pieces(vocabulary.pieces)
    normal = {
        piece for piece, kind in zip(vocabulary.pieces, vocabulary.piece_types, strict=True) if kind == PieceType.NORMAL
    }
    order = sorted(normal, key=lambda piece: (-scores[ids[piece]], ids[piece]))
    merges = [pair for piece in order for pair in _iterate_splits(piece) if pair[0] in normal and pair[1] in normal]
    unk = vocabulary.special_ids.get("unk")
    model = models.BPE(
        ids, merges, byte_fallback=True, fuse_unk=True, unk_token=None if unk is None else vocabulary.pieces[unk]
    )
    backend = tokenizers.Tokenizer(model)
    steps: list[Any] = [normalizers.Prepend(space_symbol)] if add_prefix_space else []
    decoder_steps: list[Any] = [decoders.ByteFallback(), decoders.Fuse()]
    if space_symbol != " ":
        steps.append(normalizers.Replace(" ", space_symbol))
        decoder_steps.insert(0, decoders.Replace(space_symbol, " "))
    if add_prefix_space:
        decoder_steps.append(decoders.Strip(" ", left=1))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(decoder_steps)
    return _build_tokenizer(backend, vocabulary)


def _iterate_splits(piece: str) -> Iterator[tuple[str, str]]:
    """Yield all splits of a piece in two, the longest left part first, because texts are merged from the left."""
    return ((piece[:position], piece[position:]) for position in range(len(piece) - 1, 0, -1))


class PreTokenizerConfig(NamedTuple):
    """How a byte-level BPE splits a text into words before merging; None keeps GPT-2's pattern."""

    first_step: Callable[[], Any] | None
    pattern: str | None
    use_nfc: bool = False
    ignore_merges: bool = False  # a word that is a piece is not split by merges
    add_bos: bool = False  # default if the file does not say


_LETTERS_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST_PATTERN = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_PRE_TOKENIZER = PreTokenizerConfig(
    None, rf"{_LETTERS_PATTERN}|\p{{N}}{{1,3}}|{_REST_PATTERN}", ignore_merges=True, add_bos=True
)

PRE_TOKENIZERS: dict[str, PreTokenizerConfig] = {
    "gpt-2": PreTokenizerConfig(None, None),
    "smollm": PreTokenizerConfig(lambda: pre_tokenizers.Digits(individual_digits=True), None),
    "llama-bpe": _LLAMA3_PRE_TOKENIZER,
    "llama3": _LLAMA3_PRE_TOKENIZER,
    "llama-v3": _LLAMA3_PRE_TOKENIZER,
    "qwen2": PreTokenizerConfig(None, rf"{_LETTERS_PATTERN}|\p{{N}}|{_REST_PATTERN}", use_nfc=True),
}
"""`tokenizer.ggml.pre` → pre-tokenizer."""


def build_byte_level_bpe(vocabulary: Vocabulary, merges: Sequence[str], pre_tokenizer: PreTokenizerConfig) -> Tokenizer:
    """Build a GPT-2 byte-level BPE: ranked merges within the words of the pre-tokenizer."""
    ids = _index_pieces(vocabulary.pieces)
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    for merge, (left, right) in zip(merges, pairs, strict=True):
        if not {left, right, left + right} <= ids.keys():
            raise CheckpointError(
                f"merge {merge!r} does not join two pieces of the vocabulary", "download the file again"
            )
    backend = tokenizers.Tokenizer(models.BPE(ids, pairs, ignore_merges=pre_tokenizer.ignore_merges))
    steps: list[Any] = [] if pre_tokenizer.first_step is None else [pre_tokenizer.first_step()]
    if pre_tokenizer.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pre_tokenizer.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre_tokenizer.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre_tokenizer.use_nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return _build_tokenizer(backend, vocabulary)


def _index_pieces(pieces: Sequence[str]) -> dict[str, int]:
    ids: dict[str, int] = {}
    for i, piece in enumerate(pieces):
        if not piece or len(piece) > MAX_PIECE_LENGTH:
            raise CheckpointError(f"piece {i} of the vocabulary has {len(piece)} characters", "download the file again")
        if ids.setdefault(piece, i) != i:
            raise CheckpointError(f"piece {piece!r} is in the vocabulary twice, as {ids[piece]} and {i}")
    return ids


def _build_tokenizer(backend: tokenizers.Tokenizer, vocabulary: Vocabulary) -> Tokenizer:
    """Add the special tokens and the bos post-processor."""
    pieces = vocabulary.pieces
    special_tokens = {role: pieces[id] for role, id in vocabulary.special_ids.items()}
    for piece, kind in zip(pieces, vocabulary.piece_types, strict=True):
        special = kind in (PieceType.CONTROL, PieceType.UNKNOWN) or piece in special_tokens.values()
        if special or kind == PieceType.USER:
            backend.add_tokens([AddedToken(piece, special=special, normalized=False)])
    if vocabulary.add_bos and "bos" in special_tokens:
        bos = special_tokens["bos"]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, vocabulary.special_ids["bos"])]
        )
    return Tokenizer(backend, special_tokens, vocabulary.chat_template, vocabulary.stop_ids)
