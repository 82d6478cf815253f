"""Feature reduction in a vision-language model: equality with the functions, token counts and costs."""

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
    assert_packing_is_exact,
    made,
    pictures,
    samples,
)
from vitrail import hub
from vitrail.backbones.fusion import VisualExpertConfig
from vitrail.connectors import FusedQueryConfig, MergerConfig, ProjectorConfig, QFormerConfig
from vitrail.connectors.feature_reduction import (
    CellPoolingConfig,
    VisionZipConfig,
    VisPrunerConfig,
    apply_visionzip,
    apply_vispruner,
    compute_attention_scores,
    make_reduction_config,
    pool_to_cells,
)
from vitrail.encoders.multi_tower import MultiTowerConfig, TowerConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.models.vlm import VLM, VLMConfig
from vitrail.nn import RotaryConfig, cost
from vitrail.processing.grid import Grid
from vitrail.processing.resolution_policies import NativePolicy
from vitrail.stream import build_stream, pack_streams, text_part

KINDS = {"vispruner": VisPrunerConfig(keep=8), "visionzip": VisionZipConfig(keep=9), "pool": CellPoolingConfig(keep=6)}
BARE = TOWER.replace(cls_token=False, positions="patches")
TOWERS = {
    "CLS": {"tower": TOWER, "vision_feature_layer": -2},
    "none": {"tower": BARE, "vision_feature_layer": -2},
    "registers": {"tower": TOWER.replace(register_tokens=2), "vision_feature_layer": -1},
    "read along": {"tower": TOWER.replace(register_tokens=1), "keep_prefix_tokens": True},
    "the end": {"tower": TOWER},
    "places": {"tower": TOWER, "vision_feature_layer": 2, "position_embedding": True},
}


def reduce_by_hand(model: VLM, pixels: torch.Tensor, reduce) -> torch.Tensor:
    """Features of the views and their reduction, computed with the tower's layers."""
    tower, config = model.tower, model.config
    every = [tower.forward_tokens(pixels, layer=n) for n in range(4)]  # what enters the first block, and leaves each
    depth = 3 if config.vision_feature_layer is None else config.vision_feature_layer % 4
    tokens = tower.norm_last(every[3]) if config.vision_feature_layer is None else every[depth]
    features = tokens if config.keep_prefix_tokens else tokens[:, tower.config.num_prefix_tokens :]
    features = features if model.position_embedding is None else features + model.position_embedding.table
    lead = tower.config.num_prefix_tokens if config.keep_prefix_tokens else 0
    seen = compute_attention_scores(
        tower.blocks[depth - 1], every[depth - 1], tower.config.num_prefix_tokens, tower.config.cls_token
    )
    patches = features[:, lead:]
    match reduce:
        case VisPrunerConfig():
            left = apply_vispruner(patches, seen.scores, reduce.keep).tokens
        case VisionZipConfig():
            left = apply_visionzip(patches, seen.scores, reduce.keep, 4, seen.keys).tokens  # half of nine
        case _:
            left = pool_to_cells(patches, Grid(h=6, w=6), reduce.keep)
    return model.connector(torch.cat([features[:, :lead], left], 1))


@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize("kind", KINDS)
def test_reduced_model_equals_the_functions(kind, tower):
    reduce = KINDS[kind]
    config = VLMConfig(**WHOLE | TOWERS[tower], feature_reduction=reduce)
    model = made(config)
    images = pictures((30, 50), (24, 24))
    shown = model.prepare_images(images)
    lead = model.tower.config.num_prefix_tokens if config.keep_prefix_tokens else 0
    assert [config.count_tokens(shape) for shape in shown.layouts] == [lead + reduce.keep] * 2
    found, wanted = model.encode_images(shown).features, reduce_by_hand(model, shown.pixels, reduce)
    for one, two in zip(found, wanted, strict=True):
        assert one.shape == two.shape and torch.equal(one, two)
    assert_packing_is_exact(model, images)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_match(kind):
    """Gradients of pixels and weights equal those through the functions."""
    model = made(VLMConfig(**WHOLE | TOWERS["CLS"], feature_reduction=KINDS[kind])).train()
    pixels = model.prepare_images(pictures((30, 50), (24, 24))).pixels
    weights = [*model.tower.parameters(), *model.connector.parameters()]
    both = [torch.autograd.grad(f.square().sum(), weights, allow_unused=True)
            for f in (model.encode_views(pixels), reduce_by_hand(model, pixels, KINDS[kind]))]  # fmt: skip
    assert sum(g is not None and bool(g.any()) for g in both[0]) > len(weights) // 2
    for a, b in zip(*both, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.allclose(a, b, rtol=1e-4, atol=1e-5))


@settings(max_examples=25)
@given(st.sampled_from(sorted(KINDS)), st.integers(1, 40), st.sampled_from(["naive", "anyres"]))
def test_token_counts(kind, keep, policy):
    """Counts match for all images; if all features are kept, nothing changes."""
    config = VLMConfig(**WHOLE | {"policy": POLICIES[policy]}, vision_feature_layer=-2, newline=policy == "anyres")
    try:
        config = config.replace(feature_reduction=make_reduction_config(kind, keep))
    except ConfigError as error:
        assert kind == "pool" and "cells" in str(error)
        return
    model = made(config)
    shown = model.prepare_images(pictures((30, 50), (24, 24)))
    mine = [build_stream([config.make_part(shape), text_part([7, 8])], config.rules) for shape in shown.layouts]
    views = [len(shape.views) for shape in shown.layouts]
    if keep < 36:
        assert [config.count_tokens(shape) for shape in shown.layouts] == [keep * n for n in views]
    assert [len(stream) - 2 for stream in mine] == [config.count_tokens(shape) for shape in shown.layouts]
    batch = pack_streams(mine, sum(map(len, mine)))
    logits = model(batch, shown)
    if keep >= 36:
        assert torch.equal(logits, model.with_reduction(None)(batch, shown))


def test_keeping_all_features_changes_nothing():
    model = made(VLMConfig(**WHOLE | TOWERS["read along"]))
    shown = model.prepare_images(pictures((30, 50), (24, 24)))
    mine = samples(model, shown.layouts)
    batch = pack_streams(mine, sum(map(len, mine)))
    wanted = model(batch, shown)
    for kind in KINDS:
        more = model.with_reduction(make_reduction_config(kind, 36))
        assert more.config.active_reduction is None and torch.equal(more(batch, shown), wanted)
        fewer = more.with_reduction(make_reduction_config(kind, 6))
        assert fewer.decoder is model.decoder and model.config.feature_reduction is None
        assert fewer.config.count_tokens(shown.layouts[0]) == 2 + 6
        assert torch.equal(fewer.with_reduction(None)(batch, shown), wanted)


def test_tokens_of_tiles():
    """Tokens of each view follow one another, base view first, without newlines, as in the released code."""
    config = VLMConfig(
        **WHOLE | {"policy": POLICIES["anyres"]},
        vision_feature_layer=-2,
        newline=True,
        feature_reduction=KINDS["vispruner"],
    )
    model = made(config)
    shown = model.prepare_images(pictures((30, 50)))
    found = model.encode_images(shown).features[0]
    each = [model.encode_views(view[None])[0] for view in shown.pixels]
    assert len(each) > 2 and torch.allclose(found, torch.cat(each), atol=1e-5)
    assert_packing_is_exact(model, pictures((30, 50), (24, 24), (61, 33)))


def test_connectors_with_reduction():
    """Query connectors take reduced features; a merger needs a grid, as pooling gives."""
    for name in ("qformer", "resampler"):
        assert_packing_is_exact(
            made(VLMConfig(**WHOLE | {"connector": CONNECTORS[name]}, feature_reduction=KINDS["visionzip"])),
            pictures((24, 24)),
        )
    merged = VLMConfig(**WHOLE | {"connector": CONNECTORS["merger"]}, feature_reduction=CellPoolingConfig(keep=16))
    assert merged.count_tokens(merged.policy.layout(1, 1)) == 4
    assert_packing_is_exact(made(merged), pictures((24, 24), (30, 50)))
    fused = FusedQueryConfig(
        in_features=16,
        out_features=32,
        vocab_size=50,
        first_queries=5,
        later_queries=2,
        layers=2,
        width=24,
        heads=2,
        intermediate_size=32,
    )
    between = {"connector": ProjectorConfig(in_features=16, out_features=16), "queries": fused}
    model = made(VLMConfig(**WHOLE | between, feature_reduction=KINDS["vispruner"]))
    assert model.config.count_connector_tokens(model.config.policy.layout(1, 1)) == 8
    assert len(model.encode_images(model.prepare_images(pictures((30, 50)))).features[0]) == 5


def test_pooling_with_two_towers():
    towers = MultiTowerConfig(towers=(TowerConfig(vit=TOWER), TowerConfig(vit=BARE)), image_size=24)
    apart = {"tower": towers, "mean": (0.0,) * 3, "std": (1.0,) * 3}
    whole = WHOLE | apart | {"connector": ProjectorConfig(in_features=32, out_features=32)}
    assert_packing_is_exact(
        made(VLMConfig(**whole, feature_reduction=CellPoolingConfig(keep=9))), pictures((24, 24), (30, 50))
    )
    with pytest.raises(ConfigError, match="one ViT"):
        VLMConfig(**whole, feature_reduction=KINDS["vispruner"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tower", ["CLS", "none"])
def test_flops_match_torch_counter(kind, tower):
    """Compare scores, selection, connector and decoder with torch's counter."""
    model = made(VLMConfig(**WHOLE | TOWERS[tower], feature_reduction=KINDS[kind]))
    shown = model.prepare_images(pictures((24, 24), (30, 50)))
    parts = [one for shape in shown.layouts for one in model.config.make_parts(shape)]
    batch = pack_streams([build_stream([*parts, text_part([1, 2, 3])], model.config.rules)], 64)
    work = model.workload([(24, 24), (30, 50)], 3).replace(logit_tokens=None)
    component_costs = model.cost_components(work)

    def counted(call) -> int:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
            call()
        return counter.get_total_flops()

    assert component_costs["tower"].flops + component_costs["connector"].flops == counted(
        lambda: model.encode_images(shown)
    )
    assert (
        component_costs["decoder"].workload.tokens
        == 2 * model.config.count_tokens(shown.layouts[0]) + 3
        == int((batch.segments >= 0).sum())
    )
    assert cost.count_flops(model, work) < cost.count_flops(
        model.with_reduction(None), model.with_reduction(None).workload([(24, 24)] * 2, 3)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_fixed_shape_training_equals_the_model(kind):
    model = made(
        VLMConfig(
            **WHOLE | {"decoder": DECODER.replace(fusion=VisualExpertConfig())},
            vision_feature_layer=-2,
            feature_reduction=KINDS[kind],
        )
    )
    shown = model.prepare_images(pictures((24, 24), (24, 24)))
    ids = torch.randint(1, 50, (2, 5), generator=torch.Generator().manual_seed(0))
    template = model.make_row_template([3], 5)
    found = model.forward_rows(template, shown.pixels, ids)
    parts = [
        [text_part([3]), *model.config.make_parts(shape), text_part(own)]
        for shape, own in zip(shown.layouts, ids, strict=True)
    ]
    mine = [build_stream(own, model.config.rules) for own in parts]
    wanted = model.forward_hidden(pack_streams(mine, len(mine[0])), shown)[:, -5:]
    assert torch.allclose(found, wanted, atol=1e-5)
    assert template.prefix_length == 1 + KINDS[kind].keep


def test_context_check_uses_reduced_tokens():
    """An image of 36 tokens does not fit a context of 20; its 8 reduced tokens do."""
    tight = WHOLE | {"decoder": DECODER.replace(context_length=20)}
    with pytest.raises(ConfigError, match="fills the decoder's context"):
        VLMConfig(**tight)
    assert VLMConfig(**tight, feature_reduction=KINDS["vispruner"]).min_image_tokens == 8
    with pytest.raises(ConfigError, match="fills the decoder's context"):
        VLMConfig(**tight, feature_reduction=VisPrunerConfig(keep=20))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"connector": CONNECTORS["merger"]}, "needs a full grid"),
        ({"connector": CONNECTORS["conv"]}, "needs a full grid"),
        ({"tower": TOWER.replace(rotary=RotaryConfig(8, layout="2d"))}, "rotary"),
        ({"vision_feature_layer": 0}, "first block"),
        ({"feature_reduction": CellPoolingConfig(keep=7)}, "1 × 7 cells"),
    ],
)
def test_invalid_configs_raise_before_building(change, message):
    with pytest.raises(ConfigError, match=message):
        VLMConfig(**WHOLE | {"feature_reduction": KINDS["vispruner"]} | change)


def test_invalid_reductions_raise():
    for make in (VisPrunerConfig, VisionZipConfig, CellPoolingConfig):
        with pytest.raises(ConfigError, match="at least 1"):
            make(keep=0)
    with pytest.raises(ConfigError, match="important"):
        VisPrunerConfig(keep=4, important_fraction=2.0)
    with pytest.raises(ConfigError, match="contextual"):
        VisionZipConfig(keep=4, contextual_tokens=5)
    assert [VisionZipConfig(keep=n).resolved_contextual_tokens for n in (1, 8, 64)] == [0, 4, 10]
    with pytest.raises(ConfigError, match="visionzip"):
        make_reduction_config("visonzip", 4)
    merger = MergerConfig(in_features=16, out_features=32, order="blocks")
    native = {"tower": PACKED, "connector": merger, "decoder": TURNED, "policy": NativePolicy(patch_size=4)}
    with pytest.raises(ConfigError, match="packed tower"):
        VLMConfig(**native, feature_reduction=KINDS["pool"])


def test_save_load_and_export(tmp_path):
    model = made(
        VLMConfig(**WHOLE, vision_feature_layer=-2, feature_reduction=VisionZipConfig(keep=12, contextual_tokens=3))
    )
    hub.save(model, tmp_path / "ours")
    again = hub.load(tmp_path / "ours")
    assert again.config == model.config
    shown = model.prepare_images(pictures((24, 24)))
    assert torch.equal(again.encode_images(shown).features[0], model.encode_images(shown).features[0])
    with pytest.raises(CheckpointError, match=r"model\.with_reduction\(None\)"):
        hub.to_hf(model, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_plain_data():
    plain = VLMConfig(**WHOLE).to_dict() | {"feature_reduction": {"kind": "visionzip", "keep": 12}}
    assert VLMConfig.from_dict(plain).feature_reduction == VisionZipConfig(keep=12)
    with pytest.raises(ConfigError, match="feature_reduction"):
        VLMConfig.from_dict(plain | {"feature_reduction": {"kind": "visionzap", "keep": 12}})
    assert (
        PROJECTOR.count_tokens(12)
        == QFormerConfig(in_features=16, out_features=32, num_queries=12).count_tokens(12)
        == 12
    )
