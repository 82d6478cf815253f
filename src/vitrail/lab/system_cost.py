"""Compute the cost of one output of a complete system: an answer, an image, a frame, a clip or an action.

A system is a list of passes per output: modules on the meta device, each with its workload, so that every figure comes
from `vitrail.nn.cost`. A component with an unpublished shape counts with its published parameters only. It adds no
FLOPs or time, so that times remain lower bounds.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from vitrail.config import Config
from vitrail.lab.cost_ledger import CONTEXT_LENGTHS, DEVICES, DTYPES, PassTime, count_active_parameters, lookup
from vitrail.nn import Workload, cost


class SystemPass(NamedTuple):
    """A pass that one output repeats: modules that run in sequence, each with its workload.

    If the context grows with every repeat, `workloads` is the mean, and `last_workload` gives the final cache.
    """

    name: str
    workloads: Sequence[tuple[nn.Module, Workload]]
    repeats: int = 1
    last_workload: tuple[nn.Module, Workload] | None = None


class SystemModules(NamedTuple):
    """Modules and passes of a system.

    components            modules by name
    passes                context length → passes of one output; ignored if the context is fixed
    own_context           tokens in the context of one output itself
    tokens_per_image      tokens of an image
    tokens_per_second     tokens of a second of video
    published_parameters  parameters of components with an unpublished shape
    is_context_open       whether the context may have any length
    """

    components: Mapping[str, nn.Module]
    passes: Callable[[int], list[SystemPass]]
    own_context: int
    tokens_per_image: int
    tokens_per_second: float | None = None
    published_parameters: Mapping[str, int] = {}
    is_context_open: bool = False


class SystemSpec(NamedTuple):
    """How to build a system.

    output      what one output is: answer (its first token), image, frame, clip or action
    num_frames  video frames per output
    note        deviations from the published system, and unknowns
    """

    output: str
    build: Callable[[], SystemModules]
    num_frames: int = 0
    note: str = ""


class OutputLatency(Config):
    """Roofline latency of one output on one device.

    seconds       total
    hz            outputs per second, or frames per second for video
    num_devices   devices needed to hold weights and cache; times are those of one device that holds everything
    pass_seconds  seconds by pass
    """

    seconds: float
    hz: float
    num_devices: int
    pass_seconds: dict[str, float]


class SystemCost(Config):
    """Cost of one system. `flops`, `cache_bytes` and `latency` have the context length as key."""

    name: str
    output: str
    parameters: int
    active_parameters: int
    components: dict[str, int]
    published_components: tuple[str, ...]
    tokens_per_image: int
    tokens_per_second: float | None
    num_frames: int
    own_context: int
    is_context_open: bool
    weight_bytes: int
    flops: dict[int, int]
    cache_bytes: dict[int, int]
    latency: dict[str, dict[int, OutputLatency]]
    note: str


def compute_system_cost(
    name: str,
    spec: SystemSpec,
    *,
    devices: Sequence[str] = tuple(DEVICES),
    context_lengths: Sequence[int] = CONTEXT_LENGTHS,
    dtype: str = "bfloat16",
) -> SystemCost:
    """Compute the cost of a system at its own context, and after `context_lengths` if its context is open."""
    torch_dtype = lookup(DTYPES, dtype, "type")
    with torch.device("meta"):
        built = spec.build()
    modules = nn.ModuleList(built.components.values()).to(torch_dtype)
    parts = {part: sum(p.numel() for p in module.parameters()) for part, module in built.components.items()}
    untold = sum(built.published_parameters.values())
    weights = sum(p.numel() * p.element_size() for p in modules.parameters()) + untold * torch_dtype.itemsize
    flops, cache, reach = {}, {}, {label: {} for label in devices}
    for context in (0, *(context_lengths if built.is_context_open else ())):
        passes, key = built.passes(context), context or built.own_context
        traffic = [_count_pass_bytes(one) for one in passes]
        flops[key] = sum(one.repeats * _count_pass_flops(one) for one in passes)
        ends = [cost.count_bytes(*one.last_workload) for one in passes if one.last_workload is not None]
        cache[key] = max(found.cache for found in (*traffic, *ends))
        for label in devices:
            device = lookup(DEVICES, label, "device")
            times = {
                one.name: one.repeats
                * PassTime(
                    compute=_count_pass_flops(one) / device.flops, memory=(found.read + found.cache) / device.bandwidth
                ).roofline
                for one, found in zip(passes, traffic, strict=True)
            }
            seconds = sum(times.values())
            num_devices = math.ceil((weights + cache[key]) / device.memory)
            hz = max(1, spec.num_frames) / seconds
            reach[label][key] = OutputLatency(seconds=seconds, hz=hz, num_devices=num_devices, pass_seconds=times)
    return SystemCost(
        name=name,
        output=spec.output,
        parameters=sum(p.numel() for p in modules.parameters()) + untold,
        active_parameters=count_active_parameters(modules) + untold,
        components=parts | dict(built.published_parameters),
        published_components=tuple(built.published_parameters),
        tokens_per_image=built.tokens_per_image,
        tokens_per_second=built.tokens_per_second,
        num_frames=spec.num_frames,
        own_context=built.own_context,
        is_context_open=built.is_context_open,
        weight_bytes=weights,
        flops=flops,
        cache_bytes=cache,
        latency=reach,
        note=spec.note,
    )


def _count_pass_flops(system_pass: SystemPass) -> int:
    return sum(cost.count_flops(module, work) for module, work in system_pass.workloads)


def _count_pass_bytes(system_pass: SystemPass) -> cost.MemoryBytes:
    return sum((cost.count_bytes(module, work) for module, work in system_pass.workloads), cost.MemoryBytes())
