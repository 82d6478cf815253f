"""Scores over tokens, a panel a task and a line a way."""

from vitrail.show.figure import Dot, Line, Words
from vitrail.show.scaling import COLOURS, draw_ways


def test_a_way_has_one_colour_in_all_panels_and_is_named_once():
    ways = [f"way {i}" for i in range(len(COLOURS) + 2)]
    tasks = {
        task: {way: [(1.0, 0.1 * i), (64.0, 0.2 * i)] for i, way in enumerate(ways)} for task in ("reading", "count")
    }
    tasks["count"]["alone"] = [(8.0, 0.5)]
    figure = draw_ways(tasks, "title", "note")
    said = [shape.words for shape in figure.shapes if isinstance(shape, Words)]
    assert all(said.count(way) == 1 for way in [*ways, "alone"])
    drawn = [shape for shape in figure.shapes if isinstance(shape, Line) and shape.width == 1.5]
    assert len(drawn) == 3 * len(ways) + 1  # and beside the names
    assert [line.colour for line in drawn[: len(ways)]] == [line.colour for line in drawn[len(ways) : 2 * len(ways)]]
    assert len({(line.colour, line.dash) for line in drawn}) == len(ways) + 1
    dots = [shape for shape in figure.shapes if isinstance(shape, Dot)]
    assert len(dots) == 4 * len(ways) + 1  # one point alone is a dot


def test_a_task_of_one_height_is_drawn():
    figure = draw_ways({"reading": {"a": [(1.0, 0.0), (8.0, 0.0)]}}, "title")
    assert all(0 <= y <= figure.height for shape in figure.shapes if isinstance(shape, Line) for _, y in shape.points)
