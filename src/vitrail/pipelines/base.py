"""The pipeline protocol, and choices that all pipelines share: model type, device and dtype."""

from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import nn

from vitrail import hub
from vitrail.devices import resolve_device
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub import checkpoint_info

MINI = "mini"  # the bundled unified model
MINI_VLM = "mini-vlm"  # the bundled vision-language model; its language model is downloaded
TRAIN_MINI = "vitrail train mini-codec --out out/mini-codec && vitrail train mini --out out/mini"
TRAIN_MINI_VLM = " && ".join(
    f"vitrail train {name} --out out/{name}" for name in ("clip-scenes", "scaling-base", "mini-vlm")
)


class Pipeline(Protocol):
    """A model with everything it needs to run on images and texts. `vitrail.load` returns one."""

    model: Any

    @classmethod
    def load(cls, name_or_path: str | Path, *, device: str | torch.device | None = None) -> Self:
        """Load a bundled model, a folder or a hub id."""
        ...


def select_device(device: str | torch.device | None, *, prefer_half: bool = False) -> tuple[str, torch.dtype]:
    """Return the device and dtype for inference: bfloat16 on a GPU if there is one, else float32 on the CPU.

    With `prefer_half`, CPUs that have bfloat16 instructions use bfloat16 too.
    """
    name = resolve_device(device)
    prefer_half = prefer_half and name == "cpu" and getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return name, torch.bfloat16 if prefer_half or name.startswith("cuda") else torch.float32


def read_config_of(name_or_path: str | Path) -> Any:
    """Read the config of a checkpoint. Errors of the file system become errors of the checkpoint."""
    try:
        return checkpoint_info.read_config(name_or_path)
    except OSError as error:  # an invalid path, or a folder without read permission
        raise CheckpointError(
            f"{name_or_path!s:.80} cannot be opened: {error.strerror or error}", "give the folder of a checkpoint"
        ) from None


def find_bundled_model(name_or_path: str | Path) -> str | Path:
    """Return the folder of `mini` or `mini-vlm`, even if the working directory has a folder of that name.

    Any other name or path is returned unchanged.
    """
    if name_or_path not in (MINI, MINI_VLM):
        return name_or_path
    name = str(name_or_path)
    if name in checkpoint_info.list_bundled_models():
        return checkpoint_info.BUNDLED_MODELS_FOLDER / name
    if not (Path(name) / checkpoint_info.NATIVE_CONFIG_FILE).is_file():
        train_command = TRAIN_MINI if name == MINI else TRAIN_MINI_VLM
        raise CheckpointError(
            f"the weights of {name} are not installed",
            f"{checkpoint_info.INSTALL_BUNDLED_MODELS}, or train it ({train_command}) and give out/{name}/final",
        )
    return Path(name)


def load_model(name_or_path: str | Path, device: str | torch.device | None, dtype: torch.dtype | None) -> nn.Module:
    """Load a model onto a device. Without a dtype weights keep theirs. An unusable device raises an error."""
    device = resolve_device(device)
    try:
        return hub.load(name_or_path, dtype=dtype, device=device)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise ConfigError(
            f"{name_or_path} does not fit into {device}, of which {free / 1e9:.1f} of {total / 1e9:.1f} GB are free: "
            f"{str(error).splitlines()[0]:.120}",
            "end other processes on it, give dtype=torch.bfloat16, which halves float32 weights, or try --device cpu",
        ) from None
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {device!r} cannot be used: {reason}", "try --device cpu") from None
