"""A few episodes of the pocket world."""

from pathlib import Path

from vitrail.data.episodes.record import RecordConfig

POCKET = RecordConfig(world="pocket", steps=40, side=16)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".tar", ".json")}
