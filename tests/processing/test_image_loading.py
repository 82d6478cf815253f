"""Every kind of file a person may hand in comes out as upright 8-bit RGB, or as an ImageError with a remedy."""

import io
import os
import random
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image, ImageCms, ImageFile, ImageOps, features
from transformers.image_transforms import convert_to_rgb, normalize, rescale

from vitrail.errors import ConfigError, ImageError
from vitrail.processing import image_loading
from vitrail.processing.image_loading import IMAGE_FORMATS, NORMALIZATIONS, load_image, to_pixel_values


def noise(height: int = 43, width: int = 61, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height))


def encode(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    if "append_images" in options:  # Pillow's JPEG writer leaves its settings on a picture: give it copies
        options["append_images"] = [more.copy() for more in options["append_images"]]
    image.copy().save(file, kind, **options)
    return file.getvalue()


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *extra: tuple[bytes, bytes]) -> bytes:
    """A PNG made by hand, for what Pillow cannot write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    body = b"".join(chunk(*pair) for pair in extra) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + body


def pixels(source, **options) -> np.ndarray:
    image = load_image(source, **options)
    assert image.mode == "RGB" and not image.info
    return np.asarray(image)


def refused(source, words: str, **options) -> ImageError:
    with pytest.raises(ImageError, match=words) as caught:
        load_image(source, **options)
    assert caught.value.remedy
    return caught.value


# ── what is read ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "TGA", "WEBP"])
def test_lossless_formats(kind, tmp_path):
    path = tmp_path / "picture"
    path.write_bytes(encode(noise(), kind, **({"lossless": True} if kind == "WEBP" else {})))
    for source in (path, str(path), path.read_bytes()):
        assert np.array_equal(pixels(source), np.asarray(noise()))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_exif_orientation(kind, orientation):
    """All eight, in all formats that carry it; and not twice when what came out is read again."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(noise(), kind, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    ours = load_image(data)
    assert np.array_equal(np.asarray(ours), np.asarray(upright))
    assert ours.size == ((61, 43) if orientation < 5 else (43, 61))
    assert np.array_equal(pixels(ours), np.asarray(ours))


def test_cmyk():
    """Pure inks come out as their colours; the file holds them inverted, as Adobe writes them."""
    inks = {
        (0, 0, 0, 0): (255,) * 3,
        (255, 0, 0, 0): (0, 255, 255),
        (0, 255, 255, 0): (255, 0, 0),
        (0, 0, 0, 255): (0,) * 3,
    }
    for ink, colour in inks.items():
        data = encode(Image.new("CMYK", (16, 16), ink), "JPEG", quality=100)
        assert b"Adobe" in data
        assert np.abs(pixels(data).astype(int) - colour).max() <= 2
        assert np.abs(pixels(encode(Image.new("CMYK", (4, 4), ink), "TIFF")).astype(int) - colour).max() == 0


def test_16_bits_are_scaled_not_clipped():
    ramp = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)  # exactly the 256 grey levels
    expected = np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16, 1), 3, axis=2)
    grey = Image.fromarray(ramp)
    assert grey.mode == "I;16"
    for source in (encode(grey, "PNG"), encode(grey, "TIFF"), grey, ramp, Image.fromarray(ramp.astype(np.int32))):
        assert np.array_equal(pixels(source), expected)
    big = Image.frombytes("I;16B", (16, 16), ramp.astype(">u2").tobytes())
    assert np.array_equal(pixels(big), expected)
    rgb = b"\0" + struct.pack(">6H", 0, 0x8080, 0xFFFF, 0x0101, 0xFEFE, 0x4040)
    assert pixels(png(2, 1, 16, 2, rgb)).tolist() == [[[0, 128, 255], [1, 254, 64]]]


@given(st.integers(0, 65535))
def test_16_bits_round_to_nearest(value):
    (level,) = set(pixels(np.full((1, 1), value, np.uint16)).flat)
    assert abs(int(level) * 257 - value) <= 128


def test_floats():
    ramp = np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16)
    expected = np.arange(256).reshape(16, 16)
    for source in (ramp, Image.fromarray(ramp), encode(Image.fromarray(ramp), "TIFF"), torch.from_numpy(ramp)):
        assert np.array_equal(pixels(source)[..., 0], expected)
    assert pixels(torch.ones(3, 2, 2, dtype=torch.bfloat16)).min() == 255


def test_palette_and_one_bit():
    image = noise().quantize(16)
    assert np.array_equal(pixels(encode(image, "PNG")), np.asarray(image.convert("RGB")))
    assert np.array_equal(pixels(encode(image, "GIF")), np.asarray(image.convert("RGB")))
    dots = noise().convert("1")
    assert np.array_equal(pixels(encode(dots, "PNG")), np.asarray(dots.convert("RGB")))


@pytest.mark.parametrize("background", [(255, 255, 255), (10, 200, 30)])
def test_transparency_lies_over_the_background(background):
    """Hidden colours stay hidden: a transparent red pixel shows the background, half transparent shows half."""
    for mode in ("RGBA", "LA", "PA"):
        clear = Image.new("RGBA", (2, 1), (200, 0, 0, 0)).convert(mode)
        assert pixels(clear, background=background).tolist() == [[list(background)] * 2]
    half = Image.new("RGBA", (1, 1), (200, 0, 0, 128))
    expected = np.round(np.array([200, 0, 0]) * 128 / 255 + np.array(background) * 127 / 255)
    for source in (half, encode(half, "PNG"), encode(half, "WEBP", lossless=True), np.asarray(half)):
        assert np.abs(pixels(source, background=background) - expected).max() <= 1
    assert np.abs(pixels(half.convert("RGBa"), background=background) - expected).max() <= 2
    grey = Image.new("LA", (1, 1), (200, 128))
    straight, premultiplied = (pixels(it, background=background).astype(int) for it in (grey, grey.convert("La")))
    assert np.abs(straight - premultiplied).max() <= 1


def test_transparent_entries_and_keys():
    white = [255, 255, 255]
    palette = Image.new("P", (2, 1))
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.putpixel((1, 0), 1)
    for kind in ("PNG", "GIF"):
        assert pixels(encode(palette, kind, transparency=0)).tolist() == [[white, [0, 0, 255]]]
    assert pixels(encode(palette, "PNG", transparency=b"\x80\xff"))[0, 0].tolist() == [255, 127, 127]
    key = encode(Image.fromarray(np.array([[[1, 2, 3], [3, 2, 1]]], np.uint8)), "PNG", transparency=(1, 2, 3))
    assert pixels(key).tolist() == [[white, [3, 2, 1]]]
    deep = png(3, 1, 16, 0, b"\0" + struct.pack(">3H", 0, 1000, 0x8080), (b"tRNS", struct.pack(">H", 1000)))
    assert pixels(deep, background=(9, 8, 7)).tolist() == [[[0, 0, 0], [9, 8, 7], [128, 128, 128]]]


def test_transparency_agrees_with_transformers():
    rgba = Image.merge("RGBA", [*noise().split(), noise(seed=1).convert("L")])
    for image in (rgba, rgba.convert("LA"), noise().convert("CMYK"), noise().quantize(16)):
        assert np.array_equal(pixels(image), convert_to_rgb(image, return_numpy=True))


@pytest.mark.parametrize("mode", ["RGBX", "YCbCr", "HSV", "LAB"])
def test_other_colour_spaces(mode):
    image = noise()
    if mode == "LAB":
        srgb, lab = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
        other = ImageCms.profileToProfile(image, srgb, lab, outputMode="LAB")
    else:
        other = image.convert(mode)
    assert np.abs(pixels(other).astype(int) - np.asarray(image)).mean() < 4


def test_inputs_are_not_modified():
    image = noise()
    image.info["comment"] = b"kept"
    load_image(image).putpixel((0, 0), (1, 2, 3))
    assert np.array_equal(np.asarray(image), np.asarray(noise())) and image.info["comment"] == b"kept"


# ── frames ─────────────────────────────────────────────────────────────────────────────────────────────────────

FRAMES = [Image.new("RGB", (8, 6), colour) for colour in ("red", "lime", "blue")]


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_animations_need_a_frame(kind, tmp_path):
    path = tmp_path / f"moving.{kind.lower()}"
    path.write_bytes(
        encode(
            FRAMES[0], kind, save_all=True, append_images=FRAMES[1:], **({"lossless": True} if kind == "WEBP" else {})
        )
    )
    error = refused(path, "has 3 frames")
    assert str(path) in error.problem and "frame=0 … 2" in error.remedy
    for index, frame in enumerate(FRAMES):
        assert np.array_equal(pixels(path, frame=index), np.asarray(frame))
    for index in (3, -1):
        refused(path, f"no frame {index}", frame=index)


def test_stills_have_one_frame():
    assert np.array_equal(pixels(noise(), frame=0), np.asarray(noise()))
    refused(encode(noise(), "PNG"), "no frame 1", frame=1)
    refused(np.zeros((2, 2), np.uint8), "frame 1 of an array", frame=1)


def test_a_stereo_photograph_is_its_first_picture():
    data = encode(FRAMES[0], "MPO", save_all=True, append_images=FRAMES[1:])
    assert np.array_equal(pixels(data), pixels(encode(FRAMES[0], "JPEG")))


def test_pages_are_measured_one_by_one():
    data = encode(FRAMES[0], "TIFF", save_all=True, append_images=[Image.new("RGB", (100, 100))])
    assert pixels(data, frame=0, max_pixels=50).shape == (6, 8, 3)
    refused(data, "more than the limit of 50", frame=1, max_pixels=50)


# ── what is refused ────────────────────────────────────────────────────────────────────────────────────────────


def test_invalid_files(tmp_path):
    refused(tmp_path / "absent.png", "absent.png does not exist")
    refused(tmp_path, "is a directory")
    empty = tmp_path / "empty.jpg"
    empty.touch()
    refused(empty, "empty.jpg is empty")
    words = tmp_path / "words.png"
    words.write_text("This is not an image.")
    refused(words, "words.png is not an image")
    refused("https://example.com/cat.jpg", "is a URL")
    refused("a\0b", "cannot be read|does not exist")
    refused("x" * 5000, "cannot be read|does not exist")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    refused(pipe, "not a regular file")
    refused(b"", "is empty")
    refused(object(), "object is not an image")


def test_no_permission(tmp_path, monkeypatch):
    path = tmp_path / "secret.png"
    path.write_bytes(encode(noise(), "PNG"))

    def deny(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", deny)
    refused(path, "secret.png cannot be read.*Permission denied")


def test_no_ghostscript():
    """EPS would be run by another program: it is not opened at all."""
    assert "EPS" not in IMAGE_FORMATS
    refused(encode(noise(), "EPS"), "is not an image")


@pytest.mark.parametrize("side", [9_460, 20_000, 2**31 - 1])
def test_bombs_are_refused_before_decoding(side, tmp_path):
    """The header of a gigantic image without pixels: the error is about the size, not the missing data."""
    path = tmp_path / "bomb.png"
    path.write_bytes(png(side, side, 8, 2, b""))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused(path, "bomb.png (declares|is too large)")


def test_the_limit_is_a_parameter():
    limit = Image.MAX_IMAGE_PIXELS
    refused(encode(noise(10, 10), "PNG"), "10×10 pixels, more than the limit of 99", max_pixels=99)
    assert pixels(encode(noise(10, 10), "PNG"), max_pixels=100).shape == (10, 10, 3)
    refused(noise(10, 10), "more than the limit", max_pixels=99)
    refused(np.zeros((10, 10), np.uint8), "more than the limit", max_pixels=99)
    assert limit == Image.MAX_IMAGE_PIXELS


def test_a_limit_above_pillows_own(monkeypatch):
    """Pillow refuses twice its limit by itself; ours is raised around it, from several threads at once."""
    monkeypatch.setattr(image_loading, "MAX_PIXELS", 50)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
    data = encode(noise(20, 20), "PNG")
    refused(data, "is too large", max_pixels=50)
    with ThreadPoolExecutor(4) as pool:
        shapes = [call.result().size for call in [pool.submit(load_image, data, max_pixels=400) for _ in range(40)]]
    assert shapes == [(20, 20)] * 40
    refused(data, "more than the limit of 399", max_pixels=399)
    assert Image.MAX_IMAGE_PIXELS == 50


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "PPM", "TGA", "JPEG2000", "AVIF"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_truncated(kind, share, tmp_path):
    if kind == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    data = encode(noise(), kind)
    path = tmp_path / "half.img"
    path.write_bytes(data[: int(len(data) * share)])
    assert "half.img" in refused(path, "corrupt or truncated|not an image").problem


@pytest.mark.parametrize("size", [(0, 5), (5, 0)])
def test_zero_sized(size):
    refused(Image.new("RGB", size), "0×5|5×0")
    refused(np.zeros((*size, 3), np.uint8), "0×5|5×0")


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros(5, np.uint8), r"shape \(5,\)"),
        (np.zeros((1, 2, 2, 3), np.uint8), "shape"),
        (np.zeros((3, 20, 20), np.uint8), r"shape \(3, 20, 20\)\n.*\(H, W, C\)"),
        (np.zeros((4, 4, 2), np.uint8), "1, 3 or 4 channels"),
        (torch.zeros(20, 20, 3), r"shape \(20, 20, 3\)\n.*\(C, H, W\)"),
        (np.zeros((4, 4), np.int64), "int64"),
        (np.zeros((4, 4), np.complex64), "complex64"),
        (np.array([["a"]]), "<U1"),
        (np.full((4, 4), np.nan), "nan"),
        (np.array([[0, np.nan]]), "nan"),
        (np.array([[0, np.inf]]), "inf"),
        (np.full((4, 4), 1.01), "1.01"),
        (np.full((4, 4), -0.01), "-0.01"),
        (np.full((4, 4, 3), 255.0), "by 255"),
        (Image.fromarray(np.full((4, 4), 70_000, np.int32)), "beyond 16 bits"),
        (Image.fromarray(np.full((4, 4), -1, np.int32)), "beyond 16 bits"),
        (Image.fromarray(np.full((4, 4), 255, np.float32)), "by 255"),
    ],
)
def test_bad_arrays(array, words):
    refused(array, words)


@pytest.mark.parametrize("background", [(1, 2), (1, 2, 256), (-1, 0, 0)])
def test_bad_background(background):
    with pytest.raises(ConfigError, match="background"):
        load_image(noise(), background=background)


@given(arrays(np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3]))))
def test_arrays_and_tensors_agree(array):
    expected = np.broadcast_to(array, (*array.shape[:2], 3))
    assert np.array_equal(pixels(array), expected)
    assert np.array_equal(pixels(torch.from_numpy(array).permute(2, 0, 1)), expected)


# ── anything at all ────────────────────────────────────────────────────────────────────────────────────────────


def specimens() -> dict[str, bytes]:
    image, more = noise(), [noise(seed=1), noise(seed=2)]
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "maker"
    grey = Image.fromarray(np.random.default_rng(0).integers(0, 65536, (30, 40), dtype=np.uint16))
    made = {
        "png": encode(image, "PNG", exif=exif),
        "palette": encode(image.quantize(16), "PNG", transparency=0),
        "deep": encode(grey, "PNG"),
        "apng": encode(image, "PNG", save_all=True, append_images=more),
        "jpeg": encode(image, "JPEG", exif=exif),
        "cmyk": encode(image.convert("CMYK"), "JPEG"),
        "progressive": encode(image, "JPEG", progressive=True),
        "mpo": encode(image, "MPO", save_all=True, append_images=more),
        "gif": encode(image, "GIF", save_all=True, append_images=more),
        "webp": encode(image, "WEBP", exif=exif),
        "webps": encode(image, "WEBP", save_all=True, append_images=more),
        "tiff": encode(image, "TIFF", exif=exif),
        "lzw": encode(image, "TIFF", compression="tiff_lzw"),
        "pages": encode(image, "TIFF", save_all=True, append_images=more),
        "bmp": encode(image, "BMP"),
        "ppm": encode(image, "PPM"),
        "tga": encode(image, "TGA", compression="tga_rle"),
        "jpeg2000": encode(image, "JPEG2000"),
    }
    return made | ({"avif": encode(image, "AVIF")} if features.check("avif") else {})


SPECIMENS = specimens()


def spoil(data: bytes, chance: random.Random) -> bytes:
    """Cut it short, flip bits (more often in the header), or overwrite a stretch."""
    spoilt = bytearray(data)
    draw = chance.random()
    if draw < 0.25:
        return data[: chance.randrange(len(data))]
    if draw < 0.8:
        for _ in range(chance.randint(1, 6)):
            reach = 200 if chance.random() < 0.6 else len(spoilt)
            spoilt[chance.randrange(min(reach, len(spoilt)))] ^= 1 << chance.randrange(8)
        return bytes(spoilt)
    at = chance.randrange(len(spoilt))
    spoilt[at : at + chance.randint(1, 8)] = chance.randbytes(chance.randint(0, 8))
    return bytes(spoilt)


@pytest.mark.parametrize("name", SPECIMENS)
@pytest.mark.parametrize("strict", [False, True], ids=["warnings", "errors"])
def test_spoilt_files_only_raise_image_errors(name, strict, capfd):
    """A picture or an ImageError, nothing else, also for those who turn warnings into errors."""
    chance = random.Random(f"{name} {strict}")
    outcomes = {"picture": 0, "error": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("error" if strict else "ignore")
        for _ in range(150):
            try:
                image = load_image(
                    spoilt := spoil(SPECIMENS[name], chance), frame=chance.choice([None, 0]), max_pixels=10**6
                )
            except ImageError as error:
                assert error.problem and error.remedy and len(error.problem) < 400, spoilt[:50]
                outcomes["error"] += 1
            else:
                assert image.mode == "RGB" and image.width * image.height <= 10**6
                outcomes["picture"] += 1
    assert outcomes["error"] > 5


@pytest.mark.parametrize(
    "error",
    [
        *(OSError, SyntaxError, ValueError, TypeError, KeyError, IndexError, ZeroDivisionError, OverflowError),
        *(EOFError, AttributeError, RuntimeError, NotImplementedError, MemoryError, struct.error, zlib.error),
        *(UserWarning, Image.DecompressionBombError, Image.DecompressionBombWarning),
    ],
)
@pytest.mark.parametrize("where", [(Image, "open"), (ImageFile.ImageFile, "load"), (Image.Image, "getexif")])
def test_whatever_pillow_raises(error, where, monkeypatch):
    """Rare errors, which a few thousand damaged files may not cause."""

    def fail(*args, **kwargs):
        raise error("deep inside")

    data = encode(noise(), "PNG")
    monkeypatch.setattr(*where, fail)
    refused(data, "deep inside")


@given(st.binary(max_size=200))
@settings(max_examples=100)
def test_any_bytes(data):
    with pytest.raises(ImageError):
        load_image(data, max_pixels=100)


# ── numbers ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("norm", NORMALIZATIONS)
@pytest.mark.parametrize("scale", [1 / 255, 0.00392156862745098, 1 / 127.5])
def test_to_array_is_transformers_bit_for_bit(norm, scale):
    levels = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
    mean, std = NORMALIZATIONS[norm]
    reference = normalize(rescale(levels.transpose(2, 0, 1), scale), mean, std, input_data_format="channels_first")
    ours = to_pixel_values(Image.fromarray(levels), mean, std, scale)
    assert ours.dtype == torch.float32 and ours.is_contiguous()
    assert np.array_equal(ours.numpy().view(np.int32), np.ascontiguousarray(reference).view(np.int32))


def test_to_array_wants_rgb():
    with pytest.raises(ImageError, match="load_image"):
        to_pixel_values(Image.new("L", (2, 2)))


# ── time and memory ────────────────────────────────────────────────────────────────────────────────────────────


def test_large_images_are_converted_in_strips(monkeypatch):
    """Strips give the same pixels, so the copies of a conversion never exist of the whole image."""
    transparent = noise(40, 30).convert("RGBA")
    transparent.putalpha(noise(40, 30, seed=2).convert("L"))
    deep = Image.fromarray(np.random.default_rng(0).integers(0, 65536, (40, 30), dtype=np.uint16))
    floats = Image.fromarray(np.random.default_rng(0).random((40, 30), dtype=np.float32))
    given = {
        "rgba": encode(transparent, "PNG"),
        "deep": encode(deep, "PNG"),
        "float": encode(floats, "TIFF"),
        "palette": encode(noise(40, 30).quantize(16), "PNG", transparency=0),
        "cmyk": encode(noise(40, 30).convert("CMYK"), "TIFF"),
    }
    whole = {name: pixels(data) for name, data in given.items()}
    sizes = []
    plain = image_loading._convert_to_rgb
    monkeypatch.setattr(image_loading, "STRIP_PIXELS", 30 * 7)
    monkeypatch.setattr(
        image_loading, "_convert_to_rgb", lambda image, *how: sizes.append(image.size) or plain(image, *how)
    )
    for name, data in given.items():
        assert np.array_equal(pixels(data), whole[name]), name
    assert set(sizes) == {(30, 7), (30, 5)}


def test_tiff_with_too_many_pages():
    page = bytearray(encode(Image.new("L", (1, 1)), "TIFF"))
    (first,) = struct.unpack_from("<I", page, 4)
    (entries,) = struct.unpack_from("<H", page, first)
    end = first + 2 + 12 * entries
    directory = bytes(page[first:end])
    page = page[:end]
    for _ in range(6000):  # each page is a copy of the first one's directory
        page += struct.pack("<I", len(page) + 4) + directory
    refused(bytes(page + bytes(4)), "more than 5,000 pages", frame=5500)
    struct.pack_into("<I", page, end, first)  # a loop: the page after the first one is the first one
    refused(bytes(page), "")
