from pathlib import Path

import pytest

from data.episodes.pockets import POCKET
from vitrail.data.episodes import record


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """25 episodes of the pocket world in three shards."""
    folder = tmp_path_factory.mktemp("made")
    record(POCKET, folder, episodes=25, per_shard=10, quiet=True)
    return folder
