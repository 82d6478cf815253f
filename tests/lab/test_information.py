"""The information ledger: measures with a closed form, readings of what was planted and of what was not, and the walk
through tiny models."""

import json
import math

import pytest
import torch
from cyclopts import App
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import worlds
from models import test_looking as looking
from models import test_vlm as vlm
from vitrail.codecs.codec import Codec
from vitrail.codecs.presets import vit_codec
from vitrail.codecs.quantizers import BSQConfig
from vitrail.connectors import FusedConfig
from vitrail.data.scenes.sprites import Atlas
from vitrail.encoders.presets import TEXTS, VITS
from vitrail.encoders.vit import ViT
from vitrail.errors import ConfigError, DataError, VitrailError
from vitrail.hub import save
from vitrail.lab import information as lab
from vitrail.lab.bottlenecks import bottlenecks, side_of
from vitrail.lab.information import Bottleneck, Truth, effective_rank, information, intrinsic_dimension, read
from vitrail.lab.truths import classed, scenes
from vitrail.models.clip import Contrastive, ContrastiveConfig
from vitrail.models.looking import LookingVLM
from vitrail.models.qlip import QLIP, QLIPConfig
from vitrail.models.unified import Unified, UnifiedConfig
from vitrail.models.vlm import VLMConfig

BLOCK = VITS["clip-b16"].block
SMALL = BLOCK.with_(width=32, attention=BLOCK.attention.with_(heads=2), mlp=BLOCK.mlp.with_(hidden=48))
VIT = VITS["clip-b16"].with_(layers=1, image=32, patch=8, block=SMALL, norm_first=False)
PLAIN = VIT.with_(cls=False, positions="patches", pool="mean", norm_last="tokens")
CODEC = vit_codec(PLAIN, BSQConfig(bits=6), 6)
TEXT = next(iter(TEXTS.values())).with_(layers=1, vocab=50, eos=49, context=7, block=SMALL)


# ---- ranks ------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.integers(1, 8), st.integers(8, 12), st.floats(0.01, 100.0), st.integers(0, 99))
def test_directions_used_equally_are_the_rank(k, D, scale, seed):
    turn, _ = torch.linalg.qr(torch.randn(D, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    assert effective_rank(scale * turn[:k]) == pytest.approx(k)
    assert effective_rank(torch.cat([turn[:k], turn[:k]])) == pytest.approx(k)  # a row again is no new direction


@settings(max_examples=30)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any))
def test_effective_rank_is_the_entropy_of_singular_values(values):
    shares = [v / sum(values) for v in values if v > 0]
    assert effective_rank(torch.tensor(values).float().diag()) == pytest.approx(
        math.exp(-sum(p * math.log(p) for p in shares)), rel=1e-5
    )


def test_nothing_has_no_rank_and_what_is_no_number_is_refused():
    assert effective_rank(torch.zeros(3, 4)) == 0
    with pytest.raises(DataError, match="weights whole"):
        effective_rank(torch.tensor([[1.0, math.nan]]))


# ---- dimension --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 2, 4])
def test_dimension_of_a_cube_that_lies_in_more(d):
    chance = torch.Generator().manual_seed(d)
    turn, _ = torch.linalg.qr(torch.randn(20, 20, generator=chance))
    cube = torch.rand(1500, d, generator=chance)
    assert intrinsic_dimension(cube @ turn[:d]) == pytest.approx(d, rel=0.1)


def test_dimension_cannot_be_told_of_few_points_or_of_a_lattice():
    assert intrinsic_dimension(torch.rand(9, 3)) is None
    lattice = torch.cartesian_prod(*[torch.arange(4.0)] * 3)
    assert intrinsic_dimension(lattice) is None
    cube = torch.rand(300, 2, generator=torch.Generator().manual_seed(0))
    assert intrinsic_dimension(torch.cat([cube, cube])) == intrinsic_dimension(cube)


# ---- readings ---------------------------------------------------------------------------------------------------


def planted(n=500, F=100, seed=0):
    """Features, and a number and a class that lie along directions of them."""
    chance = torch.Generator().manual_seed(seed)
    x = torch.randn(n, F, generator=chance)
    number, cut = x @ torch.randn(F, 2, generator=chance), x[:, :10] @ torch.randn(10, 3, generator=chance)
    return x, number, cut.argmax(1), torch.randint(3, (n,), generator=chance), torch.randn(n, 2, generator=chance)


def halves(x, y, classes=0):
    return x[:400], Truth(y[:400], classes), x[400:], Truth(y[400:], classes)


def test_what_was_planted_is_found_and_what_is_absent_is_not():
    x, number, kind, other, noise = planted()
    assert read(*halves(x, number)).value > 0.99
    found = read(*halves(x, kind, 3))
    assert found.value > 0.75 > found.blind + 0.2 and found.of == 100
    absent = read(*halves(x, other, 3))
    assert absent.interval[0] <= max(absent.blind, 1 / 3) and absent.value < 0.5
    nothing = read(*halves(x, noise))
    assert nothing.interval[0] < 0 and nothing.value < 0.05


def test_scale_and_place_of_a_feature_do_not_matter():
    x, number, *_ = planted(F=30)
    moved = x * torch.logspace(-2, 2, 30) + 5
    moved = torch.cat([moved, torch.full((len(x), 3), 7.0)], 1)  # what never changes says nothing
    assert read(*halves(moved, number)).value == pytest.approx(read(*halves(x, number)).value, abs=1e-3)


def test_the_reading_is_ridge_regression(monkeypatch):
    """By way of products of pictures or of features, it is one solution."""
    monkeypatch.setattr(lab, "PENALTIES", (0.1,))
    monkeypatch.setattr(lab, "AT_ONCE", 7)
    x, number, *_ = planted(n=40, F=20)
    train, test, y = x[:30].double(), x[30:].double(), number[:30].double()
    z, t = ((part - train.mean(0)) / train.std(0) / 20**0.5 for part in (train, test))
    strength = 0.1 * (z @ z.T).diag().mean()
    weights = torch.linalg.solve(z.T @ z + strength * torch.eye(20), z.T @ (y - y.mean(0)))
    torch.testing.assert_close(lab._ridge(train, y, test), y.mean(0) + t @ weights, rtol=1e-6, atol=1e-6)


def test_the_error_of_pictures_left_out_is_that_of_fits_without_them():
    x, number, *_ = planted(n=25, F=12)
    z, y = x.double() - x.double().mean(0), number.double()
    strength = torch.tensor(3.0, dtype=torch.float64)
    found = lab._left_out(*torch.linalg.eigh(z @ z.T), y, strength)
    free = torch.cat([z, torch.ones(25, 1)], 1)  # the mean is not held back
    held = torch.diag(torch.cat([strength.expand(12), torch.zeros(1)]))
    for i in range(25):
        rest = torch.arange(25) != i
        weights = torch.linalg.solve(free[rest].T @ free[rest] + held, free[rest].T @ y[rest])
        torch.testing.assert_close(found[i], y[i] - free[i] @ weights)


def test_few_pictures_are_refused():
    with pytest.raises(DataError, match="at least 20"):
        read(torch.rand(9, 2), Truth(torch.rand(9, 1)), torch.rand(2, 2), Truth(torch.rand(2, 1)))


# ---- the ledger -------------------------------------------------------------------------------------------------


def test_what_is_lost_does_not_come_back():
    wide, narrow = torch.rand(60, 4, 8), torch.rand(60, 4, 2)
    lines = information(
        [Bottleneck("a", wide), Bottleneck("b", narrow, 3), Bottleneck("c", wide), Bottleneck("d", narrow, after="a")],
        raw=500,
        sets={},
    )
    assert [line.bits for line in lines] == [4 * 8 * 16, 4 * 3, 4 * 8 * 16, 4 * 2 * 16]
    assert [line.at_most for line in lines] == [500, 12, 12, 128]
    assert [line.after for line in lines] == ["", "a", "b", "a"]
    assert [line.bound for line in lines] == [4, 2, 4, 2]
    assert all(1 <= line.rank <= line.bound and 1 <= line.spread <= line.width for line in lines)
    assert lines[1].ratio == 500 / 12


def test_clips_bound_says_nothing():
    """576 × 1024 numbers in 16 bits are more than the picture has, and the rank is bound by the patches."""
    (line,) = information([Bottleneck("patches", torch.rand(1, 576, 1024))], raw=24 * 336**2, sets={})
    assert line.ratio < 0.3 and line.at_most == 24 * 336**2
    assert line.bound == 576


PICTURES = torch.randint(0, 256, (5, 3, 32, 32), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def shapes(model, pictures=PICTURES):
    return {b.name: (*b.tokens.shape[1:], b.bits, b.after) for b in bottlenecks(model, pictures)}


def test_codecs():
    torch.manual_seed(0)
    model = Codec(CODEC)
    assert side_of(model) == 32
    assert shapes(model) == {
        "pixels": (1024, 3, 24, ""),
        "features": (16, 32, 0, ""),
        "before the quantizer": (16, 6, 0, ""),
        "codes": (16, 6, 6, ""),
    }
    codes = bottlenecks(model, PICTURES)[-1].tokens
    torch.testing.assert_close(codes, model.encode(model.pixels(PICTURES)).codes.flatten(1, 2))


def test_towers_and_pairs():
    cls = VIT.with_(pool="cls")
    assert shapes(ViT(cls)) == {"pixels": (1024, 3, 24, ""), "patches": (16, 32, 0, ""), "pooled": (1, 32, 0, "pixels")}
    found = shapes(Contrastive(ContrastiveConfig(image=PLAIN, text=TEXT, embed=12)))
    assert found["pooled"] == (1, 32, 0, "patches") and found["embedding"] == (1, 12, 0, "")


def test_qlip_and_the_unified_model():
    qlip = QLIP(QLIPConfig(codec=CODEC, text=TEXT, embed=12))
    assert shapes(qlip)["embedding"] == (1, 12, 0, "features")  # the mean of them, and not of the codes
    model = Unified(UnifiedConfig(decoder=vlm.DECODER, codec=CODEC))
    found = shapes(model)
    assert list(found)[-2:] == ["soft tokens", "last hidden states"]
    assert found["soft tokens"] == (16, 32, 0, "codes")


def test_vision_language_models():
    config = VLMConfig(
        tower=vlm.TOWER, decoder=vlm.DECODER, policy=vlm.POLICIES["naive"], connector=vlm.PROJECTOR, layer=-2
    )
    found = shapes(vlm.made(config))
    assert list(found) == ["pixels", "tower", "soft tokens", "last hidden states"]
    assert found["tower"][0] == found["soft tokens"][0] == found["last hidden states"][0]
    asked = FusedConfig(reads=32, gives=32, vocab=50, first=5, later=2, layers=2, width=24, heads=2, hidden=32)
    reading = vlm.made(config.with_(queries=asked))
    shown = reading.prepare([Image.fromarray(PICTURES[0].permute(1, 2, 0).numpy())])
    soft = {b.name: b.tokens for b in bottlenecks(reading, PICTURES[:1])}["soft tokens"][0]
    torch.testing.assert_close(soft, reading.look(shown).blocks[0].detach(), rtol=1e-4, atol=1e-5)
    found = shapes(reading)
    assert list(found) == ["pixels", "tower", "before the queries", "soft tokens", "last hidden states"]
    assert found["before the queries"][0] == found["tower"][0] > found["soft tokens"][0] == 5
    assert found["last hidden states"][0] == 5
    for kind in looking.KINDS:
        tiny = looking.KINDS[kind]
        model = LookingVLM(tiny.with_(tower=tiny.tower.with_(channels=3)))
        names = ["pixels", "tower"] + ["soft tokens"] * (tiny.connector is not None)
        assert list(shapes(model)) == names


def test_world_models():
    world, side = worlds.genie(), 8
    codec = world.codec
    assert side_of(world) == side
    wanted = {
        "pixels": (side**2, 3, 24, ""),
        "codes": (math.prod(codec.config.grid), codec.quantizer.width, codec.bits, ""),
    }
    assert shapes(world, PICTURES[:, :, :side, :side]) == wanted


def test_what_has_no_bottlenecks_is_refused():
    with pytest.raises(ConfigError, match="no bottlenecks that are known"):
        side_of(torch.nn.Linear(2, 2))


# ---- scenes -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def atlas() -> Atlas:
    from data.scenes.conftest import drawn

    return Atlas.build(drawn())


def test_truths_are_those_of_the_scenes(atlas):
    shown = scenes(atlas, 32, 60)
    assert shown.pictures.shape == (120, 3, 32, 32)
    (one, position), (_, colour), (_, identity), (many, count) = (
        shown.truths[name] for name in ("position", "colour", "identity", "count")
    )
    assert (one, many) == (slice(0, 60), slice(60, 120))
    assert position.values.shape == (60, 2) and 0 < position.values.min() and position.values.max() < 1
    assert (colour.classes, identity.classes, count.classes) == (10, 10, 4)
    for truth in (colour, identity, count):
        assert truth.values.min() >= 0 and truth.values.unique().numel() > truth.classes // 2
        assert truth.values.max() < truth.classes
    with pytest.raises(ConfigError, match="at least 40"):
        scenes(atlas, 32, 39)


def test_a_position_that_is_drawn_can_be_read(atlas):
    """The pixels of flat scenes tell it badly; where the sprite is the only thing that is bright, a straight reading of
    the brightness finds it."""
    shown = scenes(atlas, 32, 200)
    x, y = shown.truths["position"][1].values.T[..., None]  # (B, 1) each
    across, down = ((-((torch.arange(32) / 31 - place) ** 2) / 0.02).exp() for place in (x, y))
    lit = down[:, :, None] * across[:, None, :]
    (line,) = information(
        [Bottleneck("lit", lit.flatten(1)[..., None])], 24 * 32**2, {"position": shown.truths["position"]}
    )
    assert line.readings["position"].value > 0.9


def test_pictures_with_classes():
    images = [picture.permute(1, 2, 0).numpy() for picture in PICTURES]
    shown = classed(images, torch.tensor([0, 1, 2, 0, 1]), 3, 16)
    assert shown.pictures.shape == (5, 3, 16, 16) and shown.pictures.dtype == torch.uint8
    assert shown.truths["identity"][1].classes == 3


def test_pictures_sorted_by_class_are_tested_on_classes_that_were_fitted():
    """Folders are read class by class, and the last quarter is the test."""
    labels = torch.arange(4).repeat_interleave(40)
    chance = torch.Generator().manual_seed(0)
    colours = torch.tensor([[0, 0, 0], [200, 0, 0], [0, 200, 0], [0, 0, 200]], dtype=torch.uint8)[labels]
    noise = torch.randint(0, 50, (160, 4, 4, 3), generator=chance, dtype=torch.uint8)
    images = list((colours[:, None, None] + noise).numpy())
    shown = classed(images, labels, 4, 4)
    rows, truth = shown.truths["identity"]
    bright = shown.pictures.double().mean((2, 3)) > 100  # (B, 3)
    assert torch.equal((bright * torch.tensor([1, 2, 3])).sum(1), truth.values) and rows == slice(0, 160)
    (line,) = information([Bottleneck("pixels", shown.pictures.flatten(2).mT.float(), 24)], 384, shown.truths)
    assert line.readings["identity"].value > 0.9
    assert torch.equal(classed(images, labels, 4, 4).pictures, shown.pictures)


def test_command(atlas, tmp_path, monkeypatch, capsys):
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    save(Codec(CODEC), "codec")
    atlas.save(tmp_path / "shapes.safetensors")
    app = App(result_action="return_value")
    app.command("vitrail.cli.information:information", name="information")
    words = [
        "information",
        "codec",
        "--atlas",
        "shapes.safetensors",
        "--count",
        "60",
        "--json",
        "l.json",
        "--out",
        "l.svg",
    ]
    app([*words, "--device", "cpu"], exit_on_error=False)
    out = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in out[1:6]] == [
        "pixels", "features", "before the quantizer", "codes", "without looking",
    ]  # fmt: skip
    said = json.loads((tmp_path / "l.json").read_text())
    assert [line["bits"] for line in said["lines"]] == [24 * 32**2, 16 * 32 * 16, 16 * 6 * 16, 16 * 6]
    assert said["lines"][-1]["at_most"] == 96 and "of 6" in out[4] and "256×" in out[4]
    assert "codes" in (tmp_path / "l.svg").read_text()
    monkeypatch.setattr("vitrail.hub.load", None)
    with pytest.raises(VitrailError, match=r"l\.svg/l\.json cannot be written"):  # before the weights are read
        app(["information", "codec", "--json", "l.svg/l.json"], exit_on_error=False)
