"""Sharded checkpoints. Ranks are threads here; test_distributed.py has processes."""

import errno
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from vitrail.errors import CheckpointError
from vitrail.training import checkpoint, distributed, tensor_shards


class Share(NamedTuple):
    """Local shard of a tensor, as of a DTensor."""

    shape: tuple[int, ...]
    box: tensor_shards.Box
    values: torch.Tensor
    is_writer: bool = True


def share(x: torch.Tensor, axis: int | None, ranks: int, rank: int) -> Share | torch.Tensor:
    """Return a copy of the rank's shard of x; axis None means that every rank has all of x."""
    if axis is None:
        return x.clone()
    box = tensor_shards.shard_box(x.shape, [(axis, ranks, rank)])
    return Share(tuple(x.shape), box, x[tensor_shards.relative_slices(box, tensor_shards.full_box(x.shape))].clone())


def run_ranks(ranks: int, act) -> list:
    """Run act(rank) on all ranks in parallel; raise an error of any rank."""
    here, barrier, objects = threading.local(), threading.Barrier(ranks, timeout=300), [None] * ranks

    def gather(mine):
        objects[here.rank] = mine
        barrier.wait()
        gathered = list(objects)
        barrier.wait()
        return gathered

    def run(rank):
        here.rank = rank
        return act(rank)

    plain = checkpoint.get_local_shard
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(ranks) as pool:
        patch.setattr(distributed, "get_world_size", lambda: ranks)
        patch.setattr(distributed, "get_rank", lambda: here.rank)
        patch.setattr(distributed, "gather_objects", gather)
        patch.setattr(checkpoint, "get_local_shard", lambda x, rank: x if isinstance(x, Share) else plain(x, rank))
        return [future.result() for future in [pool.submit(run, rank) for rank in range(ranks)]]


def save(folder, step: int, tensors: dict, axes: dict, ranks: int) -> None:
    def act(rank):
        group = {name: share(x, axes[name], ranks, rank) for name, x in tensors.items()}
        return checkpoint.save_checkpoint(folder, step, {"model": group}, {"step": step})

    run_ranks(ranks, act)


def load(path, like: dict, axes: dict, ranks: int) -> list[dict]:
    """Load into blank tensors and return those of each rank."""

    def act(rank):
        group = {name: share(torch.full_like(x, 77), axes[name], ranks, rank) for name, x in like.items()}
        checkpoint.load_checkpoint(path, {"model": group})
        return group

    return run_ranks(ranks, act)


TENSORS = {
    "even": torch.randn(6, 4),
    "uneven": torch.randn(7, 3),
    "one_row": torch.randn(1, 5),
    "vector": torch.randn(5),
    "half": torch.randn(9, 2).bfloat16(),
    "columns": torch.randn(3, 8),
    "everywhere": torch.randn(2, 2),
    "steps": torch.tensor(12),
    "nothing": torch.empty(0, 3),
}
AXES = {name: {"everywhere": None, "steps": None, "columns": 1}.get(name, 0) for name in TENSORS}


@pytest.mark.parametrize("saved", [1, 2, 3, 4])
def test_load_with_another_number_of_ranks(tmp_path, saved):
    save(tmp_path, 5, TENSORS, AXES, saved)
    for ranks in (1, 2, 3, 5):
        for rank, group in enumerate(load(checkpoint.get_checkpoint_path(tmp_path, 5), TENSORS, AXES, ranks)):
            for name, x in TENSORS.items():
                wanted, got = share(x, AXES[name], ranks, rank), group[name]
                if isinstance(wanted, Share):
                    wanted, got = wanted.values, got.values
                assert torch.equal(got, wanted), (name, ranks, rank)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 6), max_size=3), st.integers(1, 4), st.integers(1, 4), st.data())
def test_shards_of_any_shape_round_trip(tmp_path_factory, shape, saved, ranks, data):
    """Shard along one axis to save and along another to load."""
    folder, x = tmp_path_factory.mktemp("pieces"), torch.randn(shape)
    axis = st.sampled_from([None, *range(len(shape))])
    save(folder, 1, {"x": x}, {"x": data.draw(axis)}, saved)
    axis = data.draw(axis)
    for rank, group in enumerate(load(checkpoint.get_checkpoint_path(folder, 1), {"x": x}, {"x": axis}, ranks)):
        wanted, got = share(x, axis, ranks, rank), group["x"]
        assert torch.equal(*((wanted.values, got.values) if isinstance(wanted, Share) else (wanted, got)))
    shutil.rmtree(folder)


def test_ranks_write_their_shards_and_replicated_tensors_once(tmp_path):
    save(tmp_path, 5, TENSORS, AXES, 3)
    path = checkpoint.get_checkpoint_path(tmp_path, 5)
    names = [f"model-{rank:05}-of-00003.safetensors" for rank in range(3)]
    assert sorted(p.name for p in path.iterdir()) == [*names, "state.json"]
    files = [load_file(path / name) for name in names]
    for name in ("everywhere", "steps", "one_row"):
        assert [name in file for file in files] == [True, False, False]
    assert [len(file["uneven"]) for file in files] == [3, 3, 1]
    assert sum(file["vector"].numel() for file in files) == 5
    with safe_open(path / names[2], "pt") as file:
        assert json.loads(file.metadata()["places"])["uneven"] == {"shape": [7, 3], "start": [6, 0]}


def test_one_process_writes_plain_files(tmp_path):
    save(tmp_path, 5, TENSORS, AXES, 1)
    path = checkpoint.get_checkpoint_path(tmp_path, 5)
    assert sorted(p.name for p in path.iterdir()) == ["model.safetensors", "state.json"]
    plain = load_file(path / "model.safetensors")
    assert plain.keys() == TENSORS.keys()
    assert all(torch.equal(plain[name], x) for name, x in TENSORS.items())
    with safe_open(path / "model.safetensors", "pt") as file:
        assert not file.metadata()


def missing(path):
    path.unlink()


def truncated(path):
    path.write_bytes(path.read_bytes()[:-8])


def changed(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def swapped(path):
    path.write_bytes((path.parent / "model-00000-of-00003.safetensors").read_bytes())


@pytest.mark.parametrize("corrupt", [missing, truncated, changed, swapped])
@pytest.mark.parametrize("ranks", [1, 2])
def test_corrupt_file_is_named_on_every_rank(tmp_path, corrupt, ranks):
    save(tmp_path, 5, TENSORS, AXES, 3)
    path = checkpoint.get_checkpoint_path(tmp_path, 5)
    corrupt(path / "model-00001-of-00003.safetensors")

    def act(rank):
        group = {name: share(x, AXES[name], ranks, rank) for name, x in TENSORS.items()}
        with pytest.raises(CheckpointError, match=r"step-00000005.*model-00001-of-00003\.safetensors"):
            checkpoint.load_checkpoint(path, {"model": group})

    run_ranks(ranks, act)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"step": 5}'])
def test_corrupt_state_is_named(tmp_path, content):
    save(tmp_path, 5, TENSORS, AXES, 2)
    file = checkpoint.get_checkpoint_path(tmp_path, 5) / "state.json"
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(CheckpointError, match="step-00000005"):
        load(file.parent, TENSORS, AXES, 2)


def test_missing_rows_raise(tmp_path):
    """Also with valid checksums."""
    save(tmp_path, 5, TENSORS, AXES, 2)
    path = checkpoint.get_checkpoint_path(tmp_path, 5)
    state = json.loads((path / "state.json").read_text())
    name = "model-00001-of-00002.safetensors"
    with safe_open(path / name, "pt") as file:
        metadata = file.metadata()
    save_file({k: v for k, v in load_file(path / name).items() if k != "vector"}, path / name, metadata=metadata)
    state["files"][name] |= {"bytes": (path / name).stat().st_size, "sha256": checkpoint._compute_sha256(path / name)}
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match="tensor vector has 3 of 5"):
        load(path, TENSORS, AXES, 1)


def test_tensors_of_another_model_raise(tmp_path):
    save(tmp_path, 5, TENSORS, AXES, 2)
    with pytest.raises(CheckpointError, match="'uneven'"):
        load(checkpoint.get_checkpoint_path(tmp_path, 5), TENSORS | {"uneven": torch.randn(8, 3)}, AXES, 2)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_full_disk_on_one_rank_raises_on_all(tmp_path, monkeypatch, bad):
    save(tmp_path, 3, TENSORS, AXES, 3)
    plain = checkpoint.write_tensor_file

    def full(path, *given):
        if f"{bad:05}-of" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(path, *given)

    monkeypatch.setattr(checkpoint, "write_tensor_file", full)

    def act(rank):
        group = {name: share(x, AXES[name], 3, rank) for name, x in TENSORS.items()}
        with pytest.raises(CheckpointError, match=rf"rank {bad}: .*No space left(.|\n)*resumes from step 3"):
            checkpoint.save_checkpoint(tmp_path, 6, {"model": group}, {"step": 6})

    run_ranks(3, act)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000003"]


def test_ranks_without_a_shared_folder_raise(tmp_path):
    def act(rank):
        with pytest.raises(CheckpointError, match="do not share this folder"):
            (tmp_path / str(rank) / ".partial-00000001").mkdir(parents=True)
            checkpoint.save_checkpoint(tmp_path / str(rank), 1, {"model": {"x": share(torch.ones(4), 0, 2, rank)}}, {})

    run_ranks(2, act)


def test_old_checkpoints_are_deleted(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, TENSORS, AXES, 2)
    assert checkpoint.list_steps(tmp_path) == [2, 3]
    assert len(list(tmp_path.iterdir())) == 2
