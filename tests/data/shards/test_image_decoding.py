"""The fast JPEG decoder gives the same pixels as the full decoder."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitrail.data.shards import RandomCrop, decode_image
from vitrail.data.shards import image_decoding as module
from vitrail.errors import ConfigError, DataError, ImageError
from vitrail.processing.image_loading import load_image
from vitrail.processing.resolution_policies import CropPolicy, LetterboxPolicy, NaFlexPolicy, NaivePolicy, NativePolicy


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Peak signal-to-noise ratio in dB."""
    assert a.shape == b.shape and a.dtype == b.dtype == np.uint8
    return 10 * np.log10(255**2 / max(np.mean((a.astype(float) - b) ** 2), 1e-9))


def decode_exactly(data: bytes, look) -> np.ndarray:
    return np.asarray(look.apply(load_image(data))[0])


@pytest.fixture
def quick(monkeypatch):
    """Fail if the full decoder is used."""
    monkeypatch.setattr(module, "load_image", lambda data: pytest.fail("full decoding"))


@pytest.mark.parametrize("name", ["astronaut", "chelsea", "coffee", "rocket", "retina"])
@pytest.mark.parametrize("side", [1024, 985, 900, 700])
def test_photographs_to_224(photographs, jpeg, quick, name, side):
    """40 dB against full decoding and Pillow's bicubic, also if the size is not divisible by the decoding factor."""
    picture = photographs[name].resize((side, side), Image.Resampling.LANCZOS)
    data = jpeg(picture)
    assert psnr(decode_image(data, NaivePolicy(image_size=224)), decode_exactly(data, NaivePolicy(image_size=224))) > 40


LOOKS = {
    "naive": NaivePolicy(image_size=112),
    "crop": CropPolicy(image_size=112),
    "crop from 128": CropPolicy(image_size=112, shortest_edge=128, resample="bilinear"),
    "native": NativePolicy(max_pixels=28 * 28 * 24),
    "naflex": NaFlexPolicy(max_patches=36),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("size", [(1024, 768), (601, 903), (450, 301), (97, 131)])
def test_every_transform(photographs, jpeg, quick, look, size):
    data = jpeg(photographs["coffee"].resize(size, Image.Resampling.LANCZOS))
    assert psnr(decode_image(data, LOOKS[look]), decode_exactly(data, LOOKS[look])) > 38


@pytest.mark.parametrize(
    "look",
    [LetterboxPolicy(image_size=112), CropPolicy(image_size=112, resample="lanczos"), NativePolicy(resample="lanczos")],
)
def test_unsupported_transforms_are_exact(photographs, jpeg, look):
    data = jpeg(photographs["coffee"])
    assert np.array_equal(decode_image(data, look), decode_exactly(data, look))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [(640, 480), (643, 481)])
def test_orientation(photographs, jpeg, quick, orientation, size):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = jpeg(photographs["coffee"].resize(size), exif=exif)
    for look in (CropPolicy(image_size=112), NaivePolicy(image_size=112), NaFlexPolicy(max_patches=49)):
        assert psnr(decode_image(data, look), decode_exactly(data, look)) > 38


def test_orientation_in_xmp_or_missing(photographs, jpeg, quick):
    xmp = b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="6"/>'
    plain = jpeg(photographs["coffee"])
    tagged = plain[:2] + b"\xff\xe1" + (len(xmp) + 2).to_bytes(2, "big") + xmp + plain[2:]
    assert load_image(tagged).size == photographs["coffee"].size[::-1]
    assert (
        psnr(decode_image(tagged, CropPolicy(image_size=112)), decode_exactly(tagged, CropPolicy(image_size=112))) > 40
    )
    for wrong in (0, 9, 77):
        exif = Image.Exif()
        exif[0x0112] = wrong
        data = jpeg(photographs["coffee"], exif=exif)
        assert np.array_equal(
            decode_image(data, CropPolicy(image_size=112)), decode_image(plain, CropPolicy(image_size=112))
        )


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
        assert (
            psnr(decode_image(data, CropPolicy(image_size=56)), decode_exactly(data, CropPolicy(image_size=56))) > 40
        ), kind
        assert np.array_equal(decode_image(data), np.asarray(load_image(data))), kind


def test_damaged_jpegs_are_read_like_pillow(photographs, jpeg):
    data = bytearray(jpeg(photographs["coffee"]))
    data[len(data) // 2] ^= 0x55  # wrong colours from here on
    assert (
        psnr(
            decode_image(bytes(data), NaivePolicy(image_size=56)),
            decode_exactly(bytes(data), NaivePolicy(image_size=56)),
        )
        > 30
    )
    for cut in (1, 3, 20, 600, len(data) // 2):
        with pytest.raises(ImageError) as caught:
            decode_image(bytes(data[:cut]), NaivePolicy(image_size=56))
        assert caught.value.remedy
    bomb = bytes(data).replace((400).to_bytes(2, "big") + (600).to_bytes(2, "big"), b"\xff\xff\xff\xff", 1)
    with pytest.raises(ImageError, match="pixels"):
        decode_image(bomb, NaivePolicy(image_size=56))


def test_extreme_aspect_ratios_are_refused(jpeg):
    with pytest.raises(ImageError, match="too thin"):
        decode_image(jpeg(Image.new("RGB", (60_000, 1))), CropPolicy(image_size=224))
    assert decode_image(jpeg(Image.new("RGB", (60_000, 1), "teal")), NaivePolicy(image_size=14)).shape == (14, 14, 3)


@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 40), st.integers(0, 2**40))
@settings(max_examples=150)
def test_any_size_and_crop(jpeg, height, width, size, number):
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    data = jpeg(Image.fromarray(pixels))
    look = RandomCrop(image_size=size, area=(0.05, 1.0), horizontal_flip=True)
    found = decode_image(data, look, (1, number))
    assert found.shape == (size, size, 3) and found.flags.c_contiguous and found.flags.writeable
    assert np.array_equal(found, decode_image(data, look, (1, number)))
    (top, left, h, w), _ = look.sample_crop(height, width, (1, number))
    assert 0 <= top <= top + h <= height and 0 <= left <= left + w <= width and h > 0 and w > 0
    assert decode_image(data, NaivePolicy(image_size=size, patch_size=1)).shape == (size, size, 3)


def test_random_crop_statistics():
    look = RandomCrop(area=(0.2, 0.8), aspect_ratio=(0.5, 2.0), horizontal_flip=True)
    drawn = [look.sample_crop(600, 800, (0, i)) for i in range(600)]
    areas = np.array([h * w / 480_000 for (_, _, h, w), _ in drawn])
    shapes = np.array([w / h for (_, _, h, w), _ in drawn])
    assert 0.19 < areas.min() < 0.25 and 0.6 < areas.max() < 0.81
    assert 0.49 < shapes.min() < 0.6 and 1.7 < shapes.max() < 2.02
    assert 0.4 < np.mean([mirrored for _, mirrored in drawn]) < 0.6
    assert len({rectangle for rectangle, _ in drawn}) > 590
    long = [look.sample_crop(100, 2000, (0, i))[0] for i in range(100)]
    assert all(0.49 < w / h < 2.05 for _, _, h, w in long)  # the aspect ratio is kept if the area does not fit
    for wrong in ({"image_size": 0}, {"area": (0.0, 1.0)}, {"area": (0.5, 0.2)}, {"aspect_ratio": (2.0, 1.0)}):
        with pytest.raises(ConfigError):
            RandomCrop(**wrong)


@pytest.mark.parametrize("orientation", [1, 6])
def test_random_crops_match_full_decoding(photographs, jpeg, quick, orientation):
    """Compared with full decoding; the fast decoder rounds the crop to pixels of the smaller image."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = jpeg(photographs["retina"].resize((1024, 768)), exif=exif)
    look = RandomCrop(image_size=56, area=(0.2, 1.0), horizontal_flip=True)
    for i in range(12):
        upright = load_image(data)
        (top, left, h, w), mirrored = look.sample_crop(upright.height, upright.width, (i,))
        box = (left, top, left + w, top + h)
        expected = np.asarray(upright.resize((56, 56), Image.Resampling.BICUBIC, box))
        assert psnr(decode_image(data, look, (i,)), expected[:, ::-1] if mirrored else expected) > 30


def test_missing_simplejpeg(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "simplejpeg", None)
    with pytest.raises(DataError, match="simplejpeg") as caught:
        module.require_simplejpeg()
    assert "vitrail[data]" in caught.value.remedy
