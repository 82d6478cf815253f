"""The front door: help is light, errors are words, every command shows an example."""

import subprocess
import sys

import pytest

import vitrail
from vitrail.cli import COMMANDS, app, main

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


def test_rooms_load_when_named():
    assert vitrail.nn.Block
    with pytest.raises(AttributeError, match="rooms"):
        _ = vitrail.attic
