"""The cost ledger: what a model weighs, computes and moves, before anybody pays for it.

The model is built on the meta device and walked by `vitrail.nn.cost`, so 235B parameters cost no memory. FLOPs are
those of matrix products, a multiply-add counted as two; bytes are the weights a pass must read, each once, and the
keys and values it reads or writes. A time is a floor: at the device's rates nothing can be faster.
"""

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import nn

from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.backbones.presets import DECODERS
from vitrail.codecs.codec import Codec, CodecConfig
from vitrail.codecs.presets import CODECS
from vitrail.config import Config
from vitrail.encoders import Conv, ConvConfig, TextConfig, TextTower, Towers, TowersConfig, ViT, ViTConfig
from vitrail.encoders.presets import TEXTS, TOWERS, VITS
from vitrail.errors import ConfigError, nearest
from vitrail.models.clip import Contrastive, ContrastiveConfig
from vitrail.nn import Work, cost
from vitrail.nn.mlp import Experts

Row = TypeVar("Row")

LENGTHS = (8_192, 32_768, 262_144)
"""Contexts that a ledger shows cache and decoding at."""

TRAINING = 3
"""A backward pass computes two products for each of the forward pass: for the input's gradient and the weight's."""

MOST = 2**20
"""Rows beyond which nobody looks for the batch that turns decoding."""

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8": torch.float8_e4m3fn,
}
"""What weights and cache are kept in. Products run at a device's bf16 rate whatever they are kept in."""


class Device(NamedTuple):
    flops: float  # of dense bf16 products, a second
    bandwidth: float  # bytes a second
    memory: float  # bytes
    origin: str


DEVICES = {
    "h200":    Device(790e12, 4.30e12, 141e9, "rates measured (bf16 product, copy), memory by datasheet"),
    "h100":    Device(989e12, 3.35e12, 80e9, "datasheet, SXM"),
    "a100":    Device(312e12, 2.04e12, 80e9, "datasheet, SXM 80 GB"),
    "rtx4090": Device(165e12, 1.01e12, 24e9, "datasheet"),
}  # fmt: skip


class Time(Config):
    """Seconds that a pass needs at least: all its products at the device's rate, all its bytes at its bandwidth."""

    compute: float
    memory: float

    @property
    def floor(self) -> float:
        return max(self.compute, self.memory)

    @property
    def bound(self) -> Literal["compute", "memory"]:
        return "compute" if self.compute >= self.memory else "memory"


class Floor(Config):
    """A model on one device.

    needed   devices whose memories together hold the weights and the cache of `batch` prompts
    forward  a pass over `batch` rows
    decode   context → one more token for each of `batch` rows
    turning  the least batch at which decoding at the ledger's context is bound by products and no longer by reading;
             none where a row brings more reading than work, which no batch mends
    fitting  prompts of the ledger's context that memory holds beside the weights; activations are not counted
    """

    device: str
    batch: int
    needed: int
    forward: Time
    decode: dict[int, Time] = {}
    turning: int | None = None
    fitting: int | None = None


class Ledger(Config):
    """What one model costs.

    row      what a pass reads: a prompt, a picture, a text, or a pair of the last two
    active   parameters that a token meets: all but the experts it does not use
    tokens   of a row; of a picture the patches
    forward  FLOPs of a pass over one row; a prompt is asked for the logits of its last token
    train    FLOPs of training on one token of the context, or on one row of a tower
    weights  bytes
    decode   FLOPs of one more token at that context
    cache    tokens → bytes of their keys and values
    """

    name: str
    row: Literal["prompt", "picture", "text", "pair"]
    dtype: str
    parameters: int
    active: int
    tokens: int
    forward: int
    train: int
    weights: int
    decode: int | None = None
    cache: dict[int, int] = {}
    floors: tuple[Floor, ...] = ()


class Kind(NamedTuple):
    """How a config becomes a model and rows of work: `tokens(config, context)`, `work(model, tokens, batch)`."""

    model: Callable[[Any], nn.Module]
    row: Literal["prompt", "picture", "text", "pair"]
    tokens: Callable[[Any, int], int]
    work: Callable[[Any, int, int], Work]


KINDS: dict[type[Config], Kind] = {
    DecoderConfig:     Kind(Decoder, "prompt", lambda c, n: n, lambda m, n, b: Work.prefill(n, b)),
    ViTConfig:         Kind(ViT, "picture", lambda c, n: c.side**2, lambda m, n, b: m.work(b)),
    ConvConfig:        Kind(Conv, "picture", lambda c, n: c.side**2, lambda m, n, b: m.work(b)),
    TowersConfig:      Kind(Towers, "picture", lambda c, n: (c.image // c.towers[0].vit.patch) ** 2,
                            lambda m, n, b: Work.full(n, b)),
    TextConfig:        Kind(TextTower, "text", lambda c, n: c.context, lambda m, n, b: m.work(b)),
    CodecConfig:       Kind(Codec, "picture", lambda c, n: math.prod(c.net.size) // c.net.factor**2,
                            lambda m, n, b: m.work(b)),
    ContrastiveConfig: Kind(Contrastive, "pair", lambda c, n: c.image.side**2, lambda m, n, b: m.work(b)),
}  # fmt: skip

PRESETS: dict[str, Config] = {
    **DECODERS,
    **VITS,
    **TOWERS,
    **CODECS,
    **{f"{name}-text": text for name, text in TEXTS.items()},
}


def named(name: str) -> Config:
    """The config of a preset."""
    listed = "`vitrail ledger` lists the presets; a folder with a config.json or a GGUF file will do too"
    return _pick(PRESETS, name, "preset", listed)


def ledger(
    model: str | Config,
    *,
    name: str = "",
    context: int = 8192,
    batch: int = 1,
    dtype: str = "bfloat16",
    devices: Sequence[str] = ("h200",),
    lengths: Sequence[int] = LENGTHS,
) -> Ledger:
    """The ledger of a preset or a config. `context` is a prompt's; pictures and texts have the size of their tower."""
    if context < 1 or batch < 1:
        raise ConfigError(f"{batch} rows of {context} tokens are no work", "give at least one of each")
    kept = _pick(DTYPES, dtype, "type")
    config = named(model) if isinstance(model, str) else model
    kind = _kind(config)
    with torch.device("meta"):
        built = kind.model(config).to(kept)
    tokens = kind.tokens(config, context)
    once = kind.work(built, tokens, 1)
    forward = cost.flops(built, once)
    found = Ledger(
        name=name or (model if isinstance(model, str) else type(config).__name__),
        row=kind.row,
        dtype=dtype,
        parameters=sum(p.numel() for p in built.parameters()),
        active=active(built),
        tokens=tokens,
        forward=forward,
        train=TRAINING * forward,
        weights=cost.bytes(built, once).weights,
        floors=tuple(_floor(built, kind, tokens, batch, label, lengths) for label in devices),
    )
    if kind.row != "prompt":
        return found
    return found.with_(
        decode=cost.flops(built, Work.decode(tokens)),
        train=TRAINING * cost.flops(built, Work.causal(tokens)) // tokens,
        cache={n: cost.bytes(built, Work.decode(n)).cache for n in sorted({1, tokens, *lengths})},
    )


def time_floor(model: nn.Module, work: Work, device: Device) -> Time:
    """What a pass takes at least: the weights it touches are read once, its keys and values read or written once."""
    moved = cost.bytes(model, work)
    return Time(
        compute=cost.flops(model, work) / device.flops,
        memory=(moved.read + moved.cache) / device.bandwidth,
    )


def active(model: nn.Module) -> int:
    """Parameters that a token meets."""
    idle = 0
    for module in model.modules():
        if isinstance(module, Experts):
            one = cost.bytes(module, Work.decode(1))
            idle += (one.weights - one.read) // module.down.element_size()
    return sum(p.numel() for p in model.parameters()) - idle


def turning(model: nn.Module, context: int, device: Device) -> int | None:
    """The least batch at which decoding is bound by products, up to MOST: reading per row only falls with the batch."""
    index = bisect.bisect_left(
        range(1, MOST + 1),
        True,
        key=lambda batch: time_floor(model, Work.decode(context, batch), device).bound == "compute",
    )
    return None if index == MOST else index + 1


def _floor(model: nn.Module, kind: Kind, tokens: int, batch: int, label: str, lengths: Sequence[int]) -> Floor:
    device = _pick(DEVICES, label, "device")
    work = kind.work(model, tokens, batch)
    held = cost.bytes(model, work)
    found = Floor(
        device=label,
        batch=batch,
        needed=math.ceil((held.weights + held.cache) / device.memory),
        forward=time_floor(model, work, device),
    )
    if kind.row != "prompt":
        return found
    return found.with_(
        decode={n: time_floor(model, Work.decode(n, batch), device) for n in sorted({tokens, *lengths})},
        turning=turning(model, tokens, device),
        fitting=max(0, int((device.memory - held.weights) // (held.cache // batch))),
    )


def _kind(config: Config) -> Kind:
    if type(config) not in KINDS:
        known = ", ".join(kind.__name__ for kind in KINDS)
        raise ConfigError(f"no ledger for a {type(config).__name__}", f"there are rows for {known}")
    return KINDS[type(config)]


def _pick(table: Mapping[str, Row], name: str, what: str, otherwise: str = "") -> Row:
    if name in table:
        return table[name]
    raise ConfigError(f"no {what} is called {name!r}", nearest(name, table, otherwise))
