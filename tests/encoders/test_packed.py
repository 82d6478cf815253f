"""What a tower of packed pictures promises whatever its config. Agreement with the field is in tests/hub."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers import randomize, relative
from vitrail.encoders import PackedViT, PackedViTConfig
from vitrail.encoders.packed import arrange, in_blocks
from vitrail.encoders.presets import PACKED
from vitrail.errors import ConfigError, ImageError
from vitrail.nn import AttentionConfig, BlockConfig, GatedConfig, PlainConfig, Work, cost
from vitrail.processing.grid import Grid
from vitrail.processing.patches import to_blocks

BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2, bias="all"), mlp=PlainConfig(hidden=20))
KINDS = {
    "qwen2": {},
    "qwen2.5": {"block": BLOCK.with_(norm="rms", mlp=GatedConfig(hidden=12, bias=True)), "window": 2, "full": (1,)},
    "qwen3": {"positions": 5, "patch_bias": True, "taps": (1, 2)},
    "unmerged": {"merge": 1, "temporal": 1, "window": 3},
}


def tower(kind: str = "qwen2", **more) -> PackedViT:
    settings = {"layers": 3, "block": BLOCK, "patch": 2, "channels": 1, **KINDS[kind], **more}
    return randomize(PackedViT(PackedViTConfig(**settings))).eval()


TOWERS = {kind: tower(kind) for kind in KINDS}


def rows(model: PackedViT, grids) -> torch.Tensor:
    return torch.randn(sum(t * h * w for t, h, w in grids), model.config.numbers)


def triples(merge: int):
    side = st.integers(1, 5).map(lambda n: n * merge)
    return st.lists(st.tuples(st.integers(1, 3), side, side), min_size=1, max_size=4)


@pytest.mark.parametrize("kind", KINDS)
def test_configs_are_plain_data(kind):
    config = TOWERS[kind].config
    assert PackedViTConfig.read(config.plain()) == config


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=15)
def test_packed_is_alone(kind, data):
    """Every frame of every item gives packed what it gives by itself: nothing is seen across."""
    model = TOWERS[kind]
    grids = data.draw(triples(model.config.merge))
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
    """By brute force: two patches of one frame share a window if their tokens lie in the same square."""
    merge, window = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    items = [Grid(t=t, h=h, w=w, merge=merge) for t, h, w in data.draw(triples(merge))]
    placed = arrange(items, window)
    names = [
        (i, t, y // (merge * window), x // (merge * window))
        for i, g in enumerate(items)
        for t, y, x in in_blocks(torch.cartesian_prod(*map(torch.arange, (g.t, g.h, g.w))).view(-1, 3), g).tolist()
    ]
    N, order = len(names), placed.order.tolist()
    seen = placed.windows.mask(N, N, torch.device("cpu")).expand(1, 1, N, N)[0, 0]
    expected = torch.tensor([[names[a] == names[b] for b in order] for a in order])
    assert torch.equal(seen, expected)
    for plan in (placed.windows, placed.frames):  # unbroken runs: no mask is made
        assert plan.simple or plan.lengths is not None


def test_windows_keep_to_themselves():
    """Without a block of full attention, a patch moves the features of its window alone, at their own places."""
    model = tower("qwen2.5", full=())
    patches = torch.randn(64, model.config.numbers)  # 4 × 4 tokens of 2 × 2 patches, windows of 2 × 2 tokens
    moved = patches.clone()
    moved[0] += 1.0
    changed = (model(moved, [(1, 8, 8)]) - model(patches, [(1, 8, 8)])).abs().amax(1) > 1e-6
    token = torch.arange(64) // 4
    assert torch.equal(changed, (token // 4 < 2) & (token % 4 < 2))
    whole = tower("qwen2.5")
    assert bool(((whole(moved, [(1, 8, 8)]) - whole(patches, [(1, 8, 8)])).abs().amax(1) > 1e-7).all())


def test_pictures_from_processing():
    """Patches and grids as `to_blocks` gives them; grids may be triples or a tensor."""
    model = TOWERS["qwen3"]
    still, video = torch.randn(1, 8, 12), torch.randn(4, 1, 4, 8)
    cut = [to_blocks(x, model.config.patch, merge=2, temporal=2) for x in (still, video)]
    patches, grids = torch.cat([p for p, _ in cut]), [g for _, g in cut]
    features = model(patches, grids)
    assert features.shape == (24 + 16, 16)
    assert torch.equal(features, model(patches, [(1, 4, 6), (2, 2, 4)]))
    assert torch.equal(features, model(patches, torch.tensor([[1, 4, 6], [2, 2, 4]])))
    # A still is a video of one patch that shows it all the time.
    again, _ = to_blocks(torch.stack([still, still]), model.config.patch, merge=2, temporal=2)
    assert torch.equal(again, cut[0][0])


def test_depths_come_from_one_pass():
    model = TOWERS["qwen3"]
    patches, grids = rows(model, [(1, 4, 6)]), [(1, 4, 6)]
    first, second, last = model.depths(patches, grids)
    for layer, state in ((1, first), (2, second), (3, last), (-1, last), (-2, second), (None, last)):
        assert torch.equal(model(patches, grids, layer=layer), state)
    assert model.depths(patches, grids, [0])[0].shape == (24, 16)
    short = tower("qwen3")
    short.blocks[2] = None
    assert len(short.depths(patches, grids, [2, 0])) == 2  # later blocks are not run


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
        ({"window": 0, "full": (1,)}, "window"),
        ({"window": 2, "full": (3,)}, "3 blocks"),
        ({"taps": (4,)}, "no layer 4"),
        ({"merge": 0}, "at least 1"),
        ({"positions": -1}, "0 for none"),
        ({"block": BLOCK.with_(width=12)}, "rotary"),  # heads of 6 channels
        ({"block": BLOCK.with_(chain=("cross", "mlp"))}, "self, mlp"),
    ],
)
def test_what_is_refused(more, why):
    with pytest.raises(ConfigError, match=why):
        tower(**more)


@pytest.mark.parametrize(
    "shape, grids",
    [((24, 8), [(1, 4, 4)]), ((16, 7), [(1, 4, 4)]), ((1, 16, 8), [(1, 4, 4)]), ((0, 8), [])],
)
def test_patches_that_do_not_fit_their_grids(shape, grids):
    with pytest.raises(ImageError, match="to_blocks"):
        tower()(torch.randn(*shape), grids)


def test_a_grid_that_cannot_be_merged():
    with pytest.raises(ConfigError, match="3×4"):
        tower()(torch.randn(12, 8), [(1, 3, 4)])


# ---- costs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_flops_are_those_counted(kind):
    model, grids = TOWERS[kind], [(1, 6, 12), (2, 6, 6)]
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(rows(model, grids), grids)
    assert cost.flops(model, model.work(grids)) == counter.get_total_flops()
    assert cost.bytes(model, model.work(grids)).weights == sum(p.numel() * 4 for p in model.parameters())
    with pytest.raises(ConfigError, match="work"):
        cost.flops(model, Work.full(8))


def test_windows_cost_less():
    """A page of 2240² pixels: 28 blocks of Qwen2.5-VL see 64 patches each, where Qwen2-VL's see 25,600."""
    with torch.device("meta"):
        old, new = PackedViT(PACKED["qwen2-vl"]), PackedViT(PACKED["qwen2.5-vl"])
    page = [(1, 160, 160)]
    work = new.work(page)
    assert (work.pairs, work.windowed) == (25_600**2, 25_600 * 64)
    assert cost.flops(old, old.work(page)) > 3 * cost.flops(new, work)


def test_every_row_can_be_built():
    with torch.device("meta"):
        for config in PACKED.values():
            PackedViT(config)
