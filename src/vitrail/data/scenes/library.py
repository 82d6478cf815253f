"""Atlases by name: built once from the sources they are made of, and kept."""

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from vitrail.data.pictures import pictures
from vitrail.data.scenes import collect, frames, letters, plurals, sprites
from vitrail.data.scenes.collect import sprites_of
from vitrail.data.scenes.frames import frame_sprites
from vitrail.data.scenes.letters import word_sprites
from vitrail.data.scenes.sprites import Atlas, Sprite
from vitrail.data.sources import home, source
from vitrail.errors import DataError, nearest

ATLASES: dict[str, tuple[str, ...]] = {
    # the vendors whose things it holds, each of one design; words and frames are in all of them
    "emoji": ("twemoji", "noto", "fluent", "openmoji"),
    "flat": ("fluent-flat",),  # plain shapes to draw; the judge learned from none of them
    "older": ("noto-v1", "emojione"),  # more designs to read
}


def open_atlas(name_or_file: str | Path) -> Atlas:
    """An atlas of the table, fetched and built the first time, or a file that `Atlas.save` wrote."""
    name = str(name_or_file)
    if name not in ATLASES:
        if Path(name).suffix != ".safetensors":
            raise DataError(f"there is no atlas {name!r}", f"give a .safetensors file, or {nearest(name, ATLASES)}")
        return Atlas.load(name)
    file = home() / "atlases" / f"{name}-{_made_of(name)}.safetensors"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        Atlas.build(_shown(name)).save(partial)
        partial.replace(file)
    return Atlas.load(file)


def _shown(name: str) -> Iterator[Sprite]:
    things = sprites_of([pictures(vendor) for vendor in ATLASES[name]])
    yield from tqdm(things, desc=f"atlas {name}", unit=" sprites", file=sys.stderr, disable=None)
    yield from word_sprites()
    yield from frame_sprites()


def _made_of(name: str) -> str:
    """Another version of a source, or of what makes sprites of it, makes another atlas."""
    rows = [source(part) for part in (*ATLASES[name], "emojibase")]
    made = hashlib.sha256(repr([(row.package, row.version) for row in rows]).encode())
    for module in (collect, frames, letters, plurals, sprites):
        made.update(Path(module.__file__).read_bytes())
    return made.hexdigest()[:12]
