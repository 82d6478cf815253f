"""Cached data is verified by checksum: `vitrail data verify`."""

import hashlib
import subprocess
from pathlib import Path

import pytest

from data.sources.test_fetch import client, quiet  # noqa: F401, a fixture
from vitrail.cli.data_command import app
from vitrail.data.shards import write_shards
from vitrail.data.sources import fetch_source, is_fetched, verify_source
from vitrail.data.sources.verification import verify_shards, verify_snapshot
from vitrail.errors import DataError
from vitrail.hub import packages
from vitrail.hub.packages import Package, PackageMember


def verify(*words: str) -> None:
    app(["verify", *words], result_action="return_value")


def flip(path: Path) -> None:
    """Change one bit, and neither the size nor the time."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_source(client, capsys):  # noqa: F811
    folder = fetch_source("made", log=quiet)
    verify("made")
    assert "made: 2 files, 0.0 MB: verified" in capsys.readouterr().out
    victim = folder / "package" / "a" / "1.png"
    flip(victim)
    assert is_fetched("made")  # by number and size
    with pytest.raises(DataError, match=f"{victim} was changed after it was stored"):
        verify()  # all that are fetched
    flip(victim)
    verify()
    (folder / "more.txt").write_text("x")
    assert verify_source("made").damaged == (f"{folder / 'more.txt'} was added",)
    (folder / "more.txt").unlink()
    victim.unlink()
    assert verify_source("made").damaged == (f"{victim} is missing",)
    (folder / ".vitrail-sha256").unlink()
    with pytest.raises(DataError, match="without checksums"):
        verify("made")
    assert client.calls == 1


def test_what_is_not_fetched_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path))
    with pytest.raises(DataError, match="twemoji is not fetched") as caught:
        verify("twemoji")
    assert "vitrail data get twemoji" in caught.value.remedy


def test_package_model(monkeypatch, tmp_path):
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path))
    member = PackageMember("model.bin", "x", 0, 100, hashlib.sha256(bytes(100)).hexdigest())
    monkeypatch.setitem(packages.PACKAGES, "tiny", Package("pip", "tiny", "1", "MIT", 1, "a model", (member,)))
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "model.bin").write_bytes(bytes(100))
    verify()
    flip(tmp_path / "tiny" / "model.bin")
    with pytest.raises(DataError, match=r"model\.bin was changed"):
        verify("tiny")


def test_shards(tmp_path):
    shards = write_shards(({"__key__": str(i), "txt": "a" * 50} for i in range(7)), tmp_path, max_samples=3, quiet=True)
    assert verify_shards(tmp_path).files == len(shards) == 3
    verify(str(tmp_path), str(shards[0]))
    assert subprocess.run(["sha256sum", "--check", f"{shards[0].name}.sha256"], cwd=tmp_path).returncode == 0
    flip(shards[1])
    assert verify_shards(tmp_path).damaged == (f"{shards[1]} was changed after it was stored",)
    with pytest.raises(DataError, match="1 files are damaged"):
        verify(str(tmp_path))


def test_killed_writer_adds_the_missing_checksum(tmp_path):
    samples = [{"__key__": str(i), "txt": "a" * 50} for i in range(6)]
    first = write_shards(samples[:3], tmp_path, max_samples=3, quiet=True)[0]
    sums = first.with_name(f"{first.name}.sha256")
    before = sums.read_text()
    sums.unlink()
    assert verify_shards(tmp_path).damaged == (f"{first} has no {sums.name}",)
    write_shards(samples, tmp_path, max_samples=3, quiet=True)
    assert sums.read_text() == before and not verify_shards(tmp_path).damaged


def test_snapshot_of_the_hub(tmp_path):
    """Large files are named by SHA-256, small ones by the SHA-1 of git."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "x"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    large, small = b"weights" * 100, b"{}\n"
    names = hashlib.sha256(large).hexdigest(), "0967ef424bce6791893e9a57bb952f80fd536e93"  # of `git hash-object`
    for name, blob, data in zip(("model.safetensors", "config.json"), names, (large, small), strict=True):
        (blobs / blob).write_bytes(data)
        (snapshot / name).symlink_to(blobs / blob)
    assert verify_snapshot(snapshot) == (2, len(large) + len(small), ())
    flip(blobs / names[0])
    flip(blobs / names[1])
    assert len(verify_snapshot(snapshot).damaged) == 2
    (blobs / names[0]).unlink()
    assert f"{snapshot / 'model.safetensors'} is missing" in verify_snapshot(snapshot).damaged
