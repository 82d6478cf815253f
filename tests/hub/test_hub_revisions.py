"""Hub models and data are pinned by revision, and the files of a local folder do not contact the hub."""

import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from training.test_trainer import model
from vitrail import hub
from vitrail.cli import _take_common_options
from vitrail.data.sources import fetch_source, hub_snapshots
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.checkpoint_conversion import import_checkpoint
from vitrail.hub.checkpoint_info import resolve_path, resolve_reference
from vitrail.hub.delta_checkpoint import BaseCheckpoint
from vitrail.recipe.recipe_identity import RUN_FILE, check_run_folder

client = pytest.importorskip("huggingface_hub")
COMMIT = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture
def snapshots(tmp_path, monkeypatch):
    """A hub whose only snapshot is a small Llama; returns the folder and the list of requests."""
    folder, asked = tmp_path / "cache" / "models--owner--name" / "snapshots" / COMMIT, []
    hub.to_hf(model(), folder)

    def download(name, *, revision=None, **options):
        asked.append((name, revision, options))
        return str(folder)

    monkeypatch.setattr(client, "snapshot_download", download)
    monkeypatch.setattr(client.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub_snapshots, "_commits", {})
    monkeypatch.setattr(hub_snapshots, "_default_revision", [])
    monkeypatch.delenv(hub_snapshots.ALLOW_VARIABLE, raising=False)
    return folder, asked


@pytest.mark.parametrize("revision", [COMMIT, "main", "refs/pr/3"])
def test_revision_in_the_name(snapshots, revision):
    folder, asked = snapshots
    assert resolve_path(f"owner/name@{revision}") == folder
    assert {row[:2] for row in asked} == {("owner/name", revision)}
    hub.load(f"owner/name@{revision}")


def test_option_of_the_command_line(snapshots):
    words = ["ask", "--revision", "v2", "owner/name", "--allow-hub"]
    _take_common_options(words)
    assert words == ["ask", "owner/name"] and os.environ.pop(hub_snapshots.ALLOW_VARIABLE) == "1"
    resolve_path("owner/name")
    resolve_path("owner/name@v3")
    fetch_source("hf:owner/data", log=lambda _: None)
    fetch_source("hf:owner/data@v3", log=lambda _: None)
    assert list(dict.fromkeys(row[1] for row in snapshots[1])) == ["v2", "v3"]


@pytest.mark.parametrize("wrong", ["", "../x", "a b", "--"])
def test_what_is_no_revision_is_refused(snapshots, wrong):
    with pytest.raises(ConfigError, match="is not a revision"):
        resolve_path(f"owner/name@{wrong}")


def test_revision_is_displayed_and_recorded(snapshots, tmp_path, capsys):
    resolve_path("owner/name")
    assert f"owner/name: revision {COMMIT}; to pin it, write owner/name@{COMMIT}" in capsys.readouterr().err
    resolve_path("owner/name")
    assert not capsys.readouterr().err  # once
    fetch_source("hf:owner/data@main", log=lambda _: None)
    out = import_checkpoint("owner/name", tmp_path / "imported").folder
    assert json.loads((out / "vitrail.json").read_text())["source"] == {"name": "owner/name", "revision": COMMIT}
    hub.load(out)
    run = {"seed": 1, "stages": [{"steps": 3}]}
    check_run_folder(run, tmp_path)
    check_run_folder(run, tmp_path)  # resumes
    recorded = json.loads((tmp_path / RUN_FILE).read_text())
    assert recorded["hub_revisions"] == {"hf:owner/data": COMMIT, "owner/name": COMMIT}


def make_delta(folder: Path, base: Path) -> None:
    """A local checkpoint that names a base of the hub."""
    hub.save(model(), folder)
    metadata = json.loads((folder / "vitrail.json").read_text())
    metadata["base"] = {**BaseCheckpoint.from_model(str(base)).to_dict(), "name_or_path": "owner/name"}
    (folder / "vitrail.json").write_text(json.dumps(metadata))


def test_local_folder_does_not_contact_the_hub(snapshots, tmp_path, monkeypatch):
    folder, asked = snapshots
    make_delta(tmp_path / "delta", folder)
    asked.clear()
    resolve_reference("owner/name", tmp_path / "delta")
    assert all(options["local_files_only"] for _, _, options in asked)  # its cache alone
    asked.clear()
    resolve_reference("owner/name", folder)  # a snapshot that the user named
    monkeypatch.setenv(hub_snapshots.ALLOW_VARIABLE, "1")
    resolve_reference("owner/name", tmp_path / "delta")
    assert not any("local_files_only" in options for _, _, options in asked)


def test_no_connection_is_opened_for_a_local_folder(tmp_path, monkeypatch):
    """With the real client, which is not offline here: a connection would raise another error."""
    monkeypatch.setattr(client.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(client.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    tried = []

    def connect(*given, **_more):
        tried.append(given)
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    base = tmp_path / "base"
    hub.save(model(), base)
    make_delta(tmp_path / "delta", base)
    with pytest.raises(CheckpointError, match="the files of a local folder do not contact the hub") as caught:
        hub.load(tmp_path / "delta")
    assert "hf download owner/name" in caught.value.remedy and "--allow-hub" in caught.value.remedy
    assert not tried
    shutil.rmtree(tmp_path / "delta")
    with pytest.raises(CheckpointError, match="download failed"):
        hub.load("owner/name")
    assert tried
