"""What every connector promises: counts told before, widths refused, padding unseen, costs counted."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers import randomize, relative
from vitrail.config import Config
from vitrail.connectors import (
    CONNECTORS,
    AnyConnectorConfig,
    ConvMerger,
    ConvMergerConfig,
    Fused,
    FusedConfig,
    Merger,
    MergerConfig,
    Pool,
    PoolConfig,
    Projector,
    ProjectorConfig,
    QFormerConfig,
    ResamplerConfig,
    into_blocks,
    make_connector,
    out_of_blocks,
)
from vitrail.connectors.presets import PRESETS
from vitrail.errors import ConfigError
from vitrail.nn import cost
from vitrail.processing.grid import Grid

D, W = 8, 6
FUSED = FusedConfig(reads=D, gives=W, vocab=9, first=5, layers=2, width=12, heads=2, hidden=16, question="never")
KINDS = {
    "linear": ProjectorConfig(reads=D, gives=W, layers=1),
    "mlp": ProjectorConfig(reads=D, gives=W, layers=3, hidden=(11, 13)),
    "apart": ProjectorConfig(reads=D, gives=W, apart=(5, 3)),
    "merger": MergerConfig(reads=D, gives=W),
    "shuffle": MergerConfig(reads=D, gives=W, hidden=7, norm_at="after"),
    "blocks": MergerConfig(reads=D, gives=W, order="blocks", norm_at="none"),
    "rms": MergerConfig(reads=D, gives=W, norm="rms"),
    "qformer": QFormerConfig(reads=D, gives=W, queries=3, layers=3, width=12, heads=2, hidden=10, text=True),
    "resampler": ResamplerConfig(reads=D, gives=W, latents=4, layers=2, heads=2, head_dim=5, qk_norm="layer"),
    "fused": FUSED,
    "space": PoolConfig(reads=D, gives=W, space=2),
    "time": PoolConfig(reads=D, gives=D, time=None),
    "frame": PoolConfig(reads=D, gives=W, space=None),
    "conv": ConvMergerConfig(reads=D, gives=W),
    "hd": ConvMergerConfig(reads=D, gives=D, newline=True),
}
GRIDS = [Grid(h=4, w=6), Grid(h=2, w=2, t=3), Grid(h=6, w=2)]


class Holder(Config):
    connector: AnyConnectorConfig


@pytest.fixture(params=KINDS)
def connector(request):
    return randomize(make_connector(KINDS[request.param])).eval()


@pytest.mark.parametrize("config", [*KINDS.values(), *PRESETS.values()], ids=[*KINDS, *PRESETS])
def test_configs_are_plain_data(config):
    holder = Holder(connector=config)
    assert Holder.read(holder.plain()) == holder
    assert {kind.Config for kind in CONNECTORS} >= {type(config)}


def test_as_many_tokens_as_were_told(connector):
    for grid in GRIDS:
        out = connector(torch.randn(2, grid.patches, D), grid)
        assert out.shape == (2, connector.config.tokens(grid), connector.config.gives)


def test_unequal_rows_are_as_if_alone(connector):
    x = torch.randn(3, 24, D)
    together = connector(x, GRIDS)
    noisy = x.clone()
    for row, grid in enumerate(GRIDS):
        noisy[row, grid.patches :] = 50.0
        alone = connector(x[row : row + 1, : grid.patches], grid)
        assert relative(together[row : row + 1, : alone.shape[1]], alone) <= 1e-5
        assert relative(connector(x[row : row + 1], [grid])[:, : alone.shape[1]], alone) <= 1e-5
    again = connector(noisy, GRIDS)
    for row, grid in enumerate(GRIDS):
        M = connector.config.tokens(grid)
        assert torch.equal(again[row, :M], together[row, :M])


def test_half_precision(connector):
    x = torch.randn(2, 24, D)
    half = connector.bfloat16()(x.bfloat16(), GRIDS[0])
    assert half.dtype == torch.bfloat16 and half.isfinite().all()
    assert relative(half.float(), connector.float()(x, GRIDS[0])) <= 0.1


def test_every_weight_learns(connector):
    connector.train()
    connector(torch.randn(2, 24, D, requires_grad=True), GRIDS[0]).square().sum().backward()
    still = {name for name, p in connector.named_parameters() if p.grad is None or not p.grad.any()}
    # What only text or a question would use.
    assert all(".words." in name or name == "embed.weight" or name == "end" for name in still), still


def test_what_does_not_fit_is_refused(connector):
    with pytest.raises(ConfigError, match=f"{D}"):
        connector(torch.randn(2, 24, D + 1), GRIDS[0])
    with pytest.raises(ConfigError, match="24 features"):
        connector(torch.randn(2, 24, D), Grid(h=4, w=8))
    with pytest.raises(ConfigError, match="3 rows"):
        connector(torch.randn(2, 24, D), GRIDS)
    with pytest.raises(ConfigError, match="24 features"):
        connector(torch.randn(2, 24, D), Grid(h=4, w=4))


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: ProjectorConfig(reads=0, gives=4), "reads"),
        (lambda: ProjectorConfig(reads=4, gives=4, layers=0), "layers"),
        (lambda: ProjectorConfig(reads=4, gives=4, hidden=(0,)), "hidden"),
        (lambda: ProjectorConfig(reads=4, gives=4, hidden=(5, 5)), "hidden 1"),
        (lambda: MergerConfig(reads=4, gives=4, merge=0), "merge"),
        (lambda: PoolConfig(reads=4, gives=4, time=0), "time"),
        (lambda: QFormerConfig(reads=4, gives=4, width=10, heads=3), "heads"),
        (lambda: QFormerConfig(reads=4, gives=4, queries=0), "queries"),
        (lambda: ResamplerConfig(reads=10, gives=4, heads=3), "heads"),
        (lambda: FusedConfig(reads=4, gives=4, vocab=3, first=4, later=5), "later"),
        (lambda: FusedConfig(reads=4, gives=4, vocab=3, width=10, heads=3), "heads"),
        (lambda: KINDS["merger"].tokens(Grid(h=3, w=4)), "3×4"),
        (lambda: KINDS["merger"].tokens(12), "Grid"),
        (lambda: KINDS["space"].tokens(Grid(h=3, w=4)), "3×4"),
        (lambda: PoolConfig(reads=4, gives=4, time=2).tokens(Grid(h=3, w=4, t=3)), "3 frames"),
        (lambda: FUSED.tokens(12, questions=0), "0 questions"),
    ],
)
def test_impossible_configs(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def counted(call) -> int:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_costs_are_those_that_torch_counts(connector):
    for grid in GRIDS:
        x = torch.randn(2, grid.patches, D)
        work = connector.work(grid, batch=2)
        if not isinstance(connector, Fused):  # torch counts what a causal mask hides: see test_queries
            assert cost.flops(connector, work) == counted(lambda x=x, grid=grid: connector(x, grid))
        held = cost.bytes(connector, work)
        assert held.weights == sum(p.numel() * 4 for p in connector.parameters())
        assert held.read <= held.weights


# ---- counts that were published ----------------------------------------------------------------------------------


def test_published_counts():
    tall = Grid(h=24, w=24)
    assert PRESETS["llava-1.5-7b"].tokens(tall) == 576
    assert PRESETS["qwen2-vl-7b"].tokens(tall) == 144
    assert PRESETS["internvl3-8b"].tokens(Grid(h=32, w=32)) == 256
    assert PRESETS["blip2-opt-2.7b"].tokens(257) == 32
    assert PRESETS["idefics-9b"].tokens(257) == 64
    assert PRESETS["next-video"].tokens(Grid(h=24, w=24, t=8)) == 8 * 144
    assert ConvMergerConfig(reads=1024, gives=1024).tokens(tall) == 144
    assert PRESETS["hd-9"].tokens(Grid(h=24, w=24, t=10)) == 1450
    fused = FusedConfig(reads=1024, gives=4096, vocab=9, first=256)
    assert fused.groups(3) == [256, 8, 8] and fused.tokens(1450, questions=3) == 272
    assert fused.with_(first=1).groups(3) == [1, 1, 1]
    assert fused.with_(first=8).groups(2) == [8, 8] and fused.with_(first=4).groups(2) == [4, 4]


# ---- grids -------------------------------------------------------------------------------------------------------

sides = st.integers(1, 4)


@settings(max_examples=60)
@given(sides, sides, sides, st.integers(1, 3))
def test_blocks_and_back(t, rows, columns, m):
    grid = Grid(t=t, h=rows * m, w=columns * m)
    x = torch.arange(2.0 * grid.patches * 3).view(2, grid.patches, 3)
    blocks = into_blocks(x, grid, m)
    assert blocks.shape == (2, t * rows * columns, m * m, 3)
    assert torch.equal(out_of_blocks(blocks, grid, m), x)
    # A block holds neighbours: its places span m rows and m columns of one frame.
    place = into_blocks(torch.arange(grid.patches)[None, :, None], grid, m)[0, :, :, 0]
    frame, y, column = place // (grid.h * grid.w), place // grid.w % grid.h, place % grid.w
    assert (frame == frame[:, :1]).all()
    assert (y - y[:, :1] == torch.arange(m).repeat_interleave(m)).all()
    assert (column - column[:, :1] == torch.arange(m).repeat(m)).all()


@settings(max_examples=30)
@given(sides, sides, sides, st.integers(1, 3), st.integers(1, 3))
def test_means_are_those_of_torch(t, rows, columns, k, s):
    grid = Grid(t=t * k, h=rows * s, w=columns * s)
    x = torch.randn(2, grid.patches, 3)
    ours = Pool(PoolConfig(reads=3, gives=3, space=s, time=k))(x, grid)
    movie = x.view(2, grid.t, grid.h, grid.w, 3).movedim(-1, 1)
    wanted = F.avg_pool3d(movie, (k, s, s)).flatten(2).mT
    assert ours.shape == wanted.shape and torch.allclose(ours, wanted, atol=1e-6)


def test_means_over_all():
    x = torch.randn(2, 3 * 20, 5)
    grid = Grid(t=3, h=4, w=5)
    frames = Pool(PoolConfig(reads=5, gives=5, space=None))(x, grid)
    assert torch.allclose(frames, x.view(2, 3, 20, 5).mean(2), atol=1e-6)
    still = Pool(PoolConfig(reads=5, gives=5, time=None))(x, grid)
    assert torch.allclose(still, x.view(2, 3, 20, 5).mean(1), atol=1e-6)


def test_deeper_projectors():
    ours = Projector(ProjectorConfig(reads=4, gives=6, layers=3, hidden=(5, 7)))
    assert [(linear.in_features, linear.out_features) for linear in ours.layers.linears] == [(4, 5), (5, 7), (7, 6)]
    x = torch.randn(1, 2, 4)
    a, b, c = ours.layers.linears
    assert torch.allclose(ours(x), c(F.gelu(b(F.gelu(a(x))))))


def test_a_merger_says_how_features_must_lie():
    with pytest.raises(ConfigError, match="Grid"):
        Merger(MergerConfig(reads=4, gives=4))(torch.randn(1, 16, 4))


@pytest.mark.parametrize("h, w", [(24, 24), (2, 6), (5, 3)])
def test_the_convolution_of_hd9(h, w):
    """A 3 × 3 kernel of stride 2 beside nearest neighbours; views do not mix, and each is closed by its mark."""
    ours = randomize(ConvMerger(ConvMergerConfig(reads=4, gives=4, newline=True)))
    x = torch.randn(2, 3 * h * w, 4)
    out = ours(x, Grid(t=3, h=h, w=w)).unflatten(1, (3, -1))
    for view, got in zip(x.view(2, 3, h, w, 4).unbind(1), out.unbind(1), strict=True):
        maps = view.movedim(-1, 1)
        conv = F.conv2d(maps, ours.conv.weight, ours.conv.bias, stride=2, padding=1)
        if h % 2 == w % 2 == 0:
            near = F.interpolate(maps, scale_factor=0.5, mode="nearest")
        else:
            near = maps[:, :, ::2, ::2]
        assert torch.allclose(got[:, :-1], (conv + near).flatten(2).mT, atol=1e-6)
        assert torch.equal(got[:, -1], ours.newline.expand(2, -1))
