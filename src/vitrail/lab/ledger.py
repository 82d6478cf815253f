"""The cost ledger: what a model weighs, computes and moves, before anybody pays for it.

The model is built on the meta device and walked by `vitrail.nn.cost`, so 235B parameters cost no memory. FLOPs are
those of matrix products, a multiply-add counted as two; bytes are the weights a pass must read, each once, and the
keys and values it reads or writes. A time is a floor: at the device's rates nothing can be faster. Of a vision-language
model, or of one that reads and draws, the tower and the connector are counted, in sum and each by itself.
"""

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import nn

from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.backbones.presets import DECODERS
from vitrail.codecs.codec import Codec, CodecConfig
from vitrail.codecs.presets import CODECS
from vitrail.config import Config
from vitrail.encoders import (
    SAM,
    Conv,
    ConvConfig,
    SAMConfig,
    TextConfig,
    TextTower,
    Towers,
    TowersConfig,
    ViT,
    ViTConfig,
)
from vitrail.encoders.presets import SAMS, TEXTS, TOWERS, VITS
from vitrail.errors import ConfigError, nearest
from vitrail.lab.parts import Playing, Reading
from vitrail.models.clip import Contrastive, ContrastiveConfig
from vitrail.models.genie import GenieConfig
from vitrail.models.looking import LookingVLM, LookingVLMConfig
from vitrail.models.presets import SYSTEMS
from vitrail.models.seeing import Leg
from vitrail.models.unified import UnifiedConfig
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.nn import Work, cost
from vitrail.nn.mlp import Experts

Row = TypeVar("Row")
Reads = Literal["prompt", "picture", "text", "pair", "question", "video"]

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
    "orin":    Device(42.5e12, 0.205e12, 64e9, "datasheet, AGX 64 GB: half the rate of its GPU's 85 dense int8 TOPS"),
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
    parts    of that, the parts of a vision-language model, each by itself
    decode   context → one more token for each of `batch` rows
    turning  the least batch at which decoding at the ledger's context is bound by products and no longer by reading;
             none where a row brings more reading than work, which no batch mends
    fitting  prompts of the ledger's context that memory holds beside the weights; activations are not counted
    """

    device: str
    batch: int
    needed: int
    forward: Time
    parts: dict[str, Time] = {}
    decode: dict[int, Time] = {}
    turning: int | None = None
    fitting: int | None = None


class Part(Config):
    """A tower, the connectors or a decoder within a whole: FLOPs of its share of a pass over one row, bytes of weights
    and, after that pass, of keys and values."""

    parameters: int
    forward: int
    weights: int
    cache: int


class Ledger(Config):
    """What one model costs.

    row      what a pass reads: a prompt, a picture, a text, a pair of the last two, a question (pictures and words), or
             a video as long as a world's memory, of which its dynamics are counted
    active   parameters that a token meets: all but the experts it does not use
    tokens   of a row; of a picture the patches
    forward  FLOPs of a pass over one row; a prompt or a question is asked for the logits of its last token
    train    FLOPs of training on one token of the context, or on one row of a tower or of questions, all parts learning
    weights  bytes
    decode   FLOPs of one more token at that context
    cache    tokens → bytes of their keys and values, with those of pictures that are looked at
    parts    of a vision-language model
    shown    height and width of every picture of a question
    seen     tokens of a question's pictures, or features of theirs that are looked at from beside the stream
    """

    name: str
    row: Reads
    dtype: str
    parameters: int
    active: int
    tokens: int
    forward: int
    train: int
    weights: int
    decode: int | None = None
    cache: dict[int, int] = {}
    parts: dict[str, Part] = {}
    shown: tuple[tuple[int, int], ...] = ()
    seen: int = 0
    floors: tuple[Floor, ...] = ()


class Given(NamedTuple):
    """What a row is made of where the model does not say it: words, and pictures by height and width."""

    words: int
    sizes: tuple[tuple[int, int], ...]


class Kind(NamedTuple):
    """How a config becomes a model and rows of work: `tokens(config, given)`, `work(model, given, batch)` and, of what
    writes, `step(model, given, length, batch)`: one more token."""

    model: Callable[[Any], nn.Module]
    row: Reads
    tokens: Callable[[Any, Given], int]
    work: Callable[[Any, Given, int], Work]
    step: Callable[[Any, Given, int, int], Work] | None = None


KINDS: dict[type[Config], Kind] = {
    DecoderConfig:     Kind(Decoder, "prompt", lambda c, g: g.words, lambda m, g, b: Work.prefill(g.words, b),
                            lambda m, g, n, b: Work.decode(n, b)),
    ViTConfig:         Kind(ViT, "picture", lambda c, g: c.side**2, lambda m, g, b: m.work(b)),
    ConvConfig:        Kind(Conv, "picture", lambda c, g: c.side**2, lambda m, g, b: m.work(b)),
    SAMConfig:         Kind(SAM, "picture", lambda c, g: c.side**2, lambda m, g, b: m.work(b)),
    TowersConfig:      Kind(Towers, "picture", lambda c, g: _patches(c),
                            lambda m, g, b: Work.full(_patches(m.config), b)),
    TextConfig:        Kind(TextTower, "text", lambda c, g: c.context, lambda m, g, b: m.work(b)),
    CodecConfig:       Kind(Codec, "picture", lambda c, g: _codes(c), lambda m, g, b: m.work(b)),
    ContrastiveConfig: Kind(Contrastive, "pair", lambda c, g: c.image.side**2, lambda m, g, b: m.work(b)),
    VLMConfig:         Kind(VLM, "question", lambda c, g: g.words + sum(c.tokens(c.policy.cut(*s)) for s in g.sizes),
                            lambda m, g, b: m.work(g.sizes, g.words, b), lambda m, g, n, b: m.step(n, g.sizes, b)),
    UnifiedConfig:     Kind(Reading, "question", lambda c, g: g.words + len(g.sizes) * (1 + _codes(c.codec)),
                            lambda m, g, b: m.work(len(g.sizes), g.words, b), lambda m, g, n, b: Work.decode(n, b)),
    LookingVLMConfig:  Kind(LookingVLM, "question", lambda c, g: g.words + len(g.sizes),
                            lambda m, g, b: m.work(g.sizes, g.words, b), lambda m, g, n, b: m.step(n, g.sizes, b)),
    GenieConfig:       Kind(Playing, "video", lambda c, g: c.dynamics.transformer.memory * math.prod(c.codec.grid),
                            lambda m, g, b: m.work(b)),
}  # fmt: skip


def _codes(config: CodecConfig) -> int:
    return math.prod(config.net.size) // config.net.factor**2


def _patches(config: TowersConfig) -> int:
    return (config.image // config.towers[0].vit.patch) ** 2


PRESETS: dict[str, Config] = {
    **DECODERS,
    **VITS,
    **SAMS,
    **TOWERS,
    **CODECS,
    **{f"{name}-text": text for name, text in TEXTS.items()},
    **SYSTEMS,
}


def named(name: str) -> Config:
    """The config of a preset."""
    listed = "`vitrail ledger` lists the presets; a folder with a config.json or a GGUF file will do too"
    return pick(PRESETS, name, "preset", listed)


def check_work(context: int, batch: int, pictures: int = 1) -> None:
    if context < 1 or batch < 1 or pictures < 0:
        raise ConfigError(
            f"{batch} rows of {context} tokens and {pictures} pictures are no work",
            "give at least one row and one token, and no fewer than no pictures",
        )


def ledger(
    model: str | Config,
    *,
    name: str = "",
    context: int = 8192,
    picture: tuple[int, int] = (480, 640),
    pictures: int = 1,
    batch: int = 1,
    dtype: str = "bfloat16",
    devices: Sequence[str] = ("h200",),
    lengths: Sequence[int] = LENGTHS,
) -> Ledger:
    """The ledger of a preset or a config. `context` are a prompt's tokens, or the words of a question about so many
    pictures of the size `picture` (height, width); towers read pictures and texts of their own size."""
    check_work(context, batch, pictures)
    kept = pick(DTYPES, dtype, "type")
    config = named(model) if isinstance(model, str) else model
    kind, given = kind_of(config), Given(context, (picture,) * pictures)
    with torch.device("meta"):
        built = kind.model(config).to(kept)
    tokens = kind.tokens(config, given)
    once = kind.work(built, given, 1)
    forward, held = cost.flops(built, once), cost.bytes(built, once)
    found = Ledger(
        name=name or (model if isinstance(model, str) else type(config).__name__),
        row=kind.row,
        dtype=dtype,
        parameters=sum(p.numel() for p in built.parameters()),
        active=active(built),
        tokens=tokens,
        forward=forward,
        train=TRAINING * forward,
        weights=held.weights,
        floors=tuple(_floor(built, kind, given, tokens, batch, label, lengths) for label in devices),
    )
    if kind.step is None:
        return found
    shown = {tokens, *lengths} | ({1} if kind.row == "prompt" else set())
    steps = {n: kind.step(built, given, n, 1) for n in sorted(shown)}
    every = TRAINING * cost.flops(built, once.with_(held=0, asked=None))
    # Pictures that later words no longer look at are kept all the same.
    unseen = held.cache - cost.bytes(built, steps[tokens]).cache
    found = found.with_(
        decode=cost.flops(built, steps[tokens]),
        train=every // tokens if kind.row == "prompt" else every,
        cache={n: cost.bytes(built, step).cache + unseen for n, step in steps.items()},
    )
    if kind.row != "question":
        return found
    parts = {part: _part(leg) for part, leg in _legs(built, once).items()}
    return found.with_(parts=parts, shown=given.sizes, seen=once.context)


def time_floor(model: nn.Module, work: Work, device: Device) -> Time:
    """What a pass takes at least: the weights it touches are read once, its keys and values read or written once."""
    return _time(cost.flops(model, work), cost.bytes(model, work), device)


def _time(flops: int, moved: cost.Bytes, device: Device) -> Time:
    return Time(compute=flops / device.flops, memory=(moved.read + moved.cache) / device.bandwidth)


def active(model: nn.Module) -> int:
    """Parameters that a token meets."""
    idle = 0
    for module in model.modules():
        if isinstance(module, Experts):
            one = cost.bytes(module, Work.decode(1))
            idle += (one.weights - one.read) // module.down.element_size()
    return sum(p.numel() for p in model.parameters()) - idle


def turning(
    model: nn.Module, context: int, device: Device, step: Callable[[int, int], Work] = Work.decode
) -> int | None:
    """The least batch at which decoding, `step(context, batch)`, is bound by products, up to MOST: reading per row only
    falls with the batch."""
    index = bisect.bisect_left(
        range(1, MOST + 1),
        True,
        key=lambda batch: time_floor(model, step(context, batch), device).bound == "compute",
    )
    return None if index == MOST else index + 1


def _legs(model: nn.Module, work: Work) -> dict[str, Leg]:
    return model.legs(work) if isinstance(model, VLM | LookingVLM | Reading | Playing) else {}


def _part(leg: Leg) -> Part:
    held = leg.bytes
    return Part(parameters=leg.parameters, forward=leg.flops, weights=held.weights, cache=held.cache)


def _floor(
    model: nn.Module, kind: Kind, given: Given, tokens: int, batch: int, label: str, lengths: Sequence[int]
) -> Floor:
    device = pick(DEVICES, label, "device")
    work = kind.work(model, given, batch)
    held = cost.bytes(model, work)
    found = Floor(
        device=label,
        batch=batch,
        needed=math.ceil((held.weights + held.cache) / device.memory),
        forward=time_floor(model, work, device),
        parts={part: _time(leg.flops, leg.bytes, device) for part, leg in _legs(model, work).items()},
    )
    if kind.step is None:
        return found
    step = partial(kind.step, model, given)
    return found.with_(
        decode={n: time_floor(model, step(n, batch), device) for n in sorted({tokens, *lengths})},
        turning=turning(model, tokens, device, step),
        fitting=max(0, int((device.memory - held.weights) // (held.cache // batch))),
    )


def kind_of(config: Config) -> Kind:
    if type(config) not in KINDS:
        known = ", ".join(kind.__name__ for kind in KINDS)
        raise ConfigError(f"no ledger for a {type(config).__name__}", f"there are rows for {known}")
    return KINDS[type(config)]


def pick(table: Mapping[str, Row], name: str, what: str, otherwise: str = "") -> Row:
    if name in table:
        return table[name]
    raise ConfigError(f"no {what} is called {name!r}", nearest(name, table, otherwise))
