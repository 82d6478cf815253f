"""`vitrail data`: the table, and fetching with a client that only pretends."""

import hashlib
import io
import shutil
import tarfile
from pathlib import Path

import pytest

from vitrail.cli.data_command import app, draw_dataset, make_dataset
from vitrail.data.episodes import WORLDS
from vitrail.data.scenes.config import PRESETS
from vitrail.data.sources import SOURCES, SourceSpec
from vitrail.data.sources.package_clients import CLIENTS
from vitrail.errors import DataError


@pytest.fixture
def made(tmp_path, monkeypatch) -> Path:
    """A source called "made", and an empty cache; gives where its files will be."""
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as archive:
        info = tarfile.TarInfo("package/x.png")
        info.size = 3
        archive.addfile(info, io.BytesIO(b"one"))
    sha256 = hashlib.sha256((tmp_path / "a.tgz").read_bytes()).hexdigest()
    monkeypatch.setitem(SOURCES, "made", SourceSpec("npm", "some-package", "1.2", sha256, "MIT", 3, "made for a test"))
    monkeypatch.setitem(CLIENTS, "npm", lambda row, into: Path(shutil.copy(tmp_path / "a.tgz", into)))
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "data" / "made" / "files"


def run(*words: str) -> None:
    app(list(words), result_action="return_value")


def test_list_shows_origins_and_fetched_sources(made, capsys):
    run("list")
    lines = capsys.readouterr().out.splitlines()
    assert all(any(line.startswith(name) and row.licence in line for line in lines) for name, row in SOURCES.items())
    (line,) = (line for line in lines if line.startswith("made"))
    assert "npm some-package 1.2" in line and "3 MB" in line and "✓" not in line
    run("get", "made")
    run("list")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("made "))
    assert "✓" in line


def test_get_prints_the_folder(made, capsys):
    run("get", "made", "made")
    result = capsys.readouterr()
    assert result.out.splitlines() == [str(made)] * 2 and (made / "package" / "x.png").read_bytes() == b"one"
    assert result.err.count("fetching made") == 1 and "licence MIT" in result.err


def test_unknown_source_is_refused(made):
    with pytest.raises(DataError, match="no source is called 'maid'"):
        run("get", "maid")


@pytest.mark.parametrize(
    ("command", "names"),
    [
        (make_dataset, {*PRESETS, *WORLDS} | {policy for world in WORLDS.values() for policy in world.policies}),
        (draw_dataset, set(PRESETS)),
    ],
)
def test_help_lists_every_choice(command, names):
    output = command.__doc__.replace(",", " ").replace("(", " ").replace(")", " ").replace(".", " ").split()
    assert names <= set(output)
