"""Datasets of the Hugging Face hub, through its own client, which resumes, verifies and keeps its own cache."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitrail.data.sources.table import Source
from vitrail.errors import DataError


def snapshot(row: Source, say: Callable[[str], Any]) -> Path:
    """The folder that holds a dataset's files."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise DataError(
            f"huggingface_hub is needed to fetch {row.package} and is not installed", "pip install 'vitrail[hf]'"
        ) from None
    say(f"hf:{row.package} at {row.version}: its licence is on its page, https://huggingface.co/datasets/{row.package}")
    try:
        return Path(snapshot_download(row.package, repo_type="dataset", revision=row.version))
    # Its errors are many, of several libraries, and differ between versions; all of them say why.
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(
            f"hf:{row.package} cannot be fetched: {reason}",
            "check the name and the network, log in with `hf auth login` if it is gated, or give a local folder",
        ) from error
