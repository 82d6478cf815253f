"""Space-time transformer: attention pattern, caches, CPU runner and costs."""

import copy
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from helpers import randomize, relative
from vitrail.errors import ConfigError
from vitrail.nn import (
    AttentionConfig,
    AttentionPlan,
    BlockConfig,
    FrameRingCache,
    GatedMLPConfig,
    SpaceTimeConfig,
    SpaceTimeTransformer,
    Workload,
    compute_attention,
    cost,
)
from vitrail.nn.attention_backends import _single
from vitrail.nn.position_embedding import build_grid_positions

BLOCK = BlockConfig(
    width=16, attention=AttentionConfig(heads=2, qk_norm="rms"), mlp=GatedMLPConfig(intermediate_size=20), norm="rms"
)
GRID = (2, 3)


def net(layers=2, memory=4, prefix=0, block=BLOCK) -> SpaceTimeTransformer:
    made = SpaceTimeTransformer(SpaceTimeConfig(layers=layers, block=block, context_frames=memory), GRID, prefix)
    randomize(made)
    return made.eval()


def changed(x, at):
    """Return which outputs (T, S) change when the token at (frame, position) changes."""
    ours = net(layers=1)
    y = x.clone()
    y[:, at[0], at[1]] += 1
    return (ours(x, GRID) - ours(y, GRID)).abs().amax((0, 3)) > 1e-6


def test_one_layer_attends_to_frame_then_past():
    """A token changes all of its frame (space) and, through it, all later frames (time)."""
    moved = changed(torch.randn(1, 4, 6, 16), (1, 2))
    assert moved[1:].all() and not moved[0].any()


def test_temporal_attention_stays_at_its_position():
    """Temporal attention alone changes only the same position in this and later frames."""
    block = net(layers=1).blocks[0]
    x = torch.randn(2, 5, 6, 16)
    y = x.clone()
    y[:, 2, 3] += 1
    in_time = lambda z: block.time(z.transpose(1, 2).flatten(0, 1)[:, :3]).unflatten(0, (2, 6))  # noqa: E731
    moved = (in_time(x) - in_time(y)).abs().amax((0, 2, 3)) > 1e-6  # (S,)
    assert moved.tolist() == [False, False, False, True, False, False]


def attend_by_differences(block, x, places, theta):
    """Spatial attention from position differences, pair by pair:
    Σₛ Re(qₛ · k̄ₛ · exp(i · (p − p′) · θ^(−s/S))), rows in the first half of the slots s, columns in the second."""
    look = block.space.branches["self"]
    op, S = look.op, look.op.head_dim // 4  # slots an axis
    made = op.qkv(look.norm(x)).unflatten(-1, (-1, op.head_dim))
    q, k, v = made.split([op.config.heads, op.config.num_kv_heads, op.config.num_kv_heads], -2)  # (B, N, H, D)
    q, k = (torch.complex(*norm(part).chunk(2, -1)) for norm, part in ((op.q_norm, q), (op.k_norm, k)))
    apart = places[:, None] - places[None]  # (N, N, 2): to a query from a key
    angle = apart.repeat_interleave(S, -1) * theta ** (-torch.arange(S) / S).repeat(2)
    turned = torch.einsum("bihs,bjhs,ijs->bhij", q, k.conj(), torch.polar(torch.ones_like(angle), angle))
    weights = (turned.real / op.head_dim**0.5).softmax(-1)
    return x + op.out(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2))


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("grid", [(2, 3), (1, 7), (4, 4)])
def test_spatial_attention_depends_on_differences(grid, prefix):
    """Prefix tokens have the position of the first cell. Compares gradients too."""
    ours, theta = net(layers=1, prefix=prefix), 10.0
    h, w = grid
    x = torch.randn(2, prefix + h * w, 16, requires_grad=True)
    places = torch.cat([torch.zeros(prefix, 2), torch.cartesian_prod(torch.arange(h), torch.arange(w))])
    found = ours.blocks[0].space(x, rotation=ours.space_rotation(h, w))
    truth = attend_by_differences(ours.blocks[0], x, places, theta)
    assert relative(found, truth) < 1e-5
    far = torch.randn_like(x)
    pulls = [torch.autograd.grad((y * far).sum(), x)[0] for y in (found, truth)]
    assert relative(*pulls) < 1e-5


def test_spatial_attention_is_shift_equivariant():
    """Without learned positions, shifted tokens give shifted outputs; reordered tokens do not."""
    ours, x = net(), torch.randn(1, 3, 6, 16)
    torch.nn.init.zeros_(ours.positions.table)
    first = ours(x, GRID)
    assert relative(ours(x.flip(2), GRID), first.flip(2)) > 1e-3
    ours.space_rotation = lambda h, w: ours.space_rotary(build_grid_positions(1, h, w, start=5)[None])
    assert relative(ours(x, GRID), first) < 1e-5


@pytest.mark.parametrize("memory", [1, 2, 3])
def test_layer_attends_to_the_window(memory):
    ours, x = net(layers=1, memory=memory), torch.randn(1, 6, 6, 16)
    y = x.clone()
    y[:, 1] += 1
    moved = (ours(x, GRID) - ours(y, GRID)).abs().amax((0, 2, 3)) > 1e-6
    assert moved.tolist() == [1 <= t < 1 + memory for t in range(6)]


@pytest.mark.parametrize("cuts", [(9,), (1,) * 9, (3, 1, 4, 1), (2, 7), (6, 3)])
@pytest.mark.parametrize("memory", [1, 3, 20])
def test_cached_frames_equal_one_pass(cuts, memory):
    ours, x = net(memory=memory, prefix=1), torch.randn(2, 9, 7, 16)
    cache, found = ours.make_cache(), []
    for part in x.split(cuts, 1):
        ours(torch.randn_like(part), GRID, cache)  # a draft without commit has no effect
        found.append(ours(part, GRID, cache))
        cache.commit()
    assert relative(torch.cat(found, 1), ours(x, GRID)) < 1e-5
    assert cache.num_frames == 9 and cache.num_cached_frames == min(9, memory - 1)


def test_cache_holds_only_the_window():
    ours = net(memory=3)
    cache = ours.make_cache()
    with pytest.raises(ConfigError, match="no draft"):
        cache.commit()
    for _ in range(5):
        ours(torch.randn(2, 1, 6, 16), GRID, cache)
        cache.commit()
    assert all(kept.k.shape[:2] == (12, 2) for kept in cache.past_key_values)
    held = sum(t.numel() * 4 for kept in cache.past_key_values for t in kept)
    assert cost.count_bytes(ours, ours.workload(1, 2, past_frames=4)).cache == held


@pytest.mark.parametrize("memory", [2, 4])
def test_ring_continues_from_a_full_cache(memory):
    """Frames with several passes, far beyond the window; also a ring that is filled again."""
    ours, x = net(memory=memory, prefix=1), torch.randn(2, 14, 7, 16)
    with torch.no_grad():
        whole, ring = ours(x, GRID), None
        for begun in (5, memory - 1):
            cache = ours.make_cache()
            ours(x[:, :begun], GRID, cache)
            cache.commit()
            if ring is None:
                ring = FrameRingCache(cache)
                places = [t.data_ptr() for t in (*ring.k, *ring.v, ring.num_frames)]
            else:
                assert ring.is_compatible(cache)
                ring.copy_from(cache)
            for t in range(begun, 14):
                ours(torch.randn(2, 1, 7, 16), GRID, ring)  # a draft
                assert relative(ours(x[:, t : t + 1], GRID, ring), whole[:, t : t + 1]) < 1e-5
                ring.commit()
    assert ring.num_frames == 14 and places == [t.data_ptr() for t in (*ring.k, *ring.v, ring.num_frames)]
    with pytest.raises(ConfigError, match="one frame at a time"):
        ours(x, GRID, ring)
    with pytest.raises(ConfigError, match="fill the cache"):
        FrameRingCache(ours.make_cache())
    other = net(memory=memory).make_cache()
    assert not ring.is_compatible(other)


@pytest.mark.parametrize("memory", [2, 4, 20])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_single_frame_runner_equals_the_model(memory, kv_heads, norm):
    """From a full or partial cache, far beyond the window, with several passes per frame."""
    block = BLOCK.replace(norm=norm, attention=BLOCK.attention.replace(kv_heads=kv_heads))
    ours, x = net(memory=memory, prefix=1, block=block), torch.randn(2, 14, 7, 16)
    with torch.no_grad():
        whole = ours(x, GRID)
        for begun in (1, 6):
            cache = ours.make_cache()
            ours(x[:, :begun], GRID, cache)
            cache.commit()
            lean = ours.make_single_frame_runner(cache)
            for t in range(begun, 14):
                ours(torch.randn(2, 1, 7, 16), GRID, lean)  # a draft
                assert relative(ours(x[:, t : t + 1], GRID, lean), whole[:, t : t + 1]) < 1e-5
                lean.commit()
    assert lean.num_frames == 14 and lean.num_cached_frames == min(14, memory - 1)
    with pytest.raises(ConfigError, match="2 frames in one pass"):
        ours(x[:, :2], GRID, lean)


def test_single_frame_runner_in_half_precision_is_as_exact():
    ours, x = net(layers=4, memory=4), torch.randn(2, 12, 6, 16)
    half = copy.deepcopy(ours).bfloat16()
    ours.load_state_dict(half.state_dict())
    with torch.no_grad():
        whole, cache = ours(x.bfloat16().float(), GRID), half.make_cache()
        half(x[:, :3].bfloat16(), GRID, cache)
        cache.commit()
        found = {}
        for name, kept in (("usual", FrameRingCache(cache)), ("lean", half.make_single_frame_runner(cache))):
            made = []
            for one in x[:, 3:].bfloat16().split(1, 1):
                made.append(half(one, GRID, kept))
                kept.commit()
            assert made[0].dtype == torch.bfloat16
            found[name] = relative(torch.cat(made, 1).float(), whole[:, 3:])
    assert found["lean"] < 1.1 * found["usual"] < 0.1


@pytest.mark.parametrize("grid", [(3, 2), (1, 6)])
def test_other_grid_with_every_cache(grid):
    """Grids with the same number of cells."""
    ours, x = net(memory=3, prefix=1), torch.randn(1, 6, 7, 16)
    with torch.no_grad():
        whole, cache = ours(x, grid), ours.make_cache()
        assert relative(ours(x, GRID), whole) > 1e-3
        ours(x[:, :5], grid, cache)
        cache.commit()
        for way in (FrameRingCache(cache), ours.make_single_frame_runner(cache), cache):
            assert relative(ours(x[:, 5:], grid, way), whole[:, 5:]) < 1e-5


@pytest.mark.parametrize(
    "block",
    [
        BLOCK.replace(layer_scale=0.1),
        BLOCK.replace(gated=True),
        BLOCK.replace(norm_position="after"),
        BLOCK.replace(attention=AttentionConfig(heads=2)),
        BLOCK.replace(attention=AttentionConfig(heads=2, qk_norm="rms", qk_norm_over="heads")),
        BLOCK.replace(attention=AttentionConfig(heads=2, qk_norm="rms", inner_norm="rms")),
    ],
)
def test_unsupported_blocks_have_no_runner(block):
    ours = net(block=block)
    cache = ours.make_cache()
    ours(torch.randn(1, 3, 6, 16), GRID, cache)
    cache.commit()
    assert (
        ours.make_single_frame_runner(cache) is None and net().make_single_frame_runner(net().make_cache()) is None
    )  # nor does an empty one


@pytest.mark.parametrize("groups", [1, 4])
def test_single_query_attention_equals_the_formula(groups):
    """The path a GPU uses for a single frame."""
    q, k, v = torch.randn(5, 1, 4, 8), torch.randn(5, 6, groups, 8), torch.randn(5, 6, groups, 8)
    assert relative(_single(q, k, v), compute_attention(q, k, v, AttentionPlan(), "plain")) < 1e-6


@pytest.mark.parametrize("memory", [2, 20])
def test_more_rows_than_a_launch_allows(memory, monkeypatch):
    """Temporal attention has a row per position and video."""
    ours, x = net(memory=memory), torch.randn(3, 5, 6, 16)
    whole = ours(x, GRID)
    monkeypatch.setattr(sys.modules["vitrail.nn.attention_backends"], "MAX_LAUNCH_ROWS", 4)
    assert relative(ours(x, GRID), whole) < 1e-6


def test_time_positions_are_relative():
    """Time positions are relative: frames outside the window have no effect."""
    ours, x = net(layers=1, memory=3), torch.randn(1, 4, 6, 16)
    later = torch.cat([torch.randn(1, 50, 6, 16), x], 1)
    assert relative(ours(later, GRID)[:, -2:], ours(x, GRID)[:, -2:]) < 1e-5


def test_other_grids_and_gradients():
    ours = net()
    x = torch.randn(1, 3, 20, 16, requires_grad=True)
    ours(x, (4, 5))[:, -1].sum().backward()
    assert x.grad is not None and (x.grad.abs().amax((0, 2, 3)) > 0).all()


@pytest.mark.parametrize("past", [0, 2])
def test_flops_equal_those_counted(past):
    ours = net(memory=4, prefix=1)
    cache = ours.make_cache()
    if past:
        ours(torch.randn(2, past, 7, 16), GRID, cache)
        cache.commit()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        ours(torch.randn(2, 1, 7, 16), GRID, cache)
    assert cost.count_flops(ours, ours.workload(1, 2, past_frames=past)) == counter.get_total_flops()
    steps = sum(cost.count_flops(ours, ours.workload(1, past_frames=t)) for t in range(6))
    assert steps == cost.count_flops(ours, ours.workload(6))
    weights = sum(p.numel() * 4 for p in ours.parameters())
    assert cost.count_bytes(ours, ours.workload(3)) == (weights, weights, 0)


def test_invalid_configs_raise():
    with pytest.raises(ConfigError, match="context_frames"):
        SpaceTimeConfig(layers=1, block=BLOCK, context_frames=0)
    with pytest.raises(ConfigError, match="self, mlp"):
        SpaceTimeConfig(layers=1, block=BLOCK.replace(branches=("self",)))
    with pytest.raises(ConfigError, match="FramesWorkload"):
        cost.count_flops(net(), Workload.full_attention(6))
