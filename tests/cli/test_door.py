"""The front door: help is light, errors are words, every command shows an example."""

import os
import shlex
import subprocess
import sys

import pytest

import vitrail
from vitrail.cli import COMMANDS, app, main
from vitrail.processing.text import Tokenizer

LIGHT = """
import sys
sys.argv = ["vitrail", "--help"]
from vitrail.cli import main
try:
    main()
finally:
    heavy = [name for name in ("torch", "transformers", "numpy", "PIL", "tokenizers") if name in sys.modules]
    print("heavy:", heavy)
"""


def test_help_loads_nothing_heavy():
    out = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    assert "heavy: []" in out.stdout
    assert all(name in out.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_shows_an_example(name, capsys):
    app([name, "--help"], result_action="return_value")
    shown = " ".join(capsys.readouterr().out.split())
    assert f"vitrail {name}" in shown
    assert "Example" in shown


def test_what_can_be_mended_is_said_without_a_traceback(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["vitrail", "rotary", "spiral"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "spiral" in error
    assert "mrope_interleaved" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "words",
    [
        ["train", "smoke", "--out", "{file}"],
        ["train", "smoke", "--out", "{file}/below"],
        ["sweep", "batch", "--out", "{file}"],
        ["scaling", "run", "--out", "{file}", "--smoke"],
        ["train", "smoke", "--out", "{free}", "--device", "banana"],
        ["train", "smoke", "--out", "{free}", "--device", "meta"],
        ["claims", "report", "--results", "{folder}", "--out", "{free}"],
    ],
)
def test_places_that_will_not_do_are_named(words, tmp_path, monkeypatch, capsys):
    places = {"file": tmp_path / "file", "folder": tmp_path / "folder", "free": tmp_path / "free"}
    places["file"].touch()
    places["folder"].mkdir()
    monkeypatch.setattr(sys, "argv", ["vitrail", *(word.format(**places) for word in words)])
    with pytest.raises(SystemExit) as stop:
        main()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "→" in error and "Traceback" not in error
    assert any(str(place) in error for place in places.values()) or words[-1] in error
    assert not places["free"].exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read all")
def test_what_may_not_be_read_is_named(tmp_path, monkeypatch, capsys):
    (closed := tmp_path / "closed").mkdir(0)
    for words in (["ledger"], ["data", "show"], ["eval"]):
        more = ["questions"] if words == ["eval"] else []
        monkeypatch.setattr(sys, "argv", ["vitrail", *words, str(closed), *more])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 2 and str(closed) in capsys.readouterr().err


def test_rooms_load_when_named():
    assert vitrail.nn.Block
    with pytest.raises(AttributeError, match="rooms"):
        _ = vitrail.attic


def vitrail_in_a_shell(*words: str, reader: str = "", **environment: str) -> subprocess.CompletedProcess:
    """`vitrail words | reader`, whose status is vitrail's."""
    line = f"{shlex.join([sys.executable, '-m', 'vitrail.cli', *words])}{reader}; exit ${{PIPESTATUS[0]}}"
    variables = {**os.environ, **environment}
    return subprocess.run(["bash", "-c", line], capture_output=True, check=False, env=variables)


@pytest.fixture
def words(tmp_path) -> list[str]:
    """A command that is quick to load and prints what is not ASCII."""
    Tokenizer.train(["ab"], 260).save(tmp_path)
    return ["words", "a b", "--tokenizer", str(tmp_path)]


def test_a_reader_may_leave_early(words):
    out = vitrail_in_a_shell(*words, reader=" | true")
    assert (out.returncode, out.stderr) == (0, b"")


def test_a_terminal_may_lack_characters(words):
    out = vitrail_in_a_shell(*words, PYTHONIOENCODING="ascii")
    assert (out.returncode, out.stderr) == (0, b"")
    assert b"?" in out.stdout
