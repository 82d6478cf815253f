"""`vitrail ledger`: parameters, FLOPs, memory and roofline times of models."""

import inspect
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from cyclopts import Parameter

from vitrail.backbones.decoder import DecoderConfig
from vitrail.cli.output_files import check_writable, write_json_with_origin
from vitrail.cli.text_tables import align_columns
from vitrail.config import Config
from vitrail.errors import ConfigError
from vitrail.lab.cost_ledger import CONTEXT_LENGTHS, DEVICES, DTYPES, PRESETS, CostLedger, DeviceSpec, lookup
from vitrail.lab.cost_ledger import compute_ledger as make_ledger
from vitrail.lab.cost_ledger_tables import (
    DEFAULT_CONTEXT_LENGTH,
    default_context_length,
    draw_decoder_costs,
    format_ledgers,
    format_preset,
    group_by_input,
    list_notes,
)
from vitrail.lab.pass_timing import PassTiming, combine_device_specs, measure_device, time_passes
from vitrail.lab.system_cost_tables import build_system_notes, build_system_tables
from vitrail.lab.system_specs import SYSTEM_SPECS, get_system_cost
from vitrail.lab.video_ledger import DEFAULT_FPS, QUESTION_TOKENS, VideoLedger, compute_video_ledger
from vitrail.models.presets import ALL_VLM_PRESETS
from vitrail.pipelines.base import MINI
from vitrail.plots.charts import check_chart_path, save_chart
from vitrail.plots.number_format import format_si
from vitrail.recipe import load_model_config


def print_ledger(
    names: Annotated[list[str] | None, Parameter(negative="")] = None,
    /,
    *,
    context_length: int | None = None,
    image_size: str = "640x480",
    num_images: int = 1,
    batch_size: int = 1,
    dtype: str = "bfloat16",
    device: Annotated[list[str] | None, Parameter(negative="")] = None,
    all: Annotated[bool, Parameter(negative="")] = False,
    measure: Annotated[bool, Parameter(negative="")] = False,
    video: Annotated[bool, Parameter(negative="")] = False,
    fps: float = DEFAULT_FPS,
    json: Path | None = None,
    out: Path | None = None,
) -> None:
    """Show what models cost: parameters, FLOPs, bytes and roofline times.

    Models are built on the meta device: no weights are loaded. Without a name the command lists the presets.

    Example: vitrail ledger llama-3.1-8b qwen3-30b-a3b --context-length 32768 --batch-size 16 --device h100

    Example: vitrail ledger qwen2.5-vl-7b llama-3.2-11b-vision --image-size 640x480 --context-length 64

    Example: vitrail ledger --all --json systems.json

    Example: vitrail ledger clip-b16 smollm2-135m --measure --context-length 128 --dtype float32

    Example: vitrail ledger qwen2.5-vl-7b qwen3-vl-8b --video --image-size 640x360 --fps 1

    Parameters
    ----------
    names
        Presets, mini, recipes, folders with a config.json or vitrail.json, or GGUF files.
    context_length
        Tokens of the prompt of a decoder, or text tokens of the question to a vision-language model. Default: 8192, or
        the context of the model if it is shorter.
    image_size
        Width and height of the images of a vision-language model, as WIDTHxHEIGHT. Towers and unified models use their
        own image size.
    num_images
        Number of images of a question.
    batch_size
        Number of prompts, images or questions in a batch.
    dtype
        Type of the weights and the KV cache: float32, bfloat16, float16, float8.
    device
        h200, h100, a100, rtx4090, orin. May be repeated. Default with --all: all of them.
    all
        Show complete systems at their published size: vision-language, image, world and action models, with their rate.
    measure
        Run the models with random weights on this machine, and show each pass beside its roofline time at the rates
        that the device reaches in the same run.
    video
        Show what a question about a video costs whose tokens fill a context of 8k, 32k and 256k, or of
        --context-length: frames, FLOPs, time to the first token and cache. --image-size is the size of a frame.
    fps
        Frames per second of the video, which set its duration.
    json
        A JSON file for the ledgers.
    out
        An image of decoding time and memory over the context length, for at most six decoders.
    """
    check_writable(json)
    if all:
        input_options = {"context_length": context_length, "image_size": image_size, "num_images": num_images}
        _reject_options("all", **input_options, batch_size=batch_size, measure=measure, video=video, fps=fps, out=out)
        _print_systems(names, device, dtype, json)
        return
    size = _parse_image_size(image_size)
    if video:
        _reject_options("video", num_images=num_images, batch_size=batch_size, measure=measure, out=out)
        _print_video_ledgers(names, context_length, size, fps, dtype, list(dict.fromkeys(device or ["h200"])), json)
        return
    if fps != DEFAULT_FPS:
        raise ConfigError("--fps sets the duration of a video", "add --video, or remove --fps")
    if measure:
        _reject_options("measure", num_images=num_images, device=device, out=out)
        _print_measurements(names, context_length or DEFAULT_CONTEXT_LENGTH, size, batch_size, dtype, json)
        return
    if not names:
        print("\n".join(list_presets()))
        return
    if out is not None:
        check_chart_path(out)
    devices = list(dict.fromkeys(device or ["h200"]))
    models = _load_configs(names)
    settings = {"image_size": size, "num_images": num_images, "batch_size": batch_size, "dtype": dtype}
    ledgers = [
        make_ledger(
            model,
            name=name,
            devices=devices,
            context_length=context_length or default_context_length(model, models.values()),
            **settings,
        )
        for name, model in models.items()
    ]
    columns = shutil.get_terminal_size().columns
    print("\n\n".join(format_ledgers(group, batch_size, columns) for group in group_by_input(ledgers)))
    print("\n" + "\n".join(list_notes(ledgers, models)))
    _save_ledgers(ledgers, models, devices, batch_size, dtype, json, out)


def _load_configs(names: Sequence[str]) -> dict[str, Config]:
    """Load the configs of models. Prints which part of a model the ledger covers, if it is not the whole model."""
    models = {}
    for name in names:
        models[name], part = load_model_config(name)
        if part:
            print(f"{name}: the ledger covers {part}")
    return models


def _save_ledgers(
    ledgers: list[CostLedger],
    models: dict[str, Config],
    devices: list[str],
    batch_size: int,
    dtype: str,
    json: Path | None,
    out: Path | None,
) -> None:
    if json is not None:
        origins = {name: DEVICES[name]._asdict() for name in devices}
        write_json_with_origin(json, {"devices": origins, "ledgers": [one.to_dict() for one in ledgers]})
    if out is not None:
        decoders = {name: model for name, model in models.items() if isinstance(model, DecoderConfig)}
        save_chart(draw_decoder_costs(decoders, devices[0], batch_size, dtype), out)
        print(f"→ {out}")


def _reject_options(mode: str, **options: object) -> None:
    """Refuse options that a mode does not support, unless they have their default values."""
    usual = inspect.signature(print_ledger).parameters
    for name, value in options.items():
        if value != usual[name].default:
            option = name.replace("_", "-")
            raise ConfigError(f"--{mode} does not support --{option}", "remove one of the two options")


def _print_systems(names: list[str] | None, device: list[str] | None, dtype: str, json: Path | None) -> None:
    found = [
        get_system_cost(name, devices=list(dict.fromkeys(device or DEVICES)), dtype=dtype)
        for name in names or SYSTEM_SPECS
    ]
    tables = build_system_tables(found, CONTEXT_LENGTHS)
    print("\n\n".join(align_columns([[table.title, *table.head], *table.rows]) for table in tables))
    print("\n" + "\n".join(build_system_notes(found)))
    if json is not None:
        origins = {name: DEVICES[name]._asdict() for name in found[0].latency}
        write_json_with_origin(json, {"devices": origins, "systems": [one.to_dict() for one in found]})


def _print_video_ledgers(
    names: list[str] | None,
    context_length: int | None,
    frame_size: tuple[int, int],
    fps: float,
    dtype: str,
    devices: Sequence[str],
    json: Path | None,
) -> None:
    if not names:
        raise ConfigError("--video needs a model that takes videos", "give presets or folders, such as qwen3-vl-2b")
    settings: dict[str, Any] = {"frame_size": frame_size, "fps": fps, "dtype": dtype}
    settings |= {} if context_length is None else {"context_lengths": (context_length,)}
    models: dict[str, Any] = _load_configs(names)
    ledgers = [
        compute_video_ledger(model, name=name, device=device, **settings)
        for name, model in models.items()
        for device in devices
    ]
    print("\n\n".join(_format_video_ledger(one) for one in ledgers))
    height, width = frame_size
    print(
        f"\nframes of {width} × {height} pixels at {fps:g} frames/s, a question of {QUESTION_TOKENS} tokens, {dtype}; "
        "times are rooflines"
    )
    if json is not None:
        origins = {name: DEVICES[name]._asdict() for name in devices}
        write_json_with_origin(json, {"devices": origins, "videos": [one.to_dict() for one in ledgers]})


def _format_video_ledger(ledger: VideoLedger) -> str:
    head = ["tokens", "frames", "duration", "tokens/frame", *(f"{part} FLOPs" for part in ledger.costs[0].flops)]
    rows = [[*head, "cache", "first token", "each further token"]]
    for one in ledger.costs:
        numbers = [f"{one.tokens:,}", f"{one.num_frames:,}", f"{one.seconds:,.0f} s", f"{one.frame_tokens:g}"]
        numbers += [format_si(flops, "FLOP") for flops in one.flops.values()]
        times = (format_si(time.roofline, "s") for time in (one.prefill, one.decode))
        rows.append([*numbers, format_si(one.cache_bytes, "B"), *times])
    return f"{ledger.name}, {ledger.device}\n{align_columns(rows)}"


def _print_measurements(
    names: list[str] | None,
    context_length: int,
    image_size: tuple[int, int],
    batch_size: int,
    dtype: str,
    json: Path | None,
) -> None:
    if not names:
        raise ConfigError("--measure needs a model", "give presets or folders, such as clip-b16")
    if dtype == "float8":
        raise ConfigError("--measure does not support float8", "use float32, bfloat16 or float16")
    here, models = "cuda" if torch.cuda.is_available() else "cpu", _load_configs(names)
    kept = lookup(DTYPES, dtype, "type")
    at = measure_device(here, kept)
    workload = {"context_length": context_length, "image_size": image_size, "batch_size": batch_size}
    settings = {**workload, "dtype": dtype, "device": here}
    found = [one for name, model in models.items() for one in time_passes(model, at, name=name, **settings)]
    at = combine_device_specs(at, measure_device(here, kept))
    found = [one.with_roofline(at) for one in found]
    print(_format_measurements(found, at))
    if json is not None:
        write_json_with_origin(
            json, {"device": at._asdict(), "settings": settings, "passes": [one.to_dict() for one in found]}
        )


def _format_measurements(timings: Sequence[PassTiming], at: DeviceSpec) -> str:
    """Format measured times beside their roofline times."""
    rows = [["", "pass", "roofline", "", "measured", "measured / roofline"]]
    for one in timings:
        times = format_si(one.roofline, "s"), one.bound[0], format_si(one.seconds, "s")
        rows.append([one.name, one.pass_name, *times, f"{one.ratio:.2f}"])
    rates = f"{format_si(at.flops, 'FLOP/s')}, {format_si(at.bandwidth, 'B/s')}"
    return f"{align_columns(rows)}\n\n{at.origin}: {rates}"


def list_presets() -> Iterator[str]:
    """Yield one line a preset, with vision-language models under a separate heading."""
    for name, config in PRESETS.items():
        if name not in ALL_VLM_PRESETS:
            yield format_preset(name, config)
    yield ""
    yield "vision-language models, with an image of 640 × 480 pixels:"
    for name, config in ALL_VLM_PRESETS.items():
        yield format_preset(name, config)
    yield ""
    yield "unified models that ship, with images of their own size:"
    yield format_preset(MINI, load_model_config(MINI).config)


def _parse_image_size(words: str) -> tuple[int, int]:
    """Parse WIDTHxHEIGHT → (height, width)."""
    found = re.fullmatch(r"(\d+)[x×](\d+)", words)
    if found is None:
        raise ConfigError(f"--image-size {words} is not a size", "give width and height, such as 640x480")
    return int(found[2]), int(found[1])
