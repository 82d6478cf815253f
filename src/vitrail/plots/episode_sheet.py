"""Draw episodes as a contact sheet with one row each, or save a clip that plays them side by side.

Shapes: T frames, H × W pixels.
"""

import math
from pathlib import Path

import numpy as np
from PIL import Image

from vitrail.data.episodes.episode_dataset import EpisodeDataset
from vitrail.data.episodes.frame_encoding import PLAYABLE_ENCODING, encode_frames
from vitrail.data.sampler import sample_indices
from vitrail.errors import DataError, VitrailError
from vitrail.plots.contact_sheet import Tile, draw_contact_sheet

CLIP_SUFFIXES = (".gif", ".mp4")
FRAMES_PER_ROW = 6  # frames per episode on a sheet
MAX_CLIP_SECONDS = 10  # maximum length of a clip


def draw_episodes(folder: Path, *, count: int = 24, seed: int = 0) -> Image.Image:
    """Draw `count` frames: one row of six per episode, from start to end, each with the action that follows it."""
    episodes, tiles = EpisodeDataset(folder), []
    manifest = episodes.manifest
    for number in sample_indices(len(episodes), max(1, count // FRAMES_PER_ROW), seed):
        episode = episodes.metadata[number]
        for start in np.linspace(0, episode.length - 1, FRAMES_PER_ROW).round().astype(int).tolist():
            length = min(2, episode.length - start)
            window = episodes.read_window(number, start, length)
            last = "end of the episode" if episode.ended else "end of the recording"
            done = [manifest.actions.describe(action) for action in window["actions"]] or [last]
            words = [f"episode {number}, frame {start}", *done]
            tiles.append(Tile(Image.fromarray(window["frames"][0]), words))
    title = f"{manifest.world}: {len(episodes):,} episodes, {episodes.lengths.sum():,} frames"
    under = f"seed {manifest.seed}, policy {manifest.policy!r}, {manifest.rate:g} actions per second"
    return draw_contact_sheet(tiles, title, subtitle=under, columns=FRAMES_PER_ROW)


def save_episode_clip(folder: Path, out: Path, *, count: int = 24, seed: int = 0) -> None:
    """Save a clip of some episodes side by side. An episode that has ended shows its last frame."""
    if count < 1:
        raise DataError(f"a clip of {count} episodes", "use at least 1")
    episodes = EpisodeDataset(folder)
    rate = episodes.manifest.rate
    max_frames = max(2, int(MAX_CLIP_SECONDS * rate))
    clips = []
    for number in sample_indices(len(episodes), min(count, len(episodes)), seed):
        length = min(max_frames, episodes.metadata[number].length)
        clips.append(episodes.read_window(number, 0, length, ("frames",))["frames"])
    frames = tile_clips(clips)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.suffix.lower() == ".gif":
            first, *rest = (Image.fromarray(frame) for frame in frames)
            first.save(out, save_all=True, append_images=rest, duration=round(1000 / rate), loop=0)
        else:
            even = frames[:, : frames.shape[1] // 2 * 2, : frames.shape[2] // 2 * 2]  # players need even sizes
            out.write_bytes(encode_frames(even, rate, PLAYABLE_ENCODING, "mp4"))
    except OSError as error:
        raise VitrailError(f"{out} cannot be written: {error.strerror}", "give another path with --out") from error


def tile_clips(clips: list[np.ndarray]) -> np.ndarray:
    """Tile clips (T, H, W, 3) of different lengths into one (T, rows · H, columns · W, 3)."""
    T, (H, W) = max(map(len, clips)), clips[0].shape[1:3]
    columns = math.ceil(math.sqrt(len(clips)))
    rows = math.ceil(len(clips) / columns)
    tiled = np.zeros((T, rows, H, columns, W, 3), np.uint8)
    for i, clip in enumerate(clips):
        tiled[: len(clip), i // columns, :, i % columns] = clip
        tiled[len(clip) :, i // columns, :, i % columns] = clip[-1]
    return tiled.reshape(T, rows * H, columns * W, 3)
