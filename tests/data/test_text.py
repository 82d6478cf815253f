"""Text as windows: nothing lost, nothing shared between training and judging."""

import numpy as np
import pytest

from vitrail.data.text import TextConfig, TextWindows, read_text
from vitrail.errors import ConfigError, TextError
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
    with pytest.raises(TextError, match=r"gone\.txt"):
        TextWindows(TextConfig(files=(str(tmp_path / "gone.txt"),)), words)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 10)
    with pytest.raises(TextError, match="not UTF-8"):
        TextWindows(TextConfig(files=(str(tmp_path / "latin.txt"),)), words)
    with pytest.raises(ConfigError, match="files or a package"):
        TextConfig()
    with pytest.raises(ConfigError, match="predict nothing"):
        TextConfig(package="python-docs", length=1)
