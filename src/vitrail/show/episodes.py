"""Episodes to look at: a sheet with a row for each, or a clip in which they play side by side.

E episodes, T frames, H, W pixels
"""

import math
from pathlib import Path

import numpy as np
from PIL import Image

from vitrail.data.episodes.film import SHOWN, encode_frames
from vitrail.data.episodes.read import Episodes
from vitrail.data.order import permuted
from vitrail.errors import DataError, VitrailError
from vitrail.show.sheet import Tile, draw_sheet

CLIPS = (".gif", ".mp4")
ACROSS = 6  # frames of an episode on a sheet
SECONDS = 10  # of a clip


def draw_episodes(folder: Path, *, count: int = 24, seed: int = 0) -> Image.Image:
    """`count` frames: a row of six from beginning to end for each of some episodes, with the action that follows."""
    episodes, tiles = Episodes(folder), []
    manifest = episodes.manifest
    for number in _some(len(episodes), max(1, count // ACROSS), seed):
        about = episodes.about[number]
        for start in np.linspace(0, about.length - 1, ACROSS).round().astype(int).tolist():
            length = min(2, about.length - start)
            seen = episodes.window(number, start, length)
            last = "the end" if about.ended else "recorded so far"
            done = [manifest.actions.say(action) for action in seen["actions"]] or [last]
            words = [f"episode {number}, frame {start}", *done]
            tiles.append(Tile(Image.fromarray(seen["frames"][0]), words))
    title = f"{manifest.world}: {len(episodes):,} episodes, {episodes.lengths.sum():,} frames"
    under = f"seed {manifest.seed}, played as {manifest.policy!r}, {manifest.rate:g} actions a second"
    return draw_sheet(tiles, title, under=under, columns=ACROSS)


def play_episodes(folder: Path, out: Path, *, count: int = 24, seed: int = 0) -> None:
    """Write a clip of some episodes side by side, from their beginnings; one that is over stays where it ended."""
    if count < 1:
        raise DataError(f"a clip of {count} episodes", "ask for at least one")
    episodes = Episodes(folder)
    rate = episodes.manifest.rate
    most = max(2, int(SECONDS * rate))
    clips = []
    for number in _some(len(episodes), min(count, len(episodes)), seed):
        length = min(most, episodes.about[number].length)
        clips.append(episodes.window(number, 0, length, ("frames",))["frames"])
    frames = side_by_side(clips)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.suffix.lower() == ".gif":
            first, *rest = (Image.fromarray(frame) for frame in frames)
            first.save(out, save_all=True, append_images=rest, duration=round(1000 / rate), loop=0)
        else:
            even = frames[:, : frames.shape[1] // 2 * 2, : frames.shape[2] // 2 * 2]  # what players can show
            out.write_bytes(encode_frames(even, rate, SHOWN, "mp4"))
    except OSError as error:
        raise VitrailError(f"{out} cannot be written: {error.strerror}", "give another path with --out") from error


def side_by_side(clips: list[np.ndarray]) -> np.ndarray:
    """Clips (T, H, W, 3) of different lengths → one (T, rows · H, columns · W, 3)"""
    T, (H, W) = max(map(len, clips)), clips[0].shape[1:3]
    columns = math.ceil(math.sqrt(len(clips)))
    rows = math.ceil(len(clips) / columns)
    whole = np.zeros((T, rows, H, columns, W, 3), np.uint8)
    for i, clip in enumerate(clips):
        whole[: len(clip), i // columns, :, i % columns] = clip
        whole[len(clip) :, i // columns, :, i % columns] = clip[-1]
    return whole.reshape(T, rows * H, columns * W, 3)


def _some(size: int, count: int, seed: int) -> list[int]:
    return sorted(permuted(i, size, seed) for i in range(min(count, size)))
