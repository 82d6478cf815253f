"""Score: units and direction."""

import pytest

from vitrail.evals.scores import Proportion, Score

DISTANCE = {
    "value": 342.8,
    "interval": [322.2, 363.4],
    "count": 300,
    "baselines": {"codec": 276.0, "others": 400.0},
    "unit": "distance",
}


def test_fraction_beats_baselines_with_its_whole_interval():
    score = Score.from_proportion("accuracy", Proportion(80, 100), chance=0.5, majority=0.7)
    assert str(score) == "80.0% [71.1%, 86.7%] of 100" and score.beats_baselines
    assert not Score.from_proportion("accuracy", Proportion(80, 100), chance=0.75).beats_baselines


def test_distances_are_no_percentages_and_lower_is_better():
    score = Score.from_dict("FD-ResNet50", DISTANCE)
    assert (score.unit, score.higher_is_better) == ("distance", False)
    assert str(score) == "342.8 [322.2, 363.4] of 300" and score.baselines_text == "codec 276.0, others 400.0"
    assert not score.beats_baselines
    assert Score.from_dict("FD-ResNet50", DISTANCE | {"baselines": {"others": 400.0}}).beats_baselines


@pytest.mark.parametrize("unit", ["fraction", "rank", "points", "distance", "dB"])
def test_a_score_reads_back(unit):
    score = Score.from_dict("x", {"value": 3.0, "interval": [2.0, 4.0], "count": 9, "unit": unit})
    assert Score.from_dict("x", score.as_dict) == score
    assert ("%" in str(score)) == (unit == "fraction")


def test_unknown_units_raise():
    with pytest.raises(ValueError, match="unknown unit"):
        Score.from_dict("x", {"value": 1.0, "interval": [0.0, 1.0], "count": 1, "unit": "metres"})
