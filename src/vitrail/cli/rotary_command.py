"""`vitrail rotary`: drawings of the rotary layouts."""

from pathlib import Path

from vitrail.errors import ConfigError, suggest_name
from vitrail.nn.rotary_embedding import ROTARY_LAYOUTS
from vitrail.plots.charts import check_chart_path, save_chart
from vitrail.plots.rotary_plot import draw_rotary, make_example_configs


def draw_rotary_layouts(
    layout: list[str] | None = None, /, *, head_dim: int = 128, out: Path = Path("out/rotary.png")
) -> None:
    """Draw the rotary layouts: the axis and frequency of every channel, and the resulting attention decay.

    Parameters
    ----------
    layout
        Layouts: 1d, 2d, 2d_split, 2d_interleaved, mrope, mrope_interleaved. Default: all.
    head_dim
        Channels of one attention head.
    out
        The image to write.
    """
    for name in layout or ():
        if name not in ROTARY_LAYOUTS:
            raise ConfigError(f"there is no rotary layout {name!r}", suggest_name(name, ROTARY_LAYOUTS))
    check_chart_path(out)
    chosen = make_example_configs(head_dim, layout or ROTARY_LAYOUTS)
    save_chart(draw_rotary(chosen), out)
    for name, config in chosen.items():
        ladders = "two ladders" if name in ("2d", "2d_interleaved") else "one ladder"
        parts = f"sections {config.sections}" if config.sections else ladders
        print(f"{name:18} theta {config.theta:>9,.0f}  {parts}")
    print(f"→ {out}")
