"""Pictures of one's own: a folder, and a dataset as the Hugging Face hub would leave it."""

import io

import numpy as np
import pytest
from PIL import Image

from vitrail.data.pictures import pictures
from vitrail.data.pictures.folder import Dataset
from vitrail.data.pictures.pixels import read_rgba
from vitrail.errors import DataError, ImageError

RGB = np.arange(8 * 6 * 3, dtype=np.uint8).reshape(8, 6, 3)
RGBA = np.dstack([RGB, np.full((8, 6), 77, np.uint8)])


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "mine"
    (root / "pets").mkdir(parents=True)
    Image.fromarray(RGB).save(root / "b_01.png")
    Image.fromarray(RGBA).save(root / "pets" / "a.webp", lossless=True, exact=True)
    (root / "pets" / "a.txt").write_text("a very\nsmall dog\n")
    (root / "notes.md").write_text("no picture")
    return root


def test_a_folder_of_pictures(folder):
    opened = pictures(str(folder))
    one, two = opened.about(0), opened.about(1)
    assert len(opened) == 2 and one.id == "mine/b_01.png" and one.name == "b" and one.category == ""
    assert two.key == "pets/a.webp" and two.name == "a very small dog" and two.category == "pets"
    assert np.array_equal(opened.rgba(0), np.dstack([RGB, np.full((8, 6), 255, np.uint8)]))
    assert np.array_equal(opened.rgba(1), RGBA)


def test_an_empty_folder(tmp_path):
    with pytest.raises(DataError, match="holds no pictures"):
        pictures(str(tmp_path))


@pytest.mark.parametrize(
    ("size", "side", "shape"), [((40, 20), 10, (5, 10)), ((3, 300), 30, (30, 1)), ((5, 5), 9, (9, 9))]
)
def test_the_longer_side_is_as_wanted(tmp_path, size, side, shape):
    Image.new("RGBA", size, (1, 2, 3, 255)).save(tmp_path / "x.png")
    pixels = read_rgba(tmp_path / "x.png", side)
    assert pixels.shape[:2] == shape and (pixels == (1, 2, 3, 255)).all()


def test_colours_under_transparency_do_not_bleed(tmp_path):
    pixels = np.zeros((8, 8, 4), np.uint8)
    pixels[:, :4] = (255, 0, 0, 255)
    pixels[:, 4:] = (0, 255, 0, 0)  # green that nobody sees
    Image.fromarray(pixels).save(tmp_path / "x.png")
    small = read_rgba(tmp_path / "x.png", 3)
    assert not small[small[..., 3] > 0][:, 1].any()


def test_broken_pictures_are_said_to_be(tmp_path):
    for name, data in (("x.png", b"\x89PNG\r\n\x1a\n"), ("x.jpg", b"text"), ("y.png", b"")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ImageError, match=name):
            read_rgba(tmp_path / name)


def test_a_palette_with_transparency(tmp_path):
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putdata([0, 1])
    image.save(tmp_path / "x.png", transparency=1)
    assert read_rgba(tmp_path / "x.png").tolist() == [[[255, 0, 0, 255], [0, 0, 255, 0]]]


# ---- drawings ---------------------------------------------------------------------------------------------------


def svg(body: str, size: str = 'width="40" height="20"') -> str:
    return f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {size}>{body}</svg>'


def test_drawings_are_drawn_at_the_side(tmp_path):
    pytest.importorskip("resvg_py")
    (tmp_path / "wide.svg").write_text(svg('<rect width="40" height="20" fill="#f00"/>'))
    (tmp_path / "tall.svg").write_text(svg('<rect width="9" height="90"/>', 'width="9" height="90"'))
    assert read_rgba(tmp_path / "wide.svg").shape == (20, 40, 4)
    pixels = read_rgba(tmp_path / "wide.svg", 200)
    assert pixels.shape == (100, 200, 4) and (pixels == (255, 0, 0, 255)).all()
    assert read_rgba(tmp_path / "tall.svg", 30).shape == (30, 3, 4)


@pytest.mark.parametrize("quote", ['"', "'"])
def test_a_drawing_reads_no_file_of_this_machine(tmp_path, quote):
    pytest.importorskip("resvg_py")
    Image.new("RGB", (40, 20), (255, 0, 0)).save(tmp_path / "private.png")
    private = f"{quote}{tmp_path / 'private.png'}{quote}"
    (tmp_path / "x.svg").write_text(svg(f'<image width="40" height="20" xlink:href={private}/>'))
    assert not read_rgba(tmp_path / "x.svg")[..., 3].any()


def test_what_a_drawing_holds_itself_is_drawn(tmp_path):
    pytest.importorskip("resvg_py")
    use = '<defs><rect id="r" width="40" height="20" fill="#00f"/></defs><use xlink:href="#r"/>'
    (tmp_path / "x.svg").write_text(svg(use))
    assert (read_rgba(tmp_path / "x.svg") == (0, 0, 255, 255)).all()


@pytest.mark.parametrize("text", ["", "<svg", "words", svg("", 'width="0" height="0"')])
def test_what_cannot_be_drawn(tmp_path, text):
    pytest.importorskip("resvg_py")
    (tmp_path / "x.svg").write_text(text)
    with pytest.raises(ImageError, match=r"x\.svg cannot be drawn"):
        read_rgba(tmp_path / "x.svg", 10)


# ---- Hugging Face -----------------------------------------------------------------------------------------------


@pytest.fixture
def snapshot(tmp_path, monkeypatch):
    """A dataset's folder with pictures inside a parquet file, as most of the hub's have."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    png = io.BytesIO()
    Image.fromarray(RGB).save(png, "PNG")
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "caption": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
        }
    )
    rows = {"image": [{"bytes": png.getvalue(), "path": None}] * 3, "caption": ["a dog", "", None], "label": [1, 0, -1]}
    (tmp_path / "snapshot" / "data").mkdir(parents=True)
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "snapshot" / "data" / "train-0.parquet")
    return tmp_path / "snapshot"


def test_a_dataset_of_the_hub(snapshot, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: str(snapshot))
    opened = pictures("hf:owner/pets")
    one, two, three = map(opened.about, range(3))
    assert len(opened) == 3 and one.id == "hf:owner/pets/0000000" and one.name == "a dog" and one.category == "dog"
    assert two.name == "cat" and three.name == three.category == ""  # nothing is known of it
    assert np.array_equal(opened.rgba(0)[..., :3], RGB) and opened.rgba(2, 16).shape == (16, 12, 4)


def test_a_dataset_that_is_none(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="cannot be read"):
        Dataset("hf:owner/none", tmp_path / "empty")


def test_a_dataset_without_pictures(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "texts").mkdir()
    datasets.Dataset.from_dict({"text": ["only words"]}).to_parquet(tmp_path / "texts" / "train.parquet")
    with pytest.raises(DataError, match="no column of pictures") as caught:
        Dataset("hf:owner/texts", tmp_path / "texts")
    assert "text" in caught.value.remedy


def test_without_the_library(monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="datasets is needed"):
        Dataset("hf:owner/name", tmp_path)
