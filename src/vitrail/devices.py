"""Where things run."""

import torch

from vitrail.errors import ConfigError


def usable(device: str | torch.device | None) -> str:
    """The device named, or a GPU if there is one; refused where nothing can be computed on it."""
    where = str(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device here", "leave the device out, or say cpu")
    try:
        torch.zeros(1, device=where).item()  # which the meta device cannot tell
    except (RuntimeError, AssertionError, ImportError) as error:
        said = str(error).splitlines()[0]
        raise ConfigError(f"device {where!r} cannot be used: {said}", "leave the device out, or say cpu") from None
    return where
