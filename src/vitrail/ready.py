"""`vitrail.load`: whatever a folder holds, ready to hand."""

from pathlib import Path
from typing import Any

import torch

from vitrail import studio
from vitrail.connectors.reduce import AnyReduction
from vitrail.errors import CheckpointError
from vitrail.hub import configs
from vitrail.models.genie import GenieConfig
from vitrail.play import Playground


def load(
    name_or_path: str | Path = studio.MINI,
    *,
    template: str | None = None,
    device: str | torch.device | None = None,
    reduce: AnyReduction | None = None,
) -> Any:
    """A `Playground` for a world model, a `Studio` for a unified model, a `Talker` for a vision-language model, to
    which a chat template may be named, and what leaves fewer tokens of its pictures."""
    if not plays(name_or_path):
        return studio.load(name_or_path, template=template, device=device, reduce=reduce)
    studio.refuse_talk(name_or_path, template, reduce)
    return Playground.load(name_or_path, device=device)


def plays(name_or_path: str | Path) -> bool:
    """Whether a folder holds a world model. No weight is read."""
    if name_or_path in (studio.MINI, studio.MINI_VLM):
        return False
    try:
        return isinstance(configs.read_config(name_or_path), GenieConfig)
    except OSError as error:  # a name that is no path, a folder that may not be read
        raise CheckpointError(
            f"{name_or_path!s:.80} cannot be opened: {error.strerror or error}", "give the folder of a model"
        ) from None
