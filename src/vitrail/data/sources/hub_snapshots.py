"""Snapshots of the Hugging Face hub: which revision is opened, displayed and recorded, and who may contact the hub.

A name is `owner/name` or `owner/name@revision`. The revision is a commit, a branch or a tag. A branch can change, so
the commit that it stands for is displayed once, and recorded in the files that are made from it.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any, Literal

from vitrail.errors import ConfigError

ALLOW_VARIABLE = "VITRAIL_ALLOW_HUB"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REVISION = re.compile(r"\w[\w./-]*")
_commits: dict[str, str] = {}  # what this process opened: name → commit
_default_revision: list[str] = []


def set_default_revision(revision: str) -> None:
    """Use this revision for the names of this process that have none (`--revision`)."""
    check_revision(revision)
    _default_revision[:] = [revision]


def check_revision(revision: str) -> None:
    """Raise if a text cannot be a commit, a branch or a tag."""
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise ConfigError(f"{revision!r:.80} is not a revision", "give a commit, a branch or a tag of the hub")


def split_revision(name: str) -> tuple[str, str | None]:
    """Split `owner/name@revision`. Without a revision, return the default one of this process, or None."""
    name, separator, revision = name.partition("@")
    if separator:
        check_revision(revision)
    return name, revision or (_default_revision[0] if _default_revision else None)


def fetch_snapshot(
    name: str,
    revision: str | None,
    *,
    kind: Literal["model", "dataset"],
    may_download: bool = True,
    patterns: list[str] | None = None,
) -> Path:
    """Return the folder of a snapshot, and display and record its commit.

    Without `may_download`, only the cache on this machine is read, and the hub is not contacted.
    """
    from huggingface_hub import snapshot_download

    options: dict[str, Any] = {} if kind == "model" else {"repo_type": kind}
    if patterns is not None:
        options["allow_patterns"] = patterns
    if not may_download:
        options["local_files_only"] = True
    folder = Path(snapshot_download(name, revision=revision, **options))
    _record_commit(name if kind == "model" else f"hf:{name}", folder.name, revision)
    return folder


def _record_commit(name: str, commit: str, revision: str | None) -> None:
    if not _COMMIT.fullmatch(commit) or _commits.get(name) == commit:
        return
    _commits[name] = commit
    pin = "" if revision == commit else f"; to pin it, write {name}@{commit}"
    sys.stderr.write(f"{name}: revision {commit}{pin}\n")


def list_commits() -> dict[str, str]:
    """Return the hub snapshots that this process opened: name → commit. Names of datasets begin with hf:."""
    return dict(sorted(_commits.items()))


def may_contact_hub(folder: Path) -> bool:
    """Whether a model that the files of `folder` name may be downloaded.

    The user named a hub id if the folder is a snapshot of the hub. A folder of any other origin may contact the hub
    only if the user allows it.
    """
    if os.environ.get(ALLOW_VARIABLE) == "1":
        return True
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return False
    return Path(HF_HUB_CACHE).resolve() in folder.absolute().parents
