"""Draw a contact sheet of a dataset: some of its samples with their texts."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitrail.data.episodes.episode_dataset import is_episode_folder
from vitrail.data.formats import FORMATS, detect_format, open_dataset
from vitrail.data.formats.sample import Sample, SampleDataset
from vitrail.data.image_readers import READERS, ImageReader
from vitrail.data.image_readers import open_images as open_pictures
from vitrail.data.sampler import sample_indices
from vitrail.data.scene_annotations import SceneAnnotator
from vitrail.data.scenes.atlas_library import open_atlas
from vitrail.data.scenes.config import PRESETS
from vitrail.data.scenes.scene_source import SceneSource, SceneSourceConfig
from vitrail.data.shards import ShardDataset, ShardsConfig
from vitrail.data.sources import SOURCES
from vitrail.data.sources.fetch import LogFn, log_to_stderr
from vitrail.errors import DataError, VitrailError, suggest_name
from vitrail.plots.contact_sheet import Tile, draw_contact_sheet
from vitrail.plots.episode_sheet import draw_episodes


def draw_dataset(
    source: str,
    *,
    count: int = 24,
    seed: int = 0,
    image_size: int = 192,
    image_folder: Path | None = None,
    vendors: Sequence[str] = (),
    atlas: str = "emoji",
    log: LogFn = log_to_stderr,
) -> Image.Image:
    """Draw a contact sheet of a dataset.

    `source` is a named image source, a scene preset, shards, episodes, or a file or folder in any supported format. The
    tile of an unreadable sample shows the error, and `log` gets their number. If none is readable, raise `DataError`.
    """
    if count < 1:
        raise DataError(f"a contact sheet of {count} samples", "use at least 1")
    if source in PRESETS:
        config = SceneSourceConfig(
            atlas=atlas, preset=source, scene={"vendors": list(vendors)}, image_size=image_size, seed=seed
        )
        tiles = list(_iter_scene_tiles(SceneSource(config, open_atlas(atlas)), count))
        return draw_contact_sheet(
            tiles, f"scenes: {source}", subtitle=f"seed {seed}, sprites of {', '.join(vendors) or atlas}"
        )
    path = Path(source)
    if source in SOURCES or source.startswith("hf:"):
        return _draw_source(open_pictures(source), source, count, seed, image_size)
    if is_episode_folder(path):
        return draw_episodes(path, count=count, seed=seed)
    if _is_shards(path):
        shards = ShardDataset(ShardsConfig(paths=source))
        indices = sample_indices(len(shards), count, seed)
        tiles = _make_tiles(source, partial(_make_shard_tile, shards), indices, log)
        return draw_contact_sheet(tiles, f"{source}: {len(shards):,} samples")
    if not path.exists():
        raise DataError(
            f"no dataset, file or folder {source!r}",
            f"give a file, a folder, or a name: {suggest_name(source, [*READERS, *PRESETS])}",
        )
    kind = detect_format(path)
    samples = open_dataset(kind, path, **({} if image_folder is None else {FORMATS[kind].media_option: image_folder}))
    indices = sample_indices(len(samples), count, seed)
    tiles = _make_tiles(source, partial(_make_sample_tile, samples), indices, log)
    return draw_contact_sheet(tiles, f"{path.name}: {len(samples):,} samples", subtitle=kind)


def _make_tiles(source: str, make_tile: Callable[[int], Tile], indices: Sequence[int], log: LogFn) -> list[Tile]:
    """Make the tiles of samples. Count the unreadable ones, and refuse a dataset without any readable sample."""
    tiles: list[Tile] = []
    errors: list[VitrailError] = []
    for index in indices:
        try:
            tiles.append(make_tile(index))
        except VitrailError as error:
            errors.append(error)
            tiles.append(Tile(_make_blank_image(), [error.problem]))
    if errors and len(errors) == len(indices):
        remedy = re.sub(r"(image|video)_folder=FOLDER", "--image-folder FOLDER", errors[0].remedy)
        problem = f"{source}: none of {len(indices)} samples can be read; the first: {errors[0].problem}"
        raise DataError(problem, remedy)
    if errors:
        log(f"{source}: {len(errors)} of {len(indices)} samples cannot be read; the first: {errors[0].problem}")
    return tiles


def _is_shards(path: Path) -> bool:
    """Whether a path is a tar file, a folder of tar files, or a glob pattern."""
    if path.is_dir():
        names = [file.name for file in path.iterdir() if not file.name.startswith(".")]
        return bool(names) and all(name.endswith((".tar", ".tar.vidx", ".tar.sha256")) for name in names)
    return path.suffix == ".tar" or (not path.exists() and any(mark in str(path) for mark in "*{?"))


def _draw_source(images: ImageReader, name: str, count: int, seed: int, image_size: int) -> Image.Image:
    items = sample_indices(len(images), count, seed)
    records = [images.get_record(i) for i in items]
    tiles = [
        Tile(_flatten_alpha(images.load_rgba(i, image_size)), [record.name, *_join_words(record.keywords)])
        for i, record in zip(items, records, strict=True)
    ]
    return draw_contact_sheet(tiles, f"{name}: {len(images):,} images")


def _join_words(words: Sequence[str], max_words: int = 4) -> list[str]:
    return [", ".join(words[:max_words])] if words else []


def _flatten_alpha(rgba: np.ndarray) -> Image.Image:
    """Composite over white."""
    picture = Image.fromarray(rgba, "RGBA")
    return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")


def _iter_scene_tiles(source: SceneSource, count: int) -> Iterator[Tile]:
    for annotation in SceneAnnotator(source, num_questions=2).annotate(0, count):
        yield _make_annotation_tile(Image.fromarray(annotation.pixels), annotation.ground_truth)


def _make_annotation_tile(image: Image.Image, annotations: Mapping[str, Any]) -> Tile:
    questions = [f"{q['question']} {q['answer']}" for q in annotations["questions"][:2]]
    return Tile(
        image,
        [annotations["caption"], *questions],
        [(tuple(thing["box"]), thing["name"]) for thing in annotations["objects"]],
    )


def _make_shard_tile(shards: ShardDataset, item: int) -> Tile:
    sample = shards.read_original(item)
    pixels = next((v for v in sample.values() if isinstance(v, np.ndarray) and v.ndim == 3), None)
    image = _make_blank_image() if pixels is None else Image.fromarray(pixels)
    annotations = sample.get("json")
    if isinstance(annotations, dict) and {"caption", "questions", "objects"} <= annotations.keys():  # rendered scenes
        return _make_annotation_tile(image, annotations)
    return Tile(image, [str(v)[:200] for v in sample.values() if isinstance(v, str | int)])


def _make_sample_tile(samples: SampleDataset, item: int) -> Tile:
    sample = samples[item]
    image = sample.load_image() if sample.images else _get_first_frame(sample)
    W, H = image.size
    boxes = [
        ((x0 / W, y0 / H, x1 / W, y1 / H), instance.category)
        for instance in sample.instances
        for x0, y0, x1, y1 in [instance.box]
    ]
    texts = [*sample.captions[:2], *(turn.text for turn in sample.turns[:2]), *_join_words(sample.answers)]
    return Tile(image, [text[:200] for text in texts if text] or [sample.label or sample.id], boxes)


def _get_first_frame(sample: Sample) -> Image.Image:
    if not sample.videos:
        return _make_blank_image()
    return Image.fromarray(sample.open_video().sample_frames(count=1).frames[0])


def _make_blank_image() -> Image.Image:
    return Image.new("RGB", (64, 64), (230, 228, 222))
