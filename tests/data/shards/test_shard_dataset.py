"""Samples by index: same order for any workers, exact resumption, and replaced, counted and named faults."""

import os
import pickle
import shutil
import signal
from pathlib import Path

import braceexpand
import numpy as np
import pytest
from torch.utils.data import DataLoader

from vitrail.data.shards import (
    RandomCrop,
    SampleFault,
    ShardDataset,
    ShardsConfig,
    ShuffledDataset,
    load_batches,
    write_shards,
)
from vitrail.data.shards.shard_paths import _expand_braces, expand_paths
from vitrail.errors import ConfigError, DataError
from vitrail.processing.resolution_policies import NaivePolicy

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(scope="module")
def made(samples, tmp_path_factory) -> Path:
    """40 samples in four shards."""
    folder = tmp_path_factory.mktemp("made")
    write_shards(samples(40), folder, max_samples=11, quiet=True)
    return folder


@pytest.fixture
def broken(made, tmp_path) -> Path:
    """A copy in which three images and one text are unreadable."""
    for path in made.glob("*.tar"):
        shutil.copy(path, tmp_path)
    shards = ShardDataset(ShardsConfig(paths=str(tmp_path)))
    for item, ending in ((3, "jpg"), (15, "jpg"), (16, "txt"), (30, "jpg")):
        shard, _, members = shards._locate(item)
        about, data = shards.paths[shard].stat(), bytearray(shards.paths[shard].read_bytes())
        at, length = members[ending]
        data[at : at + length] = b"\xff" * length
        shards.paths[shard].write_bytes(data)
        os.utime(shards.paths[shard], ns=(about.st_atime_ns, about.st_mtime_ns))
    return tmp_path


BAD = ("part/0003.jpg", "part/0015.jpg", "part/0016.txt", "part/0030.jpg")


def test_every_member_kind(samples, made):
    shards = ShardDataset(ShardsConfig(paths=str(made)))
    assert len(shards) == 40 and repr(shards) == "<40 samples of cls, jpg, json, npy, txt in 4 shards>"
    for i, sample in enumerate(samples(40)):
        found = shards[i]
        assert list(found) == ["__key__", "jpg", "txt", "json", "cls", "npy"]
        assert all(found[k] == sample[k] for k in ("__key__", "txt", "json", "cls"))
        assert np.array_equal(found["npy"], sample["npy"])
        assert found["jpg"].shape == (32, 48, 3) and found["jpg"].dtype == np.uint8
    for item in (-1, 40):
        with pytest.raises(IndexError):
            shards[item]


def test_fields_transforms_and_decoders(made, samples):
    shards = ShardDataset(
        ShardsConfig(paths=str(made), fields=("png;jpg", "cls"), transform=NaivePolicy(image_size=28))
    )
    assert list(shards[5]) == ["__key__", "png", "cls"] and shards[5]["png"].shape == (28, 28, 3)
    raw = ShardDataset(ShardsConfig(paths=str(made), fields=("jpg",)), decoders={"jpg": bytes})
    assert raw[5]["jpg"] == samples(6)[5]["jpg"]
    for wrong in (
        {"fields": ("",)},
        {"fields": ("a;",)},
        {"max_fault_fraction": 2.0},
        {"max_faults": -1},
        {"transform": "naive"},
    ):
        with pytest.raises(ConfigError):
            ShardsConfig(paths="x", **wrong)
    plain = {"paths": ["a", "b"], "fields": ["jpg"], "transform": {"policy": "random", "image_size": 64}}
    assert ShardsConfig.from_dict(plain).transform == RandomCrop(image_size=64)


def test_every_sample_once_an_epoch(made, samples):
    shuffled = ShuffledDataset(ShardDataset(ShardsConfig(paths=str(made), fields=("cls",))), seed=3)
    epochs = [[shuffled[e * 40 + i]["__key__"] for i in range(40)] for e in range(3)]
    assert all(sorted(epoch) == [s["__key__"] for s in samples(40)] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def read_all(data, numbers, workers: int, threads: bool) -> list[dict]:
    lists = [numbers[i : i + 3] for i in range(0, len(numbers), 3)]
    if threads:
        found = load_batches(data, lists, num_workers=workers, collate=list)
    else:
        found = DataLoader(data, batch_sampler=lists, num_workers=workers, collate_fn=list)
    return [sample for batch in found for sample in batch]


def test_results_do_not_depend_on_workers(broken):
    config = ShardsConfig(
        paths=str(broken),
        fields=("jpg", "txt"),
        transform=RandomCrop(image_size=16, horizontal_flip=True),
        max_faults=100,
    )
    expected = [ShuffledDataset(ShardDataset(config), seed=1)[i] for i in range(100)]
    for workers, threads in ((0, False), (1, True), (3, False), (3, True)):
        found = read_all(ShuffledDataset(ShardDataset(config), seed=1), range(100), workers, threads)
        for a, b in zip(expected, found, strict=True):
            assert a["__key__"] == b["__key__"] and np.array_equal(a["jpg"], b["jpg"])
    crops = [{s["__key__"]: s["jpg"] for s in expected[first : first + 40]} for first in (0, 40)]
    assert sum(np.array_equal(crops[0][key], crops[1][key]) for key in crops[0]) < 5  # other crops in the next epoch


def test_killed_reader_resumes_with_other_workers(made):
    """One process is killed while it reads; another continues after its last sample."""
    data = ShuffledDataset(ShardDataset(ShardsConfig(paths=str(made), fields=("cls",))), seed=5)
    expected = [data[i]["__key__"] for i in range(120)]
    there, here = os.pipe()
    child = os.fork()
    if not child:
        for i, sample in enumerate(DataLoader(data, batch_size=None, sampler=range(120), num_workers=2)):
            os.write(here, f"{sample['__key__']}\n".encode())
            if i == 50:
                signal.pause()  # wait to be killed
        os._exit(1)
    os.close(here)
    text = b""
    while text.count(b"\n") < 51:
        text += os.read(there, 4096)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(there)
    done = text.decode().split()
    assert done == expected[:51]
    for workers in (0, 3):
        rest = DataLoader(data, batch_size=None, sampler=range(len(done), 120), num_workers=workers)
        assert done + [sample["__key__"] for sample in rest] == expected
    rest = load_batches(data, [[i] for i in range(len(done), 120)], num_workers=3, collate=lambda b: b[0]["__key__"])
    assert done + list(rest) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_samples_are_replaced_and_reported(broken, made, workers):
    config = ShardsConfig(paths=str(broken), fields=("jpg", "txt"))
    shards, whole = ShardDataset(config), ShardDataset(config.replace(paths=str(made)))
    found = [sample["__key__"] for sample in DataLoader(shards, batch_size=None, num_workers=workers)]
    bad = {name.split(".")[0] for name in BAD}
    for i, key in enumerate(found):
        true = whole[i]["__key__"]
        assert key not in bad and (key == true) == (true not in bad)
    report = shards.report()
    assert (report.num_read, report.num_samples) == (40, 40)
    assert tuple(fault.member for fault in report.faults) == BAD
    assert {fault.file for fault in report.faults} == {f"shard-00000{i}.tar" for i in range(3)}
    assert "UnicodeDecodeError" in report.faults[2].reason and "not an image" in report.faults[0].reason
    assert "read 40 of 40 samples, 4 faults" in str(report) and BAD[1] in str(report)


# After an error, torch waits five seconds for each worker.
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_too_many_faults_raise_an_error(broken, workers):
    config = ShardsConfig(paths=str(broken), fields=("jpg", "txt"), max_fault_fraction=0.05, max_faults=2)
    with pytest.raises(DataError, match=r"[34] of \d+ samples are unreadable, more than the limit of 5.00%") as caught:
        list(DataLoader(ShardDataset(config), batch_size=None, num_workers=workers))
    assert sum(name in str(caught.value) for name in BAD) >= 3  # two workers may find one each at the same time
    assert len(list(DataLoader(ShardDataset(config.replace(max_faults=4)), batch_size=None))) == 40  # 4 are tolerated
    assert len(list(DataLoader(ShardDataset(config.replace(max_fault_fraction=0.5)), batch_size=None))) == 40
    with pytest.raises(DataError, match="1 of 4 samples"):
        list(
            load_batches(
                ShardDataset(config.replace(max_fault_fraction=0.0, max_faults=0)),
                [[i] for i in range(40)],
                num_workers=1,
                collate=list,
            )
        )


def test_no_readable_sample_is_an_error(made):
    config = ShardsConfig(paths=str(made), fields=("mp4",), max_faults=10**6)
    with pytest.raises(DataError, match="100 samples in a row are unreadable") as caught:
        ShardDataset(config)[0]
    assert "has no mp4, only jpg, txt, json, cls, npy" in str(caught.value)


def test_truncated_shards_count_as_faults(made, tmp_path):
    for path in made.glob("*.tar"):
        (tmp_path / path.name).write_bytes(path.read_bytes()[:-30_000])
    config = ShardsConfig(paths=str(tmp_path), fields=("txt",), max_faults=100)
    shards = ShardDataset(config)
    assert 20 < len(shards) < 40
    faults = shards.report().faults
    assert {fault.file for fault in faults} == {path.name for path in made.glob("*.tar")}
    assert all(isinstance(fault, SampleFault) and fault.reason for fault in faults)
    with pytest.raises(DataError, match="more than the limit"):
        ShardDataset(config.replace(max_faults=3))


def test_changed_shard_is_detected(made, tmp_path):
    shutil.copytree(made, tmp_path / "own")
    shards = ShardDataset(ShardsConfig(paths=str(tmp_path / "own"), fields=("txt",), max_faults=100))
    first = tmp_path / "own" / "shard-000000.tar"
    first.write_bytes(first.read_bytes() + bytes(512))
    assert shards[0]["__key__"] not in {f"part/{i:04}" for i in range(11)}
    assert "changed since" in shards.report().faults[0].reason


def test_dataset_can_be_pickled(made):
    shards = ShardDataset(ShardsConfig(paths=str(made), fields=("txt",)))
    assert shards[7]["txt"] == pickle.loads(pickle.dumps(shards))[7]["txt"]
    assert shards.faults.states.nonzero()[0].tolist() == [7]


@pytest.mark.slow
def test_spawned_workers(broken):
    shards = ShardDataset(ShardsConfig(paths=str(broken), fields=("jpg", "txt"), transform=NaivePolicy(image_size=14)))
    loader = DataLoader(shards, batch_size=8, num_workers=2, multiprocessing_context="spawn")
    assert sum(len(batch["__key__"]) for batch in loader) == 40
    assert tuple(fault.member for fault in shards.report().faults) == BAD


def test_batches_end_cleanly():
    class Numbers:
        def __getitem__(self, i):
            if i == 7:
                raise KeyError("seven")
            return i

    lists = [[i, i + 1] for i in range(0, 10, 2)]
    found = load_batches(Numbers(), lists, num_workers=2, collate=list)
    assert [next(found) for _ in range(3)] == lists[:3]
    with pytest.raises(KeyError, match="seven"):
        next(found)
    early = load_batches(Numbers(), lists[:3], num_workers=2, prefetch=1, collate=list)
    assert next(early) == [0, 1]
    early.close()
    with pytest.raises(ConfigError):
        next(load_batches(Numbers(), lists, num_workers=0))


# ── which files ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("pattern", ["a", "x-{000..012}.tar", "{a,b}/{1..3}", "{9..11}", "{3..1}", "{a}"])
def test_braces(pattern):
    assert _expand_braces(pattern) == list(braceexpand.braceexpand(pattern))


def test_paths(made, tmp_path):
    every = tuple(sorted(made.glob("*.tar")))
    assert (
        expand_paths(str(made))
        == expand_paths(f"{made}/*.tar")
        == expand_paths(f"{made}/shard-{{000000..000003}}.tar")
        == every
    )
    assert expand_paths((str(every[2]), str(every[0]))) == (every[2], every[0])
    odd = tmp_path / "a[1].tar"
    odd.write_bytes(every[0].read_bytes())
    assert expand_paths(str(odd)) == (odd,)
    for wrong in (str(tmp_path / "gone.tar"), f"{made}/*.zip", f"{made}/shard-{{000000..000009}}.tar"):
        with pytest.raises(DataError, match="matches no shard"):
            expand_paths(wrong)
    for wrong in ("https://somewhere/a.tar", "pipe:curl x", "s3://b/a.tar"):
        with pytest.raises(DataError, match="is a URL"):
            expand_paths(wrong)
    with pytest.raises(DataError, match="no shards"):
        expand_paths(())
    (tmp_path / "empty.tar").write_bytes(bytes(10240))
    with pytest.raises(DataError, match="hold no samples"):
        ShardDataset(ShardsConfig(paths=str(tmp_path / "empty.tar")))
