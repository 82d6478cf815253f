"""Rotary position embeddings: layouts (1-D, 2-D, M-RoPE) and scalings (linear, NTK, YaRN, Llama 3, LongRoPE).

A rotary embedding rotates pairs of channels ("slots") by an angle. Variants differ in the position axis of each slot
and in its frequency:

    angle[b, l, s] = positions[b, l, axis[s]] · frequency[s]

A layout sets `axis` and `frequency`; a scaling changes `frequency`. A text token has t = h = w, so every layout gives
it the angles of the 1-D layout.

B batch, L tokens, H heads, D head width, S slots (rotated channels / 2)
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from vitrail.config import Config, Fraction, PositiveFloat, PositiveInt
from vitrail.errors import ConfigError
from vitrail.nn.kernels import HAS_TRITON
from vitrail.nn.kernels.materialize import materialize

AXES = ("t", "h", "w")
T, H, W = range(3)


class LinearScaling(Config, tag="linear", tag_field="kind"):
    """Position interpolation: every frequency is divided by `factor`."""

    factor: PositiveFloat


class NTKScaling(Config, tag="ntk", tag_field="kind"):
    """NTK-aware scaling: a larger base. The lowest frequency is divided by `factor`, the highest stays."""

    factor: PositiveFloat


class YaRNScaling(Config, tag="yarn", tag_field="kind"):
    """YaRN: keep high frequencies, interpolate low ones, with a ramp between. cos and sin are scaled as well."""

    factor: PositiveFloat
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None


class Llama3Scaling(Config, tag="llama3", tag_field="kind"):
    """Llama 3.1's scaling: a ramp over wavelengths."""

    factor: PositiveFloat
    original_length: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


class ProportionalScaling(Config, tag="proportional", tag_field="kind"):
    """Only the `share` of highest frequencies rotates; the others are zero (Gemma 4). They are divided by `factor`."""

    share: Fraction
    factor: PositiveFloat = 1.0


class DynamicNTKScaling(Config, tag="dynamic-ntk", tag_field="kind"):
    """NTK-aware scaling by the length of each sample. Samples of up to `original_length` tokens are not scaled."""

    factor: PositiveFloat
    original_length: int


class LongRoPEScaling(Config, tag="longrope", tag_field="kind"):
    """LongRoPE (Phi-3): every frequency is divided by its own factor. cos and sin are scaled as well.

    short_factor      factors of samples of up to `original_length` tokens, one for each frequency
    long_factor       factors of longer samples
    factor            context length / original_length; it sets the scale of cos and sin
    attention_factor  scale of cos and sin; None to compute it from `factor`
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_length: int
    factor: PositiveFloat = 1.0
    attention_factor: float | None = None


class QueryScaling(Config):
    """Scale of the queries that grows with the position p (Llama 4, Ministral 3):
    1 + beta · log(1 + floor((p + offset) / original_length)).
    """

    beta: float
    original_length: PositiveInt
    offset: int = 0


RotaryScaling = (
    LinearScaling | NTKScaling | YaRNScaling | Llama3Scaling | DynamicNTKScaling | LongRoPEScaling | ProportionalScaling
)


class RotaryConfig(Config):
    """Rotary embedding settings.

    layout      see `ROTARY_LAYOUTS`
    theta       base of the frequencies
    sections    number of slots of (t, h, w) in the M-RoPE layouts
    pairing     channels of a pair: `half` is i and i + D/2 (transformers), `adjacent` is 2i and 2i + 1 (Meta, EVA)
    rotary_dim  number of channels of a head that are rotated; None for all, 0 for none
    scaling     scaling of the frequencies to longer sequences
    query_scaling  scale of the queries by their position; None for none
    """

    head_dim: int
    layout: Literal["1d", "2d", "2d_split", "2d_interleaved", "mrope", "mrope_interleaved"] = "1d"
    theta: float = 10_000.0
    sections: tuple[int, int, int] | None = None
    pairing: Literal["half", "adjacent"] = "half"
    rotary_dim: int | None = None
    scaling: RotaryScaling | None = None
    query_scaling: QueryScaling | None = None

    @property
    def num_rotated_channels(self) -> int:
        """Number of rotated channels of a head."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    def __post_init__(self) -> None:
        unit = 4 if self.layout.startswith("2d") else 2
        if (
            self.head_dim < 1
            or self.num_rotated_channels < 0
            or self.num_rotated_channels % unit
            or self.num_rotated_channels > self.head_dim
        ):
            raise ConfigError(
                f"rotary layout {self.layout!r} cannot rotate {self.num_rotated_channels} of {self.head_dim} channels",
                f"use a multiple of {unit}, at most the head width",
            )
        is_2d = self.layout in ("2d", "2d_interleaved")
        channels = self.num_rotated_channels // (2 if is_2d else 1)  # of one frequency series
        if not self.theta > 1 or (isinstance(self.scaling, NTKScaling | DynamicNTKScaling) and channels < 4):
            raise ConfigError(f"theta {self.theta} over {channels} channels gives no decreasing frequencies")
        if isinstance(self.scaling, DynamicNTKScaling | LongRoPEScaling):
            self._check_length_scaling(self.scaling)
        if self.layout.startswith("mrope"):
            if self.sections is None or min(self.sections) < 0 or sum(self.sections) != self.num_rotated_channels // 2:
                raise ConfigError(
                    f"sections {self.sections} do not distribute {self.num_rotated_channels // 2} slots over (t, h, w)",
                    f"give three numbers that add up to {self.num_rotated_channels // 2}",
                )
            if self.layout == "mrope_interleaved" and self.sections[T] < max(self.sections[H], self.sections[W]):
                raise ConfigError(
                    f"interleaved sections {self.sections} leave t with fewer slots than h or w",
                    "give t the largest section: it gets the slots after the interleaved part",
                )
        elif self.sections is not None:
            raise ConfigError(f"rotary layout {self.layout!r} has no sections", "remove `sections`")

    def _check_length_scaling(self, scaling: "DynamicNTKScaling | LongRoPEScaling") -> None:
        if self.layout.startswith("2d"):
            raise ConfigError(f"rotary layout {self.layout!r} has no scaling by length", "use the layout 1d or mrope")
        if scaling.original_length < 2:
            raise ConfigError(f"original_length of the rotary scaling is {scaling.original_length}", "use 2 or more")
        if isinstance(scaling, LongRoPEScaling):
            slots = self.num_rotated_channels // 2
            for name in ("short_factor", "long_factor"):
                factors = getattr(scaling, name)
                if len(factors) != slots or not all(factor > 0 for factor in factors):
                    raise ConfigError(
                        f"{name} of the rotary scaling has {len(factors)} values for {slots} frequencies",
                        "give one value above 0 for each frequency",
                    )


# ---- layouts: (config, frequency function) → (axis of each slot, frequency of each slot) ------------------------

FrequencyFn = Callable[[int], Tensor]
"""Function from a number of channels to the decreasing frequencies of their slots."""


class RotaryLayout(NamedTuple):
    """A rotary layout and its description."""

    description: str
    build: Callable[[RotaryConfig, FrequencyFn], tuple[Tensor, Tensor]]


def _one_axis(config: RotaryConfig, ladder: FrequencyFn) -> tuple[Tensor, Tensor]:
    frequency = ladder(config.num_rotated_channels)
    return torch.full_like(frequency, T, dtype=torch.long), frequency


def _two_axes(config: RotaryConfig, ladder: FrequencyFn) -> tuple[Tensor, Tensor]:
    frequency = ladder(config.num_rotated_channels // 2)
    return torch.tensor([H, W]).repeat_interleave(len(frequency)), frequency.repeat(2)


def _two_axes_split(config: RotaryConfig, ladder: FrequencyFn) -> tuple[Tensor, Tensor]:
    frequency = ladder(config.num_rotated_channels)
    return torch.tensor([H, W]).repeat_interleave(len(frequency) // 2), torch.cat([frequency[::2], frequency[1::2]])


def _two_axes_interleaved(config: RotaryConfig, ladder: FrequencyFn) -> tuple[Tensor, Tensor]:
    frequency = ladder(config.num_rotated_channels // 2)
    return torch.tensor([W, H]).repeat(len(frequency)), frequency.repeat_interleave(2)


def _chunks(config: RotaryConfig, ladder: FrequencyFn) -> tuple[Tensor, Tensor]:
    assert config.sections is not None
    return torch.tensor([T, H, W]).repeat_interleave(torch.tensor(config.sections)), ladder(config.num_rotated_channels)


def _interleaved(config: RotaryConfig, ladder: FrequencyFn) -> tuple[Tensor, Tensor]:
    assert config.sections is not None
    axis = torch.full((config.num_rotated_channels // 2,), T)
    for a in (H, W):  # t h w t h w …; the remaining low frequencies belong to t
        axis[a : 3 * config.sections[a] : 3] = a
    return axis, ladder(config.num_rotated_channels)


ROTARY_LAYOUTS: dict[str, RotaryLayout] = {
    "1d": RotaryLayout("all slots use t: text", _one_axis),
    "2d": RotaryLayout("h for the first half, w for the second, each with all frequencies: Qwen's ViT", _two_axes),
    "2d_split": RotaryLayout("frequencies alternate between h and w: Pixtral's ViT", _two_axes_split),
    "2d_interleaved": RotaryLayout("w and h alternate, each with all frequencies: Kimi's ViT", _two_axes_interleaved),
    "mrope": RotaryLayout("t, h, w in contiguous sections: Qwen2-VL, Qwen2.5-VL", _chunks),
    "mrope_interleaved": RotaryLayout(
        "t, h, w alternate, so each has high and low frequencies: Qwen3-VL", _interleaved
    ),
}


# ---- scalings: frequency function → scaled frequency function, and the factor on cos and sin --------------------


def _base_ladder(theta: float) -> FrequencyFn:
    # Same operations as the reference implementations, so that float32 results agree to the last bit.
    return lambda channels: 1.0 / (theta ** (torch.arange(0, channels, 2, dtype=torch.float32) / channels))


def _yarn(scaling: YaRNScaling, theta: float) -> FrequencyFn:
    def slot_of(rotations: float, channels: int) -> float:
        """Return the slot that makes `rotations` turns over the original length."""
        return channels * math.log(scaling.original_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    def frequencies(channels: int) -> Tensor:
        low, high = slot_of(scaling.beta_fast, channels), slot_of(scaling.beta_slow, channels)
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, channels - 1)
        if low == high:
            high += 0.001  # avoid a division by zero
        slots = torch.arange(channels // 2, dtype=torch.float32)
        keep = 1 - ((slots - low) / (high - low)).clamp(0, 1)
        wavelength = theta ** (torch.arange(0, channels, 2, dtype=torch.float32) / channels)
        return 1.0 / (scaling.factor * wavelength) * (1 - keep) + 1.0 / wavelength * keep

    return frequencies


def compute_yarn_mscale(factor: float, weight: float) -> float:
    """Compute YaRN's scale of cos and sin, and of the scores of DeepSeek."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn_amplitude(scaling: YaRNScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return compute_yarn_mscale(scaling.factor, scaling.mscale) / compute_yarn_mscale(
            scaling.factor, scaling.mscale_all_dim
        )
    return compute_yarn_mscale(scaling.factor, 1.0)


def _llama3(scaling: Llama3Scaling, theta: float) -> FrequencyFn:
    def frequencies(channels: int) -> Tensor:
        frequency = _base_ladder(theta)(channels)
        wavelength = 2 * math.pi / frequency
        turns = scaling.original_length / wavelength  # over the original length
        smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        ramp = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        slow = wavelength > scaling.original_length / scaling.low_freq_factor
        fast = wavelength < scaling.original_length / scaling.high_freq_factor
        return torch.where(fast, frequency, torch.where(slow, frequency / scaling.factor, ramp))

    return frequencies


def _ladder(config: RotaryConfig) -> tuple[FrequencyFn, float]:
    """Return the frequency function with the config's scaling, and the factor on cos and sin."""
    theta = config.theta
    match config.scaling:
        case None:
            return _base_ladder(theta), 1.0
        case LinearScaling(factor=factor):
            plain = _base_ladder(theta)
            return lambda channels: plain(channels) / factor, 1.0
        case NTKScaling(factor=factor):
            return lambda channels: _base_ladder(theta * factor ** (channels / (channels - 2)))(channels), 1.0
        case YaRNScaling() as yarn:
            return _yarn(yarn, theta), _yarn_amplitude(yarn)
        case Llama3Scaling() as llama3:
            return _llama3(llama3, theta), 1.0
        case ProportionalScaling() as proportional:
            return _proportional(proportional, theta), 1.0
        case DynamicNTKScaling():
            return _base_ladder(theta), 1.0
        case LongRoPEScaling() as longrope:
            return _longrope(longrope.short_factor, theta), _longrope_amplitude(longrope)


def _proportional(scaling: ProportionalScaling, theta: float) -> FrequencyFn:
    def frequencies(channels: int) -> Tensor:
        frequency = _base_ladder(theta)(channels) / scaling.factor
        frequency[int(scaling.share * channels // 2) :] = 0
        return frequency

    return frequencies


def _longrope(factors: tuple[float, ...], theta: float) -> FrequencyFn:
    scale = torch.tensor(factors, dtype=torch.float32)
    return lambda channels: 1.0 / (scale * theta ** (torch.arange(0, channels, 2, dtype=torch.float32) / channels))


def _longrope_amplitude(scaling: LongRoPEScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_length))


# ---- the module -------------------------------------------------------------------------------------------------


class Rotation(NamedTuple):
    """cos and sin of every angle, (B, L, S) float32. Computed once per batch, used by every layer.

    `query_scale` (B, L) float32 multiplies the queries after the rotation, if the config has query_scaling.
    """

    cos: Tensor
    sin: Tensor
    pairing: Literal["half", "adjacent"] = "half"
    query_scale: Tensor | None = None


class RotaryEmbedding(nn.Module):
    """Compute the `Rotation` of positions (B, L) or (B, L, 3).

    Positions (B, L) mean t = h = w. Angles are always float32: in bfloat16, position 257 would equal 256.

    The frequencies of `DynamicNTKScaling` and `LongRoPEScaling` depend on the largest position of a row, as in
    transformers. In generation, keys in the cache have the frequencies of the step that wrote them.
    """

    axis: Tensor
    frequency: Tensor
    long_frequency: Tensor | None

    def __init__(self, config: RotaryConfig):
        super().__init__()
        self.config = config
        self.reset_frequencies(torch.get_default_device())

    def reset_frequencies(self, device: torch.device) -> None:
        """Recompute the frequencies. Needed after a module on the meta device gets its weights."""
        scaling, slots = self.config.scaling, self.config.num_rotated_channels // 2
        long_frequency = None  # (S,) for samples beyond the original length
        with torch.device("meta" if device.type == "meta" else "cpu"):
            ladder, self.attention_scaling = _ladder(self.config)
            if device.type == "meta":  # the tables of an untrusted config may be huge
                axis, frequency = torch.empty(slots, dtype=torch.long), torch.empty(slots)
            else:
                axis, frequency = ROTARY_LAYOUTS[self.config.layout].build(self.config, ladder)
            if isinstance(scaling, LongRoPEScaling):
                long_frequency = _longrope(scaling.long_factor, self.config.theta)(self.config.num_rotated_channels)
        self.register_buffer("axis", axis.to(device), persistent=False)
        self.register_buffer("frequency", frequency.to(device), persistent=False)
        self.register_buffer(
            "long_frequency", None if long_frequency is None else long_frequency.to(device), persistent=False
        )

    def _apply(self, fn, recurse=True):
        # `model.bfloat16()` must not round the frequencies, and `to_empty` must not leave them uninitialized.
        super()._apply(fn, recurse)
        self.reset_frequencies(self.frequency.device)
        return self

    def forward(self, positions: Tensor) -> Rotation:
        if positions.ndim == 2:  # (B, L)
            coordinates = positions[..., None]
        else:  # (B, L, 3) → (B, L, S)
            coordinates = positions[..., self.axis]
        angle = coordinates.float() * self._scale_by_length(positions)  # (B, L, S)
        cos, sin = (materialize(x * self.attention_scaling) for x in (angle.cos(), angle.sin()))
        return Rotation(cos, sin, self.config.pairing, self._scale_queries(positions))

    def _scale_queries(self, positions: Tensor) -> Tensor | None:
        scaling = self.config.query_scaling
        if scaling is None:
            return None
        position = positions if positions.ndim == 2 else positions[..., T]  # (B, L)
        return 1 + scaling.beta * torch.log1p(((position + scaling.offset).float() / scaling.original_length).floor())

    def _scale_by_length(self, positions: Tensor) -> Tensor:
        """Return the frequencies (S,), or (B, L, S) if they depend on the lengths of the samples."""
        scaling = self.config.scaling
        if not isinstance(scaling, DynamicNTKScaling | LongRoPEScaling):
            return self.frequency
        length = _find_sample_lengths(positions)[..., None].float()  # (B, L, 1)
        if isinstance(scaling, LongRoPEScaling):
            assert self.long_frequency is not None
            long_frequency = self.long_frequency
        else:
            channels = self.config.num_rotated_channels
            growth = scaling.factor * length.clamp(min=scaling.original_length) / scaling.original_length
            theta = self.config.theta * (growth - (scaling.factor - 1)) ** (channels / (channels - 2))
            exponent = torch.arange(0, channels, 2, device=positions.device, dtype=torch.float32) / channels
            long_frequency = 1.0 / theta**exponent
        return torch.where(length > scaling.original_length, long_frequency, self.frequency)


def _find_sample_lengths(positions: Tensor) -> Tensor:
    """Return the length of the sample of each token, (B, L): its largest position plus 1. It starts at position 0."""
    furthest = positions if positions.ndim == 2 else positions.amax(-1)  # (B, L)
    sample = (furthest == 0).cumsum(1)
    largest = furthest.new_zeros(len(furthest), furthest.shape[1] + 1).scatter_reduce(1, sample, furthest, "amax")
    return largest.gather(1, sample) + 1


def apply_rotation(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the channel pairs of x (B, L, H, D). Channels after the rotated ones do not change."""
    if HAS_TRITON and x.is_cuda and x.requires_grad and not torch.compiler.is_compiling():
        from vitrail.nn.kernels.rotary_triton import rotate

        return rotate(x, rotation.cos, rotation.sin, rotation.pairing == "adjacent")
    cos, sin = rotation.cos[:, :, None], rotation.sin[:, :, None]  # (B, L, 1, S)
    rotated = 2 * cos.shape[-1]
    head, tail = x[..., :rotated].float(), x[..., rotated:]
    if rotation.pairing == "half":
        a, b = head.chunk(2, dim=-1)
        result = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    else:
        a, b = head[..., 0::2], head[..., 1::2]
        result = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return torch.cat([result.to(x.dtype), tail], dim=-1) if tail.shape[-1] else result.to(x.dtype)
