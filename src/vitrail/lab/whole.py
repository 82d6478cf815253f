"""What one output of a whole system costs: an answer, a picture, a frame, a clip or an action.

A system is the passes that one output takes: modules of this library on the meta device, each with its work, so that
every figure comes from `vitrail.nn.cost`. A part whose shape was never told has the parameters that are told and no
passes: it weighs, and its FLOPs and times are left out, so that a floor stays one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from vitrail.config import Config
from vitrail.lab.ledger import DEVICES, DTYPES, LENGTHS, Time, active, pick
from vitrail.nn import Work, cost


class Pass(NamedTuple):
    """Modules that run one after another, each with its work, so many times for one output. Where the context grows
    with every time, the work is the mean one, and `last` has the cache of the last."""

    part: str
    runs: Sequence[tuple[nn.Module, Work]]
    times: int = 1
    last: tuple[nn.Module, Work] | None = None


class Built(NamedTuple):
    """
    parts    modules by name
    told     parameters of parts whose shape nobody told
    own      tokens that are in the context when nothing else is
    passes   of one output behind n tokens, or at its own context where no other can be
    picture  tokens of a picture
    second   tokens of a second of video
    grows    whether the context may have any length
    """

    parts: Mapping[str, nn.Module]
    passes: Callable[[int], list[Pass]]
    own: int
    picture: int
    second: float | None = None
    told: Mapping[str, int] = {}
    grows: bool = False


class System(NamedTuple):
    """
    output  what is made: an answer's first token, a picture, a frame, a clip, an action
    frames  of video that an output holds
    note    what is not as published, or not known
    """

    output: str
    build: Callable[[], Built]
    frames: int = 0
    note: str = ""


class Reach(Config):
    """One output on one device: seconds it takes at least, in all and by pass, how many a second that is (of video,
    frames), and how many devices hold weights and cache; times are those of one device, as if it held all."""

    seconds: float
    hz: float
    needed: int
    passes: dict[str, float]


class Whole(Config):
    """What one system costs. Keys of `flops`, `cache` and `reach` are tokens of context: those given, or its own."""

    name: str
    output: str
    parameters: int
    active: int
    parts: dict[str, int]
    told: tuple[str, ...]
    picture: int
    second: float | None
    frames: int
    own: int
    grows: bool
    weights: int
    flops: dict[int, int]
    cache: dict[int, int]
    reach: dict[str, dict[int, Reach]]
    note: str


def weigh_up(
    name: str,
    asked: System,
    *,
    devices: Sequence[str] = tuple(DEVICES),
    lengths: Sequence[int] = LENGTHS,
    dtype: str = "bfloat16",
) -> Whole:
    """The figures of a system: behind no other context (`own` tokens), and behind as many as `lengths` say where its
    context may have any length."""
    kept = pick(DTYPES, dtype, "type")
    with torch.device("meta"):
        built = asked.build()
    modules = nn.ModuleList(built.parts.values()).to(kept)
    parts = {part: sum(p.numel() for p in module.parameters()) for part, module in built.parts.items()}
    untold = sum(built.told.values())
    weights = sum(p.numel() * p.element_size() for p in modules.parameters()) + untold * kept.itemsize
    flops, cache, reach = {}, {}, {label: {} for label in devices}
    for context in (0, *(lengths if built.grows else ())):
        passes, key = built.passes(context), context or built.own
        moved = [_moved(one) for one in passes]
        flops[key] = sum(one.times * _flops(one) for one in passes)
        ends = [cost.bytes(*one.last) for one in passes if one.last is not None]
        cache[key] = max(found.cache for found in (*moved, *ends))
        for label in devices:
            device = pick(DEVICES, label, "device")
            times = {
                one.part: one.times
                * Time(compute=_flops(one) / device.flops, memory=(found.read + found.cache) / device.bandwidth).floor
                for one, found in zip(passes, moved, strict=True)
            }
            seconds = sum(times.values())
            needed = math.ceil((weights + cache[key]) / device.memory)
            hz = max(1, asked.frames) / seconds
            reach[label][key] = Reach(seconds=seconds, hz=hz, needed=needed, passes=times)
    return Whole(
        name=name,
        output=asked.output,
        parameters=sum(p.numel() for p in modules.parameters()) + untold,
        active=active(modules) + untold,
        parts=parts | dict(built.told),
        told=tuple(built.told),
        picture=built.picture,
        second=built.second,
        frames=asked.frames,
        own=built.own,
        grows=built.grows,
        weights=weights,
        flops=flops,
        cache=cache,
        reach=reach,
        note=asked.note,
    )


def _flops(one: Pass) -> int:
    return sum(cost.flops(module, work) for module, work in one.runs)


def _moved(one: Pass) -> cost.Bytes:
    return sum((cost.bytes(module, work) for module, work in one.runs), cost.Bytes())
