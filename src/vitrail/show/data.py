"""A data set as one picture: some of its samples, spread over it, with their words."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from vitrail.data.formats import guess, open_format
from vitrail.data.formats.sample import Sample
from vitrail.data.order import permuted
from vitrail.data.pictures import READERS, pictures
from vitrail.data.scenes.config import PRESETS
from vitrail.data.scenes.library import open_atlas
from vitrail.data.scenes.source import ScenesConfig, SceneSource
from vitrail.data.shards import Shards, ShardsConfig
from vitrail.data.told import Teller
from vitrail.errors import DataError, VitrailError, nearest
from vitrail.show.sheet import Tile, draw_sheet


def draw_data(what: str, *, count: int = 24, seed: int = 0, side: int = 192, atlas: str = "emoji") -> Image.Image:
    """A contact sheet of a source by name, of scenes by their preset, of shards, or of a file or folder in any format
    that is read."""
    if what in PRESETS:
        source = SceneSource(ScenesConfig(atlas=atlas, preset=what, side=side, seed=seed), open_atlas(atlas))
        return draw_sheet(list(_scenes(source, count)), f"scenes: {what}", under=f"seed {seed}, made from {atlas}")
    if what in READERS:
        opened = pictures(what)
        items = _spread(len(opened), count, seed)
        abouts = [opened.about(i) for i in items]
        tiles = [
            Tile(_flat(opened.rgba(i, side)), [about.name, *_some(about.keywords)])
            for i, about in zip(items, abouts, strict=True)
        ]
        return draw_sheet(tiles, f"{what}: {len(opened):,} pictures")
    path = Path(what)
    if not path.exists() and not any(mark in what for mark in "*{?"):
        raise DataError(
            f"there is no data {what!r}", f"give a file, a folder, or a name: {nearest(what, [*READERS, *PRESETS])}"
        )
    if path.suffix == ".tar" or not path.exists():
        shards = Shards(ShardsConfig(paths=what))
        return draw_sheet(list(_shards(shards, _spread(len(shards), count, seed))), f"{what}: {len(shards):,} samples")
    kind = guess(path)
    samples = open_format(kind, path)
    return draw_sheet(
        list(_samples([samples[i] for i in _spread(len(samples), count, seed)])),
        f"{path.name}: {len(samples):,} samples",
        under=kind,
    )


def _spread(size: int, count: int, seed: int) -> list[int]:
    return sorted(permuted(i, size, seed) for i in range(min(count, size)))


def _some(words: Sequence[str], most: int = 4) -> list[str]:
    return [", ".join(words[:most])] if words else []


def _flat(rgba: np.ndarray) -> Image.Image:
    """Over white."""
    picture = Image.fromarray(rgba, "RGBA")
    return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")


def _scenes(source: SceneSource, count: int) -> Iterator[Tile]:
    for told in Teller(source, questions=2).told(0, count):
        asked = [f"{q['question']} {q['answer']}" for q in told.truth["questions"]]
        boxes = [(tuple(thing["box"]), thing["name"]) for thing in told.truth["objects"]]
        yield Tile(Image.fromarray(told.pixels), [told.truth["caption"], *asked], boxes)


def _shards(shards: Shards, items: list[int]) -> Iterator[Tile]:
    for i in items:
        sample = shards[i]
        picture = next((v for v in sample.values() if isinstance(v, np.ndarray) and v.ndim == 3), None)
        words = [str(v) for v in sample.values() if isinstance(v, str | int)]
        yield Tile(_blank() if picture is None else Image.fromarray(picture), [line[:200] for line in words])


def _samples(samples: list[Sample]) -> Iterator[Tile]:
    for sample in samples:
        try:
            picture = sample.image() if sample.pictures else _first_frame(sample)
        except VitrailError as error:  # the sheet shows what is wrong in its place
            yield Tile(_blank(), [sample.id, error.problem])
            continue
        W, H = picture.size
        boxes = [
            ((x0 / W, y0 / H, x1 / W, y1 / H), thing.category)
            for thing in sample.instances
            for x0, y0, x1, y1 in [thing.box]
        ]
        words = [*sample.captions[:2], *(turn.text for turn in sample.turns[:2]), *_some(sample.answers)]
        yield Tile(picture, [line[:200] for line in words if line] or [sample.label or sample.id], boxes)


def _first_frame(sample: Sample) -> Image.Image:
    if not sample.videos:
        return _blank()
    return Image.fromarray(sample.film().sample(count=1).frames[0])


def _blank() -> Image.Image:
    return Image.new("RGB", (64, 64), (230, 228, 222))
