"""Information at bottlenecks: rank and dimension measures, probes, and bottlenecks of tiny models."""

import json
import math

import pytest
import torch
from cyclopts import App
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import worlds
from models import test_cross_attention_vlm as cross_vlm
from models import test_vlm as vlm
from vitrail.codecs.codec import Codec
from vitrail.codecs.presets import make_vit_codec_config
from vitrail.codecs.quantizers import BSQConfig
from vitrail.connectors import FusedQueryConfig
from vitrail.data.scenes.atlas import Atlas
from vitrail.encoders.presets import TEXT_TOWER_PRESETS, VIT_PRESETS
from vitrail.encoders.vit import ViT
from vitrail.errors import ConfigError, DataError, VitrailError
from vitrail.hub import save
from vitrail.lab import bottleneck_information as lab
from vitrail.lab.bottleneck_information import (
    Bottleneck,
    GroundTruth,
    compute_effective_rank,
    estimate_intrinsic_dimension,
    measure_bottlenecks,
    run_linear_probe,
)
from vitrail.lab.bottlenecks import collect_bottlenecks, get_image_size
from vitrail.lab.ground_truth import make_class_images, make_scene_images
from vitrail.models.contrastive_model import ContrastiveConfig, ContrastiveModel
from vitrail.models.cross_attention_vlm import CrossAttentionVLM
from vitrail.models.qlip_model import QLIP, QLIPConfig
from vitrail.models.unified_model import UnifiedConfig, UnifiedModel
from vitrail.models.vlm import VLMConfig

BLOCK = VIT_PRESETS["clip-b16"].block
SMALL = BLOCK.replace(width=32, attention=BLOCK.attention.replace(heads=2), mlp=BLOCK.mlp.replace(intermediate_size=48))
VIT = VIT_PRESETS["clip-b16"].replace(layers=1, image_size=32, patch_size=8, block=SMALL, norm_first=False)
PLAIN = VIT.replace(cls_token=False, positions="patches", pool="mean", norm_last="tokens")
CODEC = make_vit_codec_config(PLAIN, BSQConfig(bits=6), 6)
TEXT = next(iter(TEXT_TOWER_PRESETS.values())).replace(
    layers=1, vocab_size=50, eos_token_id=49, context_length=7, block=SMALL
)


# ---- ranks ------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.integers(1, 8), st.integers(8, 12), st.floats(0.01, 100.0), st.integers(0, 99))
def test_effective_rank_counts_equal_directions(k, D, scale, seed):
    turn, _ = torch.linalg.qr(torch.randn(D, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    assert compute_effective_rank(scale * turn[:k]) == pytest.approx(k)
    assert compute_effective_rank(torch.cat([turn[:k], turn[:k]])) == pytest.approx(
        k
    )  # duplicate rows add no direction


@settings(max_examples=30)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any))
def test_effective_rank_is_the_entropy_of_singular_values(values):
    shares = [v / sum(values) for v in values if v > 0]
    assert compute_effective_rank(torch.tensor(values).float().diag()) == pytest.approx(
        math.exp(-sum(p * math.log(p) for p in shares)), rel=1e-5
    )


def test_rank_of_zeros_and_of_nan():
    assert compute_effective_rank(torch.zeros(3, 4)) == 0
    with pytest.raises(DataError, match="NaN or infinite"):
        compute_effective_rank(torch.tensor([[1.0, math.nan]]))


# ---- dimension --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 2, 4])
def test_dimension_of_an_embedded_cube(d):
    chance = torch.Generator().manual_seed(d)
    turn, _ = torch.linalg.qr(torch.randn(20, 20, generator=chance))
    cube = torch.rand(1500, d, generator=chance)
    assert estimate_intrinsic_dimension(cube @ turn[:d]) == pytest.approx(d, rel=0.1)


def test_dimension_is_none_for_few_points_or_ties():
    assert estimate_intrinsic_dimension(torch.rand(9, 3)) is None
    lattice = torch.cartesian_prod(*[torch.arange(4.0)] * 3)
    assert estimate_intrinsic_dimension(lattice) is None
    cube = torch.rand(300, 2, generator=torch.Generator().manual_seed(0))
    assert estimate_intrinsic_dimension(torch.cat([cube, cube])) == estimate_intrinsic_dimension(cube)


# ---- probes -----------------------------------------------------------------------------------------------------


def planted(n=500, F=100, seed=0):
    """Make features, and a number and a class that are linear in them."""
    chance = torch.Generator().manual_seed(seed)
    x = torch.randn(n, F, generator=chance)
    number, cut = x @ torch.randn(F, 2, generator=chance), x[:, :10] @ torch.randn(10, 3, generator=chance)
    return x, number, cut.argmax(1), torch.randint(3, (n,), generator=chance), torch.randn(n, 2, generator=chance)


def halves(x, y, classes=0):
    return x[:400], GroundTruth(y[:400], classes), x[400:], GroundTruth(y[400:], classes)


def test_probe_finds_planted_properties_only():
    x, number, kind, other, noise = planted()
    assert run_linear_probe(*halves(x, number)).value > 0.99
    found = run_linear_probe(*halves(x, kind, 3))
    assert found.value > 0.75 > found.blind + 0.2 and found.count == 100
    absent = run_linear_probe(*halves(x, other, 3))
    assert absent.interval[0] <= max(absent.blind, 1 / 3) and absent.value < 0.5
    nothing = run_linear_probe(*halves(x, noise))
    assert nothing.interval[0] < 0 and nothing.value < 0.05


def test_probe_is_invariant_to_scale_and_offset():
    x, number, *_ = planted(F=30)
    moved = x * torch.logspace(-2, 2, 30) + 5
    moved = torch.cat([moved, torch.full((len(x), 3), 7.0)], 1)  # constant features
    assert run_linear_probe(*halves(moved, number)).value == pytest.approx(
        run_linear_probe(*halves(x, number)).value, abs=1e-3
    )


def test_probe_is_ridge_regression(monkeypatch):
    """The primal and the dual solution are equal."""
    monkeypatch.setattr(lab, "RIDGE_PENALTIES", (0.1,))
    monkeypatch.setattr(lab, "CHUNK_SIZE", 7)
    x, number, *_ = planted(n=40, F=20)
    train, test, y = x[:30].double(), x[30:].double(), number[:30].double()
    z, t = ((part - train.mean(0)) / train.std(0) / 20**0.5 for part in (train, test))
    strength = 0.1 * (z @ z.T).diag().mean()
    weights = torch.linalg.solve(z.T @ z + strength * torch.eye(20), z.T @ (y - y.mean(0)))
    torch.testing.assert_close(lab._predict_ridge(train, y, test), y.mean(0) + t @ weights, rtol=1e-6, atol=1e-6)


def test_loo_residuals_match_refits():
    x, number, *_ = planted(n=25, F=12)
    z, y = x.double() - x.double().mean(0), number.double()
    strength = torch.tensor(3.0, dtype=torch.float64)
    found = lab._compute_loo_residuals(*torch.linalg.eigh(z @ z.T), y, strength)
    free = torch.cat([z, torch.ones(25, 1)], 1)  # the mean is not penalized
    held = torch.diag(torch.cat([strength.expand(12), torch.zeros(1)]))
    for i in range(25):
        rest = torch.arange(25) != i
        weights = torch.linalg.solve(free[rest].T @ free[rest] + held, free[rest].T @ y[rest])
        torch.testing.assert_close(found[i], y[i] - free[i] @ weights)


def test_too_few_images_raise():
    with pytest.raises(DataError, match="at least 20"):
        run_linear_probe(
            torch.rand(9, 2), GroundTruth(torch.rand(9, 1)), torch.rand(2, 2), GroundTruth(torch.rand(2, 1))
        )


# ---- bottlenecks -----------------------------------------------------------------------------------------------


def test_bits_bound_never_increases():
    wide, narrow = torch.rand(60, 4, 8), torch.rand(60, 4, 2)
    lines = measure_bottlenecks(
        [Bottleneck("a", wide), Bottleneck("b", narrow, 3), Bottleneck("c", wide), Bottleneck("d", narrow, source="a")],
        image_bits=500,
        ground_truths={},
    )
    assert [line.bits for line in lines] == [4 * 8 * 16, 4 * 3, 4 * 8 * 16, 4 * 2 * 16]
    assert [line.max_bits for line in lines] == [500, 12, 12, 128]
    assert [line.after for line in lines] == ["", "a", "b", "a"]
    assert [line.bound for line in lines] == [4, 2, 4, 2]
    assert all(1 <= line.rank <= line.bound and 1 <= line.spread <= line.width for line in lines)
    assert lines[1].ratio == 500 / 12


def test_bound_of_clip_is_vacuous():
    """576 × 1024 numbers of 16 bits exceed the bits of the image, and the patches bound the rank."""
    (line,) = measure_bottlenecks(
        [Bottleneck("patches", torch.rand(1, 576, 1024))], image_bits=24 * 336**2, ground_truths={}
    )
    assert line.ratio < 0.3 and line.max_bits == 24 * 336**2
    assert line.bound == 576


PICTURES = torch.randint(0, 256, (5, 3, 32, 32), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def shapes(model, pictures=PICTURES):
    return {b.name: (*b.tokens.shape[1:], b.bits_per_token, b.source) for b in collect_bottlenecks(model, pictures)}


def test_codecs():
    torch.manual_seed(0)
    model = Codec(CODEC)
    assert get_image_size(model) == 32
    assert shapes(model) == {
        "pixels": (1024, 3, 24, ""),
        "features": (16, 32, 0, ""),
        "before the quantizer": (16, 6, 0, ""),
        "codes": (16, 6, 6, ""),
    }
    codes = collect_bottlenecks(model, PICTURES)[-1].tokens
    torch.testing.assert_close(codes, model.encode(model.to_pixels(PICTURES)).codes.flatten(1, 2))


def test_towers_and_pairs():
    cls = VIT.replace(pool="cls")
    assert shapes(ViT(cls)) == {"pixels": (1024, 3, 24, ""), "patches": (16, 32, 0, ""), "pooled": (1, 32, 0, "pixels")}
    found = shapes(ContrastiveModel(ContrastiveConfig(image=PLAIN, text=TEXT, embed_dim=12)))
    assert found["pooled"] == (1, 32, 0, "patches") and found["embedding"] == (1, 12, 0, "")


def test_qlip_and_the_unified_model():
    qlip = QLIP(QLIPConfig(codec=CODEC, text=TEXT, embed_dim=12))
    assert shapes(qlip)["embedding"] == (1, 12, 0, "features")  # the mean of them, and not of the codes
    model = UnifiedModel(UnifiedConfig(decoder=vlm.DECODER, codec=CODEC))
    found = shapes(model)
    assert list(found)[-2:] == ["soft tokens", "last hidden states"]
    assert found["soft tokens"] == (16, 32, 0, "codes")


def test_vision_language_models():
    config = VLMConfig(
        tower=vlm.TOWER,
        decoder=vlm.DECODER,
        policy=vlm.POLICIES["naive"],
        connector=vlm.PROJECTOR,
        vision_feature_layer=-2,
    )
    found = shapes(vlm.made(config))
    assert list(found) == ["pixels", "tower", "soft tokens", "last hidden states"]
    assert found["tower"][0] == found["soft tokens"][0] == found["last hidden states"][0]
    asked = FusedQueryConfig(
        in_features=32,
        out_features=32,
        vocab_size=50,
        first_queries=5,
        later_queries=2,
        layers=2,
        width=24,
        heads=2,
        intermediate_size=32,
    )
    reading = vlm.made(config.replace(queries=asked))
    shown = reading.prepare_images([Image.fromarray(PICTURES[0].permute(1, 2, 0).numpy())])
    soft = {b.name: b.tokens for b in collect_bottlenecks(reading, PICTURES[:1])}["soft tokens"][0]
    torch.testing.assert_close(soft, reading.encode_images(shown).features[0].detach(), rtol=1e-4, atol=1e-5)
    found = shapes(reading)
    assert list(found) == ["pixels", "tower", "before the queries", "soft tokens", "last hidden states"]
    assert found["before the queries"][0] == found["tower"][0] > found["soft tokens"][0] == 5
    assert found["last hidden states"][0] == 5
    for kind in cross_vlm.KINDS:
        tiny = cross_vlm.KINDS[kind]
        model = CrossAttentionVLM(tiny.replace(tower=tiny.tower.replace(channels=3)))
        names = ["pixels", "tower"] + ["soft tokens"] * (tiny.connector is not None)
        assert list(shapes(model)) == names


def test_world_models():
    world, side = worlds.genie(), 8
    codec = world.codec
    assert get_image_size(world) == side
    wanted = {
        "pixels": (side**2, 3, 24, ""),
        "codes": (math.prod(codec.config.grid), codec.quantizer.width, codec.bits, ""),
    }
    assert shapes(world, PICTURES[:, :, :side, :side]) == wanted


def test_unsupported_model_raises():
    with pytest.raises(ConfigError, match="are not supported"):
        get_image_size(torch.nn.Linear(2, 2))


# ---- scenes -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def atlas() -> Atlas:
    from data.scenes.conftest import drawn

    return Atlas.build(drawn())


def test_ground_truth_matches_the_scenes(atlas):
    shown = make_scene_images(atlas, 32, 60)
    assert shown.images.shape == (120, 3, 32, 32)
    (one, position), (_, colour), (_, identity), (many, count) = (
        shown.ground_truths[name] for name in ("position", "colour", "identity", "count")
    )
    assert (one, many) == (slice(0, 60), slice(60, 120))
    assert position.values.shape == (60, 2) and 0 < position.values.min() and position.values.max() < 1
    assert (colour.num_classes, identity.num_classes, count.num_classes) == (10, 10, 4)
    for truth in (colour, identity, count):
        assert truth.values.min() >= 0 and truth.values.unique().numel() > truth.num_classes // 2
        assert truth.values.max() < truth.num_classes
    with pytest.raises(ConfigError, match="at least 40"):
        make_scene_images(atlas, 32, 39)


def test_position_is_decodable_from_brightness(atlas):
    """Position is decodable from brightness if the sprite is the only bright object."""
    shown = make_scene_images(atlas, 32, 200)
    x, y = shown.ground_truths["position"][1].values.T[..., None]  # (B, 1) each
    across, down = ((-((torch.arange(32) / 31 - place) ** 2) / 0.02).exp() for place in (x, y))
    lit = down[:, :, None] * across[:, None, :]
    (line,) = measure_bottlenecks(
        [Bottleneck("lit", lit.flatten(1)[..., None])], 24 * 32**2, {"position": shown.ground_truths["position"]}
    )
    assert line.probes["position"].value > 0.9


def test_images_with_classes():
    images = [picture.permute(1, 2, 0).numpy() for picture in PICTURES]
    shown = make_class_images(images, torch.tensor([0, 1, 2, 0, 1]), 3, 16)
    assert shown.images.shape == (5, 3, 16, 16) and shown.images.dtype == torch.uint8
    assert shown.ground_truths["identity"][1].num_classes == 3


def test_sorted_images_are_shuffled():
    """Folders are read class by class, and the last quarter is the test set."""
    labels = torch.arange(4).repeat_interleave(40)
    chance = torch.Generator().manual_seed(0)
    colours = torch.tensor([[0, 0, 0], [200, 0, 0], [0, 200, 0], [0, 0, 200]], dtype=torch.uint8)[labels]
    noise = torch.randint(0, 50, (160, 4, 4, 3), generator=chance, dtype=torch.uint8)
    images = list((colours[:, None, None] + noise).numpy())
    shown = make_class_images(images, labels, 4, 4)
    rows, truth = shown.ground_truths["identity"]
    bright = shown.images.double().mean((2, 3)) > 100  # (B, 3)
    assert torch.equal((bright * torch.tensor([1, 2, 3])).sum(1), truth.values) and rows == slice(0, 160)
    (line,) = measure_bottlenecks(
        [Bottleneck("pixels", shown.images.flatten(2).mT.float(), 24)], 384, shown.ground_truths
    )
    assert line.probes["identity"].value > 0.9
    assert torch.equal(make_class_images(images, labels, 4, 4).images, shown.images)


def test_command(atlas, tmp_path, monkeypatch, capsys):
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    save(Codec(CODEC), "codec")
    atlas.save(tmp_path / "shapes.safetensors")
    app = App(result_action="return_value")
    app.command("vitrail.cli.information_command:measure_information", name="information")
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
        "pixels", "features", "before the quantizer", "codes", "without the image",
    ]  # fmt: skip
    output = json.loads((tmp_path / "l.json").read_text())
    assert [line["bits"] for line in output["bottlenecks"]] == [24 * 32**2, 16 * 32 * 16, 16 * 6 * 16, 16 * 6]
    assert output["bottlenecks"][-1]["max_bits"] == 96 and "of 6" in out[4] and "256×" in out[4]
    assert "codes" in (tmp_path / "l.svg").read_text()
    monkeypatch.setattr("vitrail.hub.load", None)
    with pytest.raises(VitrailError, match=r"l\.svg/l\.json cannot be written"):  # before the weights are loaded
        app(["information", "codec", "--json", "l.svg/l.json"], exit_on_error=False)
