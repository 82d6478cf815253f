"""`vitrail text-tokenizer` in this process."""

import pytest

from vitrail.cli.text_tokenizer_command import app, format_pieces, terminal_width
from vitrail.errors import TextError
from vitrail.processing.tokenizer import Tokenizer

LINES = [f"{n} red cubes stand behind the blue ball\n" for n in range(40)]


def run(*tokens: object) -> None:
    app([str(token) for token in tokens], result_action="return_value", exit_on_error=False)


@pytest.fixture
def folder(tmp_path, capsys):
    text = tmp_path / "captions.txt"
    text.write_text("".join(LINES), encoding="utf-8")
    run(
        "train",
        text,
        "--vocab-size",
        300,
        "--out",
        tmp_path / "words",
        "--special-token",
        "<image>",
        "--special-token",
        "<video>",
    )
    return tmp_path / "words"


def test_train_measures_held_out_lines(folder, capsys):
    out = capsys.readouterr().out
    assert "40 lines, of which 4 are held out" in out
    assert "held out: " in out and "bytes a token" in out
    words = Tokenizer.load(folder)
    assert f"{words.vocab_size} tokens in {folder}" in out
    assert list(words.special_tokens) == ["<|endoftext|>", "<image>", "<video>"]


def test_train_reports_a_small_vocabulary(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("ab ab")
    run("train", tmp_path / "a.txt", "--out", tmp_path / "words")
    out = capsys.readouterr().out
    assert "not 4096" in out and "held out:" not in out


def test_show_prints_pieces_above_ids(folder, capsys):
    capsys.readouterr()
    run("show", "red\ncubes <image>é", "--tokenizer", folder)
    pieces, ids, _, count = capsys.readouterr().out.splitlines()
    words = Tokenizer.load(folder)
    assert [cell.strip() for cell in pieces.split("│")[:-1]] == [
        words.to_readable(i) for i in words.encode("red\ncubes <image>é")
    ]
    assert [int(cell) for cell in ids.split("│")[:-1]] == words.encode("red\ncubes <image>é")
    assert [at for at, c in enumerate(pieces) if c == "│"] == [at for at, c in enumerate(ids) if c == "│"]
    assert "19 bytes" in count and "bytes a token" in count


def test_show_chat_template(folder, capsys):
    capsys.readouterr()
    run("show", "red <|im_end|>", "--tokenizer", folder, "--chat-template", "chatml")
    out = capsys.readouterr().out
    assert "added for this command: <|im_start|> <|im_end|>" in out
    assert out.count("<|im_end|>│") == 1  # the template's; the one in the text stays in pieces
    with pytest.raises(TextError, match="unknown chat template preset"):
        run("show", "red", "--tokenizer", folder, "--chat-template", "nope")


def test_empty_text_has_no_tokens(folder, capsys):
    capsys.readouterr()
    run("show", "", "--tokenizer", folder)
    assert capsys.readouterr().out.strip() == "0 tokens, 0 bytes"


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(TextError, match="does not exist"):
        run("show", "a", "--tokenizer", tmp_path / "nope")
    with pytest.raises(TextError, match=r"nope\.txt cannot be read"):
        run("train", tmp_path / "nope.txt", "--out", tmp_path)
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(TextError, match=r"latin\.txt is not UTF-8"):
        run("train", tmp_path / "latin.txt", "--out", tmp_path)


def test_help_shows_an_example(capsys):
    for tokens, example in (
        (["show", "--help"], "vitrail text-tokenizer show"),
        (["train", "--help"], "vitrail text-tokenizer train"),
    ):
        app(tokens, result_action="return_value")
        assert f"Example: {example}" in capsys.readouterr().out


def test_lines_fit_the_terminal():
    cells = [("漢字", "1"), ("é", "22"), ("cube", "333")] * 5
    lines = format_pieces(cells, 20)
    assert max(map(terminal_width, lines)) <= 20
    assert "".join(lines).count("│") == 2 * len(cells)
    assert terminal_width("漢a\u0301") == 3
    assert format_pieces([], 20) == []


def test_invalid_sizes_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("ab ab")
    with pytest.raises(TextError, match="1,000,000,000 is too large"):
        run("train", tmp_path / "a.txt", "--vocab-size", 10**9, "--out", tmp_path / "words")
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(TextError, match=r"there is no text to train on"):
        run("train", tmp_path / "empty.txt", "--out", tmp_path / "words")
