"""Properties of the packed ViT for all configs. tests/hub compares it with transformers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers import randomize, relative
from vitrail.encoders import PackedViT, PackedViTConfig
from vitrail.encoders.packed_vit import build_packed_layout, to_block_order
from vitrail.encoders.presets import PACKED_VIT_PRESETS
from vitrail.errors import ConfigError, ImageError
from vitrail.nn import AttentionConfig, BlockConfig, GatedMLPConfig, PlainMLPConfig, Workload, cost
from vitrail.processing.grid import Grid
from vitrail.processing.patchify import patchify_blocks

BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2, bias="all"), mlp=PlainMLPConfig(intermediate_size=20))
KINDS = {
    "qwen2": {},
    "qwen2.5": {
        "block": BLOCK.replace(norm="rms", mlp=GatedMLPConfig(intermediate_size=12, bias=True)),
        "window_size": 2,
        "full_attention_layers": (1,),
    },
    "qwen3": {"position_grid_size": 5, "patch_bias": True, "feature_layers": (1, 2)},
    "unmerged": {"spatial_merge_size": 1, "temporal_patch_size": 1, "window_size": 3},
}


def tower(kind: str = "qwen2", **more) -> PackedViT:
    settings = {"layers": 3, "block": BLOCK, "patch_size": 2, "channels": 1, **KINDS[kind], **more}
    return randomize(PackedViT(PackedViTConfig(**settings))).eval()


TOWERS = {kind: tower(kind) for kind in KINDS}


def rows(model: PackedViT, grids) -> torch.Tensor:
    return torch.randn(sum(t * h * w for t, h, w in grids), model.config.patch_dim)


def triples(merge: int):
    side = st.integers(1, 5).map(lambda n: n * merge)
    return st.lists(st.tuples(st.integers(1, 3), side, side), min_size=1, max_size=4)


@pytest.mark.parametrize("kind", KINDS)
def test_configs_round_trip(kind):
    config = TOWERS[kind].config
    assert PackedViTConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=15)
def test_packed_equals_unpacked(kind, data):
    """Each frame of each item gives the same features alone and packed."""
    model = TOWERS[kind]
    grids = data.draw(triples(model.config.spatial_merge_size))
    patches = rows(model, grids)
    with torch.no_grad():
        features = model(patches, grids)
        frames = [(1, h, w) for t, h, w in grids for _ in range(t)]
        alone = [
            model(part, [grid]) for part, grid in zip(patches.split([h * w for _, h, w in frames]), frames, strict=True)
        ]
    assert relative(features, torch.cat(alone)) <= 1e-5


@given(data=st.data())
@settings(max_examples=25)
def test_windows_are_squares_of_tokens(data):
    """Brute force: patches share a window if their tokens are in the same square of a frame."""
    merge, window = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    items = [Grid(t=t, h=h, w=w, merge_size=merge) for t, h, w in data.draw(triples(merge))]
    placed = build_packed_layout(items, window)
    names = [
        (i, t, y // (merge * window), x // (merge * window))
        for i, g in enumerate(items)
        for t, y, x in to_block_order(torch.cartesian_prod(*map(torch.arange, (g.t, g.h, g.w))).view(-1, 3), g).tolist()
    ]
    N, order = len(names), placed.order.tolist()
    seen = placed.window_plan.mask(N, N, torch.device("cpu")).expand(1, 1, N, N)[0, 0]
    expected = torch.tensor([[names[a] == names[b] for b in order] for a in order])
    assert torch.equal(seen, expected)
    for plan in (placed.window_plan, placed.frame_plan):  # contiguous segments: no mask
        assert plan.is_maskless or plan.segment_lengths is not None


def test_windows_are_independent():
    """Without full attention, a patch changes only the features of its window."""
    model = tower("qwen2.5", full_attention_layers=())
    patches = torch.randn(64, model.config.patch_dim)  # 4 × 4 tokens of 2 × 2 patches, windows of 2 × 2 tokens
    moved = patches.clone()
    moved[0] += 1.0
    changed = (model(moved, [(1, 8, 8)]) - model(patches, [(1, 8, 8)])).abs().amax(1) > 1e-6
    token = torch.arange(64) // 4
    assert torch.equal(changed, (token // 4 < 2) & (token % 4 < 2))
    whole = tower("qwen2.5")
    assert bool(((whole(moved, [(1, 8, 8)]) - whole(patches, [(1, 8, 8)])).abs().amax(1) > 1e-7).all())


def test_images_from_processing():
    """Patches and grids as `patchify_blocks` gives them; grids may be triples or a tensor."""
    model = TOWERS["qwen3"]
    still, video = torch.randn(1, 8, 12), torch.randn(4, 1, 4, 8)
    cut = [patchify_blocks(x, model.config.patch_size, merge_size=2, temporal_patch_size=2) for x in (still, video)]
    patches, grids = torch.cat([p for p, _ in cut]), [g for _, g in cut]
    features = model(patches, grids)
    assert features.shape == (24 + 16, 16)
    assert torch.equal(features, model(patches, [(1, 4, 6), (2, 2, 4)]))
    assert torch.equal(features, model(patches, torch.tensor([[1, 4, 6], [2, 2, 4]])))
    # A still image equals a video that repeats it.
    again, _ = patchify_blocks(
        torch.stack([still, still]), model.config.patch_size, merge_size=2, temporal_patch_size=2
    )
    assert torch.equal(again, cut[0][0])


def test_several_layers_from_one_pass():
    model = TOWERS["qwen3"]
    patches, grids = rows(model, [(1, 4, 6)]), [(1, 4, 6)]
    first, second, last = model.forward_layers(patches, grids)
    for layer, state in ((1, first), (2, second), (3, last), (-1, last), (-2, second), (None, last)):
        assert torch.equal(model(patches, grids, layer=layer), state)
    assert model.forward_layers(patches, grids, [0])[0].shape == (24, 16)
    short = tower("qwen3")
    short.blocks[2] = None
    assert len(short.forward_layers(patches, grids, [2, 0])) == 2  # later blocks are not run


def test_half_precision():
    model = tower("qwen3").bfloat16()
    patches = rows(model, [(1, 4, 6)])
    features = model(patches, [(1, 4, 6)])
    assert features.dtype == torch.bfloat16
    assert relative(features.float(), tower("qwen3")(patches, [(1, 4, 6)])) < 0.05


def test_gradients_reach_every_parameter():
    for kind in KINDS:
        model = tower(kind)
        model(rows(model, [(2, 6, 6)]), [(2, 6, 6)]).square().sum().backward()
        assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize(
    "more, why",
    [
        ({"window_size": 0, "full_attention_layers": (1,)}, "window"),
        ({"window_size": 2, "full_attention_layers": (3,)}, "exceed 3 layers"),
        ({"feature_layers": (4,)}, "no layer 4"),
        ({"spatial_merge_size": 0}, "at least 1"),
        ({"position_grid_size": -1}, r"position_grid_size is -1\n.*at least 0"),
        ({"block": BLOCK.replace(width=12)}, "rotary"),  # heads of 6 channels
        ({"block": BLOCK.replace(branches=("cross", "mlp"))}, "self, mlp"),
    ],
)
def test_invalid_configs_raise(more, why):
    with pytest.raises(ConfigError, match=why):
        tower(**more)


@pytest.mark.parametrize(
    "shape, grids",
    [((24, 8), [(1, 4, 4)]), ((16, 7), [(1, 4, 4)]), ((1, 16, 8), [(1, 4, 4)]), ((0, 8), [])],
)
def test_mismatched_grids_raise(shape, grids):
    with pytest.raises(ImageError, match="patchify_blocks"):
        tower()(torch.randn(*shape), grids)


def test_grid_not_divisible_by_merge_size_raises():
    with pytest.raises(ConfigError, match="3×4"):
        tower()(torch.randn(12, 8), [(1, 3, 4)])


# ---- costs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_flops_equal_those_counted(kind):
    model, grids = TOWERS[kind], [(1, 6, 12), (2, 6, 6)]
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(rows(model, grids), grids)
    assert cost.count_flops(model, model.workload(grids)) == counter.get_total_flops()
    assert cost.count_bytes(model, model.workload(grids)).weights == sum(p.numel() * 4 for p in model.parameters())
    with pytest.raises(ConfigError, match="workload"):
        cost.count_flops(model, Workload.full_attention(8))


def test_windows_reduce_the_cost():
    """On an image of 2240² pixels, 28 blocks of Qwen2.5-VL attend to 64 patches, all of Qwen2-VL to 25,600."""
    with torch.device("meta"):
        old, new = PackedViT(PACKED_VIT_PRESETS["qwen2-vl"]), PackedViT(PACKED_VIT_PRESETS["qwen2.5-vl"])
    page = [(1, 160, 160)]
    work = new.workload(page)
    assert (work.attention_pairs, work.window_pairs) == (25_600**2, 25_600 * 64)
    assert cost.count_flops(old, old.workload(page)) > 3 * cost.count_flops(new, work)


def test_presets_build():
    with torch.device("meta"):
        for config in PACKED_VIT_PRESETS.values():
            PackedViT(config)
