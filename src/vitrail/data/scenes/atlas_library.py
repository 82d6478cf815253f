"""Atlas library: atlases by name, built once from their sources and cached."""

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from vitrail.data.image_readers import open_images
from vitrail.data.scenes import atlas, frame_sprites, plurals, sprite_collection, word_sprites
from vitrail.data.scenes.atlas import Atlas, Sprite
from vitrail.data.scenes.frame_sprites import draw_frame_sprites
from vitrail.data.scenes.sprite_collection import collect_sprites
from vitrail.data.scenes.word_sprites import draw_word_sprites
from vitrail.data.sources import get_cache_folder, get_source
from vitrail.errors import DataError, suggest_name

ATLASES: dict[str, tuple[str, ...]] = {
    # vendors of the things, one design each; all atlases also contain words and frames
    "emoji": ("twemoji", "noto", "fluent", "openmoji"),
    "flat": ("fluent-flat",),  # simple shapes for image generation; not in the judge's training data
    "older": ("noto-v1", "emojione"),  # additional designs for recognition
}


def open_atlas(name_or_file: str | Path) -> Atlas:
    """Return a named atlas, downloaded and built on first use, or load a file written by `Atlas.save`."""
    name = str(name_or_file)
    if name not in ATLASES:
        if Path(name).suffix != ".safetensors":
            raise DataError(f"unknown atlas {name!r}", f"give a .safetensors file, or {suggest_name(name, ATLASES)}")
        return Atlas.load(name)
    file = get_cache_folder() / "atlases" / f"{name}-{_build_hash(name)}.safetensors"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        Atlas.build(_iter_sprites(name)).save(partial)
        partial.replace(file)
    return Atlas.load(file)


def _iter_sprites(name: str) -> Iterator[Sprite]:
    things = collect_sprites([open_images(vendor) for vendor in ATLASES[name]])
    yield from tqdm(things, desc=f"atlas {name}", unit=" sprites", file=sys.stderr, disable=None)
    yield from draw_word_sprites()
    yield from draw_frame_sprites()


def _build_hash(name: str) -> str:
    """Return a hash of the source versions and of the code that makes the sprites."""
    rows = [get_source(part) for part in (*ATLASES[name], "emojibase")]
    digest = hashlib.sha256(repr([(row.package, row.version) for row in rows]).encode())
    for module in (sprite_collection, frame_sprites, word_sprites, plurals, atlas):
        digest.update(Path(module.__file__).read_bytes())
    return digest.hexdigest()[:12]
