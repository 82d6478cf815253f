"""What is written is what is read, by us and by webdataset; a killed writer goes on to the same bytes."""

import itertools
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.shards import Shards, ShardsConfig, write_shards
from vitrail.errors import DataError


def read(folder) -> list[dict]:
    shards = Shards(ShardsConfig(paths=str(folder)))
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
    pairs = [next(group) for _, group in itertools.groupby(pairs, key=lambda pair: pair[0])]  # no twins in a row
    samples = [{"__key__": key, **held} for key, held in pairs]
    folder = tmp_path_factory.mktemp("round")
    paths = write_shards(samples, folder, count=count, size=size, quiet=True)
    assert read(folder) == samples
    for path in paths:
        held = read(path)
        weights = [sum(len(v) if isinstance(v, bytes) else 0 for v in s.values()) for s in held]
        assert len(held) <= count and (len(held) == 1 or sum(weights) <= size)


def test_webdataset_reads_ours_and_we_read_its(samples, tmp_path):
    made = samples(9)
    ours = [str(path) for path in write_shards(made, tmp_path / "ours", count=4, quiet=True)]
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


def test_pictures_from_arrays_and_pillow(tmp_path, photographs):
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
        write_shards(iter(samples(8)), tmp_path / name, count=3, quiet=True)
    assert files(tmp_path / "a") == files(tmp_path / "b") and len(files(tmp_path / "a")) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_killed_writer_goes_on(samples, tmp_path, stream):
    made = samples(10)
    write_shards(made, tmp_path / "whole", count=3, quiet=True)
    folder = tmp_path / "killed"

    def dies():
        yield from made[:8]
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        write_shards(dies(), folder, count=3, quiet=True)
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert list(files(folder)) == ["shard-000000.tar", "shard-000001.tar"]  # two whole ones
    assert list(folder.glob(".*.partial"))  # and what the third had become
    asked = []

    class Watched(list):
        def __getitem__(self, i):
            asked.append(i)
            return super().__getitem__(i)

    write_shards(iter(made) if stream else Watched(made), folder, count=3, quiet=True)
    assert files(folder) == files(tmp_path / "whole")
    assert not list(folder.glob(".*"))
    assert stream or asked == [5, 6, 7, 8, 9]  # the last one written, to know it; then the rest
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    write_shards(made, folder, count=3, quiet=True)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before  # nothing left to do


def test_an_error_leaves_no_half_shard(samples, tmp_path):
    def fails():
        yield from samples(5)
        raise KeyError("the caller's own")

    with pytest.raises(KeyError):
        write_shards(fails(), tmp_path, count=3, quiet=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard-000000.tar", "shard-000000.tar.vidx"]


def test_a_folder_of_other_samples_is_left_alone(samples, tmp_path):
    write_shards(samples(6), tmp_path, count=3, quiet=True)
    other = [{**sample, "__key__": f"x{sample['__key__']}"} for sample in samples(9)]
    for given_ in (other, iter(other), samples(2), iter(samples(2))):
        with pytest.raises(DataError, match="where the samples"):
            write_shards(given_, tmp_path, count=3, quiet=True)
    (tmp_path / "shard-000000.tar").unlink()
    with pytest.raises(DataError, match=r"no shard-000000\.tar"):
        write_shards(samples(6), tmp_path, count=3, quiet=True)


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"txt": "no key"}, "__key__ is None"),
        ({"__key__": "", "txt": ""}, "__key__ is ''"),
        ({"__key__": "a.b", "txt": ""}, "'a.b'"),
        ({"__key__": "../a", "txt": ""}, "'../a'"),
        ({"__key__": "/a", "txt": ""}, "'/a'"),
        ({"__key__": "a\0b", "txt": ""}, "__key__"),
        ({"__key__": "\ud800", "txt": ""}, "__key__"),
        ({"__key__": "__a__", "txt": ""}, "__key__"),
        ({"__key__": "a"}, "holds nothing"),
        ({"__key__": "a", "__url__": "x"}, "holds nothing"),
        ({"__key__": "a", "TXT": ""}, "'TXT'"),
        ({"__key__": "a", "b/c": b""}, "'b/c'"),
        ({"__key__": "a", "txt": 3}, r"'a\.txt' cannot be written"),
        ({"__key__": "a", "cls": 3.5}, r"'a\.cls' cannot be written"),
        ({"__key__": "a", "npy": [object()]}, r"'a\.npy' cannot be written"),
        ({"__key__": "a", "jpg": np.zeros((2, 2, 9))}, r"'a\.jpg' cannot be written"),
        ({"__key__": "a", "mp4": "words"}, "nobody knows"),
    ],
)
def test_what_could_not_be_read_back_is_refused(sample, words, tmp_path):
    with pytest.raises(DataError, match=words) as caught:
        write_shards([sample], tmp_path, quiet=True)
    assert caught.value.remedy and not list(tmp_path.iterdir())


def test_twins_and_impossible_sizes(tmp_path):
    with pytest.raises(DataError, match="in a row"):
        write_shards([{"__key__": "a", "txt": ""}, {"__key__": "a", "cls": 1}], tmp_path, quiet=True)
    for wrong in ({"count": 0}, {"size": 0}, {"name": "a/b"}, {"name": "*"}):
        with pytest.raises(DataError, match="shards"):
            write_shards([], tmp_path, quiet=True, **wrong)
    with pytest.raises(DataError, match="cannot be written"):
        write_shards([], "/dev/null/x", quiet=True)
    assert write_shards([], tmp_path, quiet=True) == []


def test_grey_pictures_stay_grey(tmp_path, photographs):
    grey = photographs["coffee"].convert("L")
    write_shards([{"__key__": "a", "png": grey}], tmp_path, quiet=True)
    (path,) = tmp_path.glob("*.tar")
    (raw,) = webdataset.WebDataset([str(path)], shardshuffle=False).decode("pill")
    assert raw["png"].mode == "L"
    assert np.array_equal(read(path)[0]["png"], np.asarray(grey.convert("RGB")))
