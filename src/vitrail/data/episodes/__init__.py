"""Episodes: what was seen and done in a world, recorded once and read by windows."""

from vitrail.data.episodes.episode import Actions, Choices, Dials, Episode, Manifest
from vitrail.data.episodes.read import Episodes
from vitrail.data.episodes.record import RecordConfig, record
from vitrail.data.episodes.source import EpisodesConfig, EpisodeSource
from vitrail.data.episodes.worlds import WORLDS, World

__all__ = ["WORLDS", "Actions", "Choices", "Dials", "Episode", "EpisodeSource", "Episodes", "EpisodesConfig"]
__all__ += ["Manifest", "RecordConfig", "World", "record"]
