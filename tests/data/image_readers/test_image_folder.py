"""Local folders of images, and datasets in the layout of the Hugging Face hub."""

import io

import numpy as np
import pytest
from PIL import Image

from vitrail.data.image_readers import open_images
from vitrail.data.image_readers.image_folder import HubDatasetReader
from vitrail.data.image_readers.rgba import read_rgba
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


def test_folder_of_images(folder):
    opened = open_images(str(folder))
    one, two = opened.get_record(0), opened.get_record(1)
    assert len(opened) == 2 and one.id == "mine/b_01.png" and one.name == "b" and one.category == ""
    assert two.key == "pets/a.webp" and two.name == "a very small dog" and two.category == "pets"
    assert np.array_equal(opened.load_rgba(0), np.dstack([RGB, np.full((8, 6), 255, np.uint8)]))
    assert np.array_equal(opened.load_rgba(1), RGBA)


def test_empty_folder(tmp_path):
    with pytest.raises(DataError, match="holds no images"):
        open_images(str(tmp_path))


@pytest.mark.parametrize(
    ("size", "side", "shape"), [((40, 20), 10, (5, 10)), ((3, 300), 30, (30, 1)), ((5, 5), 9, (9, 9))]
)
def test_longer_side_has_the_requested_size(tmp_path, size, side, shape):
    Image.new("RGBA", size, (1, 2, 3, 255)).save(tmp_path / "x.png")
    pixels = read_rgba(tmp_path / "x.png", side)
    assert pixels.shape[:2] == shape and (pixels == (1, 2, 3, 255)).all()


def test_colours_under_transparency_do_not_bleed(tmp_path):
    pixels = np.zeros((8, 8, 4), np.uint8)
    pixels[:, :4] = (255, 0, 0, 255)
    pixels[:, 4:] = (0, 255, 0, 0)  # green, but transparent
    Image.fromarray(pixels).save(tmp_path / "x.png")
    small = read_rgba(tmp_path / "x.png", 3)
    assert not small[small[..., 3] > 0][:, 1].any()


def test_broken_images_are_named(tmp_path):
    for name, data in (("x.png", b"\x89PNG\r\n\x1a\n"), ("x.jpg", b"text"), ("y.png", b"")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ImageError, match=name):
            read_rgba(tmp_path / name)


def test_palette_with_transparency(tmp_path):
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putdata([0, 1])
    image.save(tmp_path / "x.png", transparency=1)
    assert read_rgba(tmp_path / "x.png").tolist() == [[[255, 0, 0, 255], [0, 0, 255, 0]]]


# ---- drawings ---------------------------------------------------------------------------------------------------


def svg(body: str, size: str = 'width="40" height="20"') -> str:
    return f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {size}>{body}</svg>'


def test_svg_is_rendered_at_the_requested_size(tmp_path):
    pytest.importorskip("resvg_py")
    (tmp_path / "wide.svg").write_text(svg('<rect width="40" height="20" fill="#f00"/>'))
    (tmp_path / "tall.svg").write_text(svg('<rect width="9" height="90"/>', 'width="9" height="90"'))
    assert read_rgba(tmp_path / "wide.svg").shape == (20, 40, 4)
    pixels = read_rgba(tmp_path / "wide.svg", 200)
    assert pixels.shape == (100, 200, 4) and (pixels == (255, 0, 0, 255)).all()
    assert read_rgba(tmp_path / "tall.svg", 30).shape == (30, 3, 4)


@pytest.mark.parametrize("quote", ['"', "'"])
def test_svg_cannot_read_local_files(tmp_path, quote):
    pytest.importorskip("resvg_py")
    Image.new("RGB", (40, 20), (255, 0, 0)).save(tmp_path / "private.png")
    private = f"{quote}{tmp_path / 'private.png'}{quote}"
    (tmp_path / "x.svg").write_text(svg(f'<image width="40" height="20" xlink:href={private}/>'))
    assert not read_rgba(tmp_path / "x.svg")[..., 3].any()


def test_internal_references_are_rendered(tmp_path):
    pytest.importorskip("resvg_py")
    use = '<defs><rect id="r" width="40" height="20" fill="#00f"/></defs><use xlink:href="#r"/>'
    (tmp_path / "x.svg").write_text(svg(use))
    assert (read_rgba(tmp_path / "x.svg") == (0, 0, 255, 255)).all()


@pytest.mark.parametrize("text", ["", "<svg", "words", svg("", 'width="0" height="0"')])
def test_invalid_svg_is_refused(tmp_path, text):
    pytest.importorskip("resvg_py")
    (tmp_path / "x.svg").write_text(text)
    with pytest.raises(ImageError, match=r"x\.svg cannot be rendered"):
        read_rgba(tmp_path / "x.svg", 10)


# ---- Hugging Face -----------------------------------------------------------------------------------------------


@pytest.fixture
def snapshot(tmp_path, monkeypatch):
    """A dataset folder with images in a parquet file, like most datasets of the hub."""
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


def test_hub_dataset(snapshot, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: str(snapshot))
    opened = open_images("hf:owner/pets")
    one, two, three = map(opened.get_record, range(3))
    assert len(opened) == 3 and one.id == "hf:owner/pets/0000000" and one.name == "a dog" and one.category == "dog"
    assert two.name == "cat" and three.name == three.category == ""  # it has no text and no class
    assert np.array_equal(opened.load_rgba(0)[..., :3], RGB) and opened.load_rgba(2, 16).shape == (16, 12, 4)


def test_empty_dataset_is_refused(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="cannot be read"):
        HubDatasetReader("hf:owner/none", tmp_path / "empty")


def test_dataset_without_images_is_refused(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "texts").mkdir()
    datasets.Dataset.from_dict({"text": ["only words"]}).to_parquet(tmp_path / "texts" / "train.parquet")
    with pytest.raises(DataError, match="no image column") as caught:
        HubDatasetReader("hf:owner/texts", tmp_path / "texts")
    assert "text" in caught.value.remedy


def test_missing_datasets_package(monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="needs the package datasets"):
        HubDatasetReader("hf:owner/name", tmp_path)
