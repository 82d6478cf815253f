"""Untrusted files: wrong bytes, wrong types, names that lead outside of the folder."""

import json

import pytest

from vitrail.data.formats import open_dataset
from vitrail.errors import DataError

ROW = {"id": 1, "image": "a.png", "conversations": [{"from": "human", "value": "<image>"}]}


def open_llava_file(tmp_path, content, **options):
    path = tmp_path / "llava.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return open_dataset("llava", path, **options)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"  \n ", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"[]", "holds no samples"),
        (b"[{", "truncated"),
        ("[]".encode("utf-16"), "UTF-16"),
        (b"\xff\xff\x00\x01", "malformed"),
        (b'[{"conversations": [{"from": "human", "value": "\xff"}]}]', "not UTF-8"),
        (b'[{"conversations": [{"from": "human", "value": "\\ud800"}]}]', "surrogate|truncated|malformed"),
        (b"[" * 100_000, "Expected `object`"),
        (b'[{"x": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"x": ' + b"[" * 100_000, "line 1 is nested too deeply"),
        (b'[{"id": ' + b"9" * 5000 + b"}]", "out of range"),
        ([{}], "missing required field `conversations` - at `\\$\\[0\\]`"),
        ([ROW, ROW | {"image": 3}], "at `\\$\\[1\\].image`"),
        ([ROW, ROW | {"id": 1.5}], "at `\\$\\[1\\].id`"),
        ([ROW | {"conversations": [{"from": "human", "value": None}]}], "value`"),
        ([ROW | {"conversations": []}], "sample 0 .1.: it has no turns"),
    ],
)
def test_broken_files_are_refused_with_position(tmp_path, content, message):
    with pytest.raises(DataError, match=message):
        open_llava_file(tmp_path, content)


def test_byte_order_mark_and_large_numbers_are_accepted(tmp_path):
    (tmp_path / "a.png").write_bytes(b"")
    assert open_llava_file(tmp_path, b"\xef\xbb\xbf" + json.dumps([ROW]).encode())[0].id == "1"
    assert open_llava_file(tmp_path, [ROW | {"id": 10**400}])[0].id == str(10**400)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../secret.png", "leads out of"),
        ("x/../../secret.png", "leads out of"),
        ("/etc/passwd", "leads out of"),
        ("out.png", "leads out of"),
        ("way/secret.png", "leads out of"),
        ("round.png", "not a valid file name|not in"),
        ("", "is an empty name"),
        (".", "not in"),
        ("a\x00b", "not a valid file name"),
        ("y" * 5000, "not a valid file name"),
        ("https://example.org/a.png", "is a URL"),
        ("lost.png", "sample 1: image 'lost.png' is not in .*\n.*=FOLDER"),
    ],
)
def test_names_outside_of_the_folder_are_refused(tmp_path, name, message):
    folder = tmp_path / "in"
    folder.mkdir()
    (tmp_path / "secret.png").write_bytes(b"secret")
    (folder / "out.png").symlink_to(tmp_path / "secret.png")
    (folder / "way").symlink_to(tmp_path)
    (folder / "round.png").symlink_to(folder / "round.png")
    samples = open_llava_file(tmp_path, [ROW | {"image": name}], image_folder=folder)
    with pytest.raises(DataError, match=message):
        samples[0]


def test_names_outside_of_the_folder_may_be_allowed(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (tmp_path / "open.png").write_bytes(b"")
    for name in ("../open.png", str(tmp_path / "open.png")):
        sample = open_llava_file(tmp_path, [ROW | {"image": name}], image_folder=folder, allow_outside=True)[0]
        assert sample.images[0].samefile(tmp_path / "open.png")
