"""What a message says and shows, each as a part: texts, pictures, videos. Whatever else it holds is refused by name."""

from dataclasses import replace
from typing import Any

from vitrail.errors import ConfigError, ImageError, TextError
from vitrail.models.videos import Video, is_video
from vitrail.processing.chat import Message

CHOICES = ("frames", "fps")  # keys of a video part, as of a Video
HELD = {"image": ("an image", "a picture"), "video": ("a video", "a video")}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def shown_of(shown: Any, frames: int | None = None, fps: float | None = None) -> list[dict[str, Any]]:
    """Parts of a picture, a video, or several of them; of videos so many frames, or so many a second."""
    items = shown if isinstance(shown, list | tuple) else [shown]
    parts = [{"type": "video", "video": one} if is_video(one) else {"type": "image", "image": one} for one in items]
    chosen = {key: value for key, value in zip(CHOICES, (frames, fps), strict=True) if value is not None}
    if chosen and all(part["type"] == "image" for part in parts):
        raise ConfigError(f"{' and '.join(chosen)} without a video", "leave it out, or show one")
    return [part | chosen if part["type"] == "video" else part for part in parts]


def parts_of(message: Any, name: str) -> list[dict[str, Any]]:
    """The parts of a message, its videos each as a `Video`."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str):
        return [text_part(content)]
    if not isinstance(content, list | tuple):
        raise TextError(f"{name} has no text and no list of parts as its content", "give one of the two")
    return [_part(part, name) for part in content]


def _part(part: Any, name: str) -> dict[str, Any]:
    kind: Any = part.get("type") if isinstance(part, dict) else part
    if not isinstance(part, dict) or kind not in ("text", *HELD):
        raise TextError(f"{name} has a part of the kind {kind!r}", "give texts, images and videos")
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise TextError(f"{name} has a text part without a text", 'give it as "text"')
        return part
    if part.get(kind) is None:
        named, held = HELD[kind]
        raise ImageError(f"{name} has {named} part without {held}", f'give it as "{kind}"')
    return part if kind == "image" else {"type": "video", "video": _video(part, name)}


def _video(part: dict[str, Any], name: str) -> Video:
    if unknown := part.keys() - {"type", "video", *CHOICES}:
        raise TextError(f"{name} has a video part with {sorted(unknown)[0]!r}", f"it takes {' and '.join(CHOICES)}")
    chosen = {key: part[key] for key in CHOICES if part.get(key) is not None}
    video = part["video"] if isinstance(part["video"], Video) else Video(part["video"])
    return replace(video, **chosen) if chosen else video


def place(part: Message) -> dict[str, Any]:
    """What a template is shown of a part."""
    return text_part(part["text"]) if part["type"] == "text" else {"type": part["type"]}
