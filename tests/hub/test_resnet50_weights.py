"""ResNet-50 from TensorFlow.js files."""

import json

import numpy as np
import pytest
import torch

from vitrail.errors import CheckpointError, DataError
from vitrail.hub.resnet50_weights import class_names, fold_batch_norms, load_resnet50, read_tensorflowjs_tensors


def write(folder, tensors, shard=100, **changes):
    """Write a model with shards that end anywhere."""
    data = b"".join(array.astype("<f4").tobytes() for array in tensors.values())
    paths = [f"group1-shard{i + 1}.bin" for i in range(-(-len(data) // shard))]
    for i, path in enumerate(paths):
        (folder / path).write_bytes(data[i * shard : (i + 1) * shard])
    weights = [{"name": n, "shape": list(a.shape), "dtype": "float32"} | changes for n, a in tensors.items()]
    (folder / "model.json").write_text(json.dumps({"weightsManifest": [{"paths": paths, "weights": weights}]}))


TENSORS = {
    "a/kernel": np.random.default_rng(0).standard_normal((3, 3, 2, 5)),
    "a/bias": np.arange(5.0),
    "b/gamma": np.array(2.5),
}


def test_shards_are_concatenated(tmp_path):
    write(tmp_path, TENSORS)
    found = read_tensorflowjs_tensors(tmp_path)
    assert list(found) == list(TENSORS)
    for name, array in TENSORS.items():
        assert np.array_equal(found[name].numpy(), array.astype(np.float32))


def test_damaged_files_raise(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        read_tensorflowjs_tensors(tmp_path)
    write(tmp_path, TENSORS, dtype="uint8")
    with pytest.raises(CheckpointError, match="not plain float32"):
        read_tensorflowjs_tensors(tmp_path)
    write(tmp_path, TENSORS)
    last = sorted(tmp_path.glob("*.bin"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="complete TensorFlow"):
        read_tensorflowjs_tensors(tmp_path)
    last.write_bytes(last.read_bytes() + b"12345")
    with pytest.raises(CheckpointError, match="bytes are left"):
        read_tensorflowjs_tensors(tmp_path)
    last.unlink()
    with pytest.raises(CheckpointError, match="complete TensorFlow"):
        read_tensorflowjs_tensors(tmp_path)
    (tmp_path / "model.json").write_text('{"weightsManifest": [{"paths": 3}]}')
    with pytest.raises(CheckpointError, match="complete TensorFlow"):
        read_tensorflowjs_tensors(tmp_path)


def test_missing_tensor_is_named():
    with pytest.raises(CheckpointError, match="bn_conv1/gamma"):
        fold_batch_norms({})


@pytest.mark.slow
def test_released_network_classifies_images():
    skimage = pytest.importorskip("skimage.data")
    try:
        network, names = load_resnet50(), class_names()
    except DataError as error:
        pytest.skip(error.problem)
    for picture, name, least in ((skimage.chelsea(), "Egyptian_cat", 0.8), (skimage.coffee(), "espresso", 0.98)):
        pixels = torch.from_numpy(picture.copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
        side = min(pixels.shape[2:])
        top, left = ((size - side) // 2 for size in pixels.shape[2:])
        square = pixels[:, :, top : top + side, left : left + side]
        square = torch.nn.functional.interpolate(square, (224, 224), mode="bicubic", antialias=True).clamp(-1, 1)
        chance = network.classify(network(square)).softmax(1)[0]
        assert names[int(chance.argmax())] == name and chance.max() > least
