"""Settings for a few episodes of the pocket world."""

from pathlib import Path

from vitrail.data.episodes.recorder import RecordConfig

POCKET = RecordConfig(world="pocket", steps=40, image_size=16)


def files(folder: Path) -> dict[str, bytes]:
    """Read the shards and the manifest of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".tar", ".json")}
