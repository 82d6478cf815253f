"""A data set as one picture: some of its samples, spread over it, with their words."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitrail.data.episodes.read import are_episodes
from vitrail.data.formats import guess, open_format
from vitrail.data.formats.sample import Sample, Samples
from vitrail.data.order import permuted
from vitrail.data.pictures import READERS, Pictures
from vitrail.data.pictures import pictures as open_pictures
from vitrail.data.scenes.config import PRESETS
from vitrail.data.scenes.library import open_atlas
from vitrail.data.scenes.source import ScenesConfig, SceneSource
from vitrail.data.shards import Shards, ShardsConfig
from vitrail.data.sources import SOURCES
from vitrail.data.told import Teller
from vitrail.errors import DataError, VitrailError, nearest
from vitrail.show.episodes import draw_episodes
from vitrail.show.sheet import Tile, draw_sheet


def draw_data(
    what: str,
    *,
    count: int = 24,
    seed: int = 0,
    side: int = 192,
    pictures: Path | None = None,
    vendors: Sequence[str] = (),
    atlas: str = "emoji",
) -> Image.Image:
    """A contact sheet of a source by name, of scenes by their preset, of shards, of episodes, or of a file or folder in
    any format that is read."""
    if count < 1:
        raise DataError(f"a sheet of {count} samples", "ask for at least one")
    if what in PRESETS:
        config = ScenesConfig(atlas=atlas, preset=what, scene={"vendors": list(vendors)}, side=side, seed=seed)
        tiles = list(_scenes(SceneSource(config, open_atlas(atlas)), count))
        return draw_sheet(tiles, f"scenes: {what}", under=f"seed {seed}, made from {', '.join(vendors) or atlas}")
    path = Path(what)
    if what in SOURCES or what.startswith("hf:"):
        return _of_source(open_pictures(what), what, count, seed, side)
    if are_episodes(path):
        return draw_episodes(path, count=count, seed=seed)
    if _are_shards(path):
        shards = Shards(ShardsConfig(paths=what))
        return draw_sheet(list(_shards(shards, _spread(len(shards), count, seed))), f"{what}: {len(shards):,} samples")
    if not path.exists():
        raise DataError(
            f"there is no data {what!r}", f"give a file, a folder, or a name: {nearest(what, [*READERS, *PRESETS])}"
        )
    kind = guess(path)
    samples = open_format(kind, path, **({} if pictures is None else {"pictures": pictures}))
    tiles = [_sample(samples, i) for i in _spread(len(samples), count, seed)]
    return draw_sheet(tiles, f"{path.name}: {len(samples):,} samples", under=kind)


def _are_shards(path: Path) -> bool:
    """A tar, a folder of nothing else, or a pattern."""
    if path.is_dir():
        names = [file.name for file in path.iterdir() if not file.name.startswith(".")]
        return bool(names) and all(name.endswith((".tar", ".tar.vidx")) for name in names)
    return path.suffix == ".tar" or (not path.exists() and any(mark in str(path) for mark in "*{?"))


def _of_source(opened: Pictures, name: str, count: int, seed: int, side: int) -> Image.Image:
    items = _spread(len(opened), count, seed)
    abouts = [opened.about(i) for i in items]
    tiles = [
        Tile(_flat(opened.rgba(i, side)), [about.name, *_some(about.keywords)])
        for i, about in zip(items, abouts, strict=True)
    ]
    return draw_sheet(tiles, f"{name}: {len(opened):,} pictures")


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
        yield _told(Image.fromarray(told.pixels), told.truth)


def _told(picture: Image.Image, truth: Mapping[str, Any]) -> Tile:
    asked = [f"{q['question']} {q['answer']}" for q in truth["questions"][:2]]
    return Tile(
        picture, [truth["caption"], *asked], [(tuple(thing["box"]), thing["name"]) for thing in truth["objects"]]
    )


def _shards(shards: Shards, items: list[int]) -> Iterator[Tile]:
    for i in items:
        sample = shards[i]
        picture = next((v for v in sample.values() if isinstance(v, np.ndarray) and v.ndim == 3), None)
        shown = _blank() if picture is None else Image.fromarray(picture)
        truth = sample.get("json")
        if isinstance(truth, dict) and {"caption", "questions", "objects"} <= truth.keys():  # scenes of our own
            yield _told(shown, truth)
            continue
        yield Tile(shown, [str(v)[:200] for v in sample.values() if isinstance(v, str | int)])


def _sample(samples: Samples, item: int) -> Tile:
    try:
        sample = samples[item]
        picture = sample.image() if sample.pictures else _first_frame(sample)
    except VitrailError as error:  # the sheet shows what is wrong in its place
        return Tile(_blank(), [error.problem])
    W, H = picture.size
    boxes = [
        ((x0 / W, y0 / H, x1 / W, y1 / H), thing.category)
        for thing in sample.instances
        for x0, y0, x1, y1 in [thing.box]
    ]
    words = [*sample.captions[:2], *(turn.text for turn in sample.turns[:2]), *_some(sample.answers)]
    return Tile(picture, [line[:200] for line in words if line] or [sample.label or sample.id], boxes)


def _first_frame(sample: Sample) -> Image.Image:
    if not sample.videos:
        return _blank()
    return Image.fromarray(sample.film().sample(count=1).frames[0])


def _blank() -> Image.Image:
    return Image.new("RGB", (64, 64), (230, 228, 222))
