"""Text timestamps of temporal patches, as in Qwen3-VL and TimeMarker, and of frames, as in SmolVLM2."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Literal

from vitrail.errors import StreamError

TimestampStyle = Literal["seconds", "hms"]


def _format_seconds(tenths: int) -> str:
    return f"<{tenths / 10:.1f} seconds>"


def _format_hms(tenths: int) -> str:
    minutes, tenths = divmod(tenths, 600)
    return f"<{minutes // 60:02}:{minutes % 60:02}:{tenths // 10:02}.{tenths % 10}>"


TIMESTAMP_STYLES: dict[TimestampStyle, Callable[[int], str]] = {"seconds": _format_seconds, "hms": _format_hms}


def format_timestamp(seconds: float, style: TimestampStyle = "seconds") -> str:
    """Format a time: 3 → `<3.0 seconds>` or `<00:00:03.0>`."""
    if style not in TIMESTAMP_STYLES:
        raise StreamError(f"unknown timestamp style {style!r}", f"choose from {', '.join(TIMESTAMP_STYLES)}")
    if seconds < 0:
        raise StreamError(f"the timestamp is {seconds} seconds", "give a time from the start of the video")
    return TIMESTAMP_STYLES[style](int(f"{seconds:.1f}".replace(".", "")))  # Python's rounding, as in the reference


def compute_patch_times(frames: Sequence[float], temporal_patch_size: int = 2) -> list[float]:
    """Return the time of each temporal patch, midway between its first and last frame.

    The last frame is repeated to fill the last patch.
    """
    full = [*frames, *[frames[-1]] * (-len(frames) % temporal_patch_size)]
    return [(full[i] + full[i + temporal_patch_size - 1]) / 2 for i in range(0, len(full), temporal_patch_size)]


# ---- SmolVLM2 ---------------------------------------------------------------------------------------------------

SMALL_NUMBERS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def format_number_words(number: int) -> str:
    """Format a number below a million in words: 1101 → one thousand, one hundred and one."""
    if number < 20:
        return SMALL_NUMBERS[number]
    if number < 100:
        tens, rest = divmod(number, 10)
        return TENS[tens - 2] + (f"-{SMALL_NUMBERS[rest]}" if rest else "")
    unit, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    count, rest = divmod(number, unit)
    words = f"{format_number_words(count)} {name}"
    if not rest:
        return words
    return f"{words}{', ' if rest >= 100 else ' and '}{format_number_words(rest)}"


def format_frame_labels(times: Sequence[float], duration: float) -> list[str]:
    """Return the text before each frame of a video, as in SmolVLM2. The first one describes the whole video."""
    seconds = int(duration)
    intro = (
        f"You are provided the following series of {format_number_words(len(times))} frames from a "
        f"{timedelta(seconds=seconds)} [H:MM:SS] video.\n"
    )
    labels = [f"\nFrame from {int(time // 60):02}:{int(time % 60):02}:" for time in times]
    return [intro + labels[0], *labels[1:]]
