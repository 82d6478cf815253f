"""Content parts of chat messages: texts, images and videos. Any other kind of part raises an error."""

from dataclasses import replace
from typing import Any

from vitrail.errors import ConfigError, ImageError, TextError
from vitrail.models.video_inputs import Video, is_video
from vitrail.processing.chat_template import Message

VIDEO_OPTIONS = ("num_frames", "fps")  # sampling keys of a video part, which are fields of `Video`
MEDIA_NAMES = {"image": "an image", "video": "a video"}


def build_text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def build_media_parts(media: Any, num_frames: int | None = None, fps: float | None = None) -> list[dict[str, Any]]:
    """Build the parts of one or several images and videos.

    `num_frames` is the number of frames of each video, `fps` the number of frames per second.
    """
    items = media if isinstance(media, list | tuple) else [media]
    parts = [{"type": "video", "video": item} if is_video(item) else {"type": "image", "image": item} for item in items]
    sampling = {key: value for key, value in zip(VIDEO_OPTIONS, (num_frames, fps), strict=True) if value is not None}
    if sampling and all(part["type"] == "image" for part in parts):
        raise ConfigError(f"{' and '.join(sampling)} is given without a video", "remove it, or give a video")
    return [part | sampling if part["type"] == "video" else part for part in parts]


def parse_parts(message: Any, name: str) -> list[dict[str, Any]]:
    """Return the content parts of a message, with each video as a `Video`."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str):
        return [build_text_part(content)]
    if not isinstance(content, list | tuple):
        raise TextError(f"the content of {name} is neither a text nor a list of parts", "give one of the two")
    return [_parse_part(part, name) for part in content]


def _parse_part(part: Any, name: str) -> dict[str, Any]:
    kind: Any = part.get("type") if isinstance(part, dict) else part
    if not isinstance(part, dict) or kind not in ("text", *MEDIA_NAMES):
        raise TextError(f"{name} has a part of type {kind!r}", "give parts of type text, image or video")
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise TextError(f"{name} has a text part without text", 'give it as "text"')
        return part
    if part.get(kind) is None:
        raise ImageError(f"{name} has {MEDIA_NAMES[kind]} part without {MEDIA_NAMES[kind]}", f'give it as "{kind}"')
    return part if kind == "image" else {"type": "video", "video": _parse_video(part, name)}


def _parse_video(part: dict[str, Any], name: str) -> Video:
    if unknown := part.keys() - {"type", "video", *VIDEO_OPTIONS}:
        raise TextError(
            f"{name} has a video part with {sorted(unknown)[0]!r}", f"known keys: {' and '.join(VIDEO_OPTIONS)}"
        )
    sampling = {key: part[key] for key in VIDEO_OPTIONS if part.get(key) is not None}
    video = part["video"] if isinstance(part["video"], Video) else Video(part["video"])
    return replace(video, **sampling) if sampling else video


def to_template_part(part: Message) -> dict[str, Any]:
    """Return a part as the chat template takes it: without pixels."""
    return build_text_part(part["text"]) if part["type"] == "text" else {"type": part["type"]}
