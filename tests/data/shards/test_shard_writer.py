"""Written shards are read back unchanged, also by webdataset; an interrupted writer resumes with the same bytes."""

import itertools
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.shards import ShardDataset, ShardsConfig, write_shards
from vitrail.errors import DataError


def read(folder) -> list[dict]:
    shards = ShardDataset(ShardsConfig(paths=str(folder)))
    return [shards[i] for i in range(len(shards))]


def files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.tar"))}


keys = st.text(st.characters(exclude_characters="\0./", exclude_categories=["Cs"]), min_size=1, max_size=120).filter(
    lambda key: not (key.startswith("__") and "__" in key[2:])
)
members = st.dictionaries(
    st.sampled_from(["bin", "txt", "json", "cls", "left.bin"]), st.binary(max_size=900), min_size=1
).map(
    lambda held: {
        ending: {"txt": data.hex(), "json": [len(data), None, {"ü": 0.5}], "cls": len(data)}.get(ending, data)
        for ending, data in held.items()
    }
)


@given(st.lists(st.tuples(keys, members), min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 3000))
@settings(max_examples=40)
def test_round_trip(tmp_path_factory, pairs, count, size):
    pairs = [next(group) for _, group in itertools.groupby(pairs, key=lambda pair: pair[0])]  # no equal keys in a row
    samples = [{"__key__": key, **contents} for key, contents in pairs]
    folder = tmp_path_factory.mktemp("round")
    paths = write_shards(samples, folder, max_samples=count, max_bytes=size, quiet=True)
    assert read(folder) == samples
    for path in paths:
        contents = read(path)
        weights = [sum(len(v) if isinstance(v, bytes) else 0 for v in s.values()) for s in contents]
        assert len(contents) <= count and (len(contents) == 1 or sum(weights) <= size)


def test_exchange_with_webdataset(samples, tmp_path):
    made = samples(9)
    ours = [str(path) for path in write_shards(made, tmp_path / "ours", max_samples=4, quiet=True)]
    assert [Path(path).name for path in ours] == [f"shard-{i:06}.tar" for i in range(3)]
    for sample, theirs in zip(made, webdataset.WebDataset(ours, shardshuffle=False).decode(), strict=True):
        assert theirs["__key__"] == sample["__key__"] and theirs["jpg"] == sample["jpg"]
        assert (theirs["txt"], theirs["json"], theirs["cls"]) == (sample["txt"], sample["json"], sample["cls"])
        assert np.array_equal(theirs["npy"], sample["npy"])
    theirs = tmp_path / "theirs.tar"
    with webdataset.TarWriter(str(theirs)) as writer:
        for sample in made:
            writer.write(sample)
    for sample, back in zip(made, read(theirs), strict=True):
        assert (back["__key__"], back["txt"], back["json"]) == (sample["__key__"], sample["txt"], sample["json"])
        assert np.array_equal(back["npy"], sample["npy"])


def test_images_from_arrays_and_pillow(tmp_path, photographs):
    picture = photographs["chelsea"]
    sample = {"__key__": "a", "png": np.asarray(picture), "webp": picture, "jpg": picture, "left.png": picture}
    write_shards([sample], tmp_path, quiet=True)
    (back,) = read(tmp_path)
    for kind in ("png", "webp", "left.png"):
        assert np.array_equal(back[kind], np.asarray(picture))
    assert np.abs(back["jpg"].astype(int) - np.asarray(picture)).mean() < 2
    assert not picture.info.get("quality")


def test_the_same_samples_give_the_same_bytes(samples, tmp_path):
    for name in ("a", "b"):
        write_shards(iter(samples(8)), tmp_path / name, max_samples=3, quiet=True)
    assert files(tmp_path / "a") == files(tmp_path / "b") and len(files(tmp_path / "a")) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_killed_writer_resumes(samples, tmp_path, stream):
    made = samples(10)
    write_shards(made, tmp_path / "whole", max_samples=3, quiet=True)
    folder = tmp_path / "killed"

    def dies():
        yield from made[:8]
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        write_shards(dies(), folder, max_samples=3, quiet=True)
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert list(files(folder)) == ["shard-000000.tar", "shard-000001.tar"]  # two complete shards
    assert list(folder.glob(".*.partial"))  # and a partial third one
    asked = []

    class Watched(list):
        def __getitem__(self, i):
            asked.append(i)
            return super().__getitem__(i)

    write_shards(iter(made) if stream else Watched(made), folder, max_samples=3, quiet=True)
    assert files(folder) == files(tmp_path / "whole")
    assert not list(folder.glob(".*"))
    assert stream or asked == [5, 6, 7, 8, 9]  # the last written sample, for comparison; then the rest
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    write_shards(made, folder, max_samples=3, quiet=True)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before  # nothing is written again


def test_error_leaves_no_partial_shard(samples, tmp_path):
    def fails():
        yield from samples(5)
        raise KeyError("the caller's own")

    with pytest.raises(KeyError):
        write_shards(fails(), tmp_path, max_samples=3, quiet=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"shard-000000.tar{ending}" for ending in ("", ".sha256", ".vidx")
    ]


def test_other_samples_are_refused(samples, tmp_path):
    write_shards(samples(6), tmp_path, max_samples=3, quiet=True)
    other = [{**sample, "__key__": f"x{sample['__key__']}"} for sample in samples(9)]
    for given_ in (other, iter(other), samples(2), iter(samples(2))):
        with pytest.raises(DataError, match="where the samples"):
            write_shards(given_, tmp_path, max_samples=3, quiet=True)
    (tmp_path / "shard-000000.tar").unlink()
    with pytest.raises(DataError, match=r"no shard-000000\.tar"):
        write_shards(samples(6), tmp_path, max_samples=3, quiet=True)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"txt": "no key"}, "invalid __key__ None"),
        ({"__key__": "", "txt": ""}, "invalid __key__ ''"),
        ({"__key__": "a.b", "txt": ""}, "'a.b'"),
        ({"__key__": "../a", "txt": ""}, "'../a'"),
        ({"__key__": "/a", "txt": ""}, "'/a'"),
        ({"__key__": "a\0b", "txt": ""}, "__key__"),
        ({"__key__": "\ud800", "txt": ""}, "__key__"),
        ({"__key__": "__a__", "txt": ""}, "__key__"),
        ({"__key__": "a"}, "is empty"),
        ({"__key__": "a", "__url__": "x"}, "is empty"),
        ({"__key__": "a", "TXT": ""}, "'TXT'"),
        ({"__key__": "a", "b/c": b""}, "'b/c'"),
        ({"__key__": "a", "txt": 3}, r"'a\.txt' cannot be encoded"),
        ({"__key__": "a", "cls": 3.5}, r"'a\.cls' cannot be encoded"),
        ({"__key__": "a", "npy": [object()]}, r"'a\.npy' cannot be encoded"),
        ({"__key__": "a", "jpg": np.zeros((2, 2, 9))}, r"'a\.jpg' cannot be encoded"),
        ({"__key__": "a", "mp4": "words"}, "cannot be encoded as 'mp4'"),
    ],
)
def test_invalid_samples_are_refused(sample, message, tmp_path):
    with pytest.raises(DataError, match=message) as caught:
        write_shards([sample], tmp_path, quiet=True)
    assert caught.value.remedy and not list(tmp_path.iterdir())


def test_duplicate_keys_and_invalid_sizes(tmp_path):
    with pytest.raises(DataError, match="in a row"):
        write_shards([{"__key__": "a", "txt": ""}, {"__key__": "a", "cls": 1}], tmp_path, quiet=True)
    for wrong in ({"max_samples": 0}, {"max_bytes": 0}, {"name": "a/b"}, {"name": "*"}):
        with pytest.raises(DataError, match="shards"):
            write_shards([], tmp_path, quiet=True, **wrong)
    with pytest.raises(DataError, match="cannot be written"):
        write_shards([], "/dev/null/x", quiet=True)
    assert write_shards([], tmp_path, quiet=True) == []


def test_greyscale_images_stay_greyscale(tmp_path, photographs):
    grey = photographs["coffee"].convert("L")
    write_shards([{"__key__": "a", "png": grey}], tmp_path, quiet=True)
    (path,) = tmp_path.glob("*.tar")
    (raw,) = webdataset.WebDataset([str(path)], shardshuffle=False).decode("pill")
    assert raw["png"].mode == "L"
    assert np.array_equal(read(path)[0]["png"], np.asarray(grey.convert("RGB")))
