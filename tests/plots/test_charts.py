"""Charts: style, inline SVG and saving."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from vitrail.errors import VitrailError
from vitrail.plots.charts import BLUE, check_chart_path, draw_heatmap, make_panels, save_chart, to_inline_svg


def make_chart():
    figure, [axes] = make_panels(1, "title", "note")
    axes.plot([1, 2], [3, 4], color=BLUE, label="line & more")
    axes.legend()
    return figure


def test_inline_svg_is_well_formed_and_its_colours_are_variables():
    text = to_inline_svg(make_chart(), 'a "label" & more')
    root = ElementTree.fromstring(text)
    assert root.get("aria-label") == 'a "label" & more' and root.get("viewBox")
    assert f"var(--{BLUE[1:]}, {BLUE})" in text and "<metadata>" not in text
    assert "title" in "".join(root.itertext()) and "line & more" in "".join(root.itertext())


def test_equal_charts_give_equal_files(tmp_path):
    files = [tmp_path / name / "chart.svg" for name in ("a", "b")]
    for file in files:
        save_chart(make_chart(), file)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_png_has_the_size_of_the_figure(tmp_path):
    save_chart(make_chart(), tmp_path / "chart.png")
    assert Image.open(tmp_path / "chart.png").width == 640


def test_panels_fill_rows():
    figure, axes = make_panels(6, "title")
    assert len(axes) == 6 and len(figure.axes) == 8


def test_heatmap_cells_show_their_values():
    values = [[0.0, 1.0, 0.5], [0.25, 0.0, 1.0]]
    figure = draw_heatmap(
        values, ["0%", "100%"], ["8", "32", "64"], title="Found", row_label="depth", column_label="frames"
    )
    [axes] = figure.axes
    assert (axes.images[0].get_array() == values).all() and axes.images[0].get_clim() == (0, 1)
    assert [text.get_text() for text in axes.texts] == ["0%", "100%", "50%", "25%", "0%", "100%"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("frames", "depth")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0%", "100%"]


def test_invalid_paths_raise(tmp_path):
    with pytest.raises(VitrailError, match="not a chart format"):
        check_chart_path(Path("chart.nothing"))
    (tmp_path / "file").write_text("")
    with pytest.raises(VitrailError, match="cannot be written"):
        save_chart(make_chart(), tmp_path / "file" / "chart.svg")


def test_missing_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(VitrailError, match="charts need matplotlib") as caught:
        draw_heatmap([[0.0]], ["a"], ["b"], title="", row_label="", column_label="")
    assert "vitrail[plots]" in caught.value.remedy
