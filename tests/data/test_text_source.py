"""Text as token windows: nothing is lost, and splits share no text."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hub.test_llama2c import made_of, write_vocabulary
from vitrail.data.text_source import TextSource, TextSourceConfig, read_text
from vitrail.errors import ConfigError, TextError
from vitrail.hub.llama2c import read_tokenizer
from vitrail.processing.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return Tokenizer.train([read_text(TextSourceConfig(package="python-docs"))[:50_000]], 400)


def test_windows_are_consecutive(words, tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("".join(f"line {i} of a text\n" for i in range(2000)))
    windows = TextSource(TextSourceConfig(files=(str(file),), window_length=16), words)
    assert len(windows) > 100
    for i in range(len(windows) - 1):
        assert windows[i].shape == (17,)
        assert windows[i][-1] == windows[i + 1][0]  # the last target is the first input of the next window
    joined = np.concatenate([windows[i][:-1] for i in range(len(windows))])
    assert len(windows.ids) - 1 - len(joined) < 16
    with pytest.raises(IndexError):
        windows[len(windows)]


def test_splits_share_no_text(words):
    parts = {part: TextSource(TextSourceConfig(package="python-docs", split=part), words) for part in ("train", "test")}
    lines = {part: set(words.decode(w.ids.tolist()).splitlines()) for part, w in parts.items()}
    long = {part: {line for line in found if len(line) > 60} for part, found in lines.items()}
    assert len(parts["test"]) * 5 < len(parts["train"]) < len(parts["test"]) * 20
    assert len(long["train"] & long["test"]) < 0.02 * len(long["test"])  # the reference itself repeats a few sentences


def test_unreadable_files_are_named(words, tmp_path):
    with pytest.raises(TextError, match=r"gone\.txt does not exist\n.*create it first"):
        TextSource(TextSourceConfig(files=(str(tmp_path / "gone.txt"),)), words)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 10)
    with pytest.raises(TextError, match="not UTF-8"):
        TextSource(TextSourceConfig(files=(str(tmp_path / "latin.txt"),)), words)
    with pytest.raises(ConfigError, match="either files or a package"):
        TextSourceConfig()
    with pytest.raises(ConfigError, match="window_length is 1"):
        TextSourceConfig(package="python-docs", window_length=1)


@given(st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=30), st.booleans())
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
def test_lines_are_separate_texts(words, tmp_path, texts, ascii_only):
    """Texts are kept and not shared, with any content; every tenth is in the test split."""
    file = tmp_path / "texts.jsonl"
    texts = [*texts, "one \u2028 line \x85 and\nanother"]
    lines = (json.dumps({"text": text, "more": 1}, ensure_ascii=ascii_only) + "\n" for text in texts)
    file.write_text("".join(lines), encoding="utf-8", newline="")
    for part, kept in (("train", [t for i, t in enumerate(texts) if i % 10 != 9]), ("test", texts[9::10])):
        ids = TextSource(TextSourceConfig(files=(str(file),), window_length=2, split=part), words).ids.tolist()
        assert ids == [i for text in kept for i in (*words.encode(text), words.eos_token_id)]
    assert read_text(TextSourceConfig(files=(str(file),))) == "\n\n".join(texts)


def test_begin_tokens_separate_texts(tmp_path):
    write_vocabulary(tmp_path / "tokenizer.bin", *made_of([(1, 2)]))
    words = read_tokenizer(tmp_path / "tokenizer.bin")
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("ab", "ba")))
    ids = TextSource(TextSourceConfig(files=(str(file),), window_length=2), words).ids.tolist()
    assert ids == [*words.encode("ab", add_special_tokens=True), *words.encode("ba", add_special_tokens=True)]
    assert ids.count(words.bos_token_id) == 2 and words.eos_token_id not in ids


@pytest.mark.parametrize("line", ["once upon a time", "[1]", '{"words": "a"}', '{"text": 3}', '{"text": "cut'])
def test_invalid_lines_are_named(words, tmp_path, line):
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "a"}\n' + line + "\n")
    with pytest.raises(TextError, match=r"texts\.jsonl, line 2"):
        TextSource(TextSourceConfig(files=(str(file),)), words)
