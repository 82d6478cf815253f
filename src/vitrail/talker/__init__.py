"""Vision-language models ready to hand: pictures, videos and a question in, words out."""

from vitrail.models.videos import Video
from vitrail.talker.talker import Talker, home

__all__ = ["Talker", "Video", "home"]
