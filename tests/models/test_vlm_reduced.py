"""Fewer tokens of a picture as a part of a vision-language model: those that the functions leave, and counted so."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.test_vlm import (
    CONNECTORS,
    DECODER,
    PACKED,
    POLICIES,
    PROJECTOR,
    TOWER,
    TURNED,
    WHOLE,
    made,
    packed_is_alone,
    pictures,
    samples,
)
from vitrail import hub
from vitrail.backbones.fusion import ExpertConfig
from vitrail.connectors import FusedConfig, MergerConfig, ProjectorConfig, QFormerConfig
from vitrail.connectors.reduce import (
    CellsConfig,
    VisionZipConfig,
    VisPrunerConfig,
    looks,
    pooled,
    reduction,
    visionzip,
    vispruner,
)
from vitrail.encoders.towers import TowerConfig, TowersConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.models.rows import Rows
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.nn import RotaryConfig, cost
from vitrail.processing.grid import Grid
from vitrail.processing.resolution import Native
from vitrail.stream import build, pack, words

KINDS = {"vispruner": VisPrunerConfig(keep=8), "visionzip": VisionZipConfig(keep=9), "pool": CellsConfig(keep=6)}
BARE = TOWER.with_(cls=False, positions="patches")
TOWERS = {
    "CLS": {"tower": TOWER, "layer": -2},
    "none": {"tower": BARE, "layer": -2},
    "registers": {"tower": TOWER.with_(registers=2), "layer": -1},
    "read along": {"tower": TOWER.with_(registers=1), "prefix": True},
    "the end": {"tower": TOWER},
    "places": {"tower": TOWER, "layer": 2, "place": True},
}


def by_hand(model: VLM, pixels: torch.Tensor, reduce) -> torch.Tensor:
    """The features of the views, and what is left of them, from the tower's own layers."""
    tower, config = model.tower, model.config
    every = [tower.tokens(pixels, layer=n) for n in range(4)]  # what enters the first block, and leaves each
    depth = 3 if config.layer is None else config.layer % 4
    tokens = tower.norm_last(every[3]) if config.layer is None else every[depth]
    features = tokens if config.prefix else tokens[:, tower.config.prefix :]
    features = features if model.place is None else features + model.place.table
    lead = tower.config.prefix if config.prefix else 0
    seen = looks(tower.blocks[depth - 1], every[depth - 1], tower.config.prefix, tower.config.cls)
    patches = features[:, lead:]
    match reduce:
        case VisPrunerConfig():
            left = vispruner(patches, seen.scores, reduce.keep).tokens
        case VisionZipConfig():
            left = visionzip(patches, seen.scores, reduce.keep, 4, seen.keys).tokens  # half of nine
        case _:
            left = pooled(patches, Grid(h=6, w=6), reduce.keep)
    return model.connector(torch.cat([features[:, :lead], left], 1))


@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_reduced_model_is_the_functions_together(kind, tower):
    reduce = KINDS[kind]
    config = VLMConfig(**WHOLE | TOWERS[tower], reduce=reduce)
    model = made(config)
    images = pictures((30, 50), (24, 24))
    shown = model.prepare(images)
    lead = model.tower.config.prefix if config.prefix else 0
    assert [config.tokens(shape) for shape in shown.shapes] == [lead + reduce.keep] * 2
    found, wanted = model.look(shown).blocks, by_hand(model, shown.pixels, reduce)
    for one, two in zip(found, wanted, strict=True):
        assert one.shape == two.shape and torch.equal(one, two)
    packed_is_alone(model, images)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_go_the_same_way(kind):
    """To the pixels and to every weight before the connector, as through the functions."""
    model = made(VLMConfig(**WHOLE | TOWERS["CLS"], reduce=KINDS[kind])).train()
    pixels = model.prepare(pictures((30, 50), (24, 24))).pixels
    weights = [*model.tower.parameters(), *model.connector.parameters()]
    both = [torch.autograd.grad(f.square().sum(), weights, allow_unused=True)
            for f in (model.soft(pixels), by_hand(model, pixels, KINDS[kind]))]  # fmt: skip
    assert sum(g is not None and bool(g.any()) for g in both[0]) > len(weights) // 2
    for a, b in zip(*both, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.allclose(a, b, rtol=1e-4, atol=1e-5))


@settings(max_examples=25)
@given(st.sampled_from(sorted(KINDS)), st.integers(1, 40), st.sampled_from(["naive", "anyres"]))
def test_as_many_as_are_counted(kind, keep, policy):
    """Whatever is kept of whatever picture; where all is kept nothing is changed at all, newlines included."""
    config = VLMConfig(**WHOLE | {"policy": POLICIES[policy]}, layer=-2, newline=policy == "anyres")
    try:
        config = config.with_(reduce=reduction(kind, keep))
    except ConfigError as error:
        assert kind == "pool" and "cells" in str(error)
        return
    model = made(config)
    shown = model.prepare(pictures((30, 50), (24, 24)))
    mine = [build([config.part(shape), words([7, 8])], config.rules) for shape in shown.shapes]
    views = [len(shape.views) for shape in shown.shapes]
    if keep < 36:
        assert [config.tokens(shape) for shape in shown.shapes] == [keep * n for n in views]
    assert [len(stream) - 2 for stream in mine] == [config.tokens(shape) for shape in shown.shapes]
    batch = pack(mine, sum(map(len, mine)))
    logits = model(batch, shown)
    if keep >= 36:
        assert torch.equal(logits, model.reduced(None)(batch, shown))


def test_all_of_it_is_left_bit_for_bit():
    model = made(VLMConfig(**WHOLE | TOWERS["read along"]))
    shown = model.prepare(pictures((30, 50), (24, 24)))
    mine = samples(model, shown.shapes)
    batch = pack(mine, sum(map(len, mine)))
    wanted = model(batch, shown)
    for kind in KINDS:
        more = model.reduced(reduction(kind, 36))
        assert more.config.reduction is None and torch.equal(more(batch, shown), wanted)
        fewer = more.reduced(reduction(kind, 6))
        assert fewer.decoder is model.decoder and model.config.reduce is None
        assert fewer.config.tokens(shown.shapes[0]) == 2 + 6
        assert torch.equal(fewer.reduced(None)(batch, shown), wanted)


def test_tiles_follow_one_another():
    """Of each view as many are left, base first, without newlines and whatever is padding, as in the released code."""
    config = VLMConfig(**WHOLE | {"policy": POLICIES["anyres"]}, layer=-2, newline=True, reduce=KINDS["vispruner"])
    model = made(config)
    shown = model.prepare(pictures((30, 50)))
    found = model.look(shown).blocks[0]
    each = [model.soft(view[None])[0] for view in shown.pixels]
    assert len(each) > 2 and torch.allclose(found, torch.cat(each), atol=1e-5)
    packed_is_alone(model, pictures((30, 50), (24, 24), (61, 33)))


def test_what_reads_fewer():
    """Queries of any kind read what is left; a merger needs neighbours, which a grid of means has."""
    for name in ("qformer", "resampler"):
        packed_is_alone(
            made(VLMConfig(**WHOLE | {"connector": CONNECTORS[name]}, reduce=KINDS["visionzip"])), pictures((24, 24))
        )
    merged = VLMConfig(**WHOLE | {"connector": CONNECTORS["merger"]}, reduce=CellsConfig(keep=16))
    assert merged.tokens(merged.policy.cut(1, 1)) == 4
    packed_is_alone(made(merged), pictures((24, 24), (30, 50)))
    fused = FusedConfig(reads=16, gives=32, vocab=50, first=5, later=2, layers=2, width=24, heads=2, hidden=32)
    between = {"connector": ProjectorConfig(reads=16, gives=16), "queries": fused}
    model = made(VLMConfig(**WHOLE | between, reduce=KINDS["vispruner"]))
    assert model.config.given(model.config.policy.cut(1, 1)) == 8
    assert len(model.look(model.prepare(pictures((30, 50)))).blocks[0]) == 5


def test_two_towers_are_pooled():
    towers = TowersConfig(towers=(TowerConfig(vit=TOWER), TowerConfig(vit=BARE)), image=24)
    apart = {"tower": towers, "mean": (0.0,) * 3, "std": (1.0,) * 3}
    whole = WHOLE | apart | {"connector": ProjectorConfig(reads=32, gives=32)}
    packed_is_alone(made(VLMConfig(**whole, reduce=CellsConfig(keep=9))), pictures((24, 24), (30, 50)))
    with pytest.raises(ConfigError, match="one ViT"):
        VLMConfig(**whole, reduce=KINDS["vispruner"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tower", ["CLS", "none"])
def test_costs_are_those_of_the_pass(kind, tower):
    """Looks, choice, connector and decoder, against torch's counter."""
    model = made(VLMConfig(**WHOLE | TOWERS[tower], reduce=KINDS[kind]))
    shown = model.prepare(pictures((24, 24), (30, 50)))
    parts = [one for shape in shown.shapes for one in model.config.parts(shape)]
    batch = pack([build([*parts, words([1, 2, 3])], model.config.rules)], 64)
    work = model.work([(24, 24), (30, 50)], 3).with_(asked=None)
    legs = model.legs(work)

    def counted(call) -> int:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
            call()
        return counter.get_total_flops()

    assert legs["tower"].flops + legs["connector"].flops == counted(lambda: model.look(shown))
    assert (
        legs["decoder"].work.tokens == 2 * model.config.tokens(shown.shapes[0]) + 3 == int((batch.segments >= 0).sum())
    )
    assert cost.flops(model, work) < cost.flops(model.reduced(None), model.reduced(None).work([(24, 24)] * 2, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_training_reads_what_the_model_reads(kind):
    model = made(VLMConfig(**WHOLE | {"decoder": DECODER.with_(fusion=ExpertConfig())}, layer=-2, reduce=KINDS[kind]))
    shown = model.prepare(pictures((24, 24), (24, 24)))
    ids = torch.randint(1, 50, (2, 5), generator=torch.Generator().manual_seed(0))
    rows = Rows(model, [3], 5)
    found = rows.hidden(rows.frame(torch.device("cpu")), shown.pixels, ids)
    parts = [[words([3]), *model.config.parts(shape), words(own)] for shape, own in zip(shown.shapes, ids, strict=True)]
    mine = [build(own, model.config.rules) for own in parts]
    wanted = model.hidden(pack(mine, len(mine[0])), shown)[:, -5:]
    assert torch.allclose(found, wanted, atol=1e-5)
    assert rows.before == 1 + KINDS[kind].keep


def test_room_is_counted_with_what_is_left():
    """A picture of 36 tokens has no room in a context of 20, its eight have."""
    tight = WHOLE | {"decoder": DECODER.with_(context=20)}
    with pytest.raises(ConfigError, match="no room for a word"):
        VLMConfig(**tight)
    assert VLMConfig(**tight, reduce=KINDS["vispruner"]).least == 8
    with pytest.raises(ConfigError, match="no room for a word"):
        VLMConfig(**tight, reduce=VisPrunerConfig(keep=20))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"connector": CONNECTORS["merger"]}, "puts neighbours together"),
        ({"connector": CONNECTORS["conv"]}, "puts neighbours together"),
        ({"tower": TOWER.with_(rotary=RotaryConfig(8, layout="2d"))}, "rotary"),
        ({"layer": 0}, "first block"),
        ({"reduce": CellsConfig(keep=7)}, "1 × 7 cells"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_built(change, says):
    with pytest.raises(ConfigError, match=says):
        VLMConfig(**WHOLE | {"reduce": KINDS["vispruner"]} | change)


def test_reductions_that_are_none():
    for make in (VisPrunerConfig, VisionZipConfig, CellsConfig):
        with pytest.raises(ConfigError, match="at least 1"):
            make(keep=0)
    with pytest.raises(ConfigError, match="important"):
        VisPrunerConfig(keep=4, important=2.0)
    with pytest.raises(ConfigError, match="contextual"):
        VisionZipConfig(keep=4, contextual=5)
    assert [VisionZipConfig(keep=n).means for n in (1, 8, 64)] == [0, 4, 10]
    with pytest.raises(ConfigError, match="visionzip"):
        reduction("visonzip", 4)
    merger = MergerConfig(reads=16, gives=32, order="blocks")
    native = {"tower": PACKED, "connector": merger, "decoder": TURNED, "policy": Native(patch=4)}
    with pytest.raises(ConfigError, match="packed tower"):
        VLMConfig(**native, reduce=KINDS["pool"])


def test_a_folder_keeps_it_and_no_family_has_it(tmp_path):
    model = made(VLMConfig(**WHOLE, layer=-2, reduce=VisionZipConfig(keep=12, contextual=3)))
    hub.save(model, tmp_path / "ours")
    again = hub.load(tmp_path / "ours")
    assert again.config == model.config
    shown = model.prepare(pictures((24, 24)))
    assert torch.equal(again.look(shown).blocks[0], model.look(shown).blocks[0])
    with pytest.raises(CheckpointError, match=r"model\.reduced\(None\)"):
        hub.to_hf(model, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_in_plain_data():
    plain = VLMConfig(**WHOLE).plain() | {"reduce": {"kind": "visionzip", "keep": 12}}
    assert VLMConfig.read(plain).reduce == VisionZipConfig(keep=12)
    with pytest.raises(ConfigError, match="reduce"):
        VLMConfig.read(plain | {"reduce": {"kind": "visionzap", "keep": 12}})
    assert PROJECTOR.tokens(12) == QFormerConfig(reads=16, gives=32, queries=12).tokens(12) == 12
