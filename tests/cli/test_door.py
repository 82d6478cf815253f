"""The front door: help is light, errors are words, every command shows an example."""

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from cyclopts import App

import vitrail
from vitrail.cli import COMMANDS, app, get_command, main
from vitrail.cli.eval_command import app as eval_app
from vitrail.processing.tokenizer import Tokenizer
from vitrail.registry import SUITES

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


def test_help_imports_no_heavy_modules():
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


def test_help_of_a_command_is_its_docstring(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["vitrail", "ask", "--help"])
    with pytest.raises(SystemExit):
        main()
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("Example: vitrail ask") == 4 and "each question is a turn" in shown
    assert "Parameters" not in shown.partition("╭")[0]  # they are in the table below
    assert all(get_command(name).help.count("Example:") >= 1 for name in COMMANDS)


def iter_examples():
    """Yield the commands after "Example:" in the help texts of all commands."""
    yield from (command.example for command in COMMANDS.values())
    for path in sorted(Path(vitrail.__file__).parent.joinpath("cli").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from re.findall(r"Example: `?(vitrail [^\n`]+)", node.value)


@pytest.mark.parametrize("name", SUITES)
def test_examples_of_suites_parse(name):
    words = shlex.split(SUITES[name].example)
    assert words[:2] == ["vitrail", "eval"] and words[3] == name
    eval_app.parse_args([name, words[2], *words[4:]], exit_on_error=False, print_error=False)


@pytest.mark.parametrize("example", sorted(set(iter_examples())))
def test_examples_parse(example):
    for command in example.split(" && "):
        app.parse_args(shlex.split(command)[1:], exit_on_error=False, print_error=False)


def test_user_errors_print_without_a_traceback(monkeypatch, capsys):
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
        ["experiments.token_scaling", "run", "--out", "{file}", "--smoke-test"],
        ["train", "smoke", "--out", "{free}", "--device", "banana"],
        ["train", "smoke", "--out", "{free}", "--device", "meta"],
        ["experiments.claims", "report", "--results", "{folder}", "--out", "{free}"],
    ],
)
def test_unwritable_paths_are_named(words, tmp_path, monkeypatch, capsys):
    places = {"file": tmp_path / "file", "folder": tmp_path / "folder", "free": tmp_path / "free"}
    places["file"].touch()
    places["folder"].mkdir()
    command = app
    if words[0].startswith("experiments."):
        command, words = importlib.import_module(f"{words[0]}.__main__").app, words[1:]
    monkeypatch.setattr(sys, "argv", ["vitrail", *(word.format(**places) for word in words)])
    with pytest.raises(SystemExit) as stop:
        main(command)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "→" in error and "Traceback" not in error
    assert any(str(place) in error for place in places.values()) or words[-1] in error
    assert not places["free"].exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read all")
def test_unreadable_files_are_named(tmp_path, monkeypatch, capsys):
    (closed := tmp_path / "closed").mkdir(0)
    for words in (["ledger"], ["data", "show"], ["eval"]):
        more = ["questions"] if words == ["eval"] else []
        monkeypatch.setattr(sys, "argv", ["vitrail", *words, str(closed), *more])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 2 and str(closed) in capsys.readouterr().err


def test_warnings_are_one_line_without_code(monkeypatch, capsys):
    def warn() -> None:
        warnings.warn("too few images", stacklevel=2)

    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(
        warnings, "showwarning", lambda message, *place: sys.stderr.write(warnings.formatwarning(message))
    )
    monkeypatch.setattr(sys, "argv", ["vitrail"])
    (application := App()).default(warn)
    with pytest.raises(SystemExit):
        main(application)
    assert capsys.readouterr().err == "warning: too few images\n"


def test_remedies_name_options(tmp_path, monkeypatch, capsys):
    (tmp_path / "chat.json").write_text(
        '[{"image": "a.png", "conversations": [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "a"}]}]'
    )
    options = ["data", "show", str(tmp_path / "chat.json"), "--image-folder", str(tmp_path / "nowhere")]
    monkeypatch.setattr(sys, "argv", ["vitrail", *options])
    with pytest.raises(SystemExit):
        main()
    assert "give an existing folder as --image-folder FOLDER" in capsys.readouterr().err


def test_packages_load_lazily():
    assert vitrail.nn.Block
    with pytest.raises(AttributeError, match="it has evaluate, load, tokenize, tokenize_videos, train, nn, processing"):
        _ = vitrail.attic


def vitrail_in_a_shell(*words: str, reader: str = "", **environment: str) -> subprocess.CompletedProcess:
    """`vitrail words | reader`, whose status is vitrail's."""
    line = f"{shlex.join([sys.executable, '-m', 'vitrail', *words])}{reader}; exit ${{PIPESTATUS[0]}}"
    variables = {**os.environ, **environment}
    return subprocess.run(["bash", "-c", line], capture_output=True, check=False, env=variables)


@pytest.fixture
def words(tmp_path) -> list[str]:
    """A command that is quick to load and prints what is not ASCII."""
    Tokenizer.train(["ab"], 260).save(tmp_path)
    return ["text-tokenizer", "show", "a b", "--tokenizer", str(tmp_path)]


def test_closed_pipe_exits_quietly(words):
    out = vitrail_in_a_shell(*words, reader=" | true")
    assert (out.returncode, out.stderr) == (0, b"")


def test_terminal_without_unicode_gets_replacements(words):
    out = vitrail_in_a_shell(*words, PYTHONIOENCODING="ascii")
    assert (out.returncode, out.stderr) == (0, b"")
    assert b"?" in out.stdout
