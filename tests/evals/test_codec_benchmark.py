"""Codec benchmark: results computed in other ways, coded bytes of file formats by hand, and invalid inputs."""

import collections
import io
import json
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, features
from torchmetrics.functional.image import structural_similarity_index_measure

from data.scenes.conftest import drawn
from helpers import randomize
from vitrail.codecs.codec import Codec, CodecConfig, compute_codec_identity
from vitrail.codecs.conv_autoencoder import ConvAutoencoderConfig
from vitrail.codecs.image_sources import ImageResizeConfig, ImageSource
from vitrail.codecs.image_tokenization import tokenize_images
from vitrail.codecs.quantizers import BSQConfig, GroupedVQConfig, KLConfig, VQConfig
from vitrail.data.scenes.atlas import Atlas
from vitrail.encoders.vgg import LPIPS
from vitrail.errors import ConfigError, DataError
from vitrail.evals import image_format_coder
from vitrail.evals.image_coder import CodecCoder, CodedUnit, CodingSummary
from vitrail.evals.image_format_coder import FORMATS, QUALITIES, ImageFormatCoder
from vitrail.evals.suites import codec_benchmark
from vitrail.evals.suites.codec_benchmark import (
    CODED_BPP,
    DECODE_RATE,
    ENCODE_RATE,
    ENTROPY_BPP,
    FILE_BPP,
    POOLED_PSNR,
    ImageSet,
    estimate_ratio,
    measure_coder,
    open_image_set,
)
from vitrail.evals.suites.linear_probe import train_linear_probe
from vitrail.evals.suites.reconstruction_recognition import LabelledBatches, ReconstructionRecognizer

HERE = [name for name, row in FORMATS.items() if features.check(row.pillow_feature)]
NET = ConvAutoencoderConfig(widths=(8, 8, 8), layers=1, norm_groups=4, image_size=(32, 32))


def smooth(count: int, height: int = 32, width: int = 32, seed: int = 0) -> list[np.ndarray]:
    """Images with soft shapes and grain, which lose detail at every quality."""
    chance = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        few = Image.fromarray(chance.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        large = np.asarray(few.resize((width, height), Image.Resampling.BICUBIC), np.float64)
        made.append((large + chance.normal(0, 12, large.shape)).clip(0, 255).astype(np.uint8))
    return made


def batch(pictures: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).contiguous()


def codec(quantizer, seed: int = 0) -> Codec:
    torch.manual_seed(seed)
    return randomize(Codec(CodecConfig(net=NET, quantizer=quantizer)), seed).eval()


def decibel(x: np.ndarray, y: np.ndarray) -> float:
    return 10 * math.log10(255**2 / np.square(x.astype(np.float64) - y).mean())


class Same:
    """A lossless coder."""

    name, kind, device, metadata = "same", "codec", "cpu", {}

    def encode(self, pictures):
        return pictures.clone()

    def decode(self, coded):
        return coded

    def measure_bits(self, coded):
        return [CodedUnit(each.shape[1] * each.shape[2], 8 * each.numel(), 8 * each.numel() + 80) for each in coded]

    def finish(self):
        return CodingSummary()


class Colour:
    """A feature network of mean colour and standard deviation."""

    name, image_size = "Colour", 16

    def __call__(self, pixels):
        return torch.cat([pixels.mean((2, 3)), pixels.std((2, 3))], 1)


def test_original_features_are_computed_once():
    class Counting(Colour):
        seen = 0

        def __call__(self, pixels):
            self.seen += len(pixels)
            return super().__call__(pixels)

    pictures, coder = ImageSet(smooth(9)), CodecCoder(codec(BSQConfig(bits=28)), "mine")
    alone, shared = Counting(), Counting()
    original = codec_benchmark.extract_features(pictures.iter_batches(4), Colour())
    first = measure_coder(coder, pictures, batch_size=4, network=alone).scores["FD-Colour"]
    again = measure_coder(coder, pictures, batch_size=4, network=shared, original_features=original).scores["FD-Colour"]
    assert (alone.seen, shared.seen) == (18, 9)
    assert first == again


# ---- formats ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sheet", [False, True])
@pytest.mark.parametrize("format", HERE)
def test_higher_quality_has_a_higher_rate_and_psnr(format, sheet):
    pictures = ImageSet(smooth(12))
    rows = [measure_coder(ImageFormatCoder(format, q, sheet=sheet), pictures, rounds=20) for q in (10, 50, 95)]
    for measured in (CODED_BPP, FILE_BPP, "PSNR", "SSIM"):
        values = [row.scores[measured].value for row in rows]
        assert values == sorted(values)
        assert values[0] < values[-1]
    assert all(row.scores[CODED_BPP].value < row.scores[FILE_BPP].value for row in rows)


@pytest.mark.parametrize("format", HERE)
def test_sheets_share_headers(format):
    pictures = ImageSet(smooth(16))
    alone, sheet = (
        measure_coder(ImageFormatCoder(format, 50, sheet=how), pictures, rounds=20).scores for how in (False, True)
    )
    assert sheet[FILE_BPP].value < alone[FILE_BPP].value
    assert sheet[FILE_BPP].value - sheet[CODED_BPP].value < (alone[FILE_BPP].value - alone[CODED_BPP].value) / 4


@settings(max_examples=30)
@given(st.integers(1, 7), st.integers(1, 40), st.integers(1, 40))
def test_sheets_are_split_as_built(B, H, W):
    pictures = torch.randint(0, 256, (B, 3, H, W), dtype=torch.uint8)
    laid_out = image_format_coder._build_sheet(pictures)
    assert laid_out.shape[1] % 16 == laid_out.shape[2] % 16 == 0
    file = image_format_coder.EncodedFile(b"", Image.new("RGB", (1, 1)), B, (H, W))
    assert torch.equal(image_format_coder._split_sheet(laid_out, file), pictures)


def test_coded_bytes_of_files():
    """Coded bytes counted independently of the module."""
    pictures = batch(smooth(6, 40, 24))
    if "jpeg" in HERE:
        coder = ImageFormatCoder("jpeg", 60)
        for file, unit in zip(coded := coder.encode(pictures), coder.measure_bits(coded), strict=True):
            own = io.BytesIO()
            file.image.save(own, "JPEG", quality=60, optimize=True, subsampling="4:2:0")
            assert own.getvalue() == file.data
            scans = []
            for optimize in (True, False):
                other = io.BytesIO()
                file.image.save(other, "JPEG", quality=60, optimize=optimize, subsampling="4:2:0")
                data = other.getvalue()
                head = data.index(b"\xff\xda")
                tables = sum(
                    2 + struct.unpack(">H", data[i + 2 : i + 4])[0]
                    for i in range(head)
                    if data[i : i + 2] == b"\xff\xc4"
                )
                scans.append(len(data) - 2 - (head + 2 + 12) + (tables if optimize else 0))
            assert unit == CodedUnit(40 * 24, 8 * min(scans), 8 * len(file.data))
        assert coder.finish().shared_bits == 8 * 2 * 69  # two tables of 64 bytes, each with a header of 5
    if "webp" in HERE:
        coder = ImageFormatCoder("webp", 60)
        for file, unit in zip(coded := coder.encode(pictures), coder.measure_bits(coded), strict=True):
            assert file.data[12:16] == b"VP8 "
            assert file.data[23:26] == b"\x9d\x01\x2a"
            assert unit.coded_bits // 8 + 20 + 7 + file.data[16] % 2 == len(file.data)
    if "avif" in HERE:
        coder = ImageFormatCoder("avif", 60)
        for file, unit in zip(coded := coder.encode(pictures), coder.measure_bits(coded), strict=True):
            inside = file.data[file.data.index(b"mdat") + 4 :]
            assert inside[:3] == b"\x12\x00\x0a"  # temporal delimiter, then sequence header
            assert unit.coded_bits == 8 * (len(inside) - 2 - 2 - inside[3])


@pytest.mark.parametrize("format", HERE)
def test_headers_are_equal_for_all_images(format):
    coder = ImageFormatCoder(format, 30)
    first, second = (coder.encode(batch(smooth(1, seed=seed)))[0].data for seed in (1, 2))
    rest = [len(data) - FORMATS[format].coded_bytes(data) for data in (first, second)]
    assert abs(rest[0] - rest[1]) <= 1  # WebP pads to even lengths


def test_invalid_formats_raise(monkeypatch):
    with pytest.raises(ConfigError, match="unknown image format 'jpg'"):
        ImageFormatCoder("jpg", 50)
    with pytest.raises(ConfigError, match="quality 101"):
        ImageFormatCoder("jpeg", 101)
    with pytest.raises(ConfigError, match="does not support chroma 4:4:4"):
        ImageFormatCoder("webp", 50, "4:4:4")
    monkeypatch.setattr(features, "check", lambda name: name != "avif")
    with pytest.raises(ConfigError, match="cannot write avif") as error:
        ImageFormatCoder("avif", 50)
    assert "11.3" in error.value.remedy
    assert QUALITIES == tuple(sorted(QUALITIES))


@pytest.mark.parametrize("format", [name for name in HERE if name != "webp"])
def test_full_chroma_has_a_higher_rate_and_psnr(format):
    noisy = [np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)]
    half, whole = (
        measure_coder(ImageFormatCoder(format, 90, chroma), ImageSet(noisy), rounds=0) for chroma in ("4:2:0", "4:4:4")
    )
    assert whole.scores["PSNR"].value > half.scores["PSNR"].value + 1
    assert whole.scores[CODED_BPP].value > half.scores[CODED_BPP].value
    assert (half.kind, whole.kind) == (format, f"{format} 4:4:4")


# ---- results ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "quantizer",
    [BSQConfig(bits=28), VQConfig(codebook_size=50, dim=6), GroupedVQConfig(codebook_size=20, dim=6, groups=3)],
)
def test_codec_results_by_hand(quantizer, tmp_path, monkeypatch):
    model, pictures = codec(quantizer), smooth(11)
    clock = iter(range(10**6))
    spent = iter([0.5, 0.25] * 100)  # encoding, decoding
    now = [0.0]

    def tick() -> float:
        if next(clock) % 2:
            now[0] += next(spent)
        return now[0]

    monkeypatch.setattr(codec_benchmark.time, "perf_counter", tick)
    torch.manual_seed(3)
    perceptual = LPIPS("alexnet").eval()
    row = measure_coder(
        CodecCoder(model, "mine"), ImageSet(pictures), batch_size=4, perceptual=perceptual, network=Colour()
    )
    assert (row.num_images, row.num_pixels, row.kind, row.missing_scores) == (11, 11 * 1024, "codec", {})
    with torch.no_grad():
        x = batch(pictures)
        drawn = torch.cat([model.reconstruct(model.to_pixels(some)) for some in x.split(4)])
        ids = torch.cat([model.encode(model.to_pixels(some)).ids for some in x.split(4)])
    given = ((drawn.clamp(-1, 1) + 1) * 127.5).round().numpy().astype(np.uint8)
    scores = {name: one.value for name, one in row.scores.items()}
    each = [decibel(a, b) for a, b in zip(x.numpy(), given, strict=True)]
    assert scores["PSNR"] == pytest.approx(np.mean(each), abs=1e-4)
    assert scores[POOLED_PSNR] == pytest.approx(decibel(x.numpy(), given), abs=1e-6)
    a, b = x / 255, torch.from_numpy(given) / 255
    assert scores["SSIM"] == pytest.approx(structural_similarity_index_measure(b, a, data_range=1.0).item(), abs=1e-4)
    with torch.no_grad():
        assert scores["LPIPS-alexnet"] == pytest.approx(perceptual(a * 2 - 1, b * 2 - 1).mean().item(), rel=1e-4)
    f, g = (torch.cat([Colour()(seen(p[None])) for p in side]).double().numpy() for side in (a * 2 - 1, b * 2 - 1))
    cf, cg = np.cov(f.T), np.cov(g.T)
    roots = np.sqrt(np.maximum(np.linalg.eigvals(cf @ cg).real, 0)).sum()
    distance = np.square(f.mean(0) - g.mean(0)).sum() + np.trace(cf) + np.trace(cg) - 2 * roots
    assert scores["FD-Colour"] == pytest.approx(distance, rel=1e-3, abs=1e-5)

    bits = sum(max(1, (size - 1).bit_length()) for size in model.vocab_sizes)
    assert scores[CODED_BPP] == 64 * bits / 1024
    named = [ImageSource(str(n), lambda n=n: png(pictures[n])) for n in range(11)]
    file = tokenize_images(
        model, named, tmp_path / "a.vtok", resize=ImageResizeConfig(how="pad"), codec_name="mine", batch_size=4
    )
    assert scores[FILE_BPP] == pytest.approx(8 * file.path.stat().st_size / (11 * 1024), rel=1e-12)
    groups = ids.flatten(0, 2).T.tolist() if model.has_id_groups else [ids.flatten().tolist()]
    assert len(row.codebook_usage) == len(groups) == len(model.vocab_sizes)
    total = 0.0
    for use, values, size in zip(row.codebook_usage, groups, model.vocab_sizes, strict=True):
        counts = collections.Counter(values)
        entropy = -sum(n / len(values) * math.log2(n / len(values)) for n in counts.values())
        assert (use.codes, use.used, use.tokens) == (size, len(counts), 11 * 64)
        assert use.entropy == pytest.approx(entropy, abs=1e-9)
        total += entropy
    assert scores[ENTROPY_BPP] == pytest.approx(total * 64 / 1024, abs=1e-9)
    assert row.perplexity == pytest.approx(2 ** (total / len(groups)))
    assert row.used_fraction == pytest.approx(np.mean([use.used / use.codes for use in row.codebook_usage]))
    assert scores[ENCODE_RATE] == pytest.approx(11 / (3 * 0.5))
    assert scores[DECODE_RATE] == pytest.approx(11 / (3 * 0.25))
    assert row.metadata["model"] == compute_codec_identity(model)
    for one in row.scores.values():
        assert one.interval[0] <= one.value <= one.interval[1]
    assert json.loads(json.dumps(row.as_dict, allow_nan=False))["scores"]["PSNR"]["value"] == scores["PSNR"]


def seen(pixels):
    return torch.nn.functional.interpolate(pixels, (16, 16), mode="bicubic", antialias=True).clamp(-1, 1)


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("format", HERE)
def test_format_results_by_hand(format):
    pictures = smooth(7)
    coder = ImageFormatCoder(format, 40)
    row = measure_coder(coder, ImageSet(pictures), batch_size=3)
    coded = sum(unit.coded_bits for unit in coder.measure_bits(coder.encode(batch(pictures))))
    once = 8 * 138 if format == "jpeg" else 0  # its quantization tables
    assert row.scores[CODED_BPP].value == pytest.approx((coded + once) / (7 * 1024))
    files, values = [], []
    for pixels in pictures:
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, format, quality=40, **FORMATS[format].save_options)
        files.append(len(file.getvalue()))
        values.append(decibel(pixels, np.asarray(Image.open(file).convert("RGB"))))
    assert row.scores[FILE_BPP].value == pytest.approx(8 * sum(files) / (7 * 1024))
    assert row.scores["PSNR"].value == pytest.approx(np.mean(values), abs=1e-4)
    assert row.scores[CODED_BPP].count == 7
    assert row.codebook_usage == ()
    assert ENTROPY_BPP not in row.scores


def test_identical_images_are_counted():
    row = measure_coder(Same(), ImageSet(smooth(5)), batch_size=2)
    assert row.num_identical == 5
    assert row.scores["PSNR"].value == row.scores[POOLED_PSNR].value == math.inf
    assert row.scores["SSIM"].value == pytest.approx(1, abs=1e-5)
    assert (row.scores[CODED_BPP].value, row.scores[FILE_BPP].value) == (24, 24 + 80 / 1024)
    plain = json.loads(json.dumps(row.as_dict, allow_nan=False))
    assert plain["scores"]["PSNR"]["value"] is None
    assert plain["num_identical"] == 5


def test_one_exact_image_does_not_hide_errors():
    """The mean PSNR is infinite; the PSNR of the mean error is not."""
    flat = np.full((32, 32, 3), 128, np.uint8)
    row = measure_coder(ImageFormatCoder("jpeg", 95), ImageSet([flat, *smooth(3)]), rounds=20)
    assert row.num_identical == 1
    assert row.scores["PSNR"].value == math.inf
    assert 20 < row.scores[POOLED_PSNR].value < 60


def test_continuous_codes_have_no_bits():
    row = measure_coder(
        CodecCoder(codec(KLConfig(width=4)), "kl"), ImageSet(smooth(3)), missing={"LPIPS": "not asked for"}
    )
    assert CODED_BPP not in row.scores
    assert "continuous" in row.missing_scores[CODED_BPP]
    assert row.missing_scores["LPIPS"] == "not asked for"
    assert (row.used_fraction, row.perplexity) == (None, None)


def test_images_of_any_size_keep_their_order():
    pictures = [*smooth(2, 30, 21), *smooth(3, 12, 40, seed=1), *smooth(1, 30, 21, seed=2)]
    found = list(ImageSet(pictures).iter_batches(2))
    assert [len(some) for some in found] == [2, 2, 1, 1]
    assert torch.equal(found[3], batch(pictures[5:]))
    model = codec(BSQConfig(bits=5))
    row = measure_coder(CodecCoder(model, "bsq"), ImageSet(pictures), batch_size=2, rounds=20)
    cells = [math.ceil(p.shape[0] / 4) * math.ceil(p.shape[1] / 4) for p in pictures]
    assert row.scores[CODED_BPP].value == pytest.approx(5 * sum(cells) / sum(p.shape[0] * p.shape[1] for p in pictures))
    sized = [some.shape[2:] for some in ImageSet(pictures, size=(16, 16)).iter_batches(10)]
    assert sized == [(16, 16)]


def test_coders_can_be_measured_twice():
    coder, pictures = CodecCoder(codec(BSQConfig(bits=5)), "bsq"), ImageSet(smooth(4))
    first, second = (measure_coder(coder, pictures, rounds=20) for _ in range(2))
    assert first.scores[FILE_BPP] == second.scores[FILE_BPP]
    assert first.codebook_usage == second.codebook_usage


def test_training_mode_and_empty_sets_raise():
    with pytest.raises(ConfigError, match="in training"):
        CodecCoder(codec(BSQConfig(bits=5)).train(), "bsq")
    with pytest.raises(DataError, match="no images"):
        measure_coder(Same(), ImageSet([]))
    with pytest.raises(ConfigError, match="batch size 0"):
        list(ImageSet(smooth(1)).iter_batches(0))


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 50)), min_size=2, max_size=12), st.integers(0, 100))
def test_ratio_of_sums(pairs, once):
    above, below = zip(*pairs, strict=True)
    found = estimate_ratio("r", above, below, count=len(pairs), shared_amount=once, rounds=50)
    assert found.value == pytest.approx((sum(above) + once) / sum(below))
    assert found.interval[0] <= found.interval[1]
    assert math.isfinite(found.interval[0]) == (len(pairs) >= 5)
    alike = estimate_ratio("r", [3] * 5, [2] * 5, count=5, rounds=50)
    assert (alike.value, alike.interval) == (1.5, (1.5, 1.5))
    assert estimate_ratio("r", above[:1], below[:1], count=1).interval == (-math.inf, math.inf)
    with pytest.raises(DataError):
        estimate_ratio("r", [], [], count=0)


# ---- image sets -------------------------------------------------------------------------------------------------


def test_scenes_and_folders(tmp_path):
    atlas = tmp_path / "atlas.safetensors"
    Atlas.build(drawn()).save(atlas)
    scenes = open_image_set("plain", limit=3, image_size=24, atlas=str(atlas))
    (pixels,) = scenes.iter_batches(8)
    assert pixels.shape == (3, 3, 24, 24)
    assert torch.equal(next(open_image_set("plain", limit=3, image_size=24, atlas=str(atlas)).iter_batches(8)), pixels)
    assert not torch.equal(
        next(open_image_set("plain", limit=3, image_size=24, atlas=str(atlas), seed=1).iter_batches(8)), pixels
    )
    many = torch.cat(list(open_image_set("plain", limit=70, image_size=24, atlas=str(atlas)).iter_batches(9)))
    assert len(many) == 70
    assert torch.equal(many[:3], pixels)
    with pytest.raises(ConfigError, match="limit = 0"):
        open_image_set("plain", limit=0, atlas=str(atlas))
    with pytest.raises(ConfigError, match="are unlimited"):
        open_image_set("plain", atlas=str(atlas))
    for name, colour in (("cats", "red"), ("dogs", "blue")):
        (tmp_path / "set" / name).mkdir(parents=True)
        Image.new("RGB", (20, 30), colour).save(tmp_path / "set" / name / "a.png")
    found = open_image_set(str(tmp_path / "set"), with_classes=True)
    assert (found.names, found.labels.tolist()) == (("cats", "dogs"), [0, 1])
    assert next(found.iter_batches(4)).shape == (2, 3, 30, 20)
    assert next(open_image_set(str(tmp_path / "set"), image_size=16).iter_batches(4)).shape == (2, 3, 16, 16)
    with pytest.raises(DataError, match="nowhere"):
        open_image_set("nowhere")


# ---- recognition ------------------------------------------------------------------------------------------------

COLOURS = {"red": 0, "green": 1, "blue": 2}


class Eyes:
    """Fake contrastive model: an image is its mean colour, a text the colour that it names."""

    def embed_images(self, pictures):
        return torch.stack([picture.float().mean((1, 2)) / 255 for picture in pictures])

    def extract_features(self, pictures):
        return torch.stack([picture.float().mean((1, 2)) for picture in pictures])

    def embed_texts(self, texts):
        return torch.stack([torch.eye(3)[next(n for name, n in COLOURS.items() if name in text)] for text in texts])


class Shifted(Same):
    """Coder that swaps the channels of every third image."""

    name = "shifted"

    def decode(self, coded):
        return torch.stack([p.roll(1, 0) if n % 3 == 0 else p for n, p in enumerate(coded)])


def test_recognition_scores():
    chance = np.random.default_rng(0)
    labels = torch.tensor([n % 3 for n in range(12)])
    pictures = []
    for n, label in enumerate(labels.tolist()):
        pixels = chance.integers(0, 60, (16, 16, 3), dtype=np.uint8)
        pixels[..., (label + (n == 11)) % 3] += 150  # the last image does not match its label
        pictures.append(pixels)
    data = ImageSet(pictures, labels, tuple(COLOURS))
    train = LabelledBatches(list(ImageSet(pictures * 3).iter_batches(7)), labels.repeat(3))
    reader = ReconstructionRecognizer(Eyes(), LabelledBatches(data.iter_batches(12), labels), data.names, train=train)
    assert reader.originals_correct.tolist() == [True] * 11 + [False]
    row = measure_coder(Shifted(), data, batch_size=12, recognizer=reader, rounds=20)
    prompted, still, probed = row.recognition_scores
    # 0, 3, 6 and 9 have swapped channels.
    assert (prompted.value, prompted.baselines["originals"]) == (7 / 12, 11 / 12)
    assert prompted.baselines["majority"] == prompted.baselines["chance"] == pytest.approx(1 / 3)
    assert (still.value, still.count) == (7 / 11, 11)
    x = Eyes().extract_features(list(torch.cat(train.batches)))
    z = Eyes().extract_features(list(batch(pictures)))
    assert (
        probed.baselines["originals"] == train_linear_probe(x, train.labels, z, labels, tuple(COLOURS)).scores[0].value
    )
    given = list(Shifted().decode(batch(pictures)))
    assert (
        probed.value
        == train_linear_probe(x, train.labels, Eyes().extract_features(given), labels, tuple(COLOURS)).scores[0].value
    )
    same = measure_coder(Same(), data, batch_size=5, recognizer=reader, rounds=20)
    assert [score.value for score in same.recognition_scores] == [11 / 12, 1.0, probed.baselines["originals"]]


def test_other_images_in_a_pass_raise():
    data = ImageSet(smooth(4), torch.tensor([0, 1, 2, 0]), tuple(COLOURS))
    reader = ReconstructionRecognizer(Eyes(), LabelledBatches(data.iter_batches(2), data.labels), data.names)
    with pytest.raises(DataError, match="3 images but 4 labels"):
        measure_coder(Same(), ImageSet(smooth(3)), recognizer=reader, rounds=20)
