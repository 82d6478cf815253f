"""Floors held against the clock: the rates of the present device, and how long passes really take there.

Rates and passes are measured in one run, on one machine as it is then.

B rows, n tokens, S side
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import nn

from vitrail.backbones.decoder import Decoder
from vitrail.codecs.codec import Codec
from vitrail.config import Config
from vitrail.encoders import SAM, Conv, TextTower, Towers, ViT
from vitrail.errors import ConfigError
from vitrail.generate.answers import Reading as Answering
from vitrail.lab.ledger import DTYPES, Device, Given, Time, check_work, kind_of, pick
from vitrail.lab.parts import Playing, Reading
from vitrail.models.clip import Contrastive
from vitrail.models.looking import LookingVLM
from vitrail.models.vlm import VLM
from vitrail.nn import KVCache, Work, cost
from vitrail.stream import build, pack, words

REPEATS, REHEARSED = 7, 2
SIZES = {"cpu": (1024, 2**27), "cuda": (8192, 2**30)}
"""Side of the matrices, and bytes that are moved: more than a cache holds."""
FIRST, AFTER = "first token, a picture and {} words", "a token at {}"


class Measured(Config):
    """One pass on the present device: the seconds it takes at least, those it took, and their ratio."""

    name: str
    what: str
    flops: int
    bytes: int
    seconds: float
    floor: float = 0.0
    bound: str = ""
    ratio: float = 0.0

    def against(self, at: Device) -> "Measured":
        """The same beside the floor at these rates."""
        floor = Time(compute=self.flops / at.flops, memory=self.bytes / at.bandwidth)
        return self.with_(floor=floor.floor, bound=floor.bound, ratio=self.seconds / floor.floor)


class Trial(NamedTuple):
    what: str
    work: Work
    call: Callable[[], object]


def rates(device: str, dtype: torch.dtype) -> Device:
    """What the device reaches now: the best of some products of square matrices, and of copying and reading memory. A
    floor needs the best: a pass cannot be faster than what nothing was seen to beat."""
    n, m = SIZES[device]
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    product = min(_times(lambda: a @ b, device))
    x, y = (torch.ones(m // dtype.itemsize, device=device, dtype=dtype) for _ in range(2))
    rows = x.view(-1, 4096)
    column = rows[0]
    moved = max(2 * m / min(_times(lambda: y.copy_(x), device)), m / min(_times(lambda: rows @ column, device)))
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, threads: {torch.get_num_threads()}"
    return Device(2 * n**3 / product, moved, _memory(device), f"{name}; measured in this run")


@torch.no_grad()
def measure(
    config: Config,
    at: Device,
    *,
    name: str = "",
    context: int = 512,
    picture: tuple[int, int] = (480, 640),
    batch: int = 1,
    dtype: str = "bfloat16",
    device: str = "cpu",
) -> list[Measured]:
    """The passes of a model with random weights, each beside its floor at the rates `at`."""
    check_work(context, batch)
    kind, given, kept = kind_of(config), Given(context, (picture,)), pick(DTYPES, dtype, "type")
    with torch.device("meta"):
        hollow = kind.model(config).to(kept)
    with torch.device("cpu"):
        needed = cost.bytes(hollow, kind.work(hollow, given, batch))
    if needed.weights + needed.cache > 0.8 * at.memory:
        raise ConfigError(
            f"{name or type(config).__name__} needs {(needed.weights + needed.cache) / 1e9:.1f} GB, "
            f"and there are {at.memory / 1e9:.1f}",
            "measure a smaller one, or in fewer bits (--dtype)",
        )
    with torch.device(device):
        model = kind.model(config).to(kept).eval()
    found = []
    for trial in _trials(model, given, batch, kept, device):
        moved = cost.bytes(model, trial.work)
        one = Measured(
            name=name or type(config).__name__,
            what=trial.what,
            flops=cost.flops(model, trial.work),
            bytes=moved.read + moved.cache,
            seconds=statistics.median(_times(trial.call, device)),
        )
        found.append(one.against(at))
    return found


def better(a: Device, b: Device) -> Device:
    """The best that either saw: where others use the machine too, rates are measured before and after."""
    return a._replace(flops=max(a.flops, b.flops), bandwidth=max(a.bandwidth, b.bandwidth))


def _trials(model: Any, given: Given, batch: int, dtype: torch.dtype, device: str) -> Iterator[Trial]:
    """What can be run of a model; each trial is timed before the next one is made."""
    match model:
        case Decoder():
            yield from _writing(model, given.words, batch, device)
        case ViT() | Conv() | SAM() | Towers() | Codec() | Contrastive() | TextTower():
            inputs = _inputs(model, batch, dtype, device)
            work = kind_of(model.config).work(model, given, batch)
            yield Trial("forward", work, lambda: model(*inputs))
        case VLM() | LookingVLM():
            yield from _asking(model, given, batch, device)
        case Reading():
            yield from _reading(model, given, batch, dtype, device)
        case Playing():
            yield _playing(model, batch, device)


def _writing(model: Decoder, n: int, batch: int, device: str) -> Iterator[Trial]:
    ids = torch.randint(model.config.vocab, (batch, n), device=device)

    def prefill(room: int = 0) -> Any:
        cache = model.cache(batch, n + room)
        model.logits(model.hidden(ids, cache=cache)[:, -1])
        return cache

    yield Trial(f"prefill, {n} tokens", Work.prefill(n, batch), prefill)
    cache = prefill(REPEATS + REHEARSED)
    yield Trial(AFTER.format(n), Work.decode(_middle(n), batch), lambda: model(ids[:, :1], cache=cache))


def _middle(length: int) -> int:
    """Every step adds a token: the floor is that of the one in the middle."""
    return length + REHEARSED + REPEATS // 2 + 1


def _inputs(model: nn.Module, batch: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Noise as pictures, any words as text."""
    text = model if isinstance(model, TextTower) else getattr(model, "text", None)
    config: Any = model.config
    found = []
    if not isinstance(model, TextTower):
        tower = config.image if isinstance(model, Contrastive) else config
        size = config.net.size if isinstance(model, Codec) else (tower.image, tower.image)
        found.append(torch.rand(batch, 3, *size, device=device).to(dtype))
    if isinstance(text, TextTower):
        ids = torch.randint(text.config.vocab, (batch, text.config.context), device=device)
        if text.config.eos is not None:
            ids[:, -1] = text.config.eos
        found.append(ids)
    return found


def _asking(model: VLM | LookingVLM, given: Given, batch: int, device: str) -> Iterator[Trial]:
    """The first token of an answer about one picture, and a token after it."""
    (height, width), n = given.sizes[0], given.words
    shown: Any = model.prepare([Image.new("RGB", (width, height), (90, 120, 150))] * batch)
    asked = [1 + i % 7 for i in range(n)]
    if isinstance(model, LookingVLM):
        streams = [build([words([model.config.mark, *asked])]) for _ in range(batch)]
    else:
        streams = [build([*model.config.parts(shape), words(asked)], model.config.rules) for shape in shown.shapes]
    rows = pack(streams, (length := len(streams[0])))

    def first(room: int = 0) -> KVCache:
        cache = model.decoder.cache(batch, length + room)
        model.decoder.logits(model.hidden(rows, shown, cache=cache)[:, -1])
        return cache

    yield Trial(FIRST.format(n), model.work([(height, width)], n, batch), first)
    cache, word = first(REHEARSED + REPEATS), torch.ones(batch, 1, dtype=torch.long, device=device)
    behind = model.step(_middle(length), [(height, width)], batch)
    yield Trial(AFTER.format(length), behind, lambda: model.decoder(word, cache=cache))


def _reading(model: Reading, given: Given, batch: int, dtype: torch.dtype, device: str) -> Iterator[Trial]:
    """The same of a unified model, whose pictures have a size of their own."""
    unified, n = model.model, given.words
    pixels = torch.rand(batch, 3, *unified.codec.size, device=device).to(dtype)
    ids, counts = torch.randint(unified.config.decoder.vocab, (batch, n)), torch.full((batch,), n)

    def first() -> Answering:
        answering = Answering(unified, unified.look(pixels)[0], batch)
        answering.prefill(ids, counts)
        return answering

    yield Trial(FIRST.format(n), (work := model.work(1, n, batch)), first)
    answering, length = first(), work.tokens // batch
    behind = Work.decode(_middle(length), batch)
    yield Trial(AFTER.format(length), behind, lambda: answering.step(ids[:, 0].to(device)))


def _playing(model: Playing, batch: int, device: str) -> Trial:
    """A world's dynamics, shown as many frames as they remember."""
    world, frames = model.model, model.config.dynamics.transformer.memory
    ids = torch.randint(world.codec.sizes[0], (batch, frames, *model.config.codec.grid), device=device)
    led = world.dynamics.led(torch.randint(world.actions, (batch, frames - 1), device=device))
    return Trial(f"dynamics, {frames} frames", model.work(batch), lambda: world.dynamics(ids, led))


def _times(call: Callable[[], object], device: str) -> list[float]:
    times = []
    for _ in range(REHEARSED + REPEATS):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        times.append(time.perf_counter() - start)
    return times[REHEARSED:]


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _memory(device: str) -> float:
    if device == "cuda":
        return float(torch.cuda.mem_get_info()[0])
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
