"""`vitrail data`: the table, and fetching with a client that only pretends."""

import hashlib
import io
import shutil
import tarfile
from pathlib import Path

import pytest

from vitrail.cli.data import app, make, show
from vitrail.data.episodes import WORLDS
from vitrail.data.scenes.config import PRESETS
from vitrail.data.sources import SOURCES, Source
from vitrail.data.sources.clients import CLIENTS
from vitrail.errors import DataError


@pytest.fixture
def made(tmp_path, monkeypatch) -> Path:
    """A source called "made", and an empty cache; gives where its files will be."""
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as archive:
        info = tarfile.TarInfo("package/x.png")
        info.size = 3
        archive.addfile(info, io.BytesIO(b"one"))
    sha256 = hashlib.sha256((tmp_path / "a.tgz").read_bytes()).hexdigest()
    monkeypatch.setitem(SOURCES, "made", Source("npm", "some-package", "1.2", sha256, "MIT", 3, "made for a test"))
    monkeypatch.setitem(CLIENTS, "npm", lambda row, into: Path(shutil.copy(tmp_path / "a.tgz", into)))
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "data" / "made" / "files"


def run(*words: str) -> None:
    app(list(words), result_action="return_value")


def test_the_list_says_where_from_and_what_is_here(made, capsys):
    run("list")
    lines = capsys.readouterr().out.splitlines()
    assert all(any(line.startswith(name) and row.licence in line for line in lines) for name, row in SOURCES.items())
    (line,) = (line for line in lines if line.startswith("made"))
    assert "npm some-package 1.2" in line and "3 MB" in line and "✓" not in line
    run("get", "made")
    run("list")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("made "))
    assert "✓" in line


def test_get_says_where_it_is(made, capsys):
    run("get", "made", "made")
    told = capsys.readouterr()
    assert told.out.splitlines() == [str(made)] * 2 and (made / "package" / "x.png").read_bytes() == b"one"
    assert told.err.count("fetching made") == 1 and "licence MIT" in told.err


def test_a_name_that_nobody_knows(made):
    with pytest.raises(DataError, match="no source is called 'maid'"):
        run("get", "maid")


@pytest.mark.parametrize(
    ("command", "names"),
    [
        (make, {*PRESETS, *WORLDS} | {policy for world in WORLDS.values() for policy in world.policies}),
        (show, set(PRESETS)),
    ],
)
def test_whatever_can_be_asked_for_is_named_in_the_help(command, names):
    said = command.__doc__.replace(",", " ").replace("(", " ").replace(")", " ").replace(".", " ").split()
    assert names <= set(said)
