"""The rotary sheet shows the layouts that there are."""

import numpy as np
import pytest

from vitrail.cli.rotary import rotary
from vitrail.errors import ConfigError, VitrailError
from vitrail.nn import LAYOUTS
from vitrail.show import style
from vitrail.show.rotary import draw_rotary, examples


def colours(image) -> set[tuple[int, ...]]:
    return {tuple(c) for c in np.asarray(image).reshape(-1, 3)[::7].tolist()}


def test_each_layout_has_a_row_and_its_axes_their_colours():
    assert set(examples()) == set(LAYOUTS)
    whole, text = draw_rotary(), draw_rotary({"1d": examples()["1d"]})
    assert whole.height > text.height
    assert {style.GOLD, style.BLUE, style.RED} <= colours(whole)
    bars = np.asarray(text)[100:250, 290:700].reshape(-1, 3)  # the bars of the one row
    assert (bars == style.GOLD).all(-1).any()
    assert not (bars == style.RED).all(-1).any()


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_examples_fit_any_head(head_dim):
    for config in examples(head_dim).values():
        assert config.rotated == head_dim


def test_command_writes_the_picture(tmp_path, capsys):
    rotary(["mrope"], out=tmp_path / "deep" / "r.png")
    assert (tmp_path / "deep" / "r.png").stat().st_size > 1000
    assert "sections (16, 24, 24)" in capsys.readouterr().out
    with pytest.raises(ConfigError):
        rotary(head_dim=30, out=tmp_path / "r.png")


def test_only_the_chosen_layouts_are_built(tmp_path, capsys):
    """Ten channels do for one axis; two would need a multiple of four."""
    rotary(["1d"], head_dim=10, out=tmp_path / "r.png")
    assert "1d" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["r.xyz", "r", "file/r.png"])
def test_an_impossible_picture(name, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(VitrailError, match="cannot be written") as caught:
        rotary(["1d"], out=tmp_path / name)
    assert "--out" in caught.value.remedy
