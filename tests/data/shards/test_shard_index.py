"""The index finds members like tarfile and webdataset; damage is reported."""

import gzip
import io
import lzma
import tarfile
from pathlib import Path

import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.shards import shard_index as module
from vitrail.data.shards.shard_index import INDEX_SUFFIX, ShardIndex, load_index, scan_shard
from vitrail.errors import DataError

FORMS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def content(path: Path, index: ShardIndex) -> list[tuple[str, dict[str, bytes]]]:
    """Return every sample with its bytes."""
    data = path.read_bytes()
    return [
        (index.get_key(i), {kind: data[at : at + n] for kind, (at, n) in index.get_members(i).items()})
        for i in range(len(index))
    ]


def read_webdataset(path: Path) -> list[tuple[str, dict[str, bytes]]]:
    samples = webdataset.WebDataset([str(path)], shardshuffle=False)
    return [(s["__key__"], {k: v for k, v in s.items() if not k.startswith("__")}) for s in samples]


def three_samples(size: int = 700) -> list[tuple[str, bytes]]:
    return [(f"s{i}.{kind}", bytes([65 + i]) * (size + i)) for i in range(3) for kind in ("jpg", "txt")]


@pytest.mark.parametrize("form", FORMS)
def test_index_matches_webdataset(form, tar):
    long = "d" * 90 + "/" + "e" * 60  # more than 100 characters: ustar splits it
    members = [
        ("a.jpg", b"1" * 513),
        ("a.txt", b""),
        ("a.seg.png", b"2"),  # the ending starts at the first dot
        ("folder.x/b.JPG", b"3" * 512),  # endings become lower case; dots in folder names do not count
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
    index = scan_shard(path)
    assert content(path, index) == read_webdataset(path)
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
def test_any_tar_of_tarfile(tmp_path_factory, samples, form):
    path = tmp_path_factory.mktemp("any") / "a.tar"
    with tarfile.open(path, "w", format=FORMS[form]) as file:
        for key, members in samples:
            for ending, data in members:
                about = tarfile.TarInfo(f"{key}.{ending}")
                about.size = len(data)
                try:
                    file.addfile(about, io.BytesIO(data))
                except ValueError:  # the name is too long for ustar
                    continue
    found = scan_shard(path)
    with tarfile.open(path) as file:
        expected = [(m.offset_data, m.size) for m in file if not module.METADATA_NAME.match(m.name)]
    assert sorted(zip(found.offset.tolist(), found.length.tolist(), strict=True)) == sorted(expected)
    assert not found.faults
    again = load_index(path)  # written
    assert content(path, load_index(path)) == content(path, again) == content(path, found)  # then read


def test_truncation_keeps_earlier_samples(tar):
    path = tar(three_samples(), form=tarfile.USTAR_FORMAT)
    data, whole = path.read_bytes(), content(path, scan_shard(path))
    marked = data.rindex(b"C") + 512  # the end-of-archive mark starts within a block after the last byte
    seen = set()
    for cut in range(0, len(data), 64):
        path.write_bytes(data[:cut])
        try:
            index = scan_shard(path)
        except DataError as error:
            assert cut < 512 and "is not a tar" in error.problem
            continue
        kept = content(path, index)
        assert kept == whole[: len(kept)]
        assert index.faults or cut > marked
        seen.add(len(kept))
    assert seen == {0, 1, 2, 3}


def test_damaged_header_is_reported_with_neighbours(tar):
    path = tar([(f"s{i}.txt", bytes([65 + i]) * 600) for i in range(6)])
    data = bytearray(path.read_bytes())
    at = data.index(b"s2.txt")
    data[at + 1] ^= 1
    path.write_bytes(data)
    index = scan_shard(path)
    assert [key for key, _ in content(path, index)] == ["s0", "s4", "s5"]
    assert [name for name, _ in index.faults] == [f"byte {at:,}", "s1", "s3"]


def test_zeros_in_the_middle_do_not_end_the_tar(tar):
    path = tar([(f"s{i}.txt", bytes([65 + i]) * 600) for i in range(6)])
    data = bytearray(path.read_bytes())
    at = data.index(b"s2.txt")
    data[at : at + 512] = bytes(512)
    path.write_bytes(data)
    index = scan_shard(path)
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
def test_special_files_are_reported_and_skipped(member, words, tmp_path):
    path = tmp_path / "a.tar"
    plain = [header(f"{name}.txt", tarfile.REGTYPE, 3) + name.encode() * 3 + bytes(509) for name in "ac"]
    path.write_bytes(plain[0] + member + plain[1] + bytes(1024))
    index = scan_shard(path)
    assert content(path, index) == [("a", {"txt": b"aaa"}), ("c", {"txt": b"ccc"})]
    ((name, reason),) = index.faults
    assert name == "b.jpg" and words in reason


def test_binary_sizes(tmp_path):
    """GNU writes large sizes in binary: accepted if correct, refused if the file is shorter."""
    path = tmp_path / "a.tar"
    block = bytearray(header("a.txt", tarfile.REGTYPE, 3))
    block[124:136] = b"\x80" + (3).to_bytes(11, "big")
    block[148:156] = b"%06o\0 " % (sum(block) - sum(block[148:156]) + 256)
    path.write_bytes(bytes(block) + b"abc" + bytes(509 + 1024))
    assert content(path, scan_shard(path)) == [("a", {"txt": b"abc"})]
    path.write_bytes(header("a.txt", tarfile.REGTYPE, 2**60) + b"abc" + bytes(509 + 1024))
    assert "claims" in scan_shard(path).faults[0][1]


def test_pax_headers(tmp_path):
    path = tmp_path / "a.tar"

    def with_pax(records: bytes) -> ShardIndex:
        extended = header("x", tarfile.XHDTYPE, len(records)) + records.ljust(512, b"\0")
        path.write_bytes(extended + header("short.txt", tarfile.REGTYPE, 0) + b"abc".ljust(512, b"\0") + bytes(1024))
        return scan_shard(path)

    assert content(path, with_pax(b"10 size=3\n16 path=b/c.txt\n")) == [("b/c", {"txt": b"abc"})]
    for wrong in (b"10 size=x\n", b"99 size=3\n", b"0 size=3\n", b"size=3\n", b"\xff" * 30):
        assert "invalid" in with_pax(wrong).faults[0][1]
    assert "sparse" in with_pax(b"22 GNU.sparse.major=1\n").faults[0][1]


def test_other_files_are_refused(tar, tmp_path):
    path = tar(three_samples())
    packed = {"gunzip": gzip.compress(path.read_bytes()), "unxz": lzma.compress(path.read_bytes())}
    packed["unzstd"] = b"\x28\xb5\x2f\xfd" + bytes(2000)
    for tool, data in packed.items():
        path.write_bytes(data)
        with pytest.raises(DataError, match="compressed") as caught:
            scan_shard(path)
        assert tool in caught.value.remedy
    for data in (b"", b"x", b"no tar" * 1000):
        path.write_bytes(data)
        with pytest.raises(DataError, match="is not a tar"):
            scan_shard(path)
    for wrong in (tmp_path, tmp_path / "gone.tar"):
        with pytest.raises(DataError, match="not a file"):
            load_index(wrong)
    path.write_bytes(bytes(10240))
    assert len(scan_shard(path)) == 0 and not scan_shard(path).faults  # an empty tar with an end mark


def test_index_is_cached_until_the_shard_changes(tar, monkeypatch):
    scans = []
    monkeypatch.setattr(module, "scan_shard", lambda path: scans.append(path) or scan_shard(path))
    path = tar(three_samples())
    index_path = path.with_name(path.name + INDEX_SUFFIX)
    first = content(path, load_index(path))
    assert content(path, load_index(path)) == first and len(scans) == 1
    tar([(name.replace("s", "t"), data) for name, data in three_samples()])  # same size as before
    assert [key for key, _ in content(path, load_index(path))] == ["t0", "t1", "t2"] and len(scans) == 2
    original = index_path.read_bytes()
    for position in range(0, len(original), 7):
        index_path.write_bytes(original[:position] + bytes([original[position] ^ 0x41]) + original[position + 1 :])
        assert [key for key, _ in content(path, load_index(path))] == ["t0", "t1", "t2"]
        assert index_path.read_bytes() == original  # rebuilt
    index_path.unlink()
    index_path.mkdir()  # a folder in its place: the index cannot be saved
    assert len(load_index(path)) == 3
    assert not list(path.parent.glob("*.partial")) and not list(path.parent.glob(".*"))
