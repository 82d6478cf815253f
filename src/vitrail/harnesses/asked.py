"""What frameworks ask of a model, in the words that `Talker` has for it."""

import importlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vitrail import studio
from vitrail.errors import ConfigError, nearest
from vitrail.generate.sampling import GREEDY, Sampling
from vitrail.processing.chat import Message
from vitrail.talker import Talker

STOPS = ("until", "stop", "stop_sequences")
DRAWN = {"top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "repetition", "seed": "seed"}
# How LLaVA's own program cuts pictures, and whether transformers keeps a cache: nothing that changes what is asked.
PASSED_OVER = ("image_aspect_ratio", "use_cache")
KNOWN = ("max_new_tokens", "do_sample", "temperature", "num_beams", *STOPS, *DRAWN, *PASSED_OVER)

_log = logging.getLogger("vitrail")


def framework(module: str, install: str) -> Any:
    """A module of a framework."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{module} cannot be imported: {error}", f"pip install {install}") from error


def talker_of(model: str | Path | Talker, template: str | None, device: str | torch.device | None) -> Talker:
    """A vision-language model by its folder or hub id, or one that is loaded already."""
    if isinstance(model, Talker):
        return model
    if model != studio.MINI_VLM and not studio.talks(model):
        raise ConfigError(f"{model} is no vision-language model", "give one, or use `vitrail eval`")
    return studio.load(model, template=template, device=device)


def read_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as transformers' `generate` and the frameworks name them, as `Talker.chat` takes them. None is as if it
    were not said; what would be left undone is refused.

    Tokens are drawn where `do_sample` says so or, where it says nothing, a temperature above 0 does; a temperature or
    top_p of 0 leaves only the likeliest.
    """
    said = {name: value for name, value in options.items() if value is not None}
    unknown = next((name for name in said if name not in KNOWN), None)
    if unknown is not None:
        raise ConfigError(f"nothing here knows the option {unknown!r} of answers", nearest(unknown, KNOWN))
    if said.get("num_beams", 1) != 1:
        raise ConfigError(f"{said['num_beams']} beams", "answers are written token by token: leave num_beams at 1")
    how: dict[str, Any] = {"sampling": _sampling(said)}
    if "max_new_tokens" in said:
        how["max_new"] = int(said["max_new_tokens"])
    stops = [stop for name in STOPS for stop in _several(name, said.get(name, ()))]
    return how | ({"stop_strings": tuple(dict.fromkeys(stops))} if stops else {})


def _sampling(said: Mapping[str, Any]) -> Sampling:
    drawn = {ours: said[name] for name, ours in DRAWN.items() if name in said}
    if drawn.get("top_k") == 0:  # transformers' way to say none
        del drawn["top_k"]
    temperature = float(said.get("temperature", 1.0 if said.get("do_sample") else 0.0))
    if not said.get("do_sample", temperature > 0) or temperature == 0 or drawn.get("top_p") == 0:
        return GREEDY.with_(repetition=drawn.get("repetition", 1.0))
    return Sampling(temperature=temperature, **drawn)


def _several(name: str, stops: Any) -> list[str]:
    several = [stops] if isinstance(stops, str) else stops
    if not isinstance(several, list | tuple) or not all(isinstance(stop, str) and stop for stop in several):
        raise ConfigError(f"{name} is {stops!r}", "give a string, or a list of strings that are not empty")
    return list(several)


def shifted(how: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The same for answer `number` of a run: with a seed, each draws from its own."""
    sampling: Sampling = how["sampling"]
    return {**how, "sampling": sampling if sampling.seed is None else sampling.with_(seed=sampling.seed + number)}


def answered(talker: Talker, messages: list[Message], how: Mapping[str, Any]) -> str:
    """The answer to a conversation. Tasks ask for up to so many tokens whatever the model: where the context ends
    before, so does the answer, which is said."""
    try:
        return talker.chat(messages, **how)
    except ConfigError:
        wanted = how.get("max_new")
        room = talker.model.config.decoder.context - len(talker.prompt(messages).stream)
        if wanted is None or not 1 <= room < wanted:
            raise
        _log.warning("the context has room for %s tokens of the %s asked for", room, wanted)
        return talker.chat(messages, **{**how, "max_new": room})
