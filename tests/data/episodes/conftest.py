from pathlib import Path

import pytest

from data.episodes.pockets import POCKET
from vitrail.data.episodes import record_episodes


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """25 episodes of the pocket world in three shards."""
    folder = tmp_path_factory.mktemp("made")
    record_episodes(POCKET, folder, episodes=25, episodes_per_shard=10, quiet=True)
    return folder
