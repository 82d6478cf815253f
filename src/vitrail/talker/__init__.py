"""Vision-language models ready to hand: pictures, videos and a question in, words out."""

from vitrail.talker.talker import Talker, home
from vitrail.talker.videos import Video

__all__ = ["Talker", "Video", "home"]
