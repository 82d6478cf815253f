"""Read the tokenizer of Kimi: a file of byte strings with ranks (`tiktoken.model`), and named special tokens.

The pair of tokens whose union has the lowest rank is merged first. The reader lists the merges of every token, so that
the `tokenizers` library gives the same ids.
"""

import base64
import binascii
from pathlib import Path

from vitrail.errors import CheckpointError
from vitrail.hub.delta_checkpoint import TOKENIZER_FILE
from vitrail.hub.tokenizer_builders import PieceType, PreTokenizerConfig, Vocabulary, build_byte_level_bpe
from vitrail.processing.tokenizer import BYTE_OF_CHAR, MAX_VOCAB_SIZE, Tokenizer
from vitrail.processing.tokenizer_files import read_bytes, read_json, read_tokenizer_files

RANKS_FILE = "tiktoken.model"
NUM_SPECIAL_TOKENS = 256  # ids after the byte strings; those without a name are reserved

_END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_END}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_END}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""How texts are split into words, as in Kimi's code."""


def has_tiktoken_tokenizer(folder: Path) -> bool:
    """Whether a folder has a file of ranks and no tokenizer.json."""
    return (folder / RANKS_FILE).is_file() and not (folder / TOKENIZER_FILE).is_file()


def read_tiktoken_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of a folder with a file of ranks."""
    pieces = read_ranks(folder / RANKS_FILE)
    first, config = len(pieces), read_json(folder / "tokenizer_config.json")
    named = {int(id): token for id, token in (config.get("added_tokens_decoder") or {}).items()}
    if outside := [id for id in named if not first <= id < first + NUM_SPECIAL_TOKENS]:
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: added_tokens_decoder has the id {outside[0]}, but {RANKS_FILE} has "
            f"{first:,} tokens",
            f"use the files of one model: special tokens have the {NUM_SPECIAL_TOKENS} ids after the others",
        )
    chars = {byte: char for char, byte in BYTE_OF_CHAR.items()}
    texts = ["".join(chars[byte] for byte in piece) for piece in pieces]
    kinds = [PieceType.NORMAL] * first
    for id in range(first, first + NUM_SPECIAL_TOKENS):
        token = named.get(id, {})
        texts.append(token.get("content", f"<|reserved_token_{id}|>"))
        kinds.append(PieceType.CONTROL if token.get("special", True) else PieceType.USER)
    found, ids = read_tokenizer_files(folder), {text: id for id, text in enumerate(texts)}
    if missing := [token for token in found.named_special_tokens.values() if token not in ids]:
        raise CheckpointError(
            f"{folder} names the special token {missing[0]!r}, which has no id", "add it to added_tokens_decoder"
        )
    roles = {role: ids[token] for role, token in found.named_special_tokens.items()}
    vocabulary = Vocabulary(texts, kinds, roles, False, stop_ids=found.stop_ids)
    tokenizer = build_byte_level_bpe(
        vocabulary, list_merges(texts[:first]), PreTokenizerConfig(None, PATTERN, ignore_merges=True)
    )
    tokenizer.set_chat_templates(found.chat_templates)
    return tokenizer


def read_ranks(file: Path) -> list[bytes]:
    """Read the byte strings of a file of ranks, in the order of their ranks."""
    lines = read_bytes(file, "download the file again").split(b"\n")
    ranks: dict[int, bytes] = {}
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        encoded, _, rank = line.partition(b" ")
        try:
            piece, index = base64.b64decode(encoded, validate=True), int(rank)
        except (ValueError, binascii.Error):
            raise CheckpointError(
                f"{file}: line {number} is not a base64 string and a rank: {line[:40]!r}", "download the file again"
            ) from None
        if not piece or not 0 <= index < MAX_VOCAB_SIZE or index in ranks:
            raise CheckpointError(
                f"{file}: line {number} has the rank {index} twice, an empty string or a rank out of range",
                "download the file again",
            )
        ranks[index] = piece
    pieces = [ranks.get(index, b"") for index in range(len(ranks))]
    if len(set(pieces)) < len(pieces) or b"" in pieces or not {bytes([byte]) for byte in range(256)} <= set(pieces):
        raise CheckpointError(
            f"{file} has {len(pieces):,} strings, which lack a byte or a rank, or contain one twice",
            "download the file again",
        )
    return pieces


def list_merges(pieces: list[str]) -> list[str]:
    """List the pairs of tokens that are tokens too, by the rank of their union, the longest left part first."""
    known = set(pieces)
    return [
        f"{piece[:at]} {piece[at:]}"
        for piece in pieces
        for at in range(len(piece) - 1, 0, -1)
        if piece[:at] in known and piece[at:] in known
    ]
