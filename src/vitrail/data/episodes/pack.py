"""An episode ⇄ the members of a sample in a shard.

Numbers lie whole, as .npy; frames as short videos and maps of pixels as .npy.gz, `chunk` of them together, so that a
window is read without the rest.

T frames
"""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from vitrail.data.episodes.episode import TRACKS, Episode, Manifest, check_track
from vitrail.data.episodes.film import HOW, decode_array, decode_frames, encode_array, encode_frames
from vitrail.errors import DataError


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an episode before any of it is decoded."""

    number: int
    length: int  # frames
    ended: bool
    reward: float  # of all its steps, and of an end before a second frame was shown
    text: str = ""


WIDEST = 3 * 4  # bytes a pixel of a track: three float32


def in_chunks(track: str) -> bool:
    """Whether a track is as large as pictures are."""
    return "H" in TRACKS[track].axes


def key_of(manifest: Manifest, number: int) -> str:
    return f"{manifest.world}/{manifest.seed}/{number:06}"


def to_sample(episode: Episode, manifest: Manifest, number: int) -> dict[str, Any]:
    """The sample that `write_shards` takes."""
    manifest.actions.check(episode.actions)
    if set(episode.tracks) != set(manifest.tracks):
        raise DataError(
            f"episode {number} has the tracks {sorted(episode.tracks)}", f"the manifest has {sorted(manifest.tracks)}"
        )
    about = About(
        number=number,
        length=len(episode),
        ended=episode.ended,
        reward=float(episode.rewards.sum()) + episode.unseen,
        text=episode.text,
    )
    sample: dict[str, Any] = {"__key__": key_of(manifest, number), "json": msgspec.to_builtins(about)}
    sample |= {"actions.npy": episode.actions, "rewards.npy": episode.rewards}
    for name, track in episode.tracks.items():
        if in_chunks(name):
            sample |= _chunks(name, "npy.gz", track, manifest.chunk, encode_array)
        else:
            sample[f"{name}.npy"] = track
    if not manifest.drawn:
        encode = lambda part: encode_frames(part, manifest.rate, HOW[manifest.video])  # noqa: E731
        sample |= _chunks("frames", "mkv", episode.frames, manifest.chunk, encode)
    return sample


def _chunks(
    name: str, ending: str, array: np.ndarray, chunk: int, encode: Callable[[np.ndarray], bytes]
) -> dict[str, bytes]:
    parts = range(0, len(array), chunk)
    return {f"{name}.{i:04}.{ending}": encode(array[start : start + chunk]) for i, start in enumerate(parts)}


def take(
    name: str, member: Callable[[str], bytes], about: About, manifest: Manifest, start: int, stop: int
) -> np.ndarray:
    """Frames, or a track, from `start` to `stop`; actions and rewards are those between the frames. `member` gives the
    bytes by their ending."""
    if name in ("actions", "rewards"):
        return _whole(name, member, about.length - 1, manifest)[start : stop - 1]
    if name != "frames" and not in_chunks(name):
        return _whole(name, member, about.length, manifest)[start:stop]
    found = []
    for part, low, high in _spans(start, stop, manifest.chunk):
        if name == "frames":
            found.append(decode_frames(member(f"frames.{part:04}.mkv"), low, high, manifest.side))
        else:
            most = manifest.chunk * manifest.side**2 * WIDEST
            found.append(decode_array(member(f"{name}.{part:04}.npy.gz"), most)[low:high])
            _check(name, found[-1], manifest)
    if len({(part.shape[1:], part.dtype) for part in found}) > 1:
        raise DataError(f"{name} has parts of different kinds: {', '.join(f'{p.dtype} {p.shape}' for p in found)}")
    joined = np.concatenate(found) if len(found) > 1 else found[0]
    if len(joined) != stop - start:
        raise DataError(f"{name} has {len(joined)} of the frames {start} … {stop}")
    return joined


def _spans(start: int, stop: int, chunk: int) -> Iterator[tuple[int, int, int]]:
    """chunk, and the stretch of it"""
    for part in range(start // chunk, (stop - 1) // chunk + 1):
        yield part, max(start - part * chunk, 0), min(stop - part * chunk, chunk)


def _whole(name: str, member: Callable[[str], bytes], length: int, manifest: Manifest) -> np.ndarray:
    array = decode_array(member(f"{name}.npy"))
    if len(array) != length:
        raise DataError(f"{name} has the shape {array.shape} where {length} rows are wanted")
    _check(name, array, manifest)
    return array


def _check(name: str, array: np.ndarray, manifest: Manifest) -> None:
    """What is read must be of the kind that the manifest tells of."""
    if name == "actions":
        manifest.actions.check(array)
    elif name == "rewards":
        if array.dtype != np.float32 or array.ndim != 1:
            raise DataError(f"rewards are {array.dtype} {array.shape}, not float32 (T − 1,)")
    else:
        H, W = (*array.shape[1:3], 0, 0)[:2] if in_chunks(name) else (0, 0)
        check_track(name, array, (len(array), H, W, 3))
        if in_chunks(name) and max(H, W) != manifest.side:
            raise DataError(f"{name} has {H} × {W} pixels where a side has {manifest.side}")
        if name == "state" and array.shape[1] != len(manifest.state):
            raise DataError(f"state has {array.shape[1]} numbers where {len(manifest.state)} are named")
