"""Kimi's tokenizer: ids are those of tiktoken's algorithm, written here once more, with its pattern as released."""

import base64
import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
import regex

from vitrail.errors import CheckpointError
from vitrail.hub import load_tokenizer
from vitrail.hub.tiktoken_tokenizer import PATTERN, read_ranks
from vitrail.processing.tokenizer import Tokenizer

RELEASED_PATTERN = "|".join(
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
TEXTS = [
    "The quick brown fox isn't here: it's 12345 and 3.14,\n\n  and  more   spaces \t",
    "日本語のテキスト, 中文字符混合English和数字123。你好！",
    "CamelCase snake_case ÀÉÎ naïve café Ελληνικά Русский 한국어 🙂🚀",
    "aaaaaaaaaaaaaaaa aaaab aaa\r\n'S 'LL we'd I'm\n",
    "",
]


def merge(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Merge the adjacent pair with the lowest rank, leftmost first, as tiktoken does."""
    parts = [piece[at : at + 1] for at in range(len(piece))]
    while len(parts) > 1 and piece not in ranks:
        pairs = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
        if min(pairs) == len(ranks):
            break
        at = pairs.index(min(pairs))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [ranks[piece]] if piece in ranks else [ranks[part] for part in parts]


def encode(text: str, ranks: dict[bytes, int]) -> list[int]:
    words = regex.findall(RELEASED_PATTERN, text, flags=regex.V1)
    return [id for word in words for id in merge(word.encode(), ranks)]


def write_tokenizer(folder: Path) -> dict[bytes, int]:
    """Write a file of ranks that is learnt from texts, and Kimi's special tokens; return the ranks."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    words = [word.encode() for text in TEXTS for word in regex.findall(RELEASED_PATTERN, text, flags=regex.V1)]
    generator = random.Random(0)
    while len(ranks) < 500:  # tokens of words, and a few that no word needs
        word = generator.choice(words)
        at, length = generator.randrange(len(word)), generator.choice((2, 3, 4))
        pieces = {rank: piece for piece, rank in ranks.items()}
        found = [pieces[id] for id in merge(word[at : at + length], ranks)]
        joined = b"".join(found[:2]) if len(found) > 1 else generator.choice(words)[:1] + found[0]
        ranks.setdefault(joined, len(ranks))
    lines = [base64.b64encode(piece) + b" " + str(rank).encode() for piece, rank in ranks.items()]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    special = {500: "[BOS]", 501: "[EOS]", 505: "<|media_pad|>", 755: "[PAD]"}
    table = {str(id): {"content": token, "special": True} for id, token in special.items()}
    table["506"] = {"content": "<think>", "special": False}
    config = {"added_tokens_decoder": table, "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]"}
    config |= {"chat_template": "{{ messages[0].content }}", "tokenizer_class": "TikTokenTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return ranks


def test_pattern_is_the_released_one():
    assert PATTERN == RELEASED_PATTERN


def test_ids_are_those_of_tiktoken(tmp_path):
    ranks = write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    generator = random.Random(1)
    letters = [*"aab bc'sST 12\n\r中文日é\u0301Ωяñ🙂._-"]
    texts = TEXTS + ["".join(generator.choices(letters, k=40)) for _ in range(300)]
    for text in texts:
        ids = tokenizer.encode(text, literal=True)
        assert ids == encode(text, ranks), text
        assert tokenizer.decode(ids) == text
    assert any(id >= 256 for text in TEXTS for id in tokenizer.encode(text))


def test_special_tokens_and_saving(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (500, 501, 755)
    assert tokenizer.vocab_size == 756 and tokenizer.token_to_id("<|reserved_token_502|>") == 502
    assert "<think>" not in tokenizer.special_tokens and tokenizer.encode("<think>a")[0] == 506
    assert tokenizer.encode("<|media_pad|>[EOS]") == [505, 501]
    assert tokenizer.chat_template == "{{ messages[0].content }}" and tokenizer.stop_ids == (501,)
    tokenizer.save(tmp_path / "saved")
    again = Tokenizer.load(tmp_path / "saved")
    assert all(again.encode(text) == tokenizer.encode(text) for text in TEXTS)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"YQ== 0\nnothing\n", "line 2 is not a base64 string"),
        (b"YQ== 0\nYg== 0\n", "line 2 has the rank 0 twice"),
        (b"YQ== 0\nYg== 7\n", "lack a byte or a rank"),
        (b"YQ== 99999999\n", "out of range"),
        (b"", "lack a byte or a rank"),
    ],
)
def test_bad_files(content, problem, tmp_path):
    (tmp_path / "tiktoken.model").write_bytes(content)
    with pytest.raises(CheckpointError, match=problem) as error:
        read_ranks(tmp_path / "tiktoken.model")
    assert str(tmp_path / "tiktoken.model") in str(error.value)


def test_special_tokens_of_another_model(tmp_path):
    write_tokenizer(tmp_path)
    table = {"163584": {"content": "[BOS]"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": table}))
    with pytest.raises(CheckpointError, match=r"has the id 163584, but tiktoken\.model has 500 tokens"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "[BOS]"}))
    with pytest.raises(CheckpointError, match=r"names the special token '\[BOS\]', which has no id"):
        load_tokenizer(tmp_path)
