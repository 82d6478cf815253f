"""The chart of probe scores at bottlenecks."""

from vitrail.plots.information_plot import BottleneckReadings, draw_information


def test_each_property_has_a_line_from_bottleneck_to_bottleneck():
    places = [
        BottleneckReadings(
            "pixels", "", 256, 3, 6144, {"colour": (0.9, (0.8, 1.0), 0.1), "count": (0.5, (0.4, 0.6), 0.25)}
        ),
        BottleneckReadings(
            "codes", "pixels", 9, 1, 99, {"colour": (0.7, (0.6, 0.8), 0.1), "count": (-0.2, (-0.3, 0), 0.25)}
        ),
    ]
    [axes] = draw_information(places, "model").axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["colour", "count"]
    assert [0.9, 0.7] in [list(line.get_ydata()) for line in axes.lines]
    assert axes.get_xticklabels()[1].get_text().startswith("codes\n9 × 1\n99")
