"""The plot of packed rows."""

import numpy as np
import pytest

from vitrail.plots import style
from vitrail.plots.stream_plot import KIND_COLOURS, MAX_MAP_TOKENS, MAX_ROWS, compute_attention_map, draw_stream
from vitrail.processing.grid import Grid
from vitrail.stream import StreamRules, build_stream, image_part, pack_streams, text_part, video_part
from vitrail.stream.stream_description import EXAMPLE_DESCRIPTION


def strip(figure, row: int = 0) -> np.ndarray:
    """Return the colours of the tokens of a row."""
    return np.asarray(figure.axes[3 * row].images[0].get_array())[0]


def test_strip_has_the_kind_of_every_token():
    streams = [
        build_stream([text_part([1] * 200), video_part(Grid(t=2, h=10, w=10))], name="clip"),
        build_stream([image_part(Grid(h=20, w=20))]),
    ]
    figure = draw_stream(pack_streams(streams, 1000))
    runs = {"text": 200, "video": 200, "image": 400}
    expected = [KIND_COLOURS[name] for name, count in runs.items() for _ in range(count)] + [style.FAINT] * 200
    assert strip(figure).tolist() == [list(colour) for colour in expected]
    assert [text.get_text() for text in figure.axes[0].texts] == ["clip · 400", "sample 1 · 400", "padding"]


@pytest.mark.parametrize("both", [(), ("image",)])
def test_attention_map_matches_the_mask(both):
    batch = pack_streams([build_stream([image_part(Grid(h=4, w=4))], StreamRules(bidirectional=both))], 16)
    seen = (compute_attention_map(batch, 0).numpy() == KIND_COLOURS["image"]).all(-1)
    assert seen.tolist() == (np.ones((16, 16), bool) if both else np.tri(16, dtype=bool)).tolist()
    brackets = [line for line in draw_stream(batch).axes[0].lines if len(line.get_xdata()) == 4]
    assert len(brackets) == len(both)


def test_positions_are_grey_where_the_axes_agree():
    batch = pack_streams(
        [build_stream([text_part([1] * 3), image_part(Grid(h=2, w=2))], StreamRules(positions="qwen2-vl"))], 7
    )
    *axes, text = draw_stream(batch).axes[1].lines[:4]
    assert text.get_xdata().tolist() == [0, 1, 2, 3] and text.get_ydata().tolist() == [0, 1, 2, 3]
    assert [line.get_ydata().tolist() for line in axes] == [[3, 3, 3], [3, 4, 4], [4, 3, 4]]


def test_extra_rows_are_not_drawn():
    batch = pack_streams([build_stream([text_part([1] * 5)]) for _ in range(MAX_ROWS + 3)], 5)
    assert len(draw_stream(batch).axes) == 3 * MAX_ROWS


def test_example_has_every_kind_and_long_rows_are_drawn():
    batch = pack_streams(EXAMPLE_DESCRIPTION.build_streams(), 112)
    assert len(batch.ids) == 2 and set(batch.kinds.unique().tolist()) == {-1, 0, 1, 2, 3, 4}
    figure = draw_stream(batch)
    drawn = {tuple(colour) for row in range(2) for colour in strip(figure, row).tolist()}
    assert drawn == {*KIND_COLOURS.values(), style.FAINT}
    long = pack_streams([build_stream([text_part([1] * 3000), image_part(1000)])], 4096)
    assert compute_attention_map(long, 0).shape == (MAX_MAP_TOKENS, MAX_MAP_TOKENS, 3)
    assert draw_stream(long, "long").texts[0].get_text() == "long"
