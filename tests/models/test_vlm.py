"""Vision-language models with any combination of tower, connector, fusion and resolution policy."""

from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import randomize
from vitrail import hub
from vitrail.backbones.decoder import DecoderConfig
from vitrail.backbones.fusion import CrossAttentionFusionConfig, DeepStackConfig, PrefixFusionConfig, VisualExpertConfig
from vitrail.connectors import (
    ConvMergerConfig,
    FusedQueryConfig,
    MergerConfig,
    PoolConnectorConfig,
    ProjectorConfig,
    QFormerConfig,
    ResamplerConfig,
)
from vitrail.connectors.feature_reduction import CellPoolingConfig
from vitrail.encoders.multi_tower import MultiTowerConfig, TowerConfig
from vitrail.encoders.packed_vit import PackedViTConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import CheckpointError, ConfigError, ImageError, StreamError
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, PlainMLPConfig, RotaryConfig
from vitrail.processing.anyres import AnyResPolicy, HD9Policy
from vitrail.processing.image_loading import to_pixel_values
from vitrail.processing.resolution_policies import LetterboxPolicy, NaFlexPolicy, NaivePolicy, NativePolicy
from vitrail.stream import StreamRules, build_stream, pack_streams, split_by_sample, text_part

BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2, bias="all"), mlp=PlainMLPConfig(intermediate_size=24))
TOWER = ViTConfig(layers=3, block=BLOCK, image_size=24, patch_size=4, cls_token=True, positions="cls_and_patches")
PACKED = PackedViTConfig(layers=3, block=BLOCK, patch_size=4, spatial_merge_size=2)
TEXT = BlockConfig(width=32, attention=AttentionConfig(heads=2), mlp=GatedMLPConfig(intermediate_size=40), norm="rms")
DECODER = DecoderConfig(vocab_size=50, layers=3, block=TEXT, rotary=RotaryConfig(16))
TURNED = DECODER.replace(rotary=RotaryConfig(16, layout="mrope", sections=(2, 3, 3)))
PROJECTOR = ProjectorConfig(in_features=16, out_features=32)

CONNECTORS = {
    "projector": PROJECTOR,
    "merger": MergerConfig(in_features=16, out_features=32),
    "pool": PoolConnectorConfig(in_features=16, out_features=32, spatial_window=2),
    "conv": ConvMergerConfig(in_features=16, out_features=32),
    "resampler": ResamplerConfig(in_features=16, out_features=32, num_latents=5, layers=1, heads=2),
    "qformer": QFormerConfig(
        in_features=16, out_features=32, num_queries=4, layers=2, width=24, heads=2, intermediate_size=32
    ),
}
POLICIES = {
    "naive": NaivePolicy(image_size=24, patch_size=4),
    "letterbox": LetterboxPolicy(image_size=24, patch_size=4),
    "anyres": AnyResPolicy(tile_size=24, patch_size=4),
}
FUSIONS = {"prefix": PrefixFusionConfig(), "expert": VisualExpertConfig()}


WHOLE = {"tower": TOWER, "connector": PROJECTOR, "decoder": DECODER, "policy": POLICIES["naive"]}


def made(config: VLMConfig) -> VLM:
    return randomize(VLM(config).eval())


def pictures(*sizes):
    chance = np.random.default_rng(0)
    return [Image.fromarray(chance.integers(0, 256, (h, w, 3), dtype=np.uint8)) for h, w in sizes]


def samples(model, shapes):
    """Samples with one image each and text of unequal length."""
    return [
        build_stream([text_part(range(1, 3 + i)), model.config.make_part(shape), text_part([7, 8])], model.config.rules)
        for i, shape in enumerate(shapes)
    ]


def assert_packing_is_exact(model, images):
    """Assert that packed samples equal single samples, without gradients between samples."""
    shown = model.prepare_images(images)
    mine = samples(model, shown.layouts)
    batch = pack_streams(mine, sum(map(len, mine)))
    pixels = shown.pixels.requires_grad_()
    logits = split_by_sample(batch, model(batch, shown))
    for sample, image, found in zip(mine, images, logits, strict=True):
        assert len(found) == len(sample)
        expected = model(pack_streams([sample], len(sample)), model.prepare_images([image]))[0]
        assert torch.allclose(found, expected, atol=1e-4)
    (gradient,) = torch.autograd.grad(logits[-1].square().sum(), pixels)
    last = model.prepare_images(images[-1:]).pixels
    assert gradient[-len(last) :].any() and not gradient[: -len(last)].any()


@pytest.mark.parametrize(("connector", "policy", "fusion"), list(product(CONNECTORS, POLICIES, FUSIONS)))
def test_combinations_of_parts(connector, policy, fusion):
    config = {
        "tower": TOWER,
        "connector": CONNECTORS[connector],
        "decoder": DECODER.replace(fusion=FUSIONS[fusion]),
        "policy": POLICIES[policy],
        "vision_feature_layer": -2,
        "newline": True,
    }
    if policy == "anyres" and connector != "projector":
        with pytest.raises(ConfigError, match="newlines"):
            model = made(VLMConfig(**config))
            model.config.make_part(POLICIES[policy].layout(30, 50))
        return
    model = made(VLMConfig(**config))
    assert_packing_is_exact(model, pictures((30, 50), (24, 24), (61, 33)))
    assert model.config.count_tokens(POLICIES[policy].layout(30, 50)) == len(
        model.encode_images(model.prepare_images(pictures((30, 50)))).features[0]
    ) + (sum(span.size[0] for span in POLICIES[policy].layout(30, 50).spans if span.newline == "row"))


NAFLEX = {
    "tower": TOWER.replace(patch_order="channels_last", position_interpolation="bilinear_antialias"),
    "policy": NaFlexPolicy(patch_size=4, max_patches=30),
}


@pytest.mark.parametrize("connector", ["projector", "conv", "resampler", "qformer"])
@pytest.mark.parametrize("keep_prefix_tokens", [False, True])
def test_naflex_views_of_unequal_sizes(connector, keep_prefix_tokens, tmp_path):
    if keep_prefix_tokens and connector == "conv":  # needs a grid
        return
    config = VLMConfig(
        connector=CONNECTORS[connector],
        decoder=DECODER,
        vision_feature_layer=-2,
        keep_prefix_tokens=keep_prefix_tokens,
        **NAFLEX,
    )
    model = made(config)
    images = pictures((30, 50), (24, 24), (61, 13), (7, 70))
    assert len({layout.views[0].grid for layout in model.prepare_images(images).layouts}) == 4
    assert_packing_is_exact(model, images)
    shown = model.prepare_images(images)
    for layout, features in zip(shown.layouts, model.encode_images(shown).features, strict=True):
        assert config.count_tokens(layout) == len(features)
    with pytest.raises(ImageError, match="patches were given"):
        model.encode_images(shown._replace(layouts=shown.layouts[:2]))
    hub.save(model, tmp_path)
    again = hub.load(tmp_path)
    assert again.config == config
    assert torch.equal(again.encode_images(shown).features[0], model.encode_images(shown).features[0])


def test_naflex_features_are_those_of_the_tower():
    model = made(VLMConfig(connector=PROJECTOR, decoder=DECODER, **NAFLEX))
    (image,) = pictures((30, 50))
    (layout,) = model.prepare_images([image]).layouts
    (h, w), pixels = layout.views[0].canvas_size, model.config.policy.apply(image)[0]
    pixels = to_pixel_values(pixels, model.config.mean, model.config.std)[None]
    assert pixels.shape == (1, 3, h, w)
    expected = model.connector(model.tower(pixels), layout.views[0].grid)[0]
    assert torch.allclose(model.encode_images(model.prepare_images([image])).features[0], expected, atol=1e-5)


def test_naflex_costs_are_those_of_each_grid():
    sizes = [(30, 50), (61, 13)]
    with torch.device("meta"):
        model = VLM(VLMConfig(connector=PROJECTOR, decoder=DECODER, **NAFLEX))
    parts = [model.cost_components(model.workload([size], 5)) for size in sizes]
    both = model.cost_components(model.workload(sizes, 5))
    for name in ("tower", "connector"):
        assert both[name].flops == sum(part[name].flops for part in parts) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"connector": CONNECTORS["merger"]}, "does not read grids of any size"),
        ({"connector": CONNECTORS["pool"]}, "does not read grids of any size"),
        ({"position_embedding": True}, "position_embedding needs one grid size"),
        ({"feature_reduction": CellPoolingConfig(keep=4)}, "feature_reduction needs one grid size"),
        (
            {
                "tower": MultiTowerConfig(towers=(TowerConfig(vit=TOWER),), image_size=24),
                "mean": (0.0,) * 3,
                "std": (1.0,) * 3,
            },
            "does not support the policy naflex",
        ),
    ],
)
def test_naflex_refuses_what_needs_one_grid(change, message):
    with pytest.raises(ConfigError, match=message):
        VLMConfig(**{"connector": PROJECTOR, "decoder": DECODER, **NAFLEX, **change})


def test_multiple_towers():
    plain = TOWER.replace(cls_token=False, positions="patches")
    towers = MultiTowerConfig(towers=(TowerConfig(vit=TOWER, layer=-2), TowerConfig(vit=plain)), image_size=24)
    projector = ProjectorConfig(in_features=32, out_features=32)
    levels = {"mean": (0.0,) * 3, "std": (1.0,) * 3}  # each tower has its own
    config = VLMConfig(tower=towers, connector=projector, decoder=DECODER, policy=POLICIES["naive"], **levels)
    assert_packing_is_exact(made(config), pictures((30, 50), (24, 24)))
    with pytest.raises(ConfigError, match="normalizes pixels itself"):
        config.replace(mean=(0.5,) * 3)
    with pytest.raises(ConfigError, match="vision_feature_layer and keep_prefix_tokens"):
        config.replace(vision_feature_layer=-2)


@pytest.mark.parametrize("stacked", [False, True])
def test_packed_towers(stacked):
    """Packed towers, with and without DeepStack, with positions of three axes."""
    merger = MergerConfig(in_features=16, out_features=32, order="blocks")
    config = VLMConfig(
        tower=PACKED.replace(feature_layers=(1, 2) if stacked else ()),
        connector=merger,
        stack=merger.replace(norm_position="after") if stacked else None,
        decoder=TURNED.replace(fusion=DeepStackConfig(layer_indices=(0, 1))) if stacked else TURNED,
        policy=NativePolicy(patch_size=4, min_pixels=64, max_pixels=1024),
        rules=StreamRules(positions="qwen3-vl"),
    )
    assert_packing_is_exact(made(config), pictures((30, 50), (24, 16), (9, 33)))


@pytest.mark.parametrize("case", ["naive", "anyres", "prefix", "towers"])
def test_position_embedding_starts_at_zero_and_is_saved(case, tmp_path):
    """A zero embedding changes nothing; a learned one is added to every view, saved and loaded."""
    config = VLMConfig(**WHOLE, keep_prefix_tokens=case == "prefix")
    if case == "anyres":
        config = config.replace(policy=POLICIES["anyres"], newline=True)
    if case == "towers":
        towers = MultiTowerConfig(towers=(TowerConfig(vit=TOWER), TowerConfig(vit=TOWER)), image_size=24)
        config = config.replace(
            tower=towers, connector=ProjectorConfig(in_features=32, out_features=32), mean=(0.0,) * 3, std=(1.0,) * 3
        )
    plain, placed = made(config), VLM(config.replace(position_embedding=True)).eval()
    missing = placed.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert missing == ["position_embedding.table"] and not placed.position_embedding.table.any()
    images = pictures((30, 50), (24, 24))
    shown = plain.prepare_images(images)
    mine = samples(plain, shown.layouts)
    batch = pack_streams(mine, sum(map(len, mine)))
    assert torch.equal(plain(batch, shown), placed(batch, shown))
    torch.nn.init.normal_(placed.position_embedding.table)
    assert not torch.allclose(plain(batch, shown), placed(batch, shown), atol=1e-3)
    difference = placed.forward_features(shown.pixels) - plain.forward_features(shown.pixels)  # (V, N, D)
    assert torch.allclose(difference, placed.position_embedding.table.expand_as(difference), atol=1e-5)
    assert_packing_is_exact(placed, images)
    hub.save(placed, tmp_path)
    assert torch.equal(hub.load(tmp_path)(batch, shown), placed(batch, shown))


def test_position_embedding_limits(tmp_path):
    with pytest.raises(CheckpointError, match="position embeddings"):
        hub.to_hf(VLM(VLMConfig(**WHOLE, position_embedding=True)), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    merger = MergerConfig(in_features=16, out_features=32, order="blocks")
    with pytest.raises(ConfigError, match="any grid"):
        VLMConfig(
            tower=PACKED, connector=merger, decoder=TURNED, policy=NativePolicy(patch_size=4), position_embedding=True
        )


def test_prefix_tokens():
    config = VLMConfig(
        tower=TOWER, connector=PROJECTOR, decoder=DECODER, policy=POLICIES["naive"], keep_prefix_tokens=True
    )
    assert config.count_tokens(config.policy.layout(30, 50)) == 37
    assert_packing_is_exact(made(config), pictures((30, 50), (24, 24)))


def test_hd9():
    tower = TOWER.replace(cls_token=False, positions="patches")
    connector = ConvMergerConfig(in_features=16, out_features=32)
    config = VLMConfig(
        tower=tower, connector=connector, decoder=DECODER, policy=HD9Policy(tile_size=24, patch_size=4), newline=True
    )
    assert config.count_tokens(config.policy.layout(30, 50)) == 10 * (9 + 1)
    assert_packing_is_exact(made(config), pictures((30, 50), (24, 24)))


def asked(model, shown, conversations, answers=(3,)):
    """Streams with the questions after every image, each after its queries."""
    samples = []
    for shape, questions in zip(shown.layouts, conversations, strict=True):
        parts = model.config.make_parts(shape, len(questions))
        conversation = [
            one
            for part, ids in zip(parts, questions, strict=True)
            for one in (part, text_part(ids), text_part(answers))
        ]
        samples.append(build_stream(conversation, model.config.rules))
    return samples, shown._replace(questions=tuple([torch.tensor(q) for q in own] for own in conversations))


def test_fused_queries():
    """Nine views and a global one, condensed to a few queries for each question. The second question does not change
    the first, and packed samples equal single samples.
    """
    tower = TOWER.replace(cls_token=False, positions="patches")
    config = VLMConfig(
        tower=tower,
        connector=ConvMergerConfig(in_features=16, out_features=16, newline=True),
        queries=FusedQueryConfig(
            in_features=16,
            out_features=32,
            vocab_size=50,
            first_queries=5,
            later_queries=2,
            layers=2,
            width=24,
            heads=2,
            intermediate_size=32,
        ),
        decoder=DECODER,
        policy=HD9Policy(tile_size=24, patch_size=4),
    )
    shape = config.policy.layout(30, 50)
    assert [config.count_tokens(shape, n) for n in (1, 2, 3)] == [5, 7, 9]
    model = made(config)
    images = pictures((30, 50), (24, 24))
    samples, shown = asked(model, model.prepare_images(images), [[[7, 8], [9]], [[4]]])
    assert [len(s) for s in samples] == [5 + 2 + 1 + 2 + 1 + 1, 5 + 1 + 1]
    batch = pack_streams(samples, sum(map(len, samples)))
    both = split_by_sample(batch, model(batch, shown))
    for image, conversation, found in zip(images, [[[7, 8], [9]], [[4]]], both, strict=True):
        (sample,), alone = asked(model, model.prepare_images([image]), [conversation])
        assert torch.allclose(found, model(pack_streams([sample], len(sample)), alone)[0], atol=1e-4)
    (sample,), alone = asked(model, model.prepare_images(images[:1]), [[[7, 8]]])
    first = model(pack_streams([sample], len(sample)), alone)[0]
    assert torch.allclose(both[0][: len(first)], first, atol=1e-4)
    (sample,), other = asked(model, model.prepare_images(images[:1]), [[[7, 6]]])
    same = model(pack_streams([sample], len(sample)), other._replace(questions=alone.questions))[0]
    changed = model(pack_streams([sample], len(sample)), other)[0]
    assert not torch.allclose(same[0], changed[0], atol=1e-3)  # the first query knows the question
    with pytest.raises(ConfigError, match="make_parts"):
        config.make_part(shape)
    with pytest.raises(ConfigError, match="questions of 1"):
        model(batch, shown._replace(questions=shown.questions[:1]))


def test_text_only():
    model = made(VLMConfig(tower=TOWER, connector=PROJECTOR, decoder=DECODER, policy=POLICIES["naive"]))
    sample = build_stream([text_part([1, 2, 3])], model.config.rules)
    batch = pack_streams([sample], 3)
    assert torch.equal(model(batch), model.decoder(batch.ids))


def test_cache_needs_one_sample_per_row():
    model = made(VLMConfig(**WHOLE))
    two = [build_stream([text_part(ids)], model.config.rules) for ids in ([1, 2], [3])]
    with pytest.raises(StreamError, match="2 samples in 1 rows"):
        model.forward_hidden(pack_streams(two, 3), cache=model.decoder.make_cache(1))


def test_cached_decoding_equals_full_pass():
    model = made(VLMConfig(tower=TOWER, connector=PROJECTOR, decoder=DECODER, policy=POLICIES["naive"]))
    shown = model.prepare_images(pictures((30, 50)))
    whole = build_stream(
        [text_part([1, 2]), model.config.make_part(shown.layouts[0]), text_part([7, 8, 9])], model.config.rules
    )
    expected = model(pack_streams([whole], len(whole)), shown)[0]
    first = build_stream(
        [text_part([1, 2]), model.config.make_part(shown.layouts[0]), text_part([7])], model.config.rules
    )
    cache = model.decoder.make_cache(1)
    hidden = [model.forward_hidden(pack_streams([first], len(first)), shown, cache=cache)]
    hidden += [model.decoder.forward_hidden(torch.tensor([[id]]), cache=cache) for id in (8, 9)]
    assert torch.allclose(model.decoder.compute_logits(torch.cat(hidden, 1))[0], expected, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"connector": PROJECTOR.replace(in_features=15)}, "in_features = 16"),
        ({"connector": PROJECTOR.replace(out_features=31)}, "out_features = 32"),
        ({"policy": NaivePolicy(image_size=24, patch_size=3)}, "policy.patch_size = 4"),
        ({"policy": NativePolicy(patch_size=4)}, "native"),
        ({"policy": NaFlexPolicy(patch_size=5)}, "policy.patch_size = 4"),
        ({"tower": PACKED}, "one view size"),
        ({"vision_feature_layer": 7}, "7"),
        ({"stack": PROJECTOR}, "DeepStack"),
        ({"decoder": DECODER.replace(fusion=DeepStackConfig(layer_indices=(0,)))}, "DeepStack"),
        ({"decoder": DECODER.replace(fusion=CrossAttentionFusionConfig(layer_indices=(0,)))}, "cross-attention-vlm"),
        ({"rules": StreamRules(vocab_size=49)}, "49"),
        ({"rules": StreamRules(fill_id=50)}, "rules.fill_id is 50"),
        ({"rules": StreamRules(positions="qwen2-vl")}, 'rules.positions = "1d"'),
    ],
)
def test_invalid_configs_raise_before_building(change, message):
    with pytest.raises(ConfigError, match=message):
        VLMConfig(**WHOLE | change)


def test_invalid_inputs_raise():
    model = made(VLMConfig(**WHOLE))
    shown = model.prepare_images(pictures((30, 50), (24, 24)))
    sample = samples(model, shown.layouts[:1])[0]
    batch = pack_streams([sample], len(sample))
    with pytest.raises(StreamError, match="2 blocks"):
        model(batch, shown)
    with pytest.raises(StreamError, match="got none"):
        model(batch)
    with pytest.raises(ImageError, match="2 views"):
        model(batch, shown._replace(layouts=shown.layouts[:1]))
    with pytest.raises(ImageError, match="no image"):
        model.prepare_images([])


def test_visual_tokens_are_added_in_rows_of_one_shape_too():
    """A model of two layers whose visual tokens are added to the embedding of the image token."""
    config = VLMConfig(
        **WHOLE | {"connector": PROJECTOR.replace(in_features=32)},
        vision_feature_layer=(-1, 1),
        merge="add",
        rules=StreamRules(fill_id=9),
    )
    model, plain = made(config), made(config.replace(merge="replace"))
    inputs = model.prepare_images(pictures((24, 24), (24, 24)))
    ids = torch.randint(1, 50, (2, 5), generator=torch.Generator().manual_seed(0))
    found = model.forward_rows(model.make_row_template([3], 5), inputs.pixels, ids)
    parts = [
        [text_part([3]), *config.make_parts(shape), text_part(own)]
        for shape, own in zip(inputs.layouts, ids, strict=True)
    ]
    rows = [build_stream(own, config.rules) for own in parts]
    batch = pack_streams(rows, len(rows[0]))
    assert torch.allclose(found, model.forward_hidden(batch, inputs)[:, -5:], atol=1e-5)
    assert not torch.allclose(found, plain.forward_hidden(batch, inputs)[:, -5:], atol=1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_feature_layer": ()}, "tuple of tower layers is empty"),
        ({"vision_feature_layer": (-1, 9), "connector": PROJECTOR.replace(in_features=32)}, "no layer 9"),
        ({"vision_feature_layer": (-1, 1)}, "set connector.in_features = 32"),
        ({"padding_embedding": True}, "needs the policy overlap"),
        ({"merge": "add", "newline": True}, "replace placeholders"),
        ({"vision_token_ids": {"image_newline": 99}}, "99 for image_newline"),
    ],
)
def test_impossible_layers_and_tokens_are_refused(change, message):
    with pytest.raises(ConfigError) as error:
        VLMConfig(**WHOLE | change)
    assert message in str(error.value)
