"""Haystacks and needles of the needle search: rendered scenes, or frames of a video."""

import io
from collections.abc import Iterator

import torch
from PIL import Image
from torch import Tensor

from vitrail.data.formats import Sample
from vitrail.data.formats.sample import build_question_turns
from vitrail.data.scenes.atlas import Atlas
from vitrail.data.scenes.scene_source import SceneSource, SceneSourceConfig
from vitrail.data.video_file import VideoFile
from vitrail.errors import ConfigError
from vitrail.evals.suites.needle_search import Frames, Haystack

BATCH = 64
QUESTION = "One frame of this video shows nothing but a word. Which word is it? Answer with the word alone."


def scene_haystack(atlas: Atlas, preset: str, image_size: int, seed: int) -> Haystack:
    """Haystack of rendered scenes without words."""
    source = _open_scenes(atlas, preset, {"word_probability": 0.0}, image_size, seed)
    return lambda count: [
        _to_image(pixels)
        for start in range(0, count, BATCH)
        for pixels in source.render_indices(torch.arange(start, min(count, start + BATCH))).pixels
    ]


def video_haystack(video: VideoFile, max_short_side: int) -> Haystack:
    """Haystack of video frames at uniform intervals, downscaled to a shorter side of at most `max_short_side`."""
    scale = min(1.0, max_short_side / min(video.height, video.width))
    size = max(1, round(video.height * scale)), max(1, round(video.width * scale))

    def haystack(count: int) -> Frames:
        if count > len(video):
            raise ConfigError(f"{video.name} has {len(video):,} frames, fewer than {count:,}", "use fewer frames")
        return [Image.fromarray(frame) for frame in video.sample_frames(count=count, size=size).frames]

    return haystack


def make_word_needles(atlas: Atlas, count: int, image_size: int, seed: int) -> list[Sample]:
    """Make needles: one image each of `count` different words."""
    source = _open_scenes(atlas, "words", {"objects": [1, 1], "word_probability": 1.0}, image_size, seed)
    table = atlas.table
    available = {table.names[concept] for concept in table.concept[table.rows_of_kind("word")].tolist()}
    if not 1 <= count <= len(available):
        raise ConfigError(f"{count} word needles", f"set 1 … {len(available)}: the atlas has {len(available)} words")
    needles: dict[str, Sample] = {}
    for word, pixels in _iter_word_images(source):
        if word not in needles:
            file = io.BytesIO()
            _to_image(pixels).save(file, "PNG")
            needles[word] = Sample(
                id=word, images=(file.getvalue(),), turns=build_question_turns(QUESTION), answers=(word,)
            )
        if len(needles) == count:
            break
    return list(needles.values())


def _iter_word_images(source: SceneSource) -> Iterator[tuple[str, Tensor]]:
    """Yield words and images of them, without end."""
    table, start = source.atlas.table, 0
    while True:
        rendered = source.render_indices(torch.arange(start, start + BATCH))
        for sprite, pixels in zip(rendered.scenes.sprite[:, 0].tolist(), rendered.pixels, strict=True):
            yield table.names[table.concept[sprite]], pixels
        start += BATCH


def _open_scenes(
    atlas: Atlas, preset: str, scene_changes: dict[str, object], image_size: int, seed: int
) -> SceneSource:
    config = SceneSourceConfig(
        atlas="-", preset=preset, scene={**scene_changes, "combinations": "all"}, image_size=image_size, seed=seed
    )
    return SceneSource(config, atlas)


def _to_image(pixels: Tensor) -> Image.Image:
    """Convert uint8 (3, H, W) to a PIL image."""
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
