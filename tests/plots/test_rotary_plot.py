"""The plot of rotary layouts."""

import pytest
from matplotlib.colors import to_hex

from vitrail.cli.rotary_command import draw_rotary_layouts
from vitrail.errors import ConfigError, VitrailError
from vitrail.nn import ROTARY_LAYOUTS
from vitrail.plots.rotary_plot import AXIS_COLOURS, SCALINGS, draw_rotary, make_example_configs


def test_each_layout_has_a_row_with_axis_colours():
    assert set(make_example_configs()) == set(ROTARY_LAYOUTS)
    whole, text = draw_rotary(), draw_rotary({"1d": make_example_configs()["1d"]})
    assert whole.get_figheight() > text.get_figheight()
    bars, space, time, scalings = text.axes[:4]
    assert len(bars.patches) == 64 and {to_hex(bar.get_facecolor()) for bar in bars.patches} == {AXIS_COLOURS["t"]}
    assert space.images[0].get_array().shape == time.images[0].get_array().shape == (33, 33)
    assert len(scalings.lines) == len(SCALINGS)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_example_configs_fit_any_head(head_dim):
    for config in make_example_configs(head_dim).values():
        assert config.num_rotated_channels == head_dim


def test_command_saves_the_image(tmp_path, capsys):
    draw_rotary_layouts(["mrope"], out=tmp_path / "deep" / "r.png")
    assert (tmp_path / "deep" / "r.png").stat().st_size > 1000
    assert "sections (16, 24, 24)" in capsys.readouterr().out
    with pytest.raises(ConfigError):
        draw_rotary_layouts(head_dim=30, out=tmp_path / "r.png")


def test_command_draws_chosen_layouts_only(tmp_path, capsys):
    """Ten channels suffice for one axis; two axes need a multiple of four."""
    draw_rotary_layouts(["1d"], head_dim=10, out=tmp_path / "r.png")
    assert "1d" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["r.xyz", "r", "file/r.png"])
def test_invalid_output_path_raises(name, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(VitrailError, match="cannot be written"):
        draw_rotary_layouts(["1d"], out=tmp_path / name)
