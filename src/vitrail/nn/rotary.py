"""Rotary positions: one table of layouts, one table of scalings.

A rotary embedding turns pairs of channels ("slots") by an angle. Every member of the family differs only in which
axis of the position drives a slot and how fast the slot turns:

    angle[b, l, s] = positions[b, l, axis[s]] · frequency[s]

so a layout is a row that fills in `axis` and `frequency`, and a scaling is a row that alters `frequency`. A text
token has t = h = w, hence every layout gives it the very angles of the 1-D one.

B batch, L tokens, H heads, D head width, S slots (rotated channels / 2)
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.errors import ConfigError
from vitrail.nn.kernels.settled import settled

AXES = ("t", "h", "w")
T, H, W = range(3)


class Linear(Config, tag="linear", tag_field="kind"):
    """Position interpolation: every slot turns `factor` times slower."""

    factor: float


class NTK(Config, tag="ntk", tag_field="kind"):
    """A larger base: the slowest slot turns `factor` times slower, the fastest as before."""

    factor: float


class YaRN(Config, tag="yarn", tag_field="kind"):
    """Fast slots kept, slow ones interpolated, a ramp between; the result is scaled to keep attention's entropy."""

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None


class Llama3(Config, tag="llama3", tag_field="kind"):
    """Llama 3.1's ramp over wavelengths."""

    factor: float
    original_length: int
    low: float = 1.0
    high: float = 4.0


Scaling = Linear | NTK | YaRN | Llama3


class RotaryConfig(Config):
    """A member of the family.

    `sections` counts the slots each of (t, h, w) drives in the M-RoPE layouts. `pairing` says which channels make a
    pair: `half` couples channel i with i + D/2 (Hugging Face), `adjacent` 2i with 2i + 1 (Meta's files, EVA). `dim`
    rotates only the first channels of a head: all of them unless given, none if 0.
    """

    head_dim: int
    layout: Literal["1d", "2d", "2d_split", "mrope", "mrope_interleaved"] = "1d"
    theta: float = 10_000.0
    sections: tuple[int, int, int] | None = None
    pairing: Literal["half", "adjacent"] = "half"
    dim: int | None = None
    scaling: Scaling | None = None

    @property
    def rotated(self) -> int:
        return self.head_dim if self.dim is None else self.dim

    def __post_init__(self) -> None:
        unit = 4 if self.layout in ("2d", "2d_split") else 2
        if self.head_dim < 1 or self.rotated < 0 or self.rotated % unit or self.rotated > self.head_dim:
            raise ConfigError(
                f"rotary layout {self.layout!r} cannot turn {self.rotated} of {self.head_dim} channels",
                f"use a multiple of {unit}, at most the head's width",
            )
        if self.scaling is not None and not self.scaling.factor > 0:
            raise ConfigError(f"a rotary scaling by {self.scaling.factor} stops every slot", "use a factor above 0")
        channels = self.rotated // 2 if self.layout == "2d" else self.rotated  # of one ladder
        if not self.theta > 1 or (isinstance(self.scaling, NTK) and channels < 4):
            raise ConfigError(f"theta {self.theta} over {channels} channels gives no falling ladder of frequencies")
        if self.layout.startswith("mrope"):
            if self.sections is None or min(self.sections) < 0 or sum(self.sections) != self.rotated // 2:
                raise ConfigError(
                    f"sections {self.sections} do not share out {self.rotated // 2} slots over (t, h, w)",
                    f"give three numbers that add up to {self.rotated // 2}",
                )
            if self.layout == "mrope_interleaved" and self.sections[T] < max(self.sections[H], self.sections[W]):
                raise ConfigError(
                    f"interleaved sections {self.sections} leave t with fewer slots than h or w",
                    "give t the largest section: the slots past the interleaved part are its",
                )
        elif self.sections is not None:
            raise ConfigError(f"rotary layout {self.layout!r} takes no sections", "leave `sections` out")


# ---- layouts: config, ladder of frequencies → (axis of each slot, frequency of each slot) -----------------------

Ladder = Callable[[int], Tensor]
"""Width in channels → the falling frequencies of its slots."""


class Layout(NamedTuple):
    says: str
    fill: Callable[[RotaryConfig, Ladder], tuple[Tensor, Tensor]]


def _one_axis(config: RotaryConfig, ladder: Ladder) -> tuple[Tensor, Tensor]:
    frequency = ladder(config.rotated)
    return torch.full_like(frequency, T, dtype=torch.long), frequency


def _two_axes(config: RotaryConfig, ladder: Ladder) -> tuple[Tensor, Tensor]:
    frequency = ladder(config.rotated // 2)
    return torch.tensor([H, W]).repeat_interleave(len(frequency)), frequency.repeat(2)


def _two_axes_split(config: RotaryConfig, ladder: Ladder) -> tuple[Tensor, Tensor]:
    frequency = ladder(config.rotated)
    return torch.tensor([H, W]).repeat_interleave(len(frequency) // 2), torch.cat([frequency[::2], frequency[1::2]])


def _chunks(config: RotaryConfig, ladder: Ladder) -> tuple[Tensor, Tensor]:
    assert config.sections is not None
    return torch.tensor([T, H, W]).repeat_interleave(torch.tensor(config.sections)), ladder(config.rotated)


def _interleaved(config: RotaryConfig, ladder: Ladder) -> tuple[Tensor, Tensor]:
    assert config.sections is not None
    axis = torch.full((config.rotated // 2,), T)
    for a in (H, W):  # t h w t h w …, and what is left at the slow end is t's
        axis[a : 3 * config.sections[a] : 3] = a
    return axis, ladder(config.rotated)


LAYOUTS: dict[str, Layout] = {
    "1d": Layout("every slot follows t: text", _one_axis),
    "2d": Layout("h on the first half, w on the second, each with a ladder of its own: Qwen's ViT", _two_axes),
    "2d_split": Layout("one ladder dealt out to h and w in turn: Pixtral's ViT", _two_axes_split),
    "mrope": Layout("t, h, w in contiguous sections: Qwen2-VL, Qwen2.5-VL", _chunks),
    "mrope_interleaved": Layout("t, h, w in turn, so each has fast and slow slots: Qwen3-VL", _interleaved),
}


# ---- scalings: ladder of frequencies → slower ladder, and the factor on cos and sin -----------------------------


def _base_ladder(theta: float) -> Ladder:
    # Written as the reference implementations write it, so that float32 results agree to the last bit.
    return lambda channels: 1.0 / (theta ** (torch.arange(0, channels, 2, dtype=torch.float32) / channels))


def _yarn(scaling: YaRN, theta: float) -> Ladder:
    def rung(rotations: float, channels: int) -> float:
        """The slot that turns `rotations` times over the original length."""
        return channels * math.log(scaling.original_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    def ladder(channels: int) -> Tensor:
        low, high = rung(scaling.beta_fast, channels), rung(scaling.beta_slow, channels)
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, channels - 1)
        if low == high:
            high += 0.001  # a step instead of a ramp, without dividing by zero
        slots = torch.arange(channels // 2, dtype=torch.float32)
        keep = 1 - ((slots - low) / (high - low)).clamp(0, 1)
        wavelength = theta ** (torch.arange(0, channels, 2, dtype=torch.float32) / channels)
        return 1.0 / (scaling.factor * wavelength) * (1 - keep) + 1.0 / wavelength * keep

    return ladder


def _yarn_amplitude(scaling: YaRN) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)


def _llama3(scaling: Llama3, theta: float) -> Ladder:
    def ladder(channels: int) -> Tensor:
        frequency = _base_ladder(theta)(channels)
        wavelength = 2 * math.pi / frequency
        turns = scaling.original_length / wavelength  # over the original length
        smooth = (turns - scaling.low) / (scaling.high - scaling.low)
        ramp = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        slow = wavelength > scaling.original_length / scaling.low
        fast = wavelength < scaling.original_length / scaling.high
        return torch.where(fast, frequency, torch.where(slow, frequency / scaling.factor, ramp))

    return ladder


def _ladder(config: RotaryConfig) -> tuple[Ladder, float]:
    """The ladder under the config's scaling, and the factor on cos and sin."""
    theta = config.theta
    match config.scaling:
        case None:
            return _base_ladder(theta), 1.0
        case Linear(factor=factor):
            plain = _base_ladder(theta)
            return lambda channels: plain(channels) / factor, 1.0
        case NTK(factor=factor):
            return lambda channels: _base_ladder(theta * factor ** (channels / (channels - 2)))(channels), 1.0
        case YaRN() as yarn:
            return _yarn(yarn, theta), _yarn_amplitude(yarn)
        case Llama3() as llama3:
            return _llama3(llama3, theta), 1.0


# ---- the module -------------------------------------------------------------------------------------------------


class Rotation(NamedTuple):
    """cos and sin of every angle, (B, L, S) float32: made once a batch, used by every layer."""

    cos: Tensor
    sin: Tensor
    pairing: Literal["half", "adjacent"] = "half"


class Rotary(nn.Module):
    """positions (B, L) or (B, L, 3) → `Rotation`.

    One position a token stands for t = h = w. Angles are float32 whatever the model's type: in bfloat16 position
    257 would equal 256.
    """

    axis: Tensor
    frequency: Tensor

    def __init__(self, config: RotaryConfig):
        super().__init__()
        self.config = config
        self.fill(torch.get_default_device())

    def fill(self, device: torch.device) -> None:
        """Set the frequencies anew: needed where a module made on the meta device is given its weights."""
        with torch.device("cpu"):
            ladder, self.amplitude = _ladder(self.config)
            axis, frequency = LAYOUTS[self.config.layout].fill(self.config, ladder)
        self.register_buffer("axis", axis.to(device), persistent=False)
        self.register_buffer("frequency", frequency.to(device), persistent=False)

    def _apply(self, fn, recurse=True):
        # A cast (`model.bfloat16()`) must not round the frequencies, and `to_empty` must not leave them unset.
        super()._apply(fn, recurse)
        self.fill(self.frequency.device)
        return self

    def forward(self, positions: Tensor) -> Rotation:
        if positions.ndim == 2:  # (B, L)
            driven = positions[..., None]
        else:  # (B, L, 3) → (B, L, S)
            driven = positions[..., self.axis]
        angle = driven.float() * self.frequency  # (B, L, S)
        cos, sin = (settled(x * self.amplitude) for x in (angle.cos(), angle.sin()))
        return Rotation(cos, sin, self.config.pairing)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn the channel pairs of x (B, L, H, D); channels past the rotated ones pass through."""
    cos, sin = rotation.cos[:, :, None], rotation.sin[:, :, None]  # (B, L, 1, S)
    rotated = 2 * cos.shape[-1]
    head, tail = x[..., :rotated].float(), x[..., rotated:]
    if rotation.pairing == "half":
        a, b = head.chunk(2, dim=-1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    else:
        a, b = head[..., 0::2], head[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return torch.cat([turned.to(x.dtype), tail], dim=-1) if tail.shape[-1] else turned.to(x.dtype)
