"""The container: ids after are ids before, bit for bit; killed anywhere it goes on; altered anywhere it is refused."""

import pickle
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.codecs.container import FRAME, LEAD, TRAILER, VERSION, Header, TokenFile
from vitrail.codecs.writer import TokenWriter
from vitrail.errors import ConfigError, DataError

FIT = {"how": "cover", "size": [32, 48]}
SIZES = st.one_of(st.integers(1, 300), st.integers(0, 63).flatmap(lambda b: st.sampled_from([2**b, max(1, 2**b - 1)])))


def header(sizes=(1000,), groups=False, **more) -> Header:
    return Header(
        **{"model": "a" * 64, "name": "codec", "sizes": sizes, "groups": groups, "factor": 16, "fit": FIT} | more
    )


def draw_ids(sizes, groups: bool, h: int, w: int, seed: int) -> torch.Tensor:
    random = np.random.default_rng(seed)
    parts = [torch.from_numpy(random.integers(0, size - 1, (h, w), dtype=np.int64, endpoint=True)) for size in sizes]
    for part, size in zip(parts, sizes, strict=True):
        part.view(-1)[0] = size - 1  # the largest is always there
    return torch.stack(parts, -1) if groups else parts[0]


def written(path, head: Header, pictures, faults=()) -> bytes:
    with TokenWriter(path, head) as writer:
        for name, ids in pictures:
            writer.add(name, ids, (ids.shape[0] * head.factor - 1, ids.shape[1] * head.factor))
        for name, reason in faults:
            writer.skip(name, reason)
        writer.finish()
    return path.read_bytes()


def sample(head: Header, count: int = 5):
    return [
        (f"folder/picture {i} é.jpg", draw_ids(head.sizes, head.groups, 1 + i % 3, 2 + i % 2, i)) for i in range(count)
    ]


def everything(path) -> list[tuple]:
    with TokenFile(path) as file:
        return [(one.name, one.ids.tolist(), one.size, one.source) for one in (file[i] for i in range(len(file)))]


# ---- whole ------------------------------------------------------------------------------------------------------


@given(
    sizes=st.lists(SIZES, min_size=1, max_size=4),
    grids=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=6),
    names=st.lists(st.text(min_size=1).filter(lambda s: s.isprintable()), min_size=6, max_size=6, unique=True),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_ids_come_back_bit_for_bit(tmp_path_factory, sizes, grids, names, seed):
    path = tmp_path_factory.mktemp("round") / "a.vtok"
    head = header(tuple(sizes), len(sizes) > 1)
    pictures = [(name, draw_ids(sizes, head.groups, *grid, seed)) for name, grid in zip(names, grids, strict=False)]
    written(path, head, pictures, faults=[("not one of them " + names[0], "is corrupt")])
    with TokenFile(path, model=head.model) as file:
        file.check()
        assert file.header == head
        assert file.names == [name for name, _ in pictures]
        assert file.faults == {"not one of them " + names[0]: "is corrupt"}
        for number, (name, ids) in enumerate(pictures):
            for which in (number, number - len(pictures), name):
                found = file[which]
                assert found.name == name
                assert found.ids.dtype == torch.int64
                assert torch.equal(found.ids, ids)
                assert found.size == (ids.shape[0] * 16 - 1, ids.shape[1] * 16)
        with pytest.raises(IndexError):
            file[len(pictures)]


def test_ids_take_their_bits_and_little_else(tmp_path):
    head = header((2**28,))
    ids = draw_ids(head.sizes, False, 16, 16, 0)
    one = len(written(tmp_path / "one", head, [("0", ids)]))
    ten = len(written(tmp_path / "ten", head, [(str(i), ids) for i in range(10)]))
    assert (ten - one) / 9 <= 16 * 16 * 28 / 8 + 40


def test_readers_share_a_file(tmp_path):
    head = header((2**13, 77), groups=True)
    pictures = sample(head, 40)
    written(tmp_path / "a", head, pictures)
    with TokenFile(tmp_path / "a") as file, ThreadPoolExecutor(4) as pool:
        other = pickle.loads(pickle.dumps(file))
        order = [i * 7 % 40 for i in range(200)]
        for i, mine, theirs in zip(
            order, pool.map(file.__getitem__, order), map(other.__getitem__, order), strict=True
        ):
            assert torch.equal(mine.ids, pictures[i][1])
            assert torch.equal(theirs.ids, pictures[i][1])


# ---- altered ----------------------------------------------------------------------------------------------------


def refused(path, data: bytes, says: str | None = None) -> None:
    """Whoever checks the whole file is told; whoever does not gets no wrong id."""
    path.write_bytes(data)
    with pytest.raises(DataError, match=says) as error, TokenFile(path) as file:
        file.check()
    assert path.name in str(error.value)
    assert error.value.remedy


@pytest.mark.parametrize("grouped", [False, True])
def test_a_changed_byte_is_refused_wherever_it_is(tmp_path, grouped):
    head = header((2**28, 1000), groups=True) if grouped else header((2**28,))
    whole = written(tmp_path / "whole", head, sample(head, 2), faults=[("bad", "is empty")])
    right = everything(tmp_path / "whole")
    random = np.random.default_rng(0)
    path = tmp_path / "changed.vtok"
    for at in range(len(whole)):
        for flip in {1 << at % 8, int(random.integers(1, 256))}:
            data = bytearray(whole)
            data[at] ^= flip
            refused(path, bytes(data))
            try:  # without looking at the whole: a record is right, or refused
                assert [one for one in everything(path) if one in right] == everything(path)
            except DataError as error:
                assert path.name in str(error)


@given(st.data())
@settings(max_examples=80)
def test_any_alteration_is_refused(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("fuzz")
    head = header((50,))
    whole = written(folder / "whole", head, sample(head))
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
    put = data.draw(st.binary(max_size=40))
    altered = whole[:start] + put + whole[stop:]
    if altered != whole:
        refused(folder / "altered", altered)


def test_a_file_that_was_cut_is_refused_at_every_length(tmp_path):
    head = header()
    whole = written(tmp_path / "whole", head, sample(head, 2))
    for length in range(len(whole)):
        refused(tmp_path / "cut.vtok", whole[:length])
    refused(tmp_path / "longer", whole + b"\0")


def test_records_that_changed_places_are_refused(tmp_path):
    head = header()
    ids = [draw_ids(head.sizes, False, 2, 2, seed) for seed in range(2)]
    whole = written(tmp_path / "whole", head, [("a", ids[0]), ("b", ids[1])])
    first = LEAD.size + LEAD.unpack(whole[: LEAD.size])[2] + 4
    length = FRAME.size + FRAME.unpack(whole[first : first + FRAME.size])[0]
    one, two = whole[first : first + length], whole[first + length : first + 2 * length]
    (tmp_path / "swapped").write_bytes(whole[:first] + two + one + whole[first + 2 * length :])
    with TokenFile(tmp_path / "swapped") as file:
        for number in range(2):
            with pytest.raises(DataError, match=f"record {number}"):
                file[number]


def test_who_is_wrong_is_said(tmp_path):
    head = header()
    path = tmp_path / "a.vtok"
    whole = written(path, head, sample(head))
    with pytest.raises(DataError, match=r"another codec: codec \(aaaaaaaaaaaa\), not the one given \(bbbbbbbbbbbb\)"):
        TokenFile(path, model="b" * 64)
    newer = bytearray(whole)
    newer[8:10] = struct.pack("<H", VERSION + 1)
    refused(tmp_path / "newer", bytes(newer), f"version {VERSION + 1}")
    refused(tmp_path / "text", b"a, b\n1, 2\n" * 20, "no file of tokens")
    refused(tmp_path / "empty", b"", "no file of tokens")
    refused(tmp_path / "torn", whole[: -TRAILER.size], "never finished")
    with pytest.raises(DataError, match="no file"):
        TokenFile(tmp_path / "nowhere")
    with pytest.raises(DataError, match="no file"):
        TokenFile(tmp_path)
    with TokenFile(path) as file, pytest.raises(DataError, match="no picture 'x'"):
        file["x"]


# ---- killed -----------------------------------------------------------------------------------------------------


def begun(path, head: Header, pictures, data: bytes) -> TokenWriter:
    """A writer that finds `data` where another was killed."""
    path.unlink(missing_ok=True)
    path.with_name(f"{path.name}.partial").write_bytes(data)
    return TokenWriter(path, head)


def go_on(path, writer: TokenWriter, pictures) -> bytes:
    with writer:
        assert writer.done == [name for name, _ in pictures[: len(writer.done)]]
        for name, ids in pictures[len(writer.done) :]:
            writer.add(name, ids, (ids.shape[0] * 16 - 1, ids.shape[1] * 16))
        writer.finish()
    return path.read_bytes()


def test_killed_at_any_byte_the_file_comes_out_the_same(tmp_path):
    head = header()
    pictures = sample(head, 3)
    whole = written(tmp_path / "whole", head, pictures)
    path = tmp_path / "again.vtok"
    for length in range(len(whole) + 1):
        assert go_on(path, begun(path, head, pictures, whole[:length]), pictures) == whole
        assert not path.with_name("again.vtok.partial").exists()


def test_what_was_damaged_while_it_lay_there_is_made_again(tmp_path):
    head = header()
    pictures = sample(head, 3)
    whole = written(tmp_path / "whole", head, pictures)
    records = LEAD.size + LEAD.unpack(whole[: LEAD.size])[2] + 4
    for at in range(records, len(whole)):
        data = bytearray(whole)
        data[at] ^= 1 + at % 255
        path = tmp_path / "again.vtok"
        assert go_on(path, begun(path, head, pictures, bytes(data)), pictures) == whole


def test_whole_batches_are_kept(tmp_path):
    head = header()
    pictures = sample(head, 7)
    whole = written(tmp_path / "whole", head, pictures)
    (tmp_path / "a.partial").write_bytes(whole)
    with TokenWriter(tmp_path / "a", head, multiple=3) as writer:
        assert len(writer.done) == 6
        assert go_on(tmp_path / "a", writer, pictures) == whole


def test_a_writer_that_is_left_keeps_what_it_has(tmp_path):
    head = header()
    pictures = sample(head, 3)
    path = tmp_path / "a"
    with pytest.raises(ZeroDivisionError), TokenWriter(path, head) as writer:
        writer.add(*pictures[0], (16, 16))
        raise ZeroDivisionError
    assert not path.exists()
    with TokenWriter(path, head) as writer:
        assert writer.done == [pictures[0][0]]


def test_one_writer_at_a_time_and_never_over_a_file(tmp_path):
    head = header()
    with TokenWriter(tmp_path / "a", head) as writer:
        with pytest.raises(DataError, match="another process"):
            TokenWriter(tmp_path / "a", head)
        writer.finish()
    with pytest.raises(DataError, match="exists already"):
        TokenWriter(tmp_path / "a", head)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "b" * 64}, "another model"),
        ({"sizes": (999,)}, "another sizes"),
        ({"fit": {"how": "pad"}}, "another fit"),
    ],
)
def test_a_file_that_was_begun_otherwise_is_left_alone(tmp_path, change, says):
    with TokenWriter(tmp_path / "a", header()) as writer:
        writer.add("x", torch.zeros(1, 1, dtype=torch.int64), (16, 16))
    before = (tmp_path / "a.partial").read_bytes()
    with pytest.raises(DataError, match=says):
        TokenWriter(tmp_path / "a", header(**change))
    assert (tmp_path / "a.partial").read_bytes() == before


# ---- what cannot be kept ----------------------------------------------------------------------------------------


def test_ids_that_are_none_are_refused(tmp_path):
    with TokenWriter(tmp_path / "a", header((10, 20), groups=True)) as writer:
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
        with pytest.raises(DataError, match="two pictures"):
            writer.add("x", torch.full((2, 2, 2), 9), (32, 32))
        writer.finish()
    assert len(everything(tmp_path / "a")) == 1
    for wrong in ({"sizes": ()}, {"sizes": (0,)}, {"sizes": (2**63 + 1,)}, {"sizes": (2, 2)}, {"factor": 0}):
        with pytest.raises(ConfigError):
            header(**wrong)
