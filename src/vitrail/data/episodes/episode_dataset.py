"""Reads episodes from a folder of shards, whole or by windows.

Shapes: E episodes, T frames of a window.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from vitrail.data.episodes.episode import Episode, Manifest
from vitrail.data.episodes.episode_sample import EpisodeMetadata, is_chunked, read_field
from vitrail.data.episodes.worlds import WORLDS
from vitrail.data.shards.shard_index import ShardIndex, load_index
from vitrail.errors import ConfigError, DataError, VitrailError

MANIFEST_FILE = "episodes.json"


def is_episode_folder(folder: Path) -> bool:
    """Whether a folder holds episodes."""
    return (folder / MANIFEST_FILE).is_file()


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a folder of episodes."""
    path = folder / MANIFEST_FILE
    try:
        manifest = Manifest.from_dict(msgspec.json.decode(path.read_bytes()))
    except FileNotFoundError:
        raise DataError(
            f"{folder} holds no {MANIFEST_FILE}",
            f"record episodes: vitrail data make WORLD -o {folder}; the recipe names the world",
        ) from None
    except VitrailError as error:
        raise DataError(f"{path} cannot be read: {error.problem}", error.remedy) from error
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}", "check that this is a folder of episodes") from error
    world = WORLDS.get(manifest.world)
    if manifest.drawn and (world is None or world.render is None or world.state_names != manifest.state):
        raise DataError(
            f"{path}: no renderer draws {manifest.world} from this state", "record the episodes with stored frames"
        )
    return manifest


class EpisodeDataset:
    """Map a number to an `Episode`; `read_window` reads a part of one.

    No file is kept open, so workers may be forked or spawned.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self.paths = sorted(self.folder.glob(f"{self.manifest.world}-*.tar"))
        self._members: list[tuple[int, dict[str, tuple[int, int]]]] = []  # shard number, and the members by ending
        self.metadata: list[EpisodeMetadata] = []
        for shard, path in enumerate(self.paths):
            self._read_shard(shard, _load_sound_index(path))
        if not self.metadata:
            raise DataError(f"{self.folder} holds no episodes", "record some: vitrail data make")
        self.lengths = np.array([metadata.length for metadata in self.metadata])  # (E,) number of frames

    def _read_shard(self, shard: int, index: ShardIndex) -> None:
        """Read the metadata of all episodes of a shard."""
        for sample in range(len(index)):
            self._members.append((shard, index.get_members(sample)))
            number = len(self.metadata)
            try:
                metadata = msgspec.json.decode(self._read_member(number, "json"), type=EpisodeMetadata)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise self._broken_error(number, error) from error
            if metadata.number != number:
                raise DataError(
                    f"{self.paths[shard]} holds episode {metadata.number}, expected {number}", REPAIR_REMEDY
                )
            if not 1 <= metadata.length <= self.manifest.steps + 1:
                raise self._broken_error(
                    number, f"it has {metadata.length} frames but at most {self.manifest.steps} steps"
                )
            self.metadata.append(metadata)

    def __len__(self) -> int:
        return len(self.metadata)

    def __getitem__(self, number: int) -> Episode:
        metadata = self.metadata[number]
        names = ("frames", "actions", "rewards", *self.manifest.tracks)
        found = self.read_window(number, 0, metadata.length, names)
        tracks = {name: found[name] for name in self.manifest.tracks}
        unseen = metadata.reward if metadata.length == 1 else 0.0
        return Episode(
            found["frames"], found["actions"], found["rewards"], metadata.ended, metadata.text, tracks, unseen
        )

    def __iter__(self) -> Iterator[Episode]:
        return (self[i] for i in range(len(self)))

    @property
    def fingerprint(self) -> str:
        """Hash of the manifest and of all episodes' metadata."""
        text = msgspec.json.encode((self.manifest, self.metadata), order="deterministic")
        return hashlib.sha256(text).hexdigest()[:16]

    def read_window(
        self, number: int, start: int, length: int, fields: Sequence[str] = ("frames", "actions")
    ) -> dict[str, np.ndarray]:
        """Read T = `length` frames from `start` on, T rows of each track, and the T − 1 actions and rewards between
        them."""
        metadata = self.metadata[number]
        self.check_fields(fields)
        if not 0 <= start < start + length <= metadata.length:
            raise ConfigError(
                f"frames {start} … {start + length} of episode {number} do not exist",
                f"it has {metadata.length} frames, numbered from 0",
            )
        arrays = {name: self._read_field(name, number, start, start + length) for name in fields}
        pixel_fields = [
            name for name in arrays if name == "frames" or (name in self.manifest.tracks and is_chunked(name))
        ]
        if len({arrays[name].shape[1:3] for name in pixel_fields}) > 1:
            raise self._broken_error(number, f"{' and '.join(pixel_fields)} have different sizes")
        return arrays

    def check_fields(self, fields: Sequence[str]) -> None:
        """Check that the folder holds these fields."""
        known = ("frames", "actions", "rewards", *self.manifest.tracks)
        for name in fields:
            if name not in known:
                raise ConfigError(f"{self.folder} has no field {name!r}", f"it has {', '.join(known)}")

    def _read_field(self, name: str, number: int, start: int, stop: int) -> np.ndarray:
        manifest, is_rendered = self.manifest, name == "frames" and self.manifest.drawn
        try:
            array = read_field(
                "state" if is_rendered else name,
                lambda ending: self._read_member(number, ending),
                self.metadata[number],
                manifest,
                start,
                stop,
            )
        except ConfigError:
            raise
        except VitrailError as error:
            raise self._broken_error(number, error.problem) from error
        if not is_rendered:
            return array
        render = WORLDS[manifest.world].render
        assert render is not None
        return render(array, manifest.side)

    def _read_member(self, number: int, ending: str) -> bytes:
        shard, members = self._members[number]
        if ending not in members:
            raise self._broken_error(number, f"it has no {ending}")
        offset, length = members[ending]
        with self.paths[shard].open("rb") as file:
            file.seek(offset)
            data = file.read(length)
        if len(data) != length:
            raise self._broken_error(number, f"{ending} is truncated")
        return data

    def _broken_error(self, number: int, why: object) -> DataError:
        path = self.paths[self._members[number][0]]
        return DataError(f"{path}: episode {number} cannot be read: {why}", REPAIR_REMEDY)


REPAIR_REMEDY = (
    "delete this shard and all later ones, and repeat the command that recorded them: it records the same episodes"
)


def _load_sound_index(path: Path) -> ShardIndex:
    """Load the index of a shard, and refuse a damaged shard."""
    index = load_index(path)
    if index.faults:
        member, reason = index.faults[0]
        raise DataError(f"{path} is damaged: {member} {reason}", REPAIR_REMEDY)
    return index
