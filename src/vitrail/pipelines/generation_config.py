"""Sampling settings of a checkpoint: its generation_config.json, read as transformers reads it."""

from pathlib import Path

import msgspec

from vitrail.errors import CheckpointError, ConfigError
from vitrail.generate.sampling import GREEDY, SamplingConfig
from vitrail.hub.safetensors_files import read_json

GENERATION_FILE = "generation_config.json"
DEFAULT_TOP_K = 50  # of transformers, if the file samples and sets none
MIN_TEMPERATURE = 1e-3  # below, sampling is greedy; some files have 1e-6


class GenerationSchema(msgspec.Struct):
    """The settings that are read; others are ignored."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_sampling(folder: Path) -> SamplingConfig:
    """Read the sampling settings of a model folder. Without a file, or without do_sample, decoding is greedy."""
    file = folder / GENERATION_FILE
    if not file.is_file():
        return GREEDY
    try:
        found = msgspec.convert(read_json(file), GenerationSchema)
        penalty = 1.0 if found.repetition_penalty is None else found.repetition_penalty
        temperature = 1.0 if found.temperature is None else found.temperature
        if not found.do_sample or 0 <= temperature < MIN_TEMPERATURE:
            return GREEDY.replace(repetition_penalty=penalty)
        top_k = DEFAULT_TOP_K if found.top_k is None else found.top_k
        return SamplingConfig(
            temperature=temperature,
            top_k=top_k or None,  # 0 keeps all tokens
            top_p=found.top_p,
            min_p=found.min_p,
            repetition_penalty=penalty,
        )
    except msgspec.ValidationError as error:
        reason, _, key = str(error).partition(" - at `$.")
        raise CheckpointError(
            f"{file}: {key.rstrip('`')}: {reason[:1].lower()}{reason[1:]}", "correct this key, or remove the file"
        ) from None
    except ConfigError as error:
        raise error.with_prefix(file) from None
