"""The quick way to a picture's pixels shows what the long way shows."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitrail.data.shards import RandomCrop, decode_picture
from vitrail.data.shards import decode as module
from vitrail.errors import ConfigError, DataError, ImageError
from vitrail.processing.images import load_image
from vitrail.processing.resolution import Crop, Letterbox, NaFlex, Naive, Native


def likeness(a: np.ndarray, b: np.ndarray) -> float:
    """Peak signal to noise, in dB."""
    assert a.shape == b.shape and a.dtype == b.dtype == np.uint8
    return 10 * np.log10(255**2 / max(np.mean((a.astype(float) - b) ** 2), 1e-9))


def exact(data: bytes, look) -> np.ndarray:
    return np.asarray(look.apply(load_image(data))[0])


@pytest.fixture
def quick(monkeypatch):
    """Fails where the long way is taken."""
    monkeypatch.setattr(module, "load_image", lambda data: pytest.fail("the long way"))


@pytest.mark.parametrize("name", ["astronaut", "chelsea", "coffee", "rocket", "retina"])
@pytest.mark.parametrize("side", [1024, 985, 900, 700])
def test_photographs_to_224(photographs, jpeg, quick, name, side):
    """40 dB against a whole decode and Pillow's bicubic, also where the side is no multiple of the shrinking."""
    picture = photographs[name].resize((side, side), Image.Resampling.LANCZOS)
    data = jpeg(picture)
    assert likeness(decode_picture(data, Naive(size=224)), exact(data, Naive(size=224))) > 40


LOOKS = {
    "naive": Naive(size=112),
    "crop": Crop(size=112),
    "crop from 128": Crop(size=112, edge=128, resample="bilinear"),
    "native": Native(max_pixels=28 * 28 * 24),
    "naflex": NaFlex(max_patches=36),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("size", [(1024, 768), (601, 903), (450, 301), (97, 131)])
def test_every_look(photographs, jpeg, quick, look, size):
    data = jpeg(photographs["coffee"].resize(size, Image.Resampling.LANCZOS))
    assert likeness(decode_picture(data, LOOKS[look]), exact(data, LOOKS[look])) > 38


@pytest.mark.parametrize("look", [Letterbox(size=112), Crop(size=112, resample="lanczos"), Native(resample="lanczos")])
def test_looks_that_take_the_long_way_are_exact(photographs, jpeg, look):
    data = jpeg(photographs["coffee"])
    assert np.array_equal(decode_picture(data, look), exact(data, look))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [(640, 480), (643, 481)])
def test_orientation(photographs, jpeg, quick, orientation, size):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = jpeg(photographs["coffee"].resize(size), exif=exif)
    for look in (Crop(size=112), Naive(size=112), NaFlex(max_patches=49)):
        assert likeness(decode_picture(data, look), exact(data, look)) > 38


def test_orientation_said_in_xmp_or_not_at_all(photographs, jpeg, quick):
    xmp = b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="6"/>'
    plain = jpeg(photographs["coffee"])
    tagged = plain[:2] + b"\xff\xe1" + (len(xmp) + 2).to_bytes(2, "big") + xmp + plain[2:]
    assert load_image(tagged).size == photographs["coffee"].size[::-1]
    assert likeness(decode_picture(tagged, Crop(size=112)), exact(tagged, Crop(size=112))) > 40
    for wrong in (0, 9, 77):
        exif = Image.Exif()
        exif[0x0112] = wrong
        data = jpeg(photographs["coffee"], exif=exif)
        assert np.array_equal(decode_picture(data, Crop(size=112)), decode_picture(plain, Crop(size=112)))


def test_every_other_format(photographs, jpeg):
    picture = photographs["chelsea"]
    encoded = {"grey": jpeg(picture.convert("L")), "progressive": jpeg(picture, progressive=True)}
    encoded |= {"CMYK": jpeg(picture.convert("CMYK")), "444": jpeg(picture, subsampling="4:4:4")}
    encoded |= {"RGB": jpeg(picture, keep_rgb=True), "restarts": jpeg(picture, restart_marker_rows=1)}
    encoded["rubbish behind"] = jpeg(picture) + b"rubbish" * 100
    for kind in ("PNG", "WEBP", "GIF", "BMP"):
        file = io.BytesIO()
        picture.save(file, kind)
        encoded[kind] = file.getvalue()
    for kind, data in encoded.items():
        assert likeness(decode_picture(data, Crop(size=56)), exact(data, Crop(size=56))) > 40, kind
        assert np.array_equal(decode_picture(data), np.asarray(load_image(data))), kind


def test_a_damaged_jpeg_is_read_if_pillow_reads_it_and_refused_if_not(photographs, jpeg):
    data = bytearray(jpeg(photographs["coffee"]))
    data[len(data) // 2] ^= 0x55  # wrong colours from there on
    assert likeness(decode_picture(bytes(data), Naive(size=56)), exact(bytes(data), Naive(size=56))) > 30
    for cut in (1, 3, 20, 600, len(data) // 2):
        with pytest.raises(ImageError) as caught:
            decode_picture(bytes(data[:cut]), Naive(size=56))
        assert caught.value.remedy
    bomb = bytes(data).replace((400).to_bytes(2, "big") + (600).to_bytes(2, "big"), b"\xff\xff\xff\xff", 1)
    with pytest.raises(ImageError, match="pixels"):
        decode_picture(bomb, Naive(size=56))


def test_strips_are_refused_not_inflated(jpeg):
    with pytest.raises(ImageError, match="too thin"):
        decode_picture(jpeg(Image.new("RGB", (60_000, 1))), Crop(size=224))
    assert decode_picture(jpeg(Image.new("RGB", (60_000, 1), "teal")), Naive(size=14)).shape == (14, 14, 3)


@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 40), st.integers(0, 2**40))
@settings(max_examples=150)
def test_any_size_and_any_crop(jpeg, height, width, size, number):
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    data = jpeg(Image.fromarray(pixels))
    look = RandomCrop(size=size, area=(0.05, 1.0), flip=True)
    found = decode_picture(data, look, (1, number))
    assert found.shape == (size, size, 3) and found.flags.c_contiguous and found.flags.writeable
    assert np.array_equal(found, decode_picture(data, look, (1, number)))
    (top, left, h, w), _ = look.draw(height, width, (1, number))
    assert 0 <= top <= top + h <= height and 0 <= left <= left + w <= width and h > 0 and w > 0
    assert decode_picture(data, Naive(size=size, patch=1)).shape == (size, size, 3)


def test_random_crops_are_as_asked():
    look = RandomCrop(area=(0.2, 0.8), aspect=(0.5, 2.0), flip=True)
    drawn = [look.draw(600, 800, (0, i)) for i in range(600)]
    areas = np.array([h * w / 480_000 for (_, _, h, w), _ in drawn])
    shapes = np.array([w / h for (_, _, h, w), _ in drawn])
    assert 0.19 < areas.min() < 0.25 and 0.6 < areas.max() < 0.81
    assert 0.49 < shapes.min() < 0.6 and 1.7 < shapes.max() < 2.02
    assert 0.4 < np.mean([mirrored for _, mirrored in drawn]) < 0.6
    assert len({rectangle for rectangle, _ in drawn}) > 590
    long = [look.draw(100, 2000, (0, i))[0] for i in range(100)]
    assert all(0.49 < w / h < 2.05 for _, _, h, w in long)  # the shape is kept where the area cannot be
    for wrong in ({"size": 0}, {"area": (0.0, 1.0)}, {"area": (0.5, 0.2)}, {"aspect": (2.0, 1.0)}):
        with pytest.raises(ConfigError):
            RandomCrop(**wrong)


@pytest.mark.parametrize("orientation", [1, 6])
def test_random_crops_show_what_they_cut(photographs, jpeg, quick, orientation):
    """Against a whole decode cut at the same place; the quick way rounds it to the pixels of the smaller picture."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = jpeg(photographs["retina"].resize((1024, 768)), exif=exif)
    look = RandomCrop(size=56, area=(0.2, 1.0), flip=True)
    for i in range(12):
        upright = load_image(data)
        (top, left, h, w), mirrored = look.draw(upright.height, upright.width, (i,))
        box = (left, top, left + w, top + h)
        expected = np.asarray(upright.resize((56, 56), Image.Resampling.BICUBIC, box))
        assert likeness(decode_picture(data, look, (i,)), expected[:, ::-1] if mirrored else expected) > 30


def test_without_the_decoder_the_remedy_is_said(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "simplejpeg", None)
    with pytest.raises(DataError, match="simplejpeg") as caught:
        module.need_simplejpeg()
    assert "vitrail[data]" in caught.value.remedy
