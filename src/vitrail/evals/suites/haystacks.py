"""What a needle is hidden in, and needles: scenes drawn by us, or the frames of a video."""

import io
from collections.abc import Iterator

import torch
from PIL import Image
from torch import Tensor

from vitrail.data.formats import Sample
from vitrail.data.formats.sample import asked
from vitrail.data.scenes.source import ScenesConfig, SceneSource
from vitrail.data.scenes.sprites import Atlas
from vitrail.data.video import Film
from vitrail.errors import ConfigError
from vitrail.evals.suites.needle import Frames, Haystack

BATCH = 64
QUESTION = "One frame of this video shows nothing but a word. Which word is it? Answer with the word alone."


def scenes(atlas: Atlas, preset: str, side: int, seed: int) -> Haystack:
    """Scenes in which nothing is written."""
    source = _source(atlas, preset, {"word": 0.0}, side, seed)
    return lambda count: [
        _picture(pixels)
        for start in range(0, count, BATCH)
        for pixels in source.draw(torch.arange(start, min(count, start + BATCH))).pixels
    ]


def frames_of(film: Film, side: int) -> Haystack:
    """Frames from the middles of equal parts of a video, their shorter side brought to `side` where it is longer."""
    scale = min(1.0, side / min(film.height, film.width))
    size = max(1, round(film.height * scale)), max(1, round(film.width * scale))

    def haystack(count: int) -> Frames:
        if count > len(film):
            raise ConfigError(f"{film.name}: {count:,} frames of a video that has {len(film):,}", "give fewer")
        return [Image.fromarray(frame) for frame in film.sample(count=count, size=size).frames]

    return haystack


def words(atlas: Atlas, count: int, side: int, seed: int) -> list[Sample]:
    """Needles: pictures of a word each, no two of the same."""
    source = _source(atlas, "words", {"objects": [1, 1], "word": 1.0}, side, seed)
    table = atlas.table
    known = {table.names[concept] for concept in table.concept[table.rows("word")].tolist()}
    if not 1 <= count <= len(known):
        raise ConfigError(
            f"{count} needles of a word each", f"the sprites have {len(known)} words: give at least 1, and no more"
        )
    found: dict[str, Sample] = {}
    for word, pixels in _written(source):
        if word not in found:
            file = io.BytesIO()
            _picture(pixels).save(file, "PNG")
            found[word] = Sample(id=word, pictures=(file.getvalue(),), turns=asked(QUESTION), answers=(word,))
        if len(found) == count:
            break
    return list(found.values())


def _written(source: SceneSource) -> Iterator[tuple[str, Tensor]]:
    """Words without end, and the scene of each."""
    table, start = source.atlas.table, 0
    while True:
        drawn = source.draw(torch.arange(start, start + BATCH))
        for sprite, pixels in zip(drawn.scenes.sprite[:, 0].tolist(), drawn.pixels, strict=True):
            yield table.names[table.concept[sprite]], pixels
        start += BATCH


def _source(atlas: Atlas, preset: str, scene: dict[str, object], side: int, seed: int) -> SceneSource:
    config = ScenesConfig(atlas="-", preset=preset, scene={**scene, "combinations": "all"}, side=side, seed=seed)
    return SceneSource(config, atlas)


def _picture(pixels: Tensor) -> Image.Image:
    """uint8 (3, H, W)"""
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
