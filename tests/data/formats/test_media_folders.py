"""Folders of images: classes, captions, metadata files and errors."""

import json
import os

import pytest
from PIL import Image

from vitrail.data.formats import open_dataset
from vitrail.errors import DataError


def test_classes_captions_and_order(make):
    made = make("images")
    (made.path / ".hidden.png").write_bytes(b"")
    (made.path / "README.md").write_bytes(b"")
    (made.path / "dog" / "lonely.txt").write_text("nobody's")
    samples = open_dataset("images", made.path)
    assert [sample.id for sample in samples] == ["cat/1.png", "dog/10.png", "dog/2.png"]
    assert [sample.label for sample in samples] == ["cat", "dog", "dog"] and samples.names == ("cat", "dog")
    assert samples[2].captions == ("a dog",) and samples[2].metadata == {"source": "here"}
    assert samples.skipped == {".md": 1, ".txt": 1, "hidden": 1}
    assert repr(samples).endswith("(images; skipped 1 .md, 1 .txt, 1 hidden)>")


def test_flat_folders_have_no_classes(make):
    made = make("images")
    flat = open_dataset("images", made.path / "dog")
    assert [(sample.id, sample.label) for sample in flat] == [("10.png", None), ("2.png", None)] and flat.names == ()
    assert {sample.label for sample in open_dataset("images", made.path, with_classes=False)} == {None}
    (made.path / "dog" / "2.png").rename(made.path / "loose.png")
    with pytest.raises(DataError, match=r"loose\.png is not in a sub-folder"):
        open_dataset("images", made.path)
    assert len(open_dataset("images", made.path, with_classes=False)) == 3


def test_different_captions_are_both_kept(make):
    made = make("images")
    (made.path / "dog" / "2.json").write_text(json.dumps({"captions": ["a hound", "a dog"], "text": None}))
    assert open_dataset("images", made.path)[2].captions == ("a dog", "a hound")
    (made.path / "dog" / "2.json").write_text(json.dumps({"caption": 3}))
    with pytest.raises(DataError, match=r"sample dog/2\.png, caption is int"):
        open_dataset("images", made.path)[2]


def test_hugging_face_metadata(make):
    made = make("images-metadata")
    samples = open_dataset("images", made.path)
    assert [(s.id, s.captions, s.label) for s in samples] == [("sub/1.png", ("one",), "3"), ("2.png", ("two",), None)]
    (made.path / "metadata.csv").write_text("file_name\n2.png\n")
    with pytest.raises(DataError, match="keep one of them"):
        open_dataset("images", made.path)
    made.files[0].unlink()
    assert len(open_dataset("images", made.path)) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"file_name": "2.png"}\n{"file_name": "2.png"}', "the same id '2.png'"),
        ('{"name": "2.png"}', "row 0: no file_name"),
        ('{"file_name": 3}', "row 0: no file_name"),
        ('{"file_name": "../classes/cat/1.png"}', "leads out of"),
        ("[1]", "Expected `object`"),
    ],
)
def test_invalid_metadata_is_refused(make, content, message):
    make("images")
    made = make("images-metadata")
    made.files[0].write_text(content)
    with pytest.raises(DataError, match=message):
        list(open_dataset("images", made.path))


def test_more_cells_than_columns(make):
    made = make("images-csv")
    assert open_dataset("images", made.path)[0].captions == ("one, two",)
    made.files[0].write_text("file_name,text\n1.png,one,two\n")
    with pytest.raises(DataError, match="more cells than columns"):
        open_dataset("images", made.path)


def test_links_are_followed_only_if_allowed(make, tmp_path):
    made = make("images")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "bird").symlink_to(made.path / "dog")
    (made.path / "dog" / "up").symlink_to(made.path / "dog")
    with pytest.raises(DataError, match="bird is a link to another folder"):
        open_dataset("images", tmp_path / "linked")
    samples = open_dataset("images", tmp_path / "linked", allow_outside=True)
    assert [sample.id for sample in samples] == ["bird/10.png", "bird/2.png"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_folder_is_an_error(make):
    made = make("images")
    (made.path / "dog").chmod(0)
    try:
        with pytest.raises(DataError, match="cannot be read"):
            open_dataset("images", made.path)
    finally:
        (made.path / "dog").chmod(0o755)


def test_empty_and_missing_folders(tmp_path):
    with pytest.raises(DataError, match="holds no samples"):
        open_dataset("images", tmp_path)
    with pytest.raises(DataError, match="is not a folder"):
        open_dataset("videos", tmp_path / "nothing")


def test_metadata_of_split_folders(tmp_path):
    """The layout of Hugging Face's imagefolder: names are relative to the metadata file."""
    for split, name in (("train", "metadata.csv"), ("test", "metadata.jsonl")):
        (tmp_path / split / "deep").mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / split / "deep/a.png")
        row = {"file_name": "deep/a.png", "text": f"of {split}"}
        text = json.dumps(row) if name.endswith("l") else "file_name,text\n" + ",".join(row.values())
        (tmp_path / split / name).write_text(text)
    samples = open_dataset("images", tmp_path)
    assert [(sample.id, sample.captions) for sample in samples] == [
        ("test/deep/a.png", ("of test",)),
        ("train/deep/a.png", ("of train",)),
    ]
    assert samples[1].images[0].samefile(tmp_path / "train/deep/a.png")
    (tmp_path / "train/metadata.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"train holds both metadata\.jsonl and metadata\.csv"):
        open_dataset("images", tmp_path)
