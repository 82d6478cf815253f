"""Vision-language models from parts: tower, connector, fusion and resolution chosen independently."""

from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import randomize
from vitrail import hub
from vitrail.backbones.decoder import DecoderConfig
from vitrail.backbones.fusion import CrossConfig, DeepStackConfig, ExpertConfig, PrefixConfig
from vitrail.connectors import (
    ConvMergerConfig,
    FusedConfig,
    MergerConfig,
    PoolConfig,
    ProjectorConfig,
    QFormerConfig,
    ResamplerConfig,
)
from vitrail.encoders.packed import PackedViTConfig
from vitrail.encoders.towers import TowerConfig, TowersConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import CheckpointError, ConfigError, ImageError, StreamError
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.nn import AttentionConfig, BlockConfig, GatedConfig, PlainConfig, RotaryConfig
from vitrail.processing.resolution import HD9, AnyRes, Letterbox, NaFlex, Naive, Native
from vitrail.stream import Rules, build, pack, split, words

BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2, bias="all"), mlp=PlainConfig(hidden=24))
TOWER = ViTConfig(layers=3, block=BLOCK, image=24, patch=4, cls=True, positions="cls_and_patches")
PACKED = PackedViTConfig(layers=3, block=BLOCK, patch=4, merge=2)
TEXT = BlockConfig(width=32, attention=AttentionConfig(heads=2), mlp=GatedConfig(hidden=40), norm="rms")
DECODER = DecoderConfig(vocab=50, layers=3, block=TEXT, rotary=RotaryConfig(16))
TURNED = DECODER.with_(rotary=RotaryConfig(16, layout="mrope", sections=(2, 3, 3)))
PROJECTOR = ProjectorConfig(reads=16, gives=32)

CONNECTORS = {
    "projector": PROJECTOR,
    "merger": MergerConfig(reads=16, gives=32),
    "pool": PoolConfig(reads=16, gives=32, space=2),
    "conv": ConvMergerConfig(reads=16, gives=32),
    "resampler": ResamplerConfig(reads=16, gives=32, latents=5, layers=1, heads=2),
    "qformer": QFormerConfig(reads=16, gives=32, queries=4, layers=2, width=24, heads=2, hidden=32),
}
POLICIES = {
    "naive": Naive(size=24, patch=4),
    "letterbox": Letterbox(size=24, patch=4),
    "anyres": AnyRes(tile=24, patch=4),
}
FUSIONS = {"prefix": PrefixConfig(), "expert": ExpertConfig()}


WHOLE = {"tower": TOWER, "connector": PROJECTOR, "decoder": DECODER, "policy": POLICIES["naive"]}


def made(config: VLMConfig) -> VLM:
    return randomize(VLM(config).eval())


def pictures(*sizes):
    chance = np.random.default_rng(0)
    return [Image.fromarray(chance.integers(0, 256, (h, w, 3), dtype=np.uint8)) for h, w in sizes]


def samples(model, shapes):
    """One picture each, and words of unequal length."""
    return [
        build([words(range(1, 3 + i)), model.config.part(shape), words([7, 8])], model.config.rules)
        for i, shape in enumerate(shapes)
    ]


def packed_is_alone(model, images):
    """Packed in one row as by itself, and no gradient from one sample to the picture of another."""
    shown = model.prepare(images)
    mine = samples(model, shown.shapes)
    batch = pack(mine, sum(map(len, mine)))
    pixels = shown.pixels.requires_grad_()
    logits = split(batch, model(batch, shown))
    for sample, image, found in zip(mine, images, logits, strict=True):
        assert len(found) == len(sample)
        expected = model(pack([sample], len(sample)), model.prepare([image]))[0]
        assert torch.allclose(found, expected, atol=1e-4)
    (gradient,) = torch.autograd.grad(logits[-1].square().sum(), pixels)
    last = model.prepare(images[-1:]).pixels
    assert gradient[-len(last) :].any() and not gradient[: -len(last)].any()


@pytest.mark.parametrize(("connector", "policy", "fusion"), list(product(CONNECTORS, POLICIES, FUSIONS)))
def test_any_connector_policy_and_fusion(connector, policy, fusion):
    config = {
        "tower": TOWER,
        "connector": CONNECTORS[connector],
        "decoder": DECODER.with_(fusion=FUSIONS[fusion]),
        "policy": POLICIES[policy],
        "layer": -2,
        "newline": True,
    }
    if policy == "anyres" and connector != "projector":
        with pytest.raises(ConfigError, match="newlines"):
            model = made(VLMConfig(**config))
            model.config.part(POLICIES[policy].cut(30, 50))
        return
    model = made(VLMConfig(**config))
    packed_is_alone(model, pictures((30, 50), (24, 24), (61, 33)))
    assert model.config.tokens(POLICIES[policy].cut(30, 50)) == len(
        model.look(model.prepare(pictures((30, 50)))).blocks[0]
    ) + (sum(span.size[0] for span in POLICIES[policy].cut(30, 50).spans if span.newline == "row"))


def test_towers_side_by_side():
    plain = TOWER.with_(cls=False, positions="patches")
    towers = TowersConfig(towers=(TowerConfig(vit=TOWER, layer=-2), TowerConfig(vit=plain)), image=24)
    projector = ProjectorConfig(reads=32, gives=32)
    levels = {"mean": (0.0,) * 3, "std": (1.0,) * 3}  # each tower has its own
    config = VLMConfig(tower=towers, connector=projector, decoder=DECODER, policy=POLICIES["naive"], **levels)
    packed_is_alone(made(config), pictures((30, 50), (24, 24)))
    with pytest.raises(ConfigError, match="by themselves"):
        config.with_(mean=(0.5,) * 3)
    with pytest.raises(ConfigError, match="layer and prefix"):
        config.with_(layer=-2)


@pytest.mark.parametrize("stacked", [False, True])
def test_pictures_of_their_own_size(stacked):
    """Packed towers, with and without DeepStack, under positions of three axes."""
    merger = MergerConfig(reads=16, gives=32, order="blocks")
    config = VLMConfig(
        tower=PACKED.with_(taps=(1, 2) if stacked else ()),
        connector=merger,
        stack=merger.with_(norm_at="after") if stacked else None,
        decoder=TURNED.with_(fusion=DeepStackConfig(at=(0, 1))) if stacked else TURNED,
        policy=Native(patch=4, min_pixels=64, max_pixels=1024),
        rules=Rules(positions="qwen3-vl"),
    )
    packed_is_alone(made(config), pictures((30, 50), (24, 16), (9, 33)))


@pytest.mark.parametrize("case", ["naive", "anyres", "prefix", "towers"])
def test_places_begin_with_nothing_and_are_kept(case, tmp_path):
    """A table of zeros changes nothing; a learned one is added to each feature of each view, saved and loaded."""
    config = VLMConfig(**WHOLE, prefix=case == "prefix")
    if case == "anyres":
        config = config.with_(policy=POLICIES["anyres"], newline=True)
    if case == "towers":
        towers = TowersConfig(towers=(TowerConfig(vit=TOWER), TowerConfig(vit=TOWER)), image=24)
        config = config.with_(
            tower=towers, connector=ProjectorConfig(reads=32, gives=32), mean=(0.0,) * 3, std=(1.0,) * 3
        )
    plain, placed = made(config), VLM(config.with_(place=True)).eval()
    missing = placed.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert missing == ["place.table"] and not placed.place.table.any()
    images = pictures((30, 50), (24, 24))
    shown = plain.prepare(images)
    mine = samples(plain, shown.shapes)
    batch = pack(mine, sum(map(len, mine)))
    assert torch.equal(plain(batch, shown), placed(batch, shown))
    torch.nn.init.normal_(placed.place.table)
    assert not torch.allclose(plain(batch, shown), placed(batch, shown), atol=1e-3)
    difference = placed.features(shown.pixels) - plain.features(shown.pixels)  # (V, N, D)
    assert torch.allclose(difference, placed.place.table.expand_as(difference), atol=1e-5)
    packed_is_alone(placed, images)
    hub.save(placed, tmp_path)
    assert torch.equal(hub.load(tmp_path)(batch, shown), placed(batch, shown))


def test_places_are_not_exported_and_need_one_grid(tmp_path):
    with pytest.raises(CheckpointError, match="learned places"):
        hub.to_hf(VLM(VLMConfig(**WHOLE, place=True)), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    merger = MergerConfig(reads=16, gives=32, order="blocks")
    with pytest.raises(ConfigError, match="any grid"):
        VLMConfig(tower=PACKED, connector=merger, decoder=TURNED, policy=Native(patch=4), place=True)


def test_a_prefix_is_read_along():
    config = VLMConfig(tower=TOWER, connector=PROJECTOR, decoder=DECODER, policy=POLICIES["naive"], prefix=True)
    assert config.tokens(config.policy.cut(30, 50)) == 37
    packed_is_alone(made(config), pictures((30, 50), (24, 24)))


def test_hd9():
    tower = TOWER.with_(cls=False, positions="patches")
    connector = ConvMergerConfig(reads=16, gives=32)
    config = VLMConfig(tower=tower, connector=connector, decoder=DECODER, policy=HD9(tile=24, patch=4), newline=True)
    assert config.tokens(config.policy.cut(30, 50)) == 10 * (9 + 1)
    packed_is_alone(made(config), pictures((30, 50), (24, 24)))


def asked(model, shown, talks, answers=(3,)):
    """Every picture with its questions behind it, each after its own queries."""
    samples = []
    for shape, questions in zip(shown.shapes, talks, strict=True):
        parts = model.config.parts(shape, len(questions))
        talk = [one for part, ids in zip(parts, questions, strict=True) for one in (part, words(ids), words(answers))]
        samples.append(build(talk, model.config.rules))
    return samples, shown._replace(questions=tuple([torch.tensor(q) for q in own] for own in talks))


def test_queries_fused_with_questions():
    """Nine views and one, condensed, then a few queries for each question; the second question changes nothing of the
    first, and pictures with unequal talks are as by themselves."""
    tower = TOWER.with_(cls=False, positions="patches")
    config = VLMConfig(
        tower=tower,
        connector=ConvMergerConfig(reads=16, gives=16, newline=True),
        queries=FusedConfig(reads=16, gives=32, vocab=50, first=5, later=2, layers=2, width=24, heads=2, hidden=32),
        decoder=DECODER,
        policy=HD9(tile=24, patch=4),
    )
    shape = config.policy.cut(30, 50)
    assert [config.tokens(shape, n) for n in (1, 2, 3)] == [5, 7, 9]
    model = made(config)
    images = pictures((30, 50), (24, 24))
    samples, shown = asked(model, model.prepare(images), [[[7, 8], [9]], [[4]]])
    assert [len(s) for s in samples] == [5 + 2 + 1 + 2 + 1 + 1, 5 + 1 + 1]
    batch = pack(samples, sum(map(len, samples)))
    both = split(batch, model(batch, shown))
    for image, talk, found in zip(images, [[[7, 8], [9]], [[4]]], both, strict=True):
        (sample,), alone = asked(model, model.prepare([image]), [talk])
        assert torch.allclose(found, model(pack([sample], len(sample)), alone)[0], atol=1e-4)
    (sample,), alone = asked(model, model.prepare(images[:1]), [[[7, 8]]])
    first = model(pack([sample], len(sample)), alone)[0]
    assert torch.allclose(both[0][: len(first)], first, atol=1e-4)
    (sample,), other = asked(model, model.prepare(images[:1]), [[[7, 6]]])
    same = model(pack([sample], len(sample)), other._replace(questions=alone.questions))[0]
    changed = model(pack([sample], len(sample)), other)[0]
    assert not torch.allclose(same[0], changed[0], atol=1e-3)  # the first query knows the question
    with pytest.raises(ConfigError, match="before each question"):
        config.part(shape)
    with pytest.raises(ConfigError, match="questions of 1"):
        model(batch, shown._replace(questions=shown.questions[:1]))


def test_text_alone():
    model = made(VLMConfig(tower=TOWER, connector=PROJECTOR, decoder=DECODER, policy=POLICIES["naive"]))
    sample = build([words([1, 2, 3])], model.config.rules)
    batch = pack([sample], 3)
    assert torch.equal(model(batch), model.decoder(batch.ids))


def test_a_cache_holds_one_sample_a_row():
    model = made(VLMConfig(**WHOLE))
    two = [build([words(ids)], model.config.rules) for ids in ([1, 2], [3])]
    with pytest.raises(StreamError, match="2 samples in 1 rows"):
        model.hidden(pack(two, 3), cache=model.decoder.cache(1))


def test_cached_is_uncached():
    model = made(VLMConfig(tower=TOWER, connector=PROJECTOR, decoder=DECODER, policy=POLICIES["naive"]))
    shown = model.prepare(pictures((30, 50)))
    whole = build([words([1, 2]), model.config.part(shown.shapes[0]), words([7, 8, 9])], model.config.rules)
    expected = model(pack([whole], len(whole)), shown)[0]
    first = build([words([1, 2]), model.config.part(shown.shapes[0]), words([7])], model.config.rules)
    cache = model.decoder.cache(1)
    hidden = [model.hidden(pack([first], len(first)), shown, cache=cache)]
    hidden += [model.decoder.hidden(torch.tensor([[id]]), cache=cache) for id in (8, 9)]
    assert torch.allclose(model.decoder.logits(torch.cat(hidden, 1))[0], expected, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"connector": PROJECTOR.with_(reads=15)}, "reads = 16"),
        ({"connector": PROJECTOR.with_(gives=31)}, "gives = 32"),
        ({"policy": Naive(size=24, patch=3)}, "policy.patch = 4"),
        ({"policy": Native(patch=4)}, "native"),
        ({"policy": NaFlex(patch=4)}, "naflex"),
        ({"tower": PACKED}, "views of one size"),
        ({"layer": 7}, "7"),
        ({"stack": PROJECTOR}, "DeepStack"),
        ({"decoder": DECODER.with_(fusion=DeepStackConfig(at=(0,)))}, "DeepStack"),
        ({"decoder": DECODER.with_(fusion=CrossConfig(at=(0,)))}, "looking-vlm"),
        ({"rules": Rules(vocab=49)}, "49"),
        ({"rules": Rules(fill=50)}, "rules.fill is 50"),
        ({"rules": Rules(positions="qwen2-vl")}, 'rules.positions = "1d"'),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_built(change, says):
    with pytest.raises(ConfigError, match=says):
        VLMConfig(**WHOLE | change)


def test_what_does_not_fit_the_stream_is_refused():
    model = made(VLMConfig(**WHOLE))
    shown = model.prepare(pictures((30, 50), (24, 24)))
    sample = samples(model, shown.shapes[:1])[0]
    batch = pack([sample], len(sample))
    with pytest.raises(StreamError, match="2 blocks"):
        model(batch, shown)
    with pytest.raises(StreamError, match="got none"):
        model(batch)
    with pytest.raises(ImageError, match="2 views"):
        model(batch, shown._replace(shapes=shown.shapes[:1]))
    with pytest.raises(ImageError, match="no picture"):
        model.prepare([])
