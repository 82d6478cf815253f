"""Episodes of simulated worlds: observations, actions and rewards, recorded once and read by windows."""

from vitrail.data.episodes.episode import ActionSpace, ContinuousActions, DiscreteActions, Episode, Manifest
from vitrail.data.episodes.episode_dataset import EpisodeDataset
from vitrail.data.episodes.episode_source import EpisodesConfig, EpisodeSource
from vitrail.data.episodes.recorder import RecordConfig, record_episodes
from vitrail.data.episodes.worlds import WORLDS, World

__all__ = [
    "WORLDS",
    "ActionSpace",
    "ContinuousActions",
    "DiscreteActions",
    "Episode",
    "EpisodeDataset",
    "EpisodeSource",
    "EpisodesConfig",
]
__all__ += ["Manifest", "RecordConfig", "World", "record_episodes"]
