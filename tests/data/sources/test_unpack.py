"""Untrusted archives: nothing is written outside the folder, and skipped members are counted."""

import io
import lzma
import stat
import tarfile
import zipfile
from contextlib import suppress
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.sources.unpack import resolve_member_path, unpack_archive
from vitrail.errors import DataError

SECRET = b"untouched"


def tar(path: Path, *members: tuple[str, bytes] | tarfile.TarInfo, mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                archive.addfile(info, io.BytesIO(member[1]))
    return path


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def zipped(path: Path, *members: tuple[str | zipfile.ZipInfo, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return path


def deb(path: Path, *members: tuple[str, bytes], ending: str = "xz") -> Path:
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    parts = [
        ("debian-binary", b"2.0\n"),
        ("control.tar.xz", b"odd"),
        (f"data.tar.{ending}", lzma.compress(inner.getvalue())),
    ]
    with path.open("wb") as out:
        out.write(b"!<arch>\n")
        for name, data in parts:
            out.write(f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}`\n".encode())
            out.write(data + b"\n" * (len(data) % 2))
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder to unpack in, next to a file that must not change."""
    (tmp_path / "secret").write_bytes(SECRET)
    return tmp_path / "deep" / "into"


def written(place: Path) -> dict[str, bytes]:
    """Return all files that were unpacked, and check that nothing else was written and no links were made."""
    root = place.parent.parent
    for path in root.rglob("*"):
        assert not path.is_symlink() and (path.is_file() or path.is_dir())
    assert (root / "secret").read_bytes() == SECRET
    outside = [
        p for p in root.rglob("*") if p.is_file() and not p.is_relative_to(place) and p.name not in ("secret", "a")
    ]
    assert not outside
    return {p.relative_to(place).as_posix(): p.read_bytes() for p in place.rglob("*") if p.is_file()}


@pytest.mark.parametrize("make", [tar, zipped, deb])
def test_regular_files_are_unpacked(make, place, tmp_path):
    done = unpack_archive(make(tmp_path / "a", ("x/1.png", b"one"), ("./x/y/2.png", b"two"), ("readme", b"")), place)
    assert written(place) == {"x/1.png": b"one", "x/y/2.png": b"two", "readme": b""}
    assert done.files == 3 and done.bytes == 6 and not done.refused and not done.skipped


def test_only_matching_files_are_unpacked(place, tmp_path):
    archive = tar(tmp_path / "a", ("p/a/1.png", b"1"), ("p/b/c/2.png", b"2"), ("p/3.txt", b"3"), ("q/4.png", b"4"))
    done = unpack_archive(archive, place, ("p/*.png", "*/3.txt"))
    assert set(written(place)) == {"p/a/1.png", "p/b/c/2.png", "p/3.txt"} and done.skipped == 1


@pytest.mark.parametrize("make", [tar, zipped])
@pytest.mark.parametrize(
    "name",
    ["../secret", "a/../../secret", "/tmp/secret", "//secret", "..", "a\\..\\..\\secret", "C:\\x", "C:x", "n" * 300],
)
def test_names_that_lead_outside(make, name, place, tmp_path):
    done = unpack_archive(make(tmp_path / "a", ("good", b"1"), (name, b"stolen"), ("better", b"2")), place)
    assert written(place) == {"good": b"1", "better": b"2"}
    assert done.refused == {"name that leads outside": 1}


@pytest.mark.parametrize("target", ["/etc/passwd", "../../secret", "good", "."])
@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_links_are_not_made(kind, target, place, tmp_path):
    # The second file would be written through the link if it existed.
    archive = tar(tmp_path / "a", ("good", b"1"), special("link", kind, target), ("link/secret", b"stolen"))
    done = unpack_archive(archive, place)
    assert written(place) == {"good": b"1", "link/secret": b"stolen"} and done.refused == {"link": 1}


def test_link_in_a_zip(place, tmp_path):
    info = zipfile.ZipInfo("link")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    done = unpack_archive(zipped(tmp_path / "a", (info, b"/etc/passwd"), ("good", b"1")), place)
    assert written(place) == {"good": b"1"} and done.refused == {"link": 1}


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_devices_are_not_made(kind, place, tmp_path):
    done = unpack_archive(tar(tmp_path / "a", special("device", kind), ("good", b"1")), place)
    assert written(place) == {"good": b"1"} and done.refused == {"device": 1}


@pytest.mark.parametrize("make", [tar, zipped])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_first_of_duplicate_names_is_kept(make, place, tmp_path):
    archive = make(tmp_path / "a", ("x", b"1"), ("x", b"2"), ("./x", b"3"), ("x/y", b"4"), ("d/e", b"5"), ("d", b"6"))
    done = unpack_archive(archive, place)
    assert written(place) == {"x": b"1", "d/e": b"5"}
    assert done.refused == {"duplicate name": 4}


@pytest.mark.parametrize("make", [tar, zipped])
def test_limit_is_enforced(make, place, tmp_path):
    archive = make(tmp_path / "a", ("x", bytes(600)), ("y", bytes(600)))
    with pytest.raises(DataError, match="claims over 1,000 bytes"):
        unpack_archive(archive, place, max_bytes=1000)
    assert unpack_archive(archive, place.with_name("again"), max_bytes=1200).bytes == 1200


def test_claimed_sizes_are_verified(place, tmp_path):
    huge = tarfile.TarInfo("huge")
    huge.size = 1 << 50
    archive = tar(tmp_path / "a", huge, mode="w")
    with pytest.raises(DataError, match="claims over"):
        unpack_archive(archive, place)
    huge.size = 5000  # within the limit, but missing
    (tmp_path / "a").write_bytes(huge.tobuf() + b"short")
    with pytest.raises(DataError, match="broken"):
        unpack_archive(tmp_path / "a", place.with_name("again"))


def test_file_modes_are_ignored(place, tmp_path):
    info = tarfile.TarInfo("tool")
    info.mode, info.size = 0o6777, 0
    unpack_archive(tar(tmp_path / "a", info), place)
    assert not (place / "tool").stat().st_mode & 0o6111


@pytest.mark.parametrize(
    "data", [b"", b"<html>sorry</html>", b"!<arch>\n", b"PK\x03\x04", b"\x1f\x8b\x08", b"\xfd7zXZ\x00"]
)
def test_other_files_are_refused(data, place, tmp_path):
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(DataError, match="not an archive"):
        unpack_archive(tmp_path / "a", place)


def test_unsupported_deb_is_refused(place, tmp_path):
    with pytest.raises(DataError, match="zstd"):
        unpack_archive(deb(tmp_path / "a", ("x", b"1"), ending="zst"), place)


NAMES = st.text(st.sampled_from("ab./\\:\0é"), min_size=1, max_size=12)


@given(NAMES)
def test_resolved_names_stay_inside(name):
    path = resolve_member_path(name)
    if path is not None:
        folder = Path("/some/folder")
        assert (
            not path.is_absolute() and (folder / path).resolve().is_relative_to(folder) and path != PurePosixPath(".")
        )


@settings(max_examples=60)
@given(make=st.sampled_from([tar, zipped, deb]), data=st.data())
def test_broken_archives_unpack_or_are_refused(tmp_path_factory, make, data):
    place = tmp_path_factory.mktemp("broken")
    member = st.tuples(st.text("ab/.", min_size=1, max_size=5), st.binary(max_size=50))
    members = data.draw(st.lists(member, min_size=1, max_size=4, unique_by=lambda m: m[0]))
    whole = bytearray(make(place / "a", *members).read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    (place / "a").write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    with suppress(DataError):
        unpack_archive(place / "a", place / "into", max_bytes=1 << 20)
    assert {p.name for p in place.iterdir()} <= {"a", "into"}
