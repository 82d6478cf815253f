"""Shared parts of the framework adapters: model loading, generation options and answers."""

import importlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vitrail.errors import ConfigError, suggest_name
from vitrail.generate.sampling import GREEDY, SamplingConfig
from vitrail.pipelines import loading
from vitrail.pipelines.chat import ChatPipeline
from vitrail.processing.chat_template import Message

STOP_OPTIONS = ("until", "stop", "stop_sequences")
SAMPLING_OPTIONS = {
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
}
# Options that do not apply here: LLaVA's resolution policy and the cache of transformers.
IGNORED_OPTIONS = ("image_aspect_ratio", "use_cache")
KNOWN_OPTIONS = (
    "max_new_tokens",
    "do_sample",
    "temperature",
    "num_beams",
    *STOP_OPTIONS,
    *SAMPLING_OPTIONS,
    *IGNORED_OPTIONS,
)

_log = logging.getLogger("vitrail")


def import_framework(module: str, install: str) -> Any:
    """Import a module of a framework. If it is missing, the error names the package to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{module} cannot be imported: {error}", f"pip install {install}") from error


def load_chat_pipeline(
    model: str | Path | ChatPipeline, template: str | None, device: str | torch.device | None
) -> ChatPipeline:
    """Return the chat pipeline of a folder or hub id, or the pipeline that is given."""
    if isinstance(model, ChatPipeline):
        return model
    if not loading.is_vlm(model):
        raise ConfigError(f"{model} is not a vision-language model", "give one, or use `vitrail eval`")
    return loading.load(model, template=template, device=device)


def parse_generation_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert generation options of transformers and of the frameworks to those of `ChatPipeline.chat`.

    Options that are None are ignored; unsupported options raise an error. Sampling is on if `do_sample` is true, or if
    it is not given and the temperature is above 0. A temperature or top_p of 0 means greedy decoding.
    """
    requested = {name: value for name, value in options.items() if value is not None}
    unknown = next((name for name in requested if name not in KNOWN_OPTIONS), None)
    if unknown is not None:
        raise ConfigError(f"unknown generation option {unknown!r}", suggest_name(unknown, KNOWN_OPTIONS))
    if requested.get("num_beams", 1) != 1:
        raise ConfigError(f"num_beams is {requested['num_beams']}", "beam search is not supported: use num_beams = 1")
    converted: dict[str, Any] = {"sampling": _build_sampling(requested)}
    if "max_new_tokens" in requested:
        converted["max_new_tokens"] = int(requested["max_new_tokens"])
    stops = [stop for name in STOP_OPTIONS for stop in _to_list(name, requested.get(name, ()))]
    return converted | ({"stop_strings": tuple(dict.fromkeys(stops))} if stops else {})


def _build_sampling(options: Mapping[str, Any]) -> SamplingConfig:
    fields = {field: options[name] for name, field in SAMPLING_OPTIONS.items() if name in options}
    if fields.get("top_k") == 0:  # transformers: no limit
        del fields["top_k"]
    temperature = float(options.get("temperature", 1.0 if options.get("do_sample") else 0.0))
    if not options.get("do_sample", temperature > 0) or temperature == 0 or fields.get("top_p") == 0:
        return GREEDY.replace(repetition_penalty=fields.get("repetition_penalty", 1.0))
    return SamplingConfig(temperature=temperature, **fields)


def _to_list(name: str, stops: Any) -> list[str]:
    values = [stops] if isinstance(stops, str) else stops
    if not isinstance(values, list | tuple) or not all(isinstance(stop, str) and stop for stop in values):
        raise ConfigError(f"{name} is {stops!r}", "give a string, or a list of non-empty strings")
    return list(values)


def offset_seed(options: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the options of answer `number` of a run: each answer gets its own seed."""
    sampling: SamplingConfig = options["sampling"]
    return {**options, "sampling": sampling if sampling.seed is None else sampling.replace(seed=sampling.seed + number)}


def generate_answer(pipeline: ChatPipeline, messages: list[Message], options: Mapping[str, Any]) -> str:
    """Generate the answer to a conversation.

    Tasks set `max_new_tokens` without regard to the model. If the context has less room, the answer is shortened and a
    warning is logged.
    """
    try:
        return pipeline.chat(messages, **options)
    except ConfigError:
        max_new_tokens = options.get("max_new_tokens")
        capacity = pipeline.model.config.decoder.context_length - len(pipeline.build_prompt(messages).stream)
        if max_new_tokens is None or not 1 <= capacity < max_new_tokens:
            raise
        _log.warning(
            "max_new_tokens is reduced from %s to %s, which is what the context has left", max_new_tokens, capacity
        )
        return pipeline.chat(messages, **{**options, "max_new_tokens": capacity})
