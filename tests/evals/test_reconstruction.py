"""Rows of coders: every number made again by other means, formats weighed by hand, and what cannot be."""

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
from vitrail.codecs.codec import Codec, CodecConfig, identity
from vitrail.codecs.conv import ConvPairConfig
from vitrail.codecs.fit import Fit, Picture
from vitrail.codecs.quantizers import BSQConfig, GroupedVQConfig, KLConfig, VQConfig
from vitrail.codecs.tokens import tokenize
from vitrail.data.scenes.sprites import Atlas
from vitrail.encoders.vgg import LPIPS
from vitrail.errors import ConfigError, DataError
from vitrail.evals import baselines
from vitrail.evals.baselines import FORMATS, QUALITIES, Baseline
from vitrail.evals.coders import CodecCoder, Kept, Unit
from vitrail.evals.suites import reconstruction
from vitrail.evals.suites.probe import probe
from vitrail.evals.suites.reader import Reader, Told
from vitrail.evals.suites.reconstruction import (
    CODED,
    DECODED,
    ENCODED,
    ENTROPY,
    FILED,
    POOLED,
    Shown,
    measure,
    ratio,
    shown,
)

HERE = [name for name, row in FORMATS.items() if features.check(row.feature)]
NET = ConvPairConfig(widths=(8, 8, 8), layers=1, groups=4, size=(32, 32))


def smooth(count: int, height: int = 32, width: int = 32, seed: int = 0) -> list[np.ndarray]:
    """Pictures with something to lose at every quality: soft shapes and some grain."""
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
    """A coder that loses nothing."""

    name, kind, device, about = "same", "codec", "cpu", {}

    def encode(self, pictures):
        return pictures.clone()

    def decode(self, coded):
        return coded

    def keep(self, coded):
        return [Unit(each.shape[1] * each.shape[2], 8 * each.numel(), 8 * each.numel() + 80) for each in coded]

    def done(self):
        return Kept()


class Colour:
    """A network that sees the mean colour and its spread."""

    name, side = "Colour", 16

    def __call__(self, pixels):
        return torch.cat([pixels.mean((2, 3)), pixels.std((2, 3))], 1)


def test_a_network_sees_the_originals_once():
    class Counting(Colour):
        seen = 0

        def __call__(self, pixels):
            self.seen += len(pixels)
            return super().__call__(pixels)

    pictures, coder = Shown(smooth(9)), CodecCoder(codec(BSQConfig(bits=28)), "mine")
    alone, shared = Counting(), Counting()
    original = reconstruction.features(pictures.batches(4), Colour())
    first = measure(coder, pictures, batch=4, network=alone).scores["FD-Colour"]
    again = measure(coder, pictures, batch=4, network=shared, original=original).scores["FD-Colour"]
    assert (alone.seen, shared.seen) == (18, 9)
    assert first == again


# ---- formats ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sheet", [False, True])
@pytest.mark.parametrize("format", HERE)
def test_a_better_quality_costs_more_and_keeps_more(format, sheet):
    pictures = Shown(smooth(12))
    rows = [measure(Baseline(format, q, sheet=sheet), pictures, rounds=20) for q in (10, 50, 95)]
    for measured in (CODED, FILED, "PSNR", "SSIM"):
        values = [row.scores[measured].value for row in rows]
        assert values == sorted(values)
        assert values[0] < values[-1]
    assert all(row.scores[CODED].value < row.scores[FILED].value for row in rows)


@pytest.mark.parametrize("format", HERE)
def test_sheets_share_heads(format):
    pictures = Shown(smooth(16))
    alone, sheet = (measure(Baseline(format, 50, sheet=how), pictures, rounds=20).scores for how in (False, True))
    assert sheet[FILED].value < alone[FILED].value
    assert sheet[FILED].value - sheet[CODED].value < (alone[FILED].value - alone[CODED].value) / 4


@settings(max_examples=30)
@given(st.integers(1, 7), st.integers(1, 40), st.integers(1, 40))
def test_a_sheet_is_cut_as_it_was_laid(B, H, W):
    pictures = torch.randint(0, 256, (B, 3, H, W), dtype=torch.uint8)
    laid = baselines._laid(pictures)
    assert laid.shape[1] % 16 == laid.shape[2] % 16 == 0
    file = baselines.File(b"", Image.new("RGB", (1, 1)), B, (H, W))
    assert torch.equal(baselines._cut(laid, file), pictures)


def test_what_of_a_file_is_the_picture():
    """Weighed by hand, byte by byte, and not with what the module reads by."""
    pictures = batch(smooth(6, 40, 24))
    if "jpeg" in HERE:
        coder = Baseline("jpeg", 60)
        for file, unit in zip(coded := coder.encode(pictures), coder.keep(coded), strict=True):
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
            assert unit == Unit(40 * 24, 8 * min(scans), 8 * len(file.data))
        assert coder.done().once == 8 * 2 * 69  # two tables of 64 bytes, each with a head of five
    if "webp" in HERE:
        coder = Baseline("webp", 60)
        for file, unit in zip(coded := coder.encode(pictures), coder.keep(coded), strict=True):
            assert file.data[12:16] == b"VP8 "
            assert file.data[23:26] == b"\x9d\x01\x2a"
            assert unit.coded // 8 + 20 + 7 + file.data[16] % 2 == len(file.data)
    if "avif" in HERE:
        coder = Baseline("avif", 60)
        for file, unit in zip(coded := coder.encode(pictures), coder.keep(coded), strict=True):
            inside = file.data[file.data.index(b"mdat") + 4 :]
            assert inside[:3] == b"\x12\x00\x0a"  # a delimiter, then the sequence
            assert unit.coded == 8 * (len(inside) - 2 - 2 - inside[3])


@pytest.mark.parametrize("format", HERE)
def test_what_is_not_the_picture_is_alike(format):
    coder = Baseline(format, 30)
    first, second = (coder.encode(batch(smooth(1, seed=seed)))[0].data for seed in (1, 2))
    rest = [len(data) - FORMATS[format].coded(data) for data in (first, second)]
    assert abs(rest[0] - rest[1]) <= 1  # WebP pads to even lengths


def test_formats_that_cannot_be(monkeypatch):
    with pytest.raises(ConfigError, match="no baseline 'jpg'"):
        Baseline("jpg", 50)
    with pytest.raises(ConfigError, match="quality 101"):
        Baseline("jpeg", 101)
    with pytest.raises(ConfigError, match="no colour at 4:4:4"):
        Baseline("webp", 50, "4:4:4")
    monkeypatch.setattr(features, "check", lambda name: name != "avif")
    with pytest.raises(ConfigError, match="writes no avif") as error:
        Baseline("avif", 50)
    assert "11.3" in error.value.remedy
    assert QUALITIES == tuple(sorted(QUALITIES))


@pytest.mark.parametrize("format", [name for name in HERE if name != "webp"])
def test_whole_colour_costs_and_keeps_more(format):
    noisy = [np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)]
    half, whole = (measure(Baseline(format, 90, chroma), Shown(noisy), rounds=0) for chroma in ("4:2:0", "4:4:4"))
    assert whole.scores["PSNR"].value > half.scores["PSNR"].value + 1
    assert whole.scores[CODED].value > half.scores[CODED].value
    assert (half.kind, whole.kind) == (format, f"{format} 4:4:4")


# ---- rows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "quantizer", [BSQConfig(bits=28), VQConfig(codes=50, dim=6), GroupedVQConfig(codes=20, dim=6, groups=3)]
)
def test_every_number_again(quantizer, tmp_path, monkeypatch):
    model, pictures = codec(quantizer), smooth(11)
    clock = iter(range(10**6))
    spent = iter([0.5, 0.25] * 100)  # encoding, decoding
    now = [0.0]

    def tick() -> float:
        if next(clock) % 2:
            now[0] += next(spent)
        return now[0]

    monkeypatch.setattr(reconstruction.time, "perf_counter", tick)
    torch.manual_seed(3)
    perceptual = LPIPS("alexnet").eval()
    row = measure(CodecCoder(model, "mine"), Shown(pictures), batch=4, perceptual=perceptual, network=Colour())
    assert (row.pictures, row.pixels, row.kind, row.missing) == (11, 11 * 1024, "codec", {})
    with torch.no_grad():
        x = batch(pictures)
        drawn = torch.cat([model.reconstruct(model.pixels(some)) for some in x.split(4)])
        ids = torch.cat([model.encode(model.pixels(some)).ids for some in x.split(4)])
    given = ((drawn.clamp(-1, 1) + 1) * 127.5).round().numpy().astype(np.uint8)
    scores = {name: one.value for name, one in row.scores.items()}
    each = [decibel(a, b) for a, b in zip(x.numpy(), given, strict=True)]
    assert scores["PSNR"] == pytest.approx(np.mean(each), abs=1e-4)
    assert scores[POOLED] == pytest.approx(decibel(x.numpy(), given), abs=1e-6)
    a, b = x / 255, torch.from_numpy(given) / 255
    assert scores["SSIM"] == pytest.approx(structural_similarity_index_measure(b, a, data_range=1.0).item(), abs=1e-4)
    with torch.no_grad():
        assert scores["LPIPS-alexnet"] == pytest.approx(perceptual(a * 2 - 1, b * 2 - 1).mean().item(), rel=1e-4)
    f, g = (torch.cat([Colour()(seen(p[None])) for p in side]).double().numpy() for side in (a * 2 - 1, b * 2 - 1))
    cf, cg = np.cov(f.T), np.cov(g.T)
    roots = np.sqrt(np.maximum(np.linalg.eigvals(cf @ cg).real, 0)).sum()
    distance = np.square(f.mean(0) - g.mean(0)).sum() + np.trace(cf) + np.trace(cg) - 2 * roots
    assert scores["FD-Colour"] == pytest.approx(distance, rel=1e-3, abs=1e-5)

    bits = sum(max(1, (size - 1).bit_length()) for size in model.sizes)
    assert scores[CODED] == 64 * bits / 1024
    named = [Picture(str(n), lambda n=n: png(pictures[n])) for n in range(11)]
    file = tokenize(model, named, tmp_path / "a.vtok", fit=Fit(how="pad"), name="mine", batch=4)
    assert scores[FILED] == pytest.approx(8 * file.path.stat().st_size / (11 * 1024), rel=1e-12)
    groups = ids.flatten(0, 2).T.tolist() if model.grouped else [ids.flatten().tolist()]
    assert len(row.use) == len(groups) == len(model.sizes)
    total = 0.0
    for use, values, size in zip(row.use, groups, model.sizes, strict=True):
        counts = collections.Counter(values)
        entropy = -sum(n / len(values) * math.log2(n / len(values)) for n in counts.values())
        assert (use.codes, use.used, use.tokens) == (size, len(counts), 11 * 64)
        assert use.entropy == pytest.approx(entropy, abs=1e-9)
        total += entropy
    assert scores[ENTROPY] == pytest.approx(total * 64 / 1024, abs=1e-9)
    assert row.perplexity == pytest.approx(2 ** (total / len(groups)))
    assert row.share == pytest.approx(np.mean([use.used / use.codes for use in row.use]))
    assert scores[ENCODED] == pytest.approx(11 / (3 * 0.5))
    assert scores[DECODED] == pytest.approx(11 / (3 * 0.25))
    assert row.about["model"] == identity(model)
    for one in row.scores.values():
        assert one.interval[0] <= one.value <= one.interval[1]
    assert json.loads(json.dumps(row.plain, allow_nan=False))["scores"]["PSNR"]["value"] == scores["PSNR"]


def seen(pixels):
    return torch.nn.functional.interpolate(pixels, (16, 16), mode="bicubic", antialias=True).clamp(-1, 1)


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("format", HERE)
def test_every_number_of_a_format_again(format):
    pictures = smooth(7)
    coder = Baseline(format, 40)
    row = measure(coder, Shown(pictures), batch=3)
    coded = sum(unit.coded for unit in coder.keep(coder.encode(batch(pictures))))
    once = 8 * 138 if format == "jpeg" else 0  # its tables
    assert row.scores[CODED].value == pytest.approx((coded + once) / (7 * 1024))
    files, values = [], []
    for pixels in pictures:
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, format, quality=40, **FORMATS[format].settings)
        files.append(len(file.getvalue()))
        values.append(decibel(pixels, np.asarray(Image.open(file).convert("RGB"))))
    assert row.scores[FILED].value == pytest.approx(8 * sum(files) / (7 * 1024))
    assert row.scores["PSNR"].value == pytest.approx(np.mean(values), abs=1e-4)
    assert row.scores[CODED].of == 7
    assert row.use == ()
    assert ENTROPY not in row.scores


def test_what_comes_back_as_it_was():
    row = measure(Same(), Shown(smooth(5)), batch=2)
    assert row.equal == 5
    assert row.scores["PSNR"].value == row.scores[POOLED].value == math.inf
    assert row.scores["SSIM"].value == pytest.approx(1, abs=1e-5)
    assert (row.scores[CODED].value, row.scores[FILED].value) == (24, 24 + 80 / 1024)
    plain = json.loads(json.dumps(row.plain, allow_nan=False))
    assert plain["scores"]["PSNR"]["value"] is None
    assert plain["equal"] == 5


def test_one_exact_picture_hides_no_error():
    """The mean is infinite then; that of the mean error is not."""
    flat = np.full((32, 32, 3), 128, np.uint8)
    row = measure(Baseline("jpeg", 95), Shown([flat, *smooth(3)]), rounds=20)
    assert row.equal == 1
    assert row.scores["PSNR"].value == math.inf
    assert 20 < row.scores[POOLED].value < 60


def test_continuous_codes_have_no_bits():
    row = measure(CodecCoder(codec(KLConfig(width=4)), "kl"), Shown(smooth(3)), missing={"LPIPS": "not asked for"})
    assert CODED not in row.scores
    assert "continuous" in row.missing[CODED]
    assert row.missing["LPIPS"] == "not asked for"
    assert (row.share, row.perplexity) == (None, None)


def test_pictures_of_any_size_keep_their_order():
    pictures = [*smooth(2, 30, 21), *smooth(3, 12, 40, seed=1), *smooth(1, 30, 21, seed=2)]
    found = list(Shown(pictures).batches(2))
    assert [len(some) for some in found] == [2, 2, 1, 1]
    assert torch.equal(found[3], batch(pictures[5:]))
    model = codec(BSQConfig(bits=5))
    row = measure(CodecCoder(model, "bsq"), Shown(pictures), batch=2, rounds=20)
    cells = [math.ceil(p.shape[0] / 4) * math.ceil(p.shape[1] / 4) for p in pictures]
    assert row.scores[CODED].value == pytest.approx(5 * sum(cells) / sum(p.shape[0] * p.shape[1] for p in pictures))
    sized = [some.shape[2:] for some in Shown(pictures, size=(16, 16)).batches(10)]
    assert sized == [(16, 16)]


def test_a_coder_can_be_measured_again():
    coder, pictures = CodecCoder(codec(BSQConfig(bits=5)), "bsq"), Shown(smooth(4))
    first, second = (measure(coder, pictures, rounds=20) for _ in range(2))
    assert first.scores[FILED] == second.scores[FILED]
    assert first.use == second.use


def test_nothing_is_measured_in_training_or_without_pictures():
    with pytest.raises(ConfigError, match="in training"):
        CodecCoder(codec(BSQConfig(bits=5)).train(), "bsq")
    with pytest.raises(DataError, match="no pictures"):
        measure(Same(), Shown([]))
    with pytest.raises(ConfigError, match="batches of 0"):
        list(Shown(smooth(1)).batches(0))


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 50)), min_size=2, max_size=12), st.integers(0, 100))
def test_a_ratio_is_of_sums(pairs, once):
    above, below = zip(*pairs, strict=True)
    found = ratio("r", above, below, of=len(pairs), once=once, rounds=50)
    assert found.value == pytest.approx((sum(above) + once) / sum(below))
    assert found.interval[0] <= found.interval[1]
    assert math.isfinite(found.interval[0]) == (len(pairs) >= 5)
    alike = ratio("r", [3] * 5, [2] * 5, of=5, rounds=50)
    assert (alike.value, alike.interval) == (1.5, (1.5, 1.5))
    assert ratio("r", above[:1], below[:1], of=1).interval == (-math.inf, math.inf)
    with pytest.raises(DataError):
        ratio("r", [], [], of=0)


# ---- data sets --------------------------------------------------------------------------------------------------


def test_scenes_and_folders(tmp_path):
    atlas = tmp_path / "atlas.safetensors"
    Atlas.build(drawn()).save(atlas)
    scenes = shown("plain", limit=3, side=24, atlas=str(atlas))
    (pixels,) = scenes.batches(8)
    assert pixels.shape == (3, 3, 24, 24)
    assert torch.equal(next(shown("plain", limit=3, side=24, atlas=str(atlas)).batches(8)), pixels)
    assert not torch.equal(next(shown("plain", limit=3, side=24, atlas=str(atlas), seed=1).batches(8)), pixels)
    many = torch.cat(list(shown("plain", limit=70, side=24, atlas=str(atlas)).batches(9)))
    assert len(many) == 70
    assert torch.equal(many[:3], pixels)
    with pytest.raises(ConfigError, match="limit of 0"):
        shown("plain", limit=0, atlas=str(atlas))
    with pytest.raises(ConfigError, match="never end"):
        shown("plain", atlas=str(atlas))
    for name, colour in (("cats", "red"), ("dogs", "blue")):
        (tmp_path / "set" / name).mkdir(parents=True)
        Image.new("RGB", (20, 30), colour).save(tmp_path / "set" / name / "a.png")
    found = shown(str(tmp_path / "set"), classes=True)
    assert (found.names, found.labels.tolist()) == (("cats", "dogs"), [0, 1])
    assert next(found.batches(4)).shape == (2, 3, 30, 20)
    assert next(shown(str(tmp_path / "set"), side=16).batches(4)).shape == (2, 3, 16, 16)
    with pytest.raises(DataError, match="nowhere"):
        shown("nowhere")


# ---- readers ----------------------------------------------------------------------------------------------------

COLOURS = {"red": 0, "green": 1, "blue": 2}


class Eyes:
    """Stands for a contrastive model: a picture is its mean colour, a text the colour that it names."""

    def images(self, pictures):
        return torch.stack([picture.float().mean((1, 2)) / 255 for picture in pictures])

    def features(self, pictures):
        return torch.stack([picture.float().mean((1, 2)) for picture in pictures])

    def texts(self, texts):
        return torch.stack([torch.eye(3)[next(n for name, n in COLOURS.items() if name in text)] for text in texts])


class Shifted(Same):
    """Gives every third picture back with its channels exchanged."""

    name = "shifted"

    def decode(self, coded):
        return torch.stack([p.roll(1, 0) if n % 3 == 0 else p for n, p in enumerate(coded)])


def test_a_reader_names_what_it_still_can():
    chance = np.random.default_rng(0)
    labels = torch.tensor([n % 3 for n in range(12)])
    pictures = []
    for n, label in enumerate(labels.tolist()):
        pixels = chance.integers(0, 60, (16, 16, 3), dtype=np.uint8)
        pixels[..., (label + (n == 11)) % 3] += 150  # the last is of another colour than its label says
        pictures.append(pixels)
    data = Shown(pictures, labels, tuple(COLOURS))
    train = Told(list(Shown(pictures * 3).batches(7)), labels.repeat(3))
    reader = Reader(Eyes(), Told(data.batches(12), labels), data.names, train=train)
    assert reader.right.tolist() == [True] * 11 + [False]
    row = measure(Shifted(), data, batch=12, reader=reader, rounds=20)
    prompted, still, probed = row.read
    # 0, 3, 6 and 9 came back in another colour.
    assert (prompted.value, prompted.beside["originals"]) == (7 / 12, 11 / 12)
    assert prompted.beside["majority"] == prompted.beside["chance"] == pytest.approx(1 / 3)
    assert (still.value, still.of) == (7 / 11, 11)
    x = Eyes().features(list(torch.cat(train.batches)))
    z = Eyes().features(list(batch(pictures)))
    assert probed.beside["originals"] == probe(x, train.labels, z, labels, tuple(COLOURS)).scores[0].value
    given = list(Shifted().decode(batch(pictures)))
    assert probed.value == probe(x, train.labels, Eyes().features(given), labels, tuple(COLOURS)).scores[0].value
    same = measure(Same(), data, batch=5, reader=reader, rounds=20)
    assert [score.value for score in same.read] == [11 / 12, 1.0, probed.beside["originals"]]


def test_a_reader_wants_the_same_pictures():
    data = Shown(smooth(4), torch.tensor([0, 1, 2, 0]), tuple(COLOURS))
    reader = Reader(Eyes(), Told(data.batches(2), data.labels), data.names)
    with pytest.raises(DataError, match="3 pictures and 4 labels"):
        measure(Same(), Shown(smooth(3)), reader=reader, rounds=20)
