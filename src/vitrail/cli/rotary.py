"""`vitrail rotary`: the rotary layouts, drawn."""

from pathlib import Path

from vitrail.errors import VitrailError
from vitrail.show.rotary import draw_rotary, examples


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
    configs = examples(head_dim)
    unknown = [name for name in layout or () if name not in configs]
    if unknown:
        raise VitrailError(f"no rotary layout is called {unknown[0]!r}", f"choose from {', '.join(configs)}")
    chosen = {name: configs[name] for name in layout or configs}
    out.parent.mkdir(parents=True, exist_ok=True)
    draw_rotary(chosen).save(out)
    for name, config in chosen.items():
        parts = f"sections {config.sections}" if config.sections else "one ladder" if name != "2d" else "two ladders"
        print(f"{name:18} theta {config.theta:>9,.0f}  {parts}")
    print(f"→ {out}")
