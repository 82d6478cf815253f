"""Measure time, memory and the limits of the device, for all scripts of this folder."""

import ctypes
import math
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
H200_MATRIX_RATE = 790e12
"""FLOP/s of an 8192³ product in bf16 on an H200."""


def synchronize() -> None:
    """Wait until the GPU has finished."""
    if CUDA:
        torch.cuda.synchronize()


def measure_seconds(call: Callable[[], object]) -> float:
    """Time one call, with the GPU synchronized before and after."""
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def time_calls(call: Callable[[], object], repeats: int, warmup: int = 1) -> list[float]:
    """Return the seconds of every call after the warm-up calls."""
    return [measure_seconds(call) for _ in range(warmup + repeats)][warmup:]


def median_seconds(call: Callable[[], object], repeats: int, warmup: int = 1) -> float:
    return statistics.median(time_calls(call, repeats, warmup))


def median_ms(call: Callable[[], object], repeats: int, warmup: int = 1) -> float:
    return 1000 * median_seconds(call, repeats, warmup)


def median_device_ms(call: Callable[[], object], repeats: int, warmup: int = 2) -> float:
    """Return the median time between two CUDA events, without the launch overhead."""
    times = []
    for _ in range(warmup + repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[warmup:])


# ---- comparisons ----------------------------------------------------------------------------------------------------


def time_alternating(calls: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Run every call once a round, and return the seconds of each. Every round starts with the next call."""
    names, times = list(calls), {name: [] for name in calls}
    for i in range(warmup + rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            seconds = measure_seconds(calls[name])
            if i >= warmup:
                times[name].append(seconds)
    return times


def summarize_speedup(seconds: list[float], reference_seconds: list[float]) -> dict[str, float]:
    """Return the median, smallest and largest ratio of the reference's time to ours, round by round."""
    ratios = [reference / own for own, reference in zip(seconds, reference_seconds, strict=True)]
    return {"speedup": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


def compare_alternating(
    ours: Callable[[], object], reference: Callable[[], object], rounds: int, warmup: int = 2
) -> dict[str, float]:
    """Compare two calls that alternate. `ms` is our fastest call."""
    times = time_alternating({"ours": ours, "reference": reference}, rounds, warmup)
    return {**summarize_speedup(times["ours"], times["reference"]), "ms": 1000 * min(times["ours"])}


def relative_difference(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """max |Δ| / max |reference|"""
    return ((ours - reference).abs().max() / reference.abs().max()).item()


# ---- limits of the device -------------------------------------------------------------------------------------------


def measure_bandwidth() -> float:
    """Return the bytes per second of a large copy, reads and writes counted."""
    source = torch.empty(2**31 if CUDA else 2**24, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 20 * source.numel() / median_seconds(lambda: [target.copy_(source) for _ in range(10)], 7)


def measure_matrix_rate(device: str | torch.device = DEVICE, dtype: torch.dtype = torch.bfloat16) -> float:
    """Return the FLOP/s of a large matrix product: the fastest of 8, or fewer on a CPU that takes long."""
    n = 8192 if torch.device(device).type == "cuda" else 512
    a = torch.randn(n, n, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    best, start = math.inf, time.perf_counter()
    for _ in range(8):
        if best < math.inf and n == 512 and time.perf_counter() - start > 0.2:
            break
        best = min(best, measure_seconds(lambda: a @ a))
    return 2 * n**3 / best


def measure_block_rate(block: torch.nn.Module, tokens: int, repeats: int = 3) -> float:
    """Return the FLOP/s of products of `tokens` rows with the matrices of a block."""
    weights = [p.detach() for p in block.parameters() if p.ndim == 2]
    inputs = [torch.randn(tokens, w.shape[1], device=w.device, dtype=w.dtype) for w in weights]
    passes = 20

    def multiply() -> None:
        for _ in range(passes):
            for x, w in zip(inputs, weights, strict=True):
                F.linear(x, w)

    return 2 * passes * tokens * sum(w.numel() for w in weights) / median_seconds(multiply, repeats)


# ---- memory ---------------------------------------------------------------------------------------------------------


def measure_peak_mib(call: Callable[[], object]) -> float:
    """Return the MiB that a call allocates at its peak: of the GPU, or of the process on a CPU (Linux)."""
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # return freed memory, so that the call has to allocate again
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak (VmHWM)
    before = _read_memory_kib("VmRSS")
    call()
    return max(0, _read_memory_kib("VmHWM") - before) / 1024


def read_peak_gib() -> float:
    """Return the peak of allocated GPU memory since the last reset; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0


def _read_memory_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


# ---- time limits ----------------------------------------------------------------------------------------------------


class TimeLimitError(Exception):
    """A measurement exceeded its time limit."""


@contextmanager
def limit_time(seconds: float) -> Iterator[None]:
    """Raise TimeLimitError in the block after these seconds."""
    expired = False

    def stop(*_: object) -> None:
        nonlocal expired
        expired = True
        raise TimeLimitError(f"over {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 5)  # repeats, because a handler of exceptions may swallow the first
    try:
        yield
    except Exception as error:
        if expired:  # an interrupted compiler raises an error of its own
            raise TimeLimitError(f"over {seconds:.0f} s") from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
