"""`vitrail rotary`: the rotary layouts, drawn."""

from pathlib import Path

from vitrail.errors import ConfigError, nearest
from vitrail.nn.rotary import LAYOUTS
from vitrail.show.rotary import draw_rotary, examples
from vitrail.show.style import check_picture, save_picture


def rotary(layout: list[str] | None = None, /, *, head_dim: int = 128, out: Path = Path("out/rotary.png")) -> None:
    """Draw which axis turns which channel, how fast, and what that makes near.

    Parameters
    ----------
    layout
        Only these: 1d, 2d, 2d_split, mrope, mrope_interleaved. All of them unless given.
    head_dim
        Channels of one attention head.
    out
        The picture to write.
    """
    for name in layout or ():
        if name not in LAYOUTS:
            raise ConfigError(f"no rotary layout is called {name!r}", nearest(name, LAYOUTS))
    check_picture(out)
    chosen = examples(head_dim, layout or LAYOUTS)
    save_picture(draw_rotary(chosen), out)
    for name, config in chosen.items():
        parts = f"sections {config.sections}" if config.sections else "one ladder" if name != "2d" else "two ladders"
        print(f"{name:18} theta {config.theta:>9,.0f}  {parts}")
    print(f"→ {out}")
