"""Measure passes on the current device and compare them with their rooflines.

The peak rates of the device are measured in the same run.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import singledispatch
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import nn

from vitrail.backbones.decoder import Decoder
from vitrail.codecs.causal_video_codec import CausalVideoCodec, VideoWorkload
from vitrail.config import Config
from vitrail.encoders import T5Encoder, TextTower
from vitrail.errors import ConfigError
from vitrail.generate.unified_generation import UnifiedStepper as Answering
from vitrail.lab.cost_ledger import DTYPES, DeviceSpec, InputSpec, PassTime, check_workload, get_model_kind, lookup
from vitrail.lab.partial_models import UnifiedReadingModel, WorldDynamicsModel
from vitrail.models.cross_attention_vlm import CrossAttentionVLM
from vitrail.models.vlm import VLM
from vitrail.nn import KVCache, Workload, cost
from vitrail.stream import build_stream, pack_streams, text_part

NUM_REPEATS, NUM_WARMUPS = 7, 2
PROBE_SIZES = {"cpu": (1024, 2**27), "cuda": (8192, 2**30)}
"""Device → size of the square matrices, and bytes to copy: more than the caches hold."""
FIRST_TOKEN, NEXT_TOKEN = "first token, an image and {} text tokens", "a token at {}"


class PassTiming(Config):
    """Measured seconds of one pass, its roofline and their ratio."""

    name: str
    pass_name: str
    flops: int
    bytes: int
    seconds: float
    roofline: float = 0.0
    bound: str = ""
    ratio: float = 0.0

    def with_roofline(self, device: DeviceSpec) -> "PassTiming":
        """Return a copy with the roofline of a device."""
        floor = PassTime(compute=self.flops / device.flops, memory=self.bytes / device.bandwidth)
        return self.replace(roofline=floor.roofline, bound=floor.bound, ratio=self.seconds / floor.roofline)


class TimedPass(NamedTuple):
    """A pass to time: its name, workload and callable."""

    name: str
    workload: Workload
    run: Callable[[], object]


def measure_device(device: str, dtype: torch.dtype) -> DeviceSpec:
    """Measure the peak rates of a device: the fastest of several matrix products, copies and reads.

    A roofline needs the maximum rate, not the mean.
    """
    n, m = PROBE_SIZES[device]
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    product = min(_time_calls(lambda: a @ b, device))
    x, y = (torch.ones(m // dtype.itemsize, device=device, dtype=dtype) for _ in range(2))
    rows = x.view(-1, 4096)
    column = rows[0]
    moved = max(
        2 * m / min(_time_calls(lambda: y.copy_(x), device)), m / min(_time_calls(lambda: rows @ column, device))
    )
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, threads: {torch.get_num_threads()}"
    return DeviceSpec(2 * n**3 / product, moved, _get_memory(device), f"{name}; measured in this run")


@torch.no_grad()
def time_passes(
    config: Config,
    device_spec: DeviceSpec,
    *,
    name: str = "",
    context_length: int = 512,
    image_size: tuple[int, int] = (480, 640),
    batch_size: int = 1,
    dtype: str = "bfloat16",
    device: str = "cpu",
) -> list[PassTiming]:
    """Time the passes of a model with random weights, with their rooflines on `device_spec`."""
    check_workload(context_length, batch_size)
    kind, input_spec, torch_dtype = (
        get_model_kind(config),
        InputSpec(context_length, (image_size,)),
        lookup(DTYPES, dtype, "type"),
    )
    with torch.device("meta"):
        model_on_meta = kind.build_model(config).to(torch_dtype)
    with torch.device("cpu"):
        memory = cost.count_bytes(model_on_meta, kind.workload(model_on_meta, input_spec, batch_size))
    if memory.weights + memory.cache > 0.8 * device_spec.memory:
        raise ConfigError(
            f"{name or type(config).__name__} needs {(memory.weights + memory.cache) / 1e9:.1f} GB, "
            f"and the device has {device_spec.memory / 1e9:.1f} GB",
            "measure a smaller model, or use a smaller --dtype",
        )
    with torch.device(device):
        model = kind.build_model(config).to(torch_dtype).eval()
    timings = []
    for trial in _iter_passes(model, input_spec, batch_size, torch_dtype, device):
        traffic = cost.count_bytes(model, trial.workload)
        timing = PassTiming(
            name=name or type(config).__name__,
            pass_name=trial.name,
            flops=cost.count_flops(model, trial.workload),
            bytes=traffic.read + traffic.cache,
            seconds=statistics.median(_time_calls(trial.run, device)),
        )
        timings.append(timing.with_roofline(device_spec))
    return timings


def combine_device_specs(first: DeviceSpec, second: DeviceSpec) -> DeviceSpec:
    """Take the higher rates of two measurements, for instance before and after on a shared machine."""
    return first._replace(flops=max(first.flops, second.flops), bandwidth=max(first.bandwidth, second.bandwidth))


@singledispatch
def _iter_passes(
    model: Any, input_spec: InputSpec, batch_size: int, dtype: torch.dtype, device: str
) -> Iterator[TimedPass]:
    """Yield the passes of a model: one forward pass of towers, codecs and detectors.

    Each pass is timed before the next one is built.
    """
    inputs = _make_random_inputs(model, batch_size, dtype, device)
    work = get_model_kind(model.config).workload(model, input_spec, batch_size)
    yield TimedPass("forward", work, lambda: model(*inputs))


@_iter_passes.register
def _iter_video_codec_passes(
    model: CausalVideoCodec, input_spec: InputSpec, batch_size: int, dtype: torch.dtype, device: str
) -> Iterator[TimedPass]:
    """Yield one encoding and decoding of a video."""
    work = get_model_kind(model.config).workload(model, input_spec, batch_size)
    assert isinstance(work, VideoWorkload)
    shape = (batch_size, work.num_frames, model.config.net.channels, work.height, work.width)
    video = torch.rand(shape, device=device).to(dtype)
    yield TimedPass(f"video, {work.num_frames} frames", work, lambda: model(video))


@_iter_passes.register
def _iter_decoder_passes(
    model: Decoder, input_spec: InputSpec, batch_size: int, dtype: torch.dtype, device: str
) -> Iterator[TimedPass]:
    """Yield the prefill of a prompt, and one decoding step."""
    num_tokens = input_spec.num_words
    ids = torch.randint(model.config.vocab_size, (batch_size, num_tokens), device=device)

    def prefill(room: int = 0) -> Any:
        cache = model.make_cache(batch_size, num_tokens + room)
        model.compute_logits(model.forward_hidden(ids, cache=cache)[:, -1])
        return cache

    yield TimedPass(f"prefill, {num_tokens} tokens", Workload.prefill(num_tokens, batch_size), prefill)
    cache = prefill(NUM_REPEATS + NUM_WARMUPS)
    yield TimedPass(
        NEXT_TOKEN.format(num_tokens),
        Workload.decode(_get_middle_length(num_tokens), batch_size),
        lambda: model(ids[:, :1], cache=cache),
    )


def _get_middle_length(length: int) -> int:
    """Context length of the middle step. Each timed step adds a token, so its roofline is used for all."""
    return length + NUM_WARMUPS + NUM_REPEATS // 2 + 1


def _make_random_inputs(model: nn.Module, batch_size: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Random images and token ids."""
    if isinstance(model, T5Encoder):
        return [torch.randint(model.config.vocab_size, (batch_size, model.config.context_length), device=device)]
    text = model if isinstance(model, TextTower) else getattr(model, "text", None)
    config: Any = model.config
    found = []
    if not isinstance(model, TextTower):
        net = getattr(config, "net", None) or getattr(config, "image", config)  # of a codec, or of a model with a tower
        size = net.image_size if isinstance(net.image_size, tuple) else (net.image_size, net.image_size)
        found.append(torch.rand(batch_size, 3, *size, device=device).to(dtype))
    if isinstance(text, TextTower):
        ids = torch.randint(text.config.vocab_size, (batch_size, text.config.context_length), device=device)
        if text.config.eos_token_id is not None:
            ids[:, -1] = text.config.eos_token_id
        found.append(ids)
    return found


@_iter_passes.register
def _iter_vlm_passes(
    model: VLM | CrossAttentionVLM, input_spec: InputSpec, batch_size: int, dtype: torch.dtype, device: str
) -> Iterator[TimedPass]:
    """Yield the pass to the first answer token about one image, and one decoding step."""
    (height, width), n = input_spec.image_sizes[0], input_spec.num_words
    images: Any = model.prepare_images([Image.new("RGB", (width, height), (90, 120, 150))] * batch_size)
    question_ids = [1 + i % 7 for i in range(n)]
    if isinstance(model, CrossAttentionVLM):
        streams = [build_stream([text_part([model.config.image_token_id, *question_ids])]) for _ in range(batch_size)]
    else:
        streams = [
            build_stream([*model.config.make_parts(shape), text_part(question_ids)], model.config.rules)
            for shape in images.layouts
        ]
    rows = pack_streams(streams, (length := len(streams[0])))

    def first(room: int = 0) -> KVCache:
        cache = model.decoder.make_cache(batch_size, length + room)
        model.decoder.compute_logits(model.forward_hidden(rows, images, cache=cache)[:, -1])
        return cache

    yield TimedPass(FIRST_TOKEN.format(n), model.workload([(height, width)], n, batch_size), first)
    cache, word = first(NUM_WARMUPS + NUM_REPEATS), torch.ones(batch_size, 1, dtype=torch.long, device=device)
    step_workload = model.decode_step_workload(_get_middle_length(length), [(height, width)], batch_size)
    yield TimedPass(NEXT_TOKEN.format(length), step_workload, lambda: model.decoder(word, cache=cache))


@_iter_passes.register
def _iter_unified_passes(
    model: UnifiedReadingModel, input_spec: InputSpec, batch_size: int, dtype: torch.dtype, device: str
) -> Iterator[TimedPass]:
    """Yield the same passes of a unified model, which has a fixed image size."""
    unified, n = model.model, input_spec.num_words
    pixels = torch.rand(batch_size, 3, *unified.codec.image_size, device=device).to(dtype)
    ids, counts = torch.randint(unified.config.decoder.vocab_size, (batch_size, n)), torch.full((batch_size,), n)

    def first() -> Answering:
        answering = Answering(unified, unified.encode_images(pixels)[0], batch_size)
        answering.prefill(ids, counts)
        return answering

    yield TimedPass(FIRST_TOKEN.format(n), (work := model.workload(1, n, batch_size)), first)
    answering, length = first(), work.tokens // batch_size
    step_workload = Workload.decode(_get_middle_length(length), batch_size)
    yield TimedPass(NEXT_TOKEN.format(length), step_workload, lambda: answering.step(ids[:, 0].to(device)))


@_iter_passes.register
def _iter_world_passes(
    model: WorldDynamicsModel, input_spec: InputSpec, batch_size: int, dtype: torch.dtype, device: str
) -> Iterator[TimedPass]:
    """Yield a pass of a world model's dynamics over as many frames as its memory holds."""
    world, frames = model.model, model.config.dynamics.transformer.context_frames
    ids = torch.randint(world.codec.vocab_sizes[0], (batch_size, frames, *model.config.codec.grid), device=device)
    actions = world.dynamics.shift_actions(torch.randint(world.num_actions, (batch_size, frames - 1), device=device))
    yield TimedPass(f"dynamics, {frames} frames", model.workload(batch_size), lambda: world.dynamics(ids, actions))


def _time_calls(run: Callable[[], object], device: str) -> list[float]:
    times = []
    for _ in range(NUM_WARMUPS + NUM_REPEATS):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return times[NUM_WARMUPS:]


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _get_memory(device: str) -> float:
    if device == "cuda":
        return float(torch.cuda.mem_get_info()[0])
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
