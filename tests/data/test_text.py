"""Text as windows: nothing lost, nothing shared between training and judging."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hub.test_llama2c import made_of, write_vocabulary
from vitrail.data.text import TextConfig, TextWindows, read_text
from vitrail.errors import ConfigError, TextError
from vitrail.hub.llama2c import read_tokenizer
from vitrail.processing.text import Tokenizer


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return Tokenizer.train([read_text(TextConfig(package="python-docs"))[:50_000]], 400)


def test_windows_follow_one_another(words, tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("".join(f"line {i} of a text\n" for i in range(2000)))
    windows = TextWindows(TextConfig(files=(str(file),), length=16), words)
    assert len(windows) > 100
    for i in range(len(windows) - 1):
        assert windows[i].shape == (17,)
        assert windows[i][-1] == windows[i + 1][0]  # the token predicted last is the first one read next
    joined = np.concatenate([windows[i][:-1] for i in range(len(windows))])
    assert len(windows.ids) - 1 - len(joined) < 16
    with pytest.raises(IndexError):
        windows[len(windows)]


def test_training_and_judging_share_no_stretch(words):
    parts = {part: TextWindows(TextConfig(package="python-docs", part=part), words) for part in ("train", "test")}
    lines = {part: set(words.decode(w.ids.tolist()).splitlines()) for part, w in parts.items()}
    long = {part: {line for line in found if len(line) > 60} for part, found in lines.items()}
    assert len(parts["test"]) * 5 < len(parts["train"]) < len(parts["test"]) * 20
    assert len(long["train"] & long["test"]) < 0.02 * len(long["test"])  # the reference repeats a few sentences itself


def test_what_cannot_be_read_is_named(words, tmp_path):
    with pytest.raises(TextError, match=r"gone\.txt is not there\n.*make it first"):
        TextWindows(TextConfig(files=(str(tmp_path / "gone.txt"),)), words)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 10)
    with pytest.raises(TextError, match="not UTF-8"):
        TextWindows(TextConfig(files=(str(tmp_path / "latin.txt"),)), words)
    with pytest.raises(ConfigError, match="files or a package"):
        TextConfig()
    with pytest.raises(ConfigError, match="predict nothing"):
        TextConfig(package="python-docs", length=1)


@given(st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=30), st.booleans())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_texts_of_lines_are_each_their_own(words, tmp_path, texts, ascii_only):
    """Nothing of a text is lost or shared, whatever is in it, and the tenth is for judging."""
    file = tmp_path / "texts.jsonl"
    texts = [*texts, "one \u2028 line \x85 and\nanother"]
    lines = (json.dumps({"text": text, "more": 1}, ensure_ascii=ascii_only) + "\n" for text in texts)
    file.write_text("".join(lines), encoding="utf-8", newline="")
    for part, kept in (("train", [t for i, t in enumerate(texts) if i % 10 != 9]), ("test", texts[9::10])):
        ids = TextWindows(TextConfig(files=(str(file),), length=2, part=part), words).ids.tolist()
        assert ids == [i for text in kept for i in (*words.encode(text), words.eos)]
    assert read_text(TextConfig(files=(str(file),))) == "\n\n".join(texts)


def test_a_text_that_begins_with_a_mark_ends_the_one_before(tmp_path):
    write_vocabulary(tmp_path / "tokenizer.bin", *made_of([(1, 2)]))
    words = read_tokenizer(tmp_path / "tokenizer.bin")
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("ab", "ba")))
    ids = TextWindows(TextConfig(files=(str(file),), length=2), words).ids.tolist()
    assert ids == [*words.encode("ab", specials=True), *words.encode("ba", specials=True)]
    assert ids.count(words.bos) == 2 and words.eos not in ids


@pytest.mark.parametrize("line", ["once upon a time", "[1]", '{"words": "a"}', '{"text": 3}', '{"text": "cut'])
def test_a_line_that_is_no_text_is_named(words, tmp_path, line):
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "a"}\n' + line + "\n")
    with pytest.raises(TextError, match=r"texts\.jsonl, line 2"):
        TextWindows(TextConfig(files=(str(file),)), words)
