"""Token files: lossless round trip, resuming after interruption, and detection of corruption."""

import base64
import pickle
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.codecs.token_file import (
    FORMAT_VERSION,
    HEADER_STRUCT,
    RECORD_STRUCT,
    TRAILER_STRUCT,
    TokenFile,
    TokenFileHeader,
)
from vitrail.codecs.token_file_writer import TokenFileWriter
from vitrail.errors import ConfigError, DataError

FIT = {"how": "cover", "size": [32, 48]}
SIZES = st.one_of(st.integers(1, 300), st.integers(0, 63).flatmap(lambda b: st.sampled_from([2**b, max(1, 2**b - 1)])))


def header(sizes=(1000,), groups=False, **more) -> TokenFileHeader:
    return TokenFileHeader(
        **{"model": "a" * 64, "name": "codec", "sizes": sizes, "groups": groups, "factor": 16, "fit": FIT} | more
    )


def draw_ids(sizes, groups: bool, h: int, w: int, seed: int) -> torch.Tensor:
    random = np.random.default_rng(seed)
    parts = [torch.from_numpy(random.integers(0, size - 1, (h, w), dtype=np.int64, endpoint=True)) for size in sizes]
    for part, size in zip(parts, sizes, strict=True):
        part.view(-1)[0] = size - 1  # the largest is always there
    return torch.stack(parts, -1) if groups else parts[0]


def write_file(path, head: TokenFileHeader, pictures, faults=()) -> bytes:
    with TokenFileWriter(path, head) as writer:
        for name, ids in pictures:
            writer.add(name, ids, (ids.shape[0] * head.factor - 1, ids.shape[1] * head.factor))
        for name, reason in faults:
            writer.skip(name, reason)
        writer.finish()
    return path.read_bytes()


def sample(head: TokenFileHeader, count: int = 5):
    return [
        (f"folder/picture {i} é.jpg", draw_ids(head.sizes, head.groups, 1 + i % 3, 2 + i % 2, i)) for i in range(count)
    ]


def read_all(path) -> list[tuple]:
    with TokenFile(path) as file:
        return [
            (one.name, one.ids.tolist(), one.image_size, one.source_size) for one in (file[i] for i in range(len(file)))
        ]


# ---- whole ------------------------------------------------------------------------------------------------------


@given(
    sizes=st.lists(SIZES, min_size=1, max_size=4),
    grids=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=6),
    names=st.lists(st.text(min_size=1).filter(lambda s: s.isprintable()), min_size=6, max_size=6, unique=True),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_ids_round_trip(tmp_path_factory, sizes, grids, names, seed):
    path = tmp_path_factory.mktemp("round") / "a.vtok"
    head = header(tuple(sizes), len(sizes) > 1)
    pictures = [(name, draw_ids(sizes, head.groups, *grid, seed)) for name, grid in zip(names, grids, strict=False)]
    write_file(path, head, pictures, faults=[("not one of them " + names[0], "is corrupt")])
    with TokenFile(path, codec_identity=head.model) as file:
        file.verify_digest()
        assert file.header == head
        assert file.names == [name for name, _ in pictures]
        assert file.errors == {"not one of them " + names[0]: "is corrupt"}
        for number, (name, ids) in enumerate(pictures):
            for which in (number, number - len(pictures), name):
                found = file[which]
                assert found.name == name
                assert found.ids.dtype == torch.int64
                assert torch.equal(found.ids, ids)
                assert found.image_size == (ids.shape[0] * 16 - 1, ids.shape[1] * 16)
        with pytest.raises(IndexError):
            file[len(pictures)]


def test_file_size_is_close_to_the_packed_bits(tmp_path):
    head = header((2**28,))
    ids = draw_ids(head.sizes, False, 16, 16, 0)
    one = len(write_file(tmp_path / "one", head, [("0", ids)]))
    ten = len(write_file(tmp_path / "ten", head, [(str(i), ids) for i in range(10)]))
    assert (ten - one) / 9 <= 16 * 16 * 28 / 8 + 40


def test_threads_share_a_file(tmp_path):
    head = header((2**13, 77), groups=True)
    pictures = sample(head, 40)
    write_file(tmp_path / "a", head, pictures)
    with TokenFile(tmp_path / "a") as file, ThreadPoolExecutor(4) as pool:
        other = pickle.loads(pickle.dumps(file))
        order = [i * 7 % 40 for i in range(200)]
        for i, mine, theirs in zip(
            order, pool.map(file.__getitem__, order), map(other.__getitem__, order), strict=True
        ):
            assert torch.equal(mine.ids, pictures[i][1])
            assert torch.equal(theirs.ids, pictures[i][1])


# ---- altered ----------------------------------------------------------------------------------------------------


def assert_corrupted(path, data: bytes, message: str | None = None) -> None:
    """Assert that `verify_digest` detects the corruption."""
    path.write_bytes(data)
    with pytest.raises(DataError, match=message) as error, TokenFile(path) as file:
        file.verify_digest()
    assert path.name in str(error.value)
    assert error.value.remedy


@pytest.mark.parametrize("grouped", [False, True])
def test_every_changed_byte_is_detected(tmp_path, grouped):
    head = header((2**28, 1000), groups=True) if grouped else header((2**28,))
    whole = write_file(tmp_path / "whole", head, sample(head, 2), faults=[("bad", "is empty")])
    right = read_all(tmp_path / "whole")
    random = np.random.default_rng(0)
    path = tmp_path / "changed.vtok"
    for at in range(len(whole)):
        for flip in {1 << at % 8, int(random.integers(1, 256))}:
            data = bytearray(whole)
            data[at] ^= flip
            assert_corrupted(path, bytes(data))
            try:  # without the digest: a record is read correctly, or refused
                assert [one for one in read_all(path) if one in right] == read_all(path)
            except DataError as error:
                assert path.name in str(error)


@given(st.data())
@settings(max_examples=80)
def test_every_alteration_is_detected(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("fuzz")
    head = header((50,))
    whole = write_file(folder / "whole", head, sample(head))
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
    put = data.draw(st.binary(max_size=40))
    altered = whole[:start] + put + whole[stop:]
    if altered != whole:
        assert_corrupted(folder / "altered", altered)


def test_every_truncation_is_detected(tmp_path):
    head = header()
    whole = write_file(tmp_path / "whole", head, sample(head, 2))
    for length in range(len(whole)):
        assert_corrupted(tmp_path / "cut.vtok", whole[:length])
    assert_corrupted(tmp_path / "longer", whole + b"\0")


def test_swapped_records_are_detected(tmp_path):
    head = header()
    ids = [draw_ids(head.sizes, False, 2, 2, seed) for seed in range(2)]
    whole = write_file(tmp_path / "whole", head, [("a", ids[0]), ("b", ids[1])])
    first = HEADER_STRUCT.size + HEADER_STRUCT.unpack(whole[: HEADER_STRUCT.size])[2] + 4
    length = RECORD_STRUCT.size + RECORD_STRUCT.unpack(whole[first : first + RECORD_STRUCT.size])[0]
    one, two = whole[first : first + length], whole[first + length : first + 2 * length]
    (tmp_path / "swapped").write_bytes(whole[:first] + two + one + whole[first + 2 * length :])
    with TokenFile(tmp_path / "swapped") as file:
        for number in range(2):
            with pytest.raises(DataError, match=f"record {number}"):
                file[number]


def test_error_messages(tmp_path):
    head = header()
    path = tmp_path / "a.vtok"
    whole = write_file(path, head, sample(head))
    with pytest.raises(DataError, match=r"another codec: codec \(aaaaaaaaaaaa\), not the one given \(bbbbbbbbbbbb\)"):
        TokenFile(path, codec_identity="b" * 64)
    newer = bytearray(whole)
    newer[8:10] = struct.pack("<H", FORMAT_VERSION + 1)
    assert_corrupted(tmp_path / "newer", bytes(newer), f"version {FORMAT_VERSION + 1}")
    assert_corrupted(tmp_path / "text", b"a, b\n1, 2\n" * 20, "not a token file")
    assert_corrupted(tmp_path / "empty", b"", "not a token file")
    assert_corrupted(tmp_path / "torn", whole[: -TRAILER_STRUCT.size], "never finished")
    with pytest.raises(DataError, match="not a file"):
        TokenFile(tmp_path / "nowhere")
    with pytest.raises(DataError, match="not a file"):
        TokenFile(tmp_path)
    with TokenFile(path) as file, pytest.raises(DataError, match="no image 'x'"):
        file["x"]


# ---- killed -----------------------------------------------------------------------------------------------------


def open_partial(path, head: TokenFileHeader, pictures, data: bytes) -> TokenFileWriter:
    """Open a writer on the partial file `data` of an interrupted one."""
    path.unlink(missing_ok=True)
    path.with_name(f"{path.name}.partial").write_bytes(data)
    return TokenFileWriter(path, head)


def finish_writing(path, writer: TokenFileWriter, pictures) -> bytes:
    with writer:
        assert writer.completed_names == [name for name, _ in pictures[: len(writer.completed_names)]]
        for name, ids in pictures[len(writer.completed_names) :]:
            writer.add(name, ids, (ids.shape[0] * 16 - 1, ids.shape[1] * 16))
        writer.finish()
    return path.read_bytes()


def test_resumed_file_equals_uninterrupted_file(tmp_path):
    head = header()
    pictures = sample(head, 3)
    whole = write_file(tmp_path / "whole", head, pictures)
    path = tmp_path / "again.vtok"
    for length in range(len(whole) + 1):
        assert finish_writing(path, open_partial(path, head, pictures, whole[:length]), pictures) == whole
        assert not path.with_name("again.vtok.partial").exists()


def test_damaged_partial_records_are_rewritten(tmp_path):
    head = header()
    pictures = sample(head, 3)
    whole = write_file(tmp_path / "whole", head, pictures)
    records = HEADER_STRUCT.size + HEADER_STRUCT.unpack(whole[: HEADER_STRUCT.size])[2] + 4
    for at in range(records, len(whole)):
        data = bytearray(whole)
        data[at] ^= 1 + at % 255
        path = tmp_path / "again.vtok"
        assert finish_writing(path, open_partial(path, head, pictures, bytes(data)), pictures) == whole


def test_resume_keeps_a_multiple_of_records(tmp_path):
    head = header()
    pictures = sample(head, 7)
    whole = write_file(tmp_path / "whole", head, pictures)
    (tmp_path / "a.partial").write_bytes(whole)
    with TokenFileWriter(tmp_path / "a", head, record_multiple=3) as writer:
        assert len(writer.completed_names) == 6
        assert finish_writing(tmp_path / "a", writer, pictures) == whole


def test_abandoned_writer_keeps_its_records(tmp_path):
    head = header()
    pictures = sample(head, 3)
    path = tmp_path / "a"
    with pytest.raises(ZeroDivisionError), TokenFileWriter(path, head) as writer:
        writer.add(*pictures[0], (16, 16))
        raise ZeroDivisionError
    assert not path.exists()
    with TokenFileWriter(path, head) as writer:
        assert writer.completed_names == [pictures[0][0]]


def test_writer_locks_and_never_overwrites(tmp_path):
    head = header()
    with TokenFileWriter(tmp_path / "a", head) as writer:
        with pytest.raises(DataError, match="another process"):
            TokenFileWriter(tmp_path / "a", head)
        writer.finish()
    with pytest.raises(DataError, match="exists"):
        TokenFileWriter(tmp_path / "a", head)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "b" * 64}, "another model"),
        ({"sizes": (999,)}, "another sizes"),
        ({"fit": {"how": "pad"}}, "another fit"),
    ],
)
def test_resume_with_other_settings_raises(tmp_path, change, message):
    with TokenFileWriter(tmp_path / "a", header()) as writer:
        writer.add("x", torch.zeros(1, 1, dtype=torch.int64), (16, 16))
    before = (tmp_path / "a.partial").read_bytes()
    with pytest.raises(DataError, match=message):
        TokenFileWriter(tmp_path / "a", header(**change))
    assert (tmp_path / "a.partial").read_bytes() == before


# ---- what cannot be kept ----------------------------------------------------------------------------------------


def test_invalid_ids_raise(tmp_path):
    with TokenFileWriter(tmp_path / "a", header((10, 20), groups=True)) as writer:
        for ids in (
            torch.zeros(2, 2, dtype=torch.int64),
            torch.zeros(2, 2, 3, dtype=torch.int64),
            torch.zeros(2, 2, 2, dtype=torch.int32),
            torch.zeros(2, 0, 2, dtype=torch.int64),
            torch.full((2, 2, 2), 10),
            torch.full((2, 2, 2), -1),
        ):
            with pytest.raises(DataError, match="x: ids"):
                writer.add("x", ids, (32, 32))
        writer.add("x", torch.full((2, 2, 2), 9), (32, 32))
        with pytest.raises(DataError, match="two images"):
            writer.add("x", torch.full((2, 2, 2), 9), (32, 32))
        writer.finish()
    assert len(read_all(tmp_path / "a")) == 1
    for wrong in ({"sizes": ()}, {"sizes": (0,)}, {"sizes": (2**63 + 1,)}, {"sizes": (2, 2)}, {"factor": 0}):
        with pytest.raises(ConfigError):
            header(**wrong)


# Written by format version 2: an image "a.png" with ids 1 and 999, and an unreadable "b.png".
VERSION_2 = base64.b64decode(
    "iVZUT0sNChoCAKUAAAB7Im1vZGVsIjoiYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFh"
    "YSIsIm5hbWUiOiJjb2RlYyIsInNpemVzIjpbMTAwMF0sImdyb3VwcyI6ZmFsc2UsImZhY3RvciI6MTYsImZpdCI6eyJob3ciOiJwYWQiLCJzaXplIjpu"
    "dWxsfX1ixD2xFgAAAGbedRKWpWEucG5nwJIBApIQIJIQIMQDAZwPHAAAAMPoQjaWpWIucG5nqWlzIGJyb2tlbpIAAJIAAJIAAMQAk8QItwAAAAAAAACR"
    "pWEucG5nkZKlYi5wbmepaXMgYnJva2Vui661efkAAAAAAAAAJAAAAAAAAABePoSiC5miyjXKcM0NBpdonydEhC00Ie/3AZd8J+ucIXrZjKxWVE9LRU5E"
    "Cg=="
)


@pytest.mark.parametrize("length", [0, 8, 190, 215, 240, 260])
def test_version_2_is_read_and_resumed(tmp_path, length):
    (tmp_path / "old.vtok").write_bytes(VERSION_2)
    (tmp_path / "new.vtok.partial").write_bytes(VERSION_2[:length])
    with TokenFileWriter(tmp_path / "new.vtok", header(fit={"how": "pad", "size": None})) as writer:
        if "a.png" not in writer.completed_names:
            writer.add("a.png", torch.tensor([[1, 999]]), (16, 32))
        if "b.png" not in writer.completed_names:
            writer.skip("b.png", "is broken")
        writer.finish()
    for name in ("old.vtok", "new.vtok"):
        with TokenFile(tmp_path / name) as file:
            file.verify_digest()
            assert file["a.png"].ids.tolist() == [[1, 999]] and file.errors == {"b.png": "is broken"}


@pytest.mark.parametrize("name", ["c", "the same codec in another folder"])
def test_codec_may_be_renamed_before_resuming(tmp_path, name):
    head = header()
    with TokenFileWriter(tmp_path / "a.vtok", head) as writer:
        for key, ids in sample(head, 2):
            writer.add(key, ids, (ids.shape[0] * 16, ids.shape[1] * 16))
    with TokenFileWriter(tmp_path / "a.vtok", head.replace(name=name)) as writer:
        assert len(writer.completed_names) == 2
        writer.finish()
    with TokenFile(tmp_path / "a.vtok") as file:
        file.verify_digest()
        assert file.header == head and [ids.ids.tolist() for ids in file] == [
            ids.tolist() for _, ids in sample(head, 2)
        ]
