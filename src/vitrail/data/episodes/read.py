"""Episodes out of a folder of shards: whole, or by windows.

E episodes, T frames of a window
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from vitrail.data.episodes.episode import Episode, Manifest
from vitrail.data.episodes.pack import About, in_chunks, take
from vitrail.data.episodes.worlds import WORLDS
from vitrail.data.shards.index import Index, index_of
from vitrail.errors import ConfigError, DataError, VitrailError

MANIFEST = "episodes.json"


def are_episodes(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        manifest = Manifest.read(msgspec.json.decode(path.read_bytes()))
    except FileNotFoundError:
        raise DataError(
            f"{folder} holds no {MANIFEST}", f"record some: vitrail data make WORLD -o {folder}; a recipe says which"
        ) from None
    except VitrailError as error:
        raise DataError(f"{path} cannot be read: {error.problem}", error.remedy) from error
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}", "is it a folder of episodes?") from error
    world = WORLDS.get(manifest.world)
    if manifest.drawn and (world is None or world.draw is None or world.state != manifest.state):
        raise DataError(f"{path}: nothing draws {manifest.world} from such a state", "its frames must be stored")
    return manifest


class Episodes:
    """number → `Episode`; `window` gives a part of one. Nothing is held open, so workers may be forked or spawned."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self.paths = sorted(self.folder.glob(f"{self.manifest.world}-*.tar"))
        self._places: list[tuple[int, dict[str, tuple[int, int]]]] = []  # shard, and its members by ending
        self.about: list[About] = []
        for shard, path in enumerate(self.paths):
            self._open(shard, _sound(path))
        if not self.about:
            raise DataError(f"{self.folder} holds no episodes yet", "record some: vitrail data make")
        self.lengths = np.array([about.length for about in self.about])  # (E,) frames

    def _open(self, shard: int, index: Index) -> None:
        for sample in range(len(index)):
            self._places.append((shard, index.members(sample)))
            number = len(self.about)
            try:
                about = msgspec.json.decode(self._member(number, "json"), type=About)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise self._broken(number, error) from error
            if about.number != number:
                raise DataError(f"{self.paths[shard]} holds episode {about.number}, where {number} is missing", AGAIN)
            if not 1 <= about.length <= self.manifest.steps + 1:
                raise self._broken(number, f"{about.length} frames of at most {self.manifest.steps} steps")
            self.about.append(about)

    def __len__(self) -> int:
        return len(self.about)

    def __getitem__(self, number: int) -> Episode:
        about = self.about[number]
        names = ("frames", "actions", "rewards", *self.manifest.tracks)
        found = self.window(number, 0, about.length, names)
        tracks = {name: found[name] for name in self.manifest.tracks}
        unseen = about.reward if about.length == 1 else 0.0
        return Episode(found["frames"], found["actions"], found["rewards"], about.ended, about.text, tracks, unseen)

    def __iter__(self) -> Iterator[Episode]:
        return (self[i] for i in range(len(self)))

    @property
    def fingerprint(self) -> str:
        """Changes with what was recorded."""
        text = msgspec.json.encode((self.manifest, self.about), order="deterministic")
        return hashlib.sha256(text).hexdigest()[:16]

    def window(
        self, number: int, start: int, length: int, fields: Sequence[str] = ("frames", "actions")
    ) -> dict[str, np.ndarray]:
        """T = `length` frames from `start` on, T of each track, and the T − 1 actions and rewards between them."""
        about = self.about[number]
        self.check(fields)
        if not 0 <= start < start + length <= about.length:
            raise ConfigError(
                f"frames {start} … {start + length} of episode {number}", f"it has {about.length}, counted from 0"
            )
        found = {name: self._take(name, number, start, start + length) for name in fields}
        pictures = [name for name in found if name == "frames" or (name in self.manifest.tracks and in_chunks(name))]
        if len({found[name].shape[1:3] for name in pictures}) > 1:
            raise self._broken(number, f"{' and '.join(pictures)} have different sizes")
        return found

    def check(self, fields: Sequence[str]) -> None:
        known = ("frames", "actions", "rewards", *self.manifest.tracks)
        for name in fields:
            if name not in known:
                raise ConfigError(f"{self.folder} holds no {name!r}", f"it has {', '.join(known)}")

    def _take(self, name: str, number: int, start: int, stop: int) -> np.ndarray:
        manifest, drawn = self.manifest, name == "frames" and self.manifest.drawn
        try:
            found = take(
                "state" if drawn else name,
                lambda ending: self._member(number, ending),
                self.about[number],
                manifest,
                start,
                stop,
            )
        except ConfigError:
            raise
        except VitrailError as error:
            raise self._broken(number, error.problem) from error
        if not drawn:
            return found
        draw = WORLDS[manifest.world].draw
        assert draw is not None
        return draw(found, manifest.side)

    def _member(self, number: int, ending: str) -> bytes:
        shard, members = self._places[number]
        if ending not in members:
            raise self._broken(number, f"it has no {ending}")
        offset, length = members[ending]
        with self.paths[shard].open("rb") as file:
            file.seek(offset)
            data = file.read(length)
        if len(data) != length:
            raise self._broken(number, f"{ending} is cut short")
        return data

    def _broken(self, number: int, why: object) -> DataError:
        path = self.paths[self._places[number][0]]
        return DataError(f"{path}: episode {number} cannot be read: {why}", AGAIN)


AGAIN = "delete this shard and those behind it, and give the command that recorded them again: it makes the same"


def _sound(path: Path) -> Index:
    index = index_of(path)
    if index.faults:
        member, reason = index.faults[0]
        raise DataError(f"{path} is damaged: {member} {reason}", AGAIN)
    return index
