"""Common behaviour of connectors: token counts, validation, padding and costs."""

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
    AnyConnectorConfig,
    ConvMerger,
    ConvMergerConfig,
    FusedQueryConfig,
    FusedQueryConnector,
    GatedMergerConfig,
    GridResamplerConfig,
    Merger,
    MergerConfig,
    PoolConnector,
    PoolConnectorConfig,
    Projector,
    ProjectorConfig,
    QFormerConfig,
    ResamplerConfig,
    group_blocks,
    make_connector,
    ungroup_blocks,
)
from vitrail.connectors.presets import CONNECTOR_PRESETS
from vitrail.connectors.view_stitching import stitch_spans
from vitrail.errors import ConfigError
from vitrail.nn import cost
from vitrail.processing.grid import Grid
from vitrail.processing.hd_tiles import HDTransformPolicy
from vitrail.registry import CONNECTORS

D, W = 8, 6
FUSED = FusedQueryConfig(
    in_features=D,
    out_features=W,
    vocab_size=9,
    first_queries=5,
    layers=2,
    width=12,
    heads=2,
    intermediate_size=16,
    question_mode="never",
)
KINDS = {
    "linear": ProjectorConfig(in_features=D, out_features=W, layers=1),
    "mlp": ProjectorConfig(in_features=D, out_features=W, layers=3, hidden_sizes=(11, 13)),
    "apart": ProjectorConfig(in_features=D, out_features=W, split_widths=(5, 3)),
    "merger": MergerConfig(in_features=D, out_features=W),
    "shuffle": MergerConfig(in_features=D, out_features=W, intermediate_size=7, norm_position="after"),
    "blocks": MergerConfig(in_features=D, out_features=W, order="blocks", norm_position="none"),
    "rms": MergerConfig(in_features=D, out_features=W, norm="rms"),
    "mean": MergerConfig(in_features=D, out_features=W, norm_position="none", reduction="mean"),
    "mean of blocks": MergerConfig(in_features=D, out_features=W, order="blocks", reduction="mean"),
    "qformer": QFormerConfig(
        in_features=D, out_features=W, num_queries=3, layers=3, width=12, heads=2, intermediate_size=10, use_text=True
    ),
    "resampler": ResamplerConfig(
        in_features=D, out_features=W, num_latents=4, layers=2, heads=2, head_dim=5, qk_norm="layer"
    ),
    "grid": GridResamplerConfig(in_features=D, out_features=12, num_queries=3, heads=2),
    "grid, one width": GridResamplerConfig(in_features=D, out_features=D, num_queries=5, heads=1),
    "one merger layer": MergerConfig(in_features=D, out_features=W, layers=1, bias=False, norm_position="none"),
    "fused": FUSED,
    "pooled norm": PoolConnectorConfig(in_features=D, out_features=W, spatial_window=2, norm="rms_zero_centered"),
    "space": PoolConnectorConfig(in_features=D, out_features=W, spatial_window=2),
    "time": PoolConnectorConfig(in_features=D, out_features=D, temporal_window=None),
    "frame": PoolConnectorConfig(in_features=D, out_features=W, spatial_window=None),
    "gated": GatedMergerConfig(in_features=D, out_features=W, intermediate_size=11, order="raster"),
    "gated blocks": GatedMergerConfig(in_features=D, out_features=W, intermediate_size=11),
    "conv": ConvMergerConfig(in_features=D, out_features=W),
    "hd": ConvMergerConfig(in_features=D, out_features=D, newline=True),
}
GRIDS = [Grid(h=4, w=6), Grid(h=2, w=2, t=3), Grid(h=6, w=2)]


class Holder(Config):
    connector: AnyConnectorConfig


@pytest.fixture(params=KINDS)
def connector(request):
    return randomize(make_connector(KINDS[request.param])).eval()


@pytest.mark.parametrize("config", [*KINDS.values(), *CONNECTOR_PRESETS.values()], ids=[*KINDS, *CONNECTOR_PRESETS])
def test_configs_are_plain_data(config):
    holder = Holder(connector=config)
    assert Holder.from_dict(holder.to_dict()) == holder
    assert {kind.Config for kind in CONNECTORS.values()} >= {type(config)}


def test_token_counts(connector):
    for grid in GRIDS:
        out = connector(torch.randn(2, grid.num_patches, D), grid)
        assert out.shape == (2, connector.config.count_tokens(grid), connector.config.out_features)


def test_padded_rows_equal_single_rows(connector):
    x = torch.randn(3, 24, D)
    together = connector(x, GRIDS)
    noisy = x.clone()
    for row, grid in enumerate(GRIDS):
        noisy[row, grid.num_patches :] = 50.0
        alone = connector(x[row : row + 1, : grid.num_patches], grid)
        assert relative(together[row : row + 1, : alone.shape[1]], alone) <= 1e-5
        assert relative(connector(x[row : row + 1], [grid])[:, : alone.shape[1]], alone) <= 1e-5
    again = connector(noisy, GRIDS)
    for row, grid in enumerate(GRIDS):
        M = connector.config.count_tokens(grid)
        assert torch.equal(again[row, :M], together[row, :M])


def test_half_precision(connector):
    x = torch.randn(2, 24, D)
    half = connector.bfloat16()(x.bfloat16(), GRIDS[0])
    assert half.dtype == torch.bfloat16 and half.isfinite().all()
    assert relative(half.float(), connector.float()(x, GRIDS[0])) <= 0.1


def test_every_weight_has_a_gradient(connector):
    connector.train()
    connector(torch.randn(2, 24, D, requires_grad=True), GRIDS[0]).square().sum().backward()
    still = {name for name, p in connector.named_parameters() if p.grad is None or not p.grad.any()}
    # What only text or a question would use.
    assert all(".text_mlp." in name or name == "embed.weight" or name == "end" for name in still), still


def test_invalid_inputs_raise(connector):
    with pytest.raises(ConfigError, match=f"{D}"):
        connector(torch.randn(2, 24, D + 1), GRIDS[0])
    with pytest.raises(ConfigError, match="24 features"):
        connector(torch.randn(2, 24, D), Grid(h=4, w=8))
    with pytest.raises(ConfigError, match="3 layouts"):
        connector(torch.randn(2, 24, D), GRIDS)
    with pytest.raises(ConfigError, match="24 features"):
        connector(torch.randn(2, 24, D), Grid(h=4, w=4))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: ProjectorConfig(in_features=0, out_features=4), "in_features"),
        (lambda: ProjectorConfig(in_features=4, out_features=4, layers=0), "layers"),
        (lambda: ProjectorConfig(in_features=4, out_features=4, hidden_sizes=(0,)), "hidden"),
        (lambda: ProjectorConfig(in_features=4, out_features=4, hidden_sizes=(5, 5)), "hidden_sizes"),
        (lambda: MergerConfig(in_features=4, out_features=4, merge=0), "merge"),
        (lambda: PoolConnectorConfig(in_features=4, out_features=4, temporal_window=0), "temporal_window"),
        (lambda: QFormerConfig(in_features=4, out_features=4, width=10, heads=3), "heads"),
        (lambda: QFormerConfig(in_features=4, out_features=4, num_queries=0), "queries"),
        (lambda: ResamplerConfig(in_features=10, out_features=4, heads=3), "heads"),
        (
            lambda: FusedQueryConfig(in_features=4, out_features=4, vocab_size=3, first_queries=4, later_queries=5),
            "later",
        ),
        (lambda: FusedQueryConfig(in_features=4, out_features=4, vocab_size=3, width=10, heads=3), "heads"),
        (lambda: KINDS["merger"].count_tokens(Grid(h=3, w=4)), "3×4"),
        (lambda: KINDS["merger"].count_tokens(12), "Grid"),
        (lambda: KINDS["space"].count_tokens(Grid(h=3, w=4)), "3×4"),
        (
            lambda: PoolConnectorConfig(in_features=4, out_features=4, temporal_window=2).count_tokens(
                Grid(h=3, w=4, t=3)
            ),
            "3 frames",
        ),
        (lambda: FUSED.count_tokens(12, num_questions=0), "num_questions is 0"),
    ],
)
def test_invalid_configs_raise(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def count_torch_flops(call) -> int:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_flops_match_torch_counter(connector):
    for grid in GRIDS:
        x = torch.randn(2, grid.num_patches, D)
        work = connector.workload(grid, batch_size=2)
        if not isinstance(connector, FusedQueryConnector):  # torch counts what a causal mask hides: see test_queries
            assert cost.count_flops(connector, work) == count_torch_flops(lambda x=x, grid=grid: connector(x, grid))
        held = cost.count_bytes(connector, work)
        assert held.weights == sum(p.numel() * 4 for p in connector.parameters())
        assert held.read <= held.weights


# ---- counts that were published ----------------------------------------------------------------------------------


def test_published_parameter_counts():
    tall = Grid(h=24, w=24)
    assert CONNECTOR_PRESETS["llava-1.5-7b"].count_tokens(tall) == 576
    assert CONNECTOR_PRESETS["qwen2-vl-7b"].count_tokens(tall) == 144
    assert CONNECTOR_PRESETS["internvl3-8b"].count_tokens(Grid(h=32, w=32)) == 256
    assert CONNECTOR_PRESETS["blip2-opt-2.7b"].count_tokens(257) == 32
    assert CONNECTOR_PRESETS["idefics-9b"].count_tokens(257) == 64
    assert CONNECTOR_PRESETS["next-video"].count_tokens(Grid(h=24, w=24, t=8)) == 8 * 144
    assert ConvMergerConfig(in_features=1024, out_features=1024).count_tokens(tall) == 144
    assert CONNECTOR_PRESETS["hd-9"].count_tokens(Grid(h=24, w=24, t=10)) == 1450
    fused = FusedQueryConfig(in_features=1024, out_features=4096, vocab_size=9, first_queries=256)
    assert fused.queries_per_question(3) == [256, 8, 8] and fused.count_tokens(1450, num_questions=3) == 272
    assert fused.replace(first_queries=1).queries_per_question(3) == [1, 1, 1]
    assert fused.replace(first_queries=8).queries_per_question(2) == [8, 8] and fused.replace(
        first_queries=4
    ).queries_per_question(2) == [4, 4]


# ---- grids -------------------------------------------------------------------------------------------------------

sides = st.integers(1, 4)


@settings(max_examples=60)
@given(sides, sides, sides, st.integers(1, 3))
def test_block_grouping_round_trip(t, rows, columns, m):
    grid = Grid(t=t, h=rows * m, w=columns * m)
    x = torch.arange(2.0 * grid.num_patches * 3).view(2, grid.num_patches, 3)
    blocks = group_blocks(x, grid, m)
    assert blocks.shape == (2, t * rows * columns, m * m, 3)
    assert torch.equal(ungroup_blocks(blocks, grid, m), x)
    # A block holds neighbours: its places span m rows and m columns of one frame.
    place = group_blocks(torch.arange(grid.num_patches)[None, :, None], grid, m)[0, :, :, 0]
    frame, y, column = place // (grid.h * grid.w), place // grid.w % grid.h, place % grid.w
    assert (frame == frame[:, :1]).all()
    assert (y - y[:, :1] == torch.arange(m).repeat_interleave(m)).all()
    assert (column - column[:, :1] == torch.arange(m).repeat(m)).all()


@settings(max_examples=30)
@given(sides, sides, sides, st.integers(1, 3), st.integers(1, 3))
def test_pooling_matches_torch(t, rows, columns, k, s):
    grid = Grid(t=t * k, h=rows * s, w=columns * s)
    x = torch.randn(2, grid.num_patches, 3)
    ours = PoolConnector(PoolConnectorConfig(in_features=3, out_features=3, spatial_window=s, temporal_window=k))(
        x, grid
    )
    movie = x.view(2, grid.t, grid.h, grid.w, 3).movedim(-1, 1)
    wanted = F.avg_pool3d(movie, (k, s, s)).flatten(2).mT
    assert ours.shape == wanted.shape and torch.allclose(ours, wanted, atol=1e-6)


def test_global_pooling():
    x = torch.randn(2, 3 * 20, 5)
    grid = Grid(t=3, h=4, w=5)
    frames = PoolConnector(PoolConnectorConfig(in_features=5, out_features=5, spatial_window=None))(x, grid)
    assert torch.allclose(frames, x.view(2, 3, 20, 5).mean(2), atol=1e-6)
    still = PoolConnector(PoolConnectorConfig(in_features=5, out_features=5, temporal_window=None))(x, grid)
    assert torch.allclose(still, x.view(2, 3, 20, 5).mean(1), atol=1e-6)


def test_deeper_projectors():
    ours = Projector(ProjectorConfig(in_features=4, out_features=6, layers=3, hidden_sizes=(5, 7)))
    assert [(linear.in_features, linear.out_features) for linear in ours.layers.linears] == [(4, 5), (5, 7), (7, 6)]
    x = torch.randn(1, 2, 4)
    a, b, c = ours.layers.linears
    assert torch.allclose(ours(x), c(F.gelu(b(F.gelu(a(x))))))


def test_merger_of_means_with_separators():
    """Average pooling as in torch; the MLP projects a newline and a separator too, which cost two tokens."""
    config = MergerConfig(in_features=4, out_features=6, intermediate_size=5, norm_position="none", reduction="mean")
    ours, grid = randomize(Merger(config.replace(separators=True))), Grid(h=4, w=6)
    x, (first, second) = torch.randn(2, 24, 4), ours.layers.linears
    pooled = F.avg_pool2d(x.mT.unflatten(2, (4, 6)), 2).flatten(2).mT
    assert torch.allclose(ours(x, grid), second(F.gelu(first(pooled))), atol=1e-6)
    for own, token in zip((ours.newline, ours.separator), ours.project_separators(), strict=True):
        assert torch.allclose(token, second(F.gelu(first(own))), atol=1e-6)
    work = ours.workload(grid, 2)
    more = cost.count_flops(ours, work) - cost.count_flops(Merger(config), work)
    assert more == 2 * 2 * (4 * 5 + 5 * 6)
    with pytest.raises(ConfigError, match="separators"):
        config.replace(separators=True, norm_position="after")


def test_spans_are_stitched_with_newlines_and_separators():
    """Two tiles of 2 × 2 tokens whose last row is padding, a separator, and the whole view."""
    layout = HDTransformPolicy(tile_size=4, patch_size=1, max_tiles=2).layout(10, 20)
    cropped = layout.spans[0].replace(window=(0, 0, 1, 4), size=(1, 4))
    tokens = torch.arange(12.0).view(3, 4, 1)
    newline, separator = torch.tensor([-1.0]), torch.tensor([-2.0])
    found = stitch_spans(tokens, layout.replace(spans=(cropped, *layout.spans[1:])), newline, separator)
    assert found.flatten().tolist() == [0, 1, 4, 5, -1, -2, 8, 9, -1, 10, 11, -1]


def test_merger_needs_a_grid():
    with pytest.raises(ConfigError, match="Grid"):
        Merger(MergerConfig(in_features=4, out_features=4))(torch.randn(1, 16, 4))


@pytest.mark.parametrize("h, w", [(24, 24), (2, 6), (5, 3)])
def test_hd9_convolution(h, w):
    """A 3 × 3 convolution with stride 2 plus a residual; views do not mix, and each ends with a newline token."""
    ours = randomize(ConvMerger(ConvMergerConfig(in_features=4, out_features=4, newline=True)))
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
