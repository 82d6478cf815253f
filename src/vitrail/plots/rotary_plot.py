"""Plot rotary position layouts: axis and wavelength of each slot, and the resulting similarity of positions.

Each layout has a row of bars, one per slot. The colour is the axis, the height the wavelength in tokens. Two maps show
the similarity of a position and its neighbours: the mean over slots of cos(angle difference). It is the attention logit
of constant content.
"""

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vitrail.nn.rotary_embedding import (
    AXES,
    ROTARY_LAYOUTS,
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    RotaryConfig,
    RotaryEmbedding,
    YaRNScaling,
)
from vitrail.plots.charts import BLUE, COLOURS, GOLD, RED, chart_style, make_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AXIS_COLOURS = {"t": GOLD, "h": BLUE, "w": RED}
MAX_OFFSET = 16  # maximum offset in each direction
MAX_WAVELENGTH = 1e8

SCALINGS = {
    "none": None,
    "linear x4": LinearScaling(factor=4.0),
    "NTK x4": NTKScaling(factor=4.0),
    "YaRN x4 from 8,192": YaRNScaling(factor=4.0, original_length=8192),
    "Llama 3 x8 from 8,192": Llama3Scaling(factor=8.0, original_length=8192),
}


def make_example_configs(
    head_dim: int = 128, layouts: Iterable[str] = tuple(ROTARY_LAYOUTS)
) -> dict[str, RotaryConfig]:
    """Return a config per layout with the settings of its best-known model, sections scaled to the head."""
    slots = head_dim // 2
    chunk, turn = round(slots * 3 / 8), round(slots * 5 / 16)
    sections = {"mrope": (slots - 2 * chunk, chunk, chunk), "mrope_interleaved": (slots - 2 * turn, turn, turn)}
    thetas = {"mrope": 1e6, "mrope_interleaved": 5e6}
    return {
        name: RotaryConfig(head_dim=head_dim, layout=name, theta=thetas.get(name, 1e4), sections=sections.get(name))  # pyrefly: ignore[bad-argument-type]
        for name in layouts
    }


@chart_style()
def draw_rotary(configs: Mapping[str, RotaryConfig] | None = None) -> "Figure":
    """Draw one row per layout, then the scalings as curves of wavelength over slots."""
    configs = make_example_configs() if configs is None else configs
    title = "Rotary layouts: axis and wavelength of each slot, and similarity of positions"
    num_panels, note = 3 * len(configs) + 1, "time: gold, height: blue, width: red"
    figure, axes = make_panels(num_panels, title, note, num_columns=3, size=(330, 190))
    for i, (name, config) in enumerate(configs.items()):
        bars, space, time = axes[3 * i : 3 * i + 3]
        axis, wavelength = _get_wavelengths(config)
        colours = [AXIS_COLOURS[AXES[a]] for a in axis.tolist()]
        bars.bar(range(len(axis)), wavelength.clamp(2, MAX_WAVELENGTH).tolist(), color=colours)
        bars.set_yscale("log")
        bars.set_ylim(1, MAX_WAVELENGTH)
        bars.set_title(f"{name}: {ROTARY_LAYOUTS[config.layout].description}", fontsize=8)
        counts = ", ".join(f"{AXES[a]} {int((axis == a).sum())}" for a in range(3) if (axis == a).any())
        bars.set_xlabel(f"{len(axis)} slots: {counts} · theta {config.theta:,.0f}", fontsize=8)
        for one, label, (rows, columns) in ((space, "dh", (1, 2)), (time, "dt", (0, 2))):
            _draw_similarity(one, config, rows, columns)
            one.set_xlabel("dw", fontsize=8)
            one.set_ylabel(label, fontsize=8)
    _draw_scalings(axes[-1])
    return figure


def _get_wavelengths(config: RotaryConfig) -> tuple[Tensor, Tensor]:
    rotary = RotaryEmbedding(config)
    return rotary.axis, 2 * math.pi / rotary.frequency


def _draw_similarity(axes: "Axes", config: RotaryConfig, rows: int, columns: int) -> None:
    """Draw the mean over slots of cos(angle) at all offsets on two axes: blue for 1, background for 0.5 or less."""
    span = torch.arange(-MAX_OFFSET, MAX_OFFSET + 1)
    offsets = torch.zeros(len(span), len(span), 3, dtype=torch.long)
    offsets[..., rows] = span[:, None]
    offsets[..., columns] = span[None]
    similarity = RotaryEmbedding(config)(offsets).cos.mean(-1)  # (2R + 1, 2R + 1)
    edge = MAX_OFFSET + 0.5
    axes.imshow(similarity.numpy(), vmin=0.5, vmax=1, cmap="Blues", extent=(-edge, edge, edge, -edge))


def _draw_scalings(axes: "Axes") -> None:
    axes.set_title("scalings: lower frequencies for longer contexts", fontsize=8)
    for (name, scaling), colour in zip(SCALINGS.items(), COLOURS, strict=False):
        _, wavelength = _get_wavelengths(RotaryConfig(head_dim=128, theta=500_000.0, scaling=scaling))
        axes.plot(wavelength.tolist(), color=colour, label=name)
    axes.set_yscale("log")
    axes.set_ylim(1, MAX_WAVELENGTH)
    axes.set_xlabel("64 slots · theta 500,000", fontsize=8)
    axes.legend(fontsize=7)
