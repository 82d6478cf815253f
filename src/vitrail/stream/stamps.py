"""When a temporal patch was, in words: Qwen3-VL's timestamps, after TimeMarker."""

from collections.abc import Callable, Sequence
from typing import Literal

from vitrail.errors import StreamError

Style = Literal["seconds", "hms"]


def _seconds(tenths: int) -> str:
    return f"<{tenths / 10:.1f} seconds>"


def _hms(tenths: int) -> str:
    minutes, tenths = divmod(tenths, 600)
    return f"<{minutes // 60:02}:{minutes % 60:02}:{tenths // 10:02}.{tenths % 10}>"


STYLES: dict[Style, Callable[[int], str]] = {"seconds": _seconds, "hms": _hms}


def stamp(seconds: float, style: Style = "seconds") -> str:
    """3 → `<3.0 seconds>`, or `<00:00:03.0>`."""
    if style not in STYLES:
        raise StreamError(f"no timestamp is written as {style!r}", f"choose from {', '.join(STYLES)}")
    if seconds < 0:
        raise StreamError(f"a timestamp of {seconds} seconds", "count from the start of the video")
    return STYLES[style](int(f"{seconds:.1f}".replace(".", "")))  # rounded as Python prints it, as the reference does


def patch_times(frames: Sequence[float], patch: int = 2) -> list[float]:
    """The time of each temporal patch, midway between its first and last frame; the last frame fills the last patch."""
    full = [*frames, *[frames[-1]] * (-len(frames) % patch)]
    return [(full[i] + full[i + patch - 1]) / 2 for i in range(0, len(full), patch)]
