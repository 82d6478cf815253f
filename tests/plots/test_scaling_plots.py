"""Charts of scores over tokens."""

from vitrail.plots.charts import COLOURS, RED
from vitrail.plots.scaling_plots import (
    LawPanel,
    PlanPanel,
    draw_clusters,
    draw_differences,
    draw_laws,
    draw_plan,
    draw_score_curves,
)

POINTS = [(1.0, 10.0), (4.0, 20.0), (16.0, 25.0)]


def test_laws_show_points_curve_and_outliers():
    panel = LawPanel("task", "α = 1", POINTS, POINTS, POINTS, POINTS, (4.0,))
    [axes] = draw_laws([panel], "title").axes
    assert axes.get_title(loc="left") == "task" and len(axes.lines) == 3
    [dots] = axes.collections
    assert dots.get_offsets().tolist() == [list(point) for point in POINTS]
    assert tuple(dots.get_facecolors()[1][:3]) == tuple(int(RED[i : i + 2], 16) / 255 for i in (1, 3, 5))


def test_each_way_has_one_colour_and_one_legend_entry():
    ways = [f"way {i}" for i in range(len(COLOURS) + 2)]
    figure = draw_score_curves({task: dict.fromkeys(ways, POINTS) for task in "ab"}, "title")
    first, second = figure.axes[:2]
    assert [line.get_color() for line in first.lines] == [line.get_color() for line in second.lines]
    assert len({(line.get_color(), line.get_linestyle()) for line in first.lines}) == len(ways)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ways


def test_constant_scores_and_single_points_are_drawn():
    figure = draw_score_curves({"task": {"way": [(1.0, 0.0), (2.0, 0.0)], "other": [(1.0, 0.0)]}}, "title")
    assert len(figure.axes[0].lines) == 2


def test_other_charts_have_one_panel_per_task():
    assert len(draw_clusters([{"a": POINTS, "b": POINTS}, {"c": POINTS}], "title").axes) == 2
    [bars] = draw_differences({"a": [(1.0, 0.5), (2.0, -0.25)]}, "title").axes
    assert [patch.get_width() for patch in bars.patches] == [0.5, -0.25]
    [plan] = draw_plan({"a": PlanPanel(POINTS, (4.0, 20.0))}, "title").axes
    assert plan.get_xlabel() == "4 tokens"
