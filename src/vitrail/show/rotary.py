"""One sheet: which axis turns which slot, how fast, and what that makes near.

A layout's row shows its slots as bars (colour: the axis that drives it; height: the logarithm of its wavelength in
tokens) and two maps of how alike a position and its neighbours are: the mean over slots of cos(angle difference),
which is what attention sees when the content says nothing.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from vitrail.nn.rotary import AXES, LAYOUTS, NTK, Linear, Llama3, Rotary, RotaryConfig, YaRN
from vitrail.show import style
from vitrail.show.style import SCALE

COLOURS = {"t": style.GOLD, "h": style.BLUE, "w": style.RED}
WIDTH, MARGIN, HEAD = 1120, 36, 92
LEFT, BARS, MAP, ROW = 250, 430, 132, 168
REACH = 16  # neighbours shown, each way
LONGEST = 8.0  # log10 of the longest wavelength drawn

SCALINGS = {
    "none": None,
    "linear x4": Linear(factor=4.0),
    "NTK x4": NTK(factor=4.0),
    "YaRN x4 from 8,192": YaRN(factor=4.0, original_length=8192),
    "Llama 3 x8 from 8,192": Llama3(factor=8.0, original_length=8192),
}
CURVES = (style.INK, style.GREEN, style.VIOLET, style.RED, style.BLUE)


def examples(head_dim: int = 128, layouts: Iterable[str] = tuple(LAYOUTS)) -> dict[str, RotaryConfig]:
    """Each layout as its best-known model sets it, the sections scaled to the head."""
    slots = head_dim // 2
    chunk, turn = round(slots * 3 / 8), round(slots * 5 / 16)
    sections = {"mrope": (slots - 2 * chunk, chunk, chunk), "mrope_interleaved": (slots - 2 * turn, turn, turn)}
    thetas = {"mrope": 1e6, "mrope_interleaved": 5e6}
    return {
        name: RotaryConfig(head_dim=head_dim, layout=name, theta=thetas.get(name, 1e4), sections=sections.get(name))  # pyrefly: ignore[bad-argument-type]
        for name in layouts
    }


def draw_rotary(configs: Mapping[str, RotaryConfig] | None = None) -> Image.Image:
    """A row a layout, then the scalings as curves of wavelength over slots."""
    configs = examples() if configs is None else configs
    height = HEAD + len(configs) * ROW + 300
    sheet, draw = style.canvas(WIDTH, height)
    style.text(draw, (MARGIN, 22), "Rotary layouts: what drives a slot, and how fast it turns", 22)
    x = MARGIN
    for axis in AXES:
        draw.rectangle([x * SCALE, 64 * SCALE, (x + 12) * SCALE, 76 * SCALE], fill=COLOURS[axis])
        style.text(draw, (x + 18, 62), {"t": "time", "h": "height", "w": "width"}[axis], 13)
        x += 86
    style.text(draw, (MARGIN + LEFT, 62), "slots, by wavelength in tokens (logarithmic)", 13, style.SOFT)
    style.text(draw, (MARGIN + LEFT + BARS + 40, 62), "alike over (dw, dh)", 13, style.SOFT)
    style.text(draw, (MARGIN + LEFT + BARS + 60 + MAP, 62), "alike over (dw, dt)", 13, style.SOFT)
    for i, (name, config) in enumerate(configs.items()):
        _layout(sheet, draw, name, config, HEAD + i * ROW)
    _scalings(draw, HEAD + len(configs) * ROW + 10)
    return style.finish(sheet)


def _wavelengths(config: RotaryConfig) -> tuple[Tensor, Tensor]:
    rotary = Rotary(config)
    return rotary.axis, 2 * math.pi / rotary.frequency


def _level(wavelength: float) -> float:
    """0 … 1 on the logarithmic scale of the bars."""
    return min(max(math.log10(wavelength) / LONGEST, 0.0), 1.0)


def _rulings(draw: ImageDraw.ImageDraw, left: float, base: float, tall: float) -> None:
    for power, label in ((1, "10"), (3, "1,000"), (5, "100,000")):
        y = base - tall * power / LONGEST
        draw.line([left * SCALE, y * SCALE, (left + BARS) * SCALE, y * SCALE], fill=style.FAINT, width=SCALE)
        style.text(draw, (left - 6, y), label, 10, style.SOFT, "rm")


def _layout(sheet: Image.Image, draw: ImageDraw.ImageDraw, name: str, config: RotaryConfig, top: float) -> None:
    style.text(draw, (MARGIN, top + 8), name, 18)
    for i, line in enumerate(_wrap(LAYOUTS[config.layout].says, 32)):
        style.text(draw, (MARGIN, top + 36 + 17 * i), line, 13, style.SOFT)
    axis, wavelength = _wavelengths(config)
    left, base, tall = MARGIN + LEFT, top + ROW - 34, ROW - 50
    _rulings(draw, left, base, tall)
    step = BARS / len(axis)
    for i, (a, length) in enumerate(zip(axis.tolist(), wavelength.tolist(), strict=True)):
        x = left + i * step
        rise = tall * max(_level(length), 0.02)
        draw.rectangle(
            [(x + 0.12 * step) * SCALE, (base - rise) * SCALE, (x + 0.88 * step) * SCALE, base * SCALE],
            fill=COLOURS[AXES[a]],
        )
    counts = ", ".join(f"{AXES[a]} {int((axis == a).sum())}" for a in range(3) if (axis == a).any())
    style.text(draw, (left, base + 6), f"{len(axis)} slots: {counts} · theta {config.theta:,.0f}", 12, style.SOFT)
    for i, across in enumerate(((1, 2), (0, 2))):
        tile = _alike(config, *across).resize((MAP * SCALE, MAP * SCALE), Image.Resampling.NEAREST)
        sheet.paste(tile, (round(MARGIN + LEFT + BARS + 40 + i * (MAP + 20)) * SCALE, round(top + 6) * SCALE))


def _alike(config: RotaryConfig, rows: int, columns: int) -> Image.Image:
    """Mean over slots of cos(angle) at every offset up to REACH on two axes: blue for like, paper for half as like."""
    span = torch.arange(-REACH, REACH + 1)
    offsets = torch.zeros(len(span), len(span), 3, dtype=torch.long)
    offsets[..., rows] = span[:, None]
    offsets[..., columns] = span[None]
    alike = Rotary(config)(offsets).cos.mean(-1)  # (2R + 1, 2R + 1)
    paper, blue = (torch.tensor(colour).float() for colour in (style.PAPER, style.BLUE))
    strength = (2 * alike - 1).clamp(0, 1)[..., None]
    pixels = (paper + (blue - paper) * strength).round().to(torch.uint8)
    return Image.fromarray(pixels.numpy())


def _scalings(draw: ImageDraw.ImageDraw, top: float) -> None:
    style.text(draw, (MARGIN, top + 8), "scalings", 18)
    for i, line in enumerate(("the same slots made to turn", "slower, for contexts longer than", "those trained on")):
        style.text(draw, (MARGIN, top + 36 + 17 * i), line, 13, style.SOFT)
    left, tall, wide = MARGIN + LEFT, 220, BARS
    base = top + tall + 10
    _rulings(draw, left, base, tall)
    for i, ((name, scaling), colour) in enumerate(zip(SCALINGS.items(), CURVES, strict=True)):
        _, wavelength = _wavelengths(RotaryConfig(head_dim=128, theta=500_000.0, scaling=scaling))
        points = [
            ((left + wide * s / (len(wavelength) - 1)) * SCALE, (base - tall * _level(length)) * SCALE)
            for s, length in enumerate(wavelength.tolist())
        ]
        draw.line(points, fill=colour, width=2 * SCALE, joint="curve")
        y = top + 30 + 24 * i
        key = [(left + wide + 40) * SCALE, (y + 8) * SCALE, (left + wide + 64) * SCALE, (y + 8) * SCALE]
        draw.line(key, fill=colour, width=3 * SCALE)
        style.text(draw, (left + wide + 74, y), name, 13)
    style.text(draw, (left, base + 6), "64 slots · theta 500,000", 12, style.SOFT)


def _wrap(words: str, width: int) -> list[str]:
    lines = [""]
    for word in words.split():
        if len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
