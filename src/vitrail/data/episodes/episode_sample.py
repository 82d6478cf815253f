"""Converts an episode to and from the members of a shard sample.

Arrays of numbers are stored whole, as .npy. Frames are stored as short videos and pixel maps as .npy.gz, in chunks of
`chunk` frames, so that a window is read without the rest of the episode.

Shape: T frames.
"""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from vitrail.data.episodes.episode import TRACKS, Episode, Manifest, check_track
from vitrail.data.episodes.frame_encoding import (
    VIDEO_ENCODINGS,
    decode_array,
    decode_frames,
    encode_array,
    encode_frames,
)
from vitrail.errors import DataError


class EpisodeMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of an episode, known before any of it is decoded. Field names are JSON keys in the shards."""

    number: int
    length: int  # number of frames
    ended: bool
    reward: float  # sum over all steps, including an end before a second frame was observed
    text: str = ""


MAX_BYTES_PER_PIXEL = 3 * 4  # bytes per pixel of a track: three float32


def is_chunked(track: str) -> bool:
    """Whether a track has pixel maps, which are stored in chunks."""
    return "H" in TRACKS[track].axes


def build_key(manifest: Manifest, number: int) -> str:
    """Build the sample key of an episode."""
    return f"{manifest.world}/{manifest.seed}/{number:06}"


def to_sample(episode: Episode, manifest: Manifest, number: int) -> dict[str, Any]:
    """Convert an episode to the sample that `write_shards` takes."""
    manifest.actions.check_actions(episode.actions)
    if set(episode.tracks) != set(manifest.tracks):
        raise DataError(
            f"episode {number} has the tracks {sorted(episode.tracks)}",
            f"give those of the manifest: {sorted(manifest.tracks)}",
        )
    metadata = EpisodeMetadata(
        number=number,
        length=len(episode),
        ended=episode.terminated,
        reward=float(episode.rewards.sum()) + episode.unobserved_reward,
        text=episode.task,
    )
    sample: dict[str, Any] = {"__key__": build_key(manifest, number), "json": msgspec.to_builtins(metadata)}
    sample |= {"actions.npy": episode.actions, "rewards.npy": episode.rewards}
    for name, track in episode.tracks.items():
        if is_chunked(name):
            sample |= _encode_chunks(name, "npy.gz", track, manifest.chunk, encode_array)
        else:
            sample[f"{name}.npy"] = track
    if not manifest.drawn:
        encode = lambda frames: encode_frames(frames, manifest.rate, VIDEO_ENCODINGS[manifest.video])  # noqa: E731
        sample |= _encode_chunks("frames", "mkv", episode.frames, manifest.chunk, encode)
    return sample


def _encode_chunks(
    name: str, ending: str, array: np.ndarray, chunk: int, encode: Callable[[np.ndarray], bytes]
) -> dict[str, bytes]:
    """Encode an array in chunks, as a member for each."""
    parts = range(0, len(array), chunk)
    return {f"{name}.{i:04}.{ending}": encode(array[start : start + chunk]) for i, start in enumerate(parts)}


def read_field(
    name: str, read_member: Callable[[str], bytes], metadata: EpisodeMetadata, manifest: Manifest, start: int, stop: int
) -> np.ndarray:
    """Read frames or a track from `start` to `stop`; for actions and rewards, the transitions between those frames.

    `read_member` returns the bytes of a member by its ending.
    """
    if name in ("actions", "rewards"):
        return _read_whole(name, read_member, metadata.length - 1, manifest)[start : stop - 1]
    if name != "frames" and not is_chunked(name):
        return _read_whole(name, read_member, metadata.length, manifest)[start:stop]
    parts = []
    for chunk_number, low, high in _chunk_ranges(start, stop, manifest.chunk):
        if name == "frames":
            parts.append(decode_frames(read_member(f"frames.{chunk_number:04}.mkv"), low, high, manifest.side))
        else:
            most = manifest.chunk * manifest.side**2 * MAX_BYTES_PER_PIXEL
            parts.append(decode_array(read_member(f"{name}.{chunk_number:04}.npy.gz"), most)[low:high])
            _check(name, parts[-1], manifest)
    if len({(chunk_number.shape[1:], chunk_number.dtype) for chunk_number in parts}) > 1:
        raise DataError(f"{name} has chunks of different types: {', '.join(f'{p.dtype} {p.shape}' for p in parts)}")
    joined = np.concatenate(parts) if len(parts) > 1 else parts[0]
    if len(joined) != stop - start:
        raise DataError(f"{name} has only {len(joined)} of frames {start} … {stop}")
    return joined


def _chunk_ranges(start: int, stop: int, chunk: int) -> Iterator[tuple[int, int, int]]:
    """Yield the chunk numbers of a window, and the range within each chunk."""
    for part in range(start // chunk, (stop - 1) // chunk + 1):
        yield part, max(start - part * chunk, 0), min(stop - part * chunk, chunk)


def _read_whole(name: str, member: Callable[[str], bytes], length: int, manifest: Manifest) -> np.ndarray:
    """Read an array that is stored whole, and check its length."""
    array = decode_array(member(f"{name}.npy"))
    if len(array) != length:
        raise DataError(f"{name} has the shape {array.shape}, expected {length} rows")
    _check(name, array, manifest)
    return array


def _check(name: str, array: np.ndarray, manifest: Manifest) -> None:
    """Check that an array is of the type that the manifest describes."""
    if name == "actions":
        manifest.actions.check_actions(array)
    elif name == "rewards":
        if array.dtype != np.float32 or array.ndim != 1:
            raise DataError(f"rewards are {array.dtype} {array.shape}, not float32 (T − 1,)")
    else:
        H, W = (*array.shape[1:3], 0, 0)[:2] if is_chunked(name) else (0, 0)
        check_track(name, array, (len(array), H, W, 3))
        if is_chunked(name) and max(H, W) != manifest.side:
            raise DataError(f"{name} has {H} × {W} pixels, expected a side of {manifest.side}")
        if name == "state" and array.shape[1] != len(manifest.state):
            raise DataError(f"state has {array.shape[1]} numbers, expected {len(manifest.state)}")
