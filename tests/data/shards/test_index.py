"""Where members lie: as tarfile and webdataset find them; and what is cut, damaged or strange is said, not guessed."""

import gzip
import io
import lzma
import tarfile
from pathlib import Path

import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.shards import index as module
from vitrail.data.shards.index import SUFFIX, Index, index_of, scan
from vitrail.errors import DataError

FORMS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def content(path: Path, index: Index) -> list[tuple[str, dict[str, bytes]]]:
    """Every sample with its bytes."""
    data = path.read_bytes()
    return [
        (index.key(i), {kind: data[at : at + n] for kind, (at, n) in index.members(i).items()})
        for i in range(len(index))
    ]


def theirs(path: Path) -> list[tuple[str, dict[str, bytes]]]:
    samples = webdataset.WebDataset([str(path)], shardshuffle=False)
    return [(s["__key__"], {k: v for k, v in s.items() if not k.startswith("__")}) for s in samples]


def three(size: int = 700) -> list[tuple[str, bytes]]:
    return [(f"s{i}.{kind}", bytes([65 + i]) * (size + i)) for i in range(3) for kind in ("jpg", "txt")]


@pytest.mark.parametrize("form", FORMS)
def test_names_and_bytes_as_webdataset_reads_them(form, tar):
    long = "d" * 90 + "/" + "e" * 60  # more than 100 characters: ustar splits it
    members = [
        ("a.jpg", b"1" * 513),
        ("a.txt", b""),
        ("a.seg.png", b"2"),  # the ending begins at the first dot
        ("folder.x/b.JPG", b"3" * 512),  # endings in small letters; dots in folders are none
        (f"{long}.jpg", b"4"),
        ("README", b"no sample"),
        (".hidden", b"no sample"),
        ("__meta__/a.json", b"no sample"),
        ("größe/ü.txt", b"5" * 2000),
        ("a.jpg", b"again, later: a sample of its own"),
    ]
    if form != "ustar":
        members.append(("f" * 300 + ".jpg", b"6"))
    path = tar(members, form=FORMS[form])
    index = scan(path)
    assert content(path, index) == theirs(path)
    assert [key for key, _ in content(path, index)][:2] == ["a", "folder.x/b"]
    assert (index.ignored, index.faults) == (3, ())


names = st.lists(
    st.tuples(
        st.text(st.characters(exclude_characters="\0./", exclude_categories=["Cs"]), min_size=1, max_size=150),
        st.lists(st.tuples(st.sampled_from(["jpg", "txt", "a.b", "json"]), st.binary(max_size=1100)), min_size=1),
    ),
    max_size=6,
)


@given(names, st.sampled_from(sorted(FORMS)))
@settings(max_examples=60)
def test_any_tar_that_tarfile_writes(tmp_path_factory, samples, form):
    path = tmp_path_factory.mktemp("any") / "a.tar"
    with tarfile.open(path, "w", format=FORMS[form]) as file:
        for key, members in samples:
            for ending, data in members:
                about = tarfile.TarInfo(f"{key}.{ending}")
                about.size = len(data)
                try:
                    file.addfile(about, io.BytesIO(data))
                except ValueError:  # ustar has no room for the name
                    continue
    found = scan(path)
    with tarfile.open(path) as file:
        expected = [(m.offset_data, m.size) for m in file if not module.META.match(m.name)]
    assert sorted(zip(found.offset.tolist(), found.length.tolist(), strict=True)) == sorted(expected)
    assert not found.faults
    again = index_of(path)  # written
    assert content(path, index_of(path)) == content(path, again) == content(path, found)  # and read


def test_a_cut_anywhere_leaves_the_whole_samples_before_it(tar):
    path = tar(three(), form=tarfile.USTAR_FORMAT)
    data, whole = path.read_bytes(), content(path, scan(path))
    marked = data.rindex(b"C") + 512  # the end mark begins within a block after the last byte
    seen = set()
    for cut in range(0, len(data), 64):
        path.write_bytes(data[:cut])
        try:
            index = scan(path)
        except DataError as error:
            assert cut < 512 and "holds no tar" in error.problem
            continue
        kept = content(path, index)
        assert kept == whole[: len(kept)]
        assert index.faults or cut > marked
        seen.add(len(kept))
    assert seen == {0, 1, 2, 3}


def test_a_damaged_header_costs_its_neighbours_and_is_named(tar):
    path = tar([(f"s{i}.txt", bytes([65 + i]) * 600) for i in range(6)])
    data = bytearray(path.read_bytes())
    at = data.index(b"s2.txt")
    data[at + 1] ^= 1
    path.write_bytes(data)
    index = scan(path)
    assert [key for key, _ in content(path, index)] == ["s0", "s4", "s5"]
    assert [name for name, _ in index.faults] == [f"byte {at:,}", "s1", "s3"]


def test_zeros_in_the_middle_end_nothing(tar):
    path = tar([(f"s{i}.txt", bytes([65 + i]) * 600) for i in range(6)])
    data = bytearray(path.read_bytes())
    at = data.index(b"s2.txt")
    data[at : at + 512] = bytes(512)
    path.write_bytes(data)
    index = scan(path)
    assert [key for key, _ in content(path, index)] == ["s0", "s4", "s5"]
    assert "zeros" in index.faults[0][1]


def header(name: str, kind: bytes, size: int = 0, link: str = "") -> bytes:
    about = tarfile.TarInfo(name)
    about.type, about.size, about.linkname = kind, size, link
    return about.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    ("member", "words"),
    [
        (header("b.jpg", tarfile.LNKTYPE, link="a.jpg"), "hard link"),
        (header("b.jpg", tarfile.SYMTYPE, link="/etc/passwd"), "symbolic link"),
        (header("b.jpg", tarfile.GNUTYPE_SPARSE, 512) + bytes(512), "sparse"),
        (header("b.jpg", tarfile.FIFOTYPE), "pipe"),
        (header("b.jpg", b"Z", 512) + bytes(512), "of kind"),
    ],
)
def test_what_is_no_plain_file_is_named_and_passed_over(member, words, tmp_path):
    path = tmp_path / "a.tar"
    plain = [header(f"{name}.txt", tarfile.REGTYPE, 3) + name.encode() * 3 + bytes(509) for name in "ac"]
    path.write_bytes(plain[0] + member + plain[1] + bytes(1024))
    index = scan(path)
    assert content(path, index) == [("a", {"txt": b"aaa"}), ("c", {"txt": b"ccc"})]
    ((name, reason),) = index.faults
    assert name == "b.jpg" and words in reason


def test_numbers_too_large_for_octal(tmp_path):
    """GNU writes the number itself: read where it is true, refused where the file is shorter than it claims."""
    path = tmp_path / "a.tar"
    block = bytearray(header("a.txt", tarfile.REGTYPE, 3))
    block[124:136] = b"\x80" + (3).to_bytes(11, "big")
    block[148:156] = b"%06o\0 " % (sum(block) - sum(block[148:156]) + 256)
    path.write_bytes(bytes(block) + b"abc" + bytes(509 + 1024))
    assert content(path, scan(path)) == [("a", {"txt": b"abc"})]
    path.write_bytes(header("a.txt", tarfile.REGTYPE, 2**60) + b"abc" + bytes(509 + 1024))
    assert "claims" in scan(path).faults[0][1]


def test_pax_says_the_size_and_may_make_no_sense(tmp_path):
    path = tmp_path / "a.tar"

    def with_pax(records: bytes) -> Index:
        extended = header("x", tarfile.XHDTYPE, len(records)) + records.ljust(512, b"\0")
        path.write_bytes(extended + header("short.txt", tarfile.REGTYPE, 0) + b"abc".ljust(512, b"\0") + bytes(1024))
        return scan(path)

    assert content(path, with_pax(b"10 size=3\n16 path=b/c.txt\n")) == [("b/c", {"txt": b"abc"})]
    for wrong in (b"10 size=x\n", b"99 size=3\n", b"0 size=3\n", b"size=3\n", b"\xff" * 30):
        assert "makes no sense" in with_pax(wrong).faults[0][1]
    assert "sparse" in with_pax(b"22 GNU.sparse.major=1\n").faults[0][1]


def test_what_is_no_tar_is_refused_with_a_remedy(tar, tmp_path):
    path = tar(three())
    packed = {"gunzip": gzip.compress(path.read_bytes()), "unxz": lzma.compress(path.read_bytes())}
    packed["unzstd"] = b"\x28\xb5\x2f\xfd" + bytes(2000)
    for tool, data in packed.items():
        path.write_bytes(data)
        with pytest.raises(DataError, match="compressed") as caught:
            scan(path)
        assert tool in caught.value.remedy
    for data in (b"", b"x", b"no tar" * 1000):
        path.write_bytes(data)
        with pytest.raises(DataError, match="holds no tar"):
            scan(path)
    for wrong in (tmp_path, tmp_path / "gone.tar"):
        with pytest.raises(DataError, match="not a file"):
            index_of(wrong)
    path.write_bytes(bytes(10240))
    assert len(scan(path)) == 0 and not scan(path).faults  # empty, and says so


def test_the_index_is_made_once_and_again_when_the_shard_changes(tar, monkeypatch):
    scans = []
    monkeypatch.setattr(module, "scan", lambda path: scans.append(path) or scan(path))
    path = tar(three())
    beside = path.with_name(path.name + SUFFIX)
    first = content(path, index_of(path))
    assert content(path, index_of(path)) == first and len(scans) == 1
    tar([(name.replace("s", "t"), data) for name, data in three()])  # as long as before
    assert [key for key, _ in content(path, index_of(path))] == ["t0", "t1", "t2"] and len(scans) == 2
    good = beside.read_bytes()
    for at in range(0, len(good), 7):
        beside.write_bytes(good[:at] + bytes([good[at] ^ 0x41]) + good[at + 1 :])
        assert [key for key, _ in content(path, index_of(path))] == ["t0", "t1", "t2"]
        assert beside.read_bytes() == good  # mended
    beside.unlink()
    beside.mkdir()  # in the way: no index can be left
    assert len(index_of(path)) == 3
    assert not list(path.parent.glob("*.partial")) and not list(path.parent.glob(".*"))
