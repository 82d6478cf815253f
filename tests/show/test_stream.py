"""The sheet shows the rows as they are packed."""

import numpy as np
import pytest

from vitrail.processing.grid import Grid
from vitrail.show import style
from vitrail.show.stream import HEAD, KIND_COLOURS, LEFT, MAP, MARGIN, MOST, ROW, STRIP, TALL, WIDTH, draw_stream
from vitrail.stream import Rules, build, pack, picture, video, words
from vitrail.stream.describe import EXAMPLE


def strip(batch, row: int = 0) -> np.ndarray:
    """One line of pixels through the middle of a row's strip."""
    pixels = np.asarray(draw_stream(batch)).astype(int)
    return pixels[HEAD + row * ROW + 18 + TALL // 2, MARGIN + LEFT : MARGIN + LEFT + STRIP]


def share(line: np.ndarray, colour) -> float:
    return float((abs(line - colour).max(-1) <= 24).mean())


def test_kinds_take_their_share_of_the_strip():
    streams = [build([words([1] * 200), video(Grid(t=2, h=10, w=10))]), build([picture(Grid(h=20, w=20))])]
    line = strip(pack(streams, 1000))
    for name, part in (("text", 0.2), ("video", 0.2), ("image", 0.4)):
        assert share(line, KIND_COLOURS[name]) == pytest.approx(part, abs=0.02)
    assert share(line, style.FAINT) == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize("both", [(), ("image",)])
def test_the_map_shows_who_sees_whom(both):
    batch = pack([build([picture(Grid(h=4, w=4))], Rules(both=both))], 16)
    pixels = np.asarray(draw_stream(batch)).astype(int)
    top, left = HEAD + 18, WIDTH - MARGIN - MAP
    seen = share(pixels[top + 2 : top + MAP - 2, left + 2 : left + MAP - 2].reshape(-1, 3), KIND_COLOURS["image"])
    assert seen == pytest.approx(1.0 if both else 136 / 256, abs=0.03)
    first_sees_last = abs(pixels[top + 5, left + MAP - 5] - KIND_COLOURS["image"]).max() <= 24
    assert first_sees_last == bool(both)


def test_rows_beyond_the_sheet_are_said_not_lost():
    batch = pack([build([words([1] * 5)]) for _ in range(MOST + 3)], 5)
    assert draw_stream(batch).height == draw_stream(pack([build([words([1] * 5)])] * MOST, 5)).height


def test_the_example_holds_every_kind_and_a_long_row_is_drawn():
    batch = pack(EXAMPLE.streams(), 112)
    assert len(batch.ids) == 2 and set(batch.kinds.unique().tolist()) == {-1, 0, 1, 2, 3, 4}
    first = np.asarray(draw_stream(batch)).reshape(-1, 3)
    for colour in KIND_COLOURS.values():
        assert (first == colour).all(-1).any()
    long = pack([build([words([1] * 3000), picture(1000)])], 4096)
    assert draw_stream(long, "long").width == WIDTH
