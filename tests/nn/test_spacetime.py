"""The ST-transformer: what sees what, any length, a cache that equals none, and what it costs."""

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
    BlockConfig,
    FrameRing,
    GatedConfig,
    Plan,
    SpaceTime,
    SpaceTimeConfig,
    Work,
    attend,
    cost,
)
from vitrail.nn.attend import _single
from vitrail.nn.positions import grid_positions

BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2, qk_norm="rms"), mlp=GatedConfig(hidden=20), norm="rms")
GRID = (2, 3)


def net(layers=2, memory=4, prefix=0, block=BLOCK) -> SpaceTime:
    made = SpaceTime(SpaceTimeConfig(layers=layers, block=block, memory=memory), GRID, prefix)
    randomize(made)
    return made.eval()


def changed(x, at):
    """(T, S) which outputs move when the token at (frame, place) does."""
    ours = net(layers=1)
    y = x.clone()
    y[:, at[0], at[1]] += 1
    return (ours(x, GRID) - ours(y, GRID)).abs().amax((0, 3)) > 1e-6


def test_one_layer_sees_its_frame_then_its_place_in_the_past():
    """Frame 1, place 2 moves all of frame 1 (space), and from there every place of later frames (time)."""
    moved = changed(torch.randn(1, 4, 6, 16), (1, 2))
    assert moved[1:].all() and not moved[0].any()


def test_time_stays_at_its_place():
    """Without the spatial half a token moves its own place alone, in its own frame and later ones."""
    block = net(layers=1).blocks[0]
    x = torch.randn(2, 5, 6, 16)
    y = x.clone()
    y[:, 2, 3] += 1
    in_time = lambda z: block.time(z.transpose(1, 2).flatten(0, 1)[:, :3]).unflatten(0, (2, 6))  # noqa: E731
    moved = (in_time(x) - in_time(y)).abs().amax((0, 2, 3)) > 1e-6  # (S,)
    assert moved.tolist() == [False, False, False, True, False, False]


def by_differences(block, x, places, theta):
    """Attention within a frame, written with the differences of places instead of angles of each, pair by pair:
    Σₛ Re(qₛ · k̄ₛ · exp(i · (p − p′) · θ^(−s/S))), rows on the first half of the slots s and columns on the other."""
    look = block.space.branches["self"]
    op, S = look.op, look.op.head_dim // 4  # slots an axis
    made = op.qkv(look.norm(x)).unflatten(-1, (-1, op.head_dim))
    q, k, v = made.split([op.config.heads, op.config.groups, op.config.groups], -2)  # (B, N, H, D)
    q, k = (torch.complex(*norm(part).chunk(2, -1)) for norm, part in ((op.q_norm, q), (op.k_norm, k)))
    apart = places[:, None] - places[None]  # (N, N, 2): to a query from a key
    angle = apart.repeat_interleave(S, -1) * theta ** (-torch.arange(S) / S).repeat(2)
    turned = torch.einsum("bihs,bjhs,ijs->bhij", q, k.conj(), torch.polar(torch.ones_like(angle), angle))
    weights = (turned.real / op.head_dim**0.5).softmax(-1)
    return x + op.out(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2))


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("grid", [(2, 3), (1, 7), (4, 4)])
def test_around_in_a_frame_only_differences_of_places_count(grid, prefix):
    """Those on no grid stand where its first place does. Gradients too."""
    ours, theta = net(layers=1, prefix=prefix), 10.0
    h, w = grid
    x = torch.randn(2, prefix + h * w, 16, requires_grad=True)
    places = torch.cat([torch.zeros(prefix, 2), torch.cartesian_prod(torch.arange(h), torch.arange(w))])
    found = ours.blocks[0].space(x, rotation=ours.around(h, w))
    truth = by_differences(ours.blocks[0], x, places, theta)
    assert relative(found, truth) < 1e-5
    far = torch.randn_like(x)
    pulls = [torch.autograd.grad((y * far).sum(), x)[0] for y in (found, truth)]
    assert relative(*pulls) < 1e-5


def test_what_is_moved_across_a_frame_comes_out_moved():
    """Without learned positions, tokens that all stand elsewhere give the same; in another order they do not."""
    ours, x = net(), torch.randn(1, 3, 6, 16)
    torch.nn.init.zeros_(ours.positions.table)
    first = ours(x, GRID)
    assert relative(ours(x.flip(2), GRID), first.flip(2)) > 1e-3
    ours.around = lambda h, w: ours.places(grid_positions(1, h, w, start=5)[None])
    assert relative(ours(x, GRID), first) < 1e-5


@pytest.mark.parametrize("memory", [1, 2, 3])
def test_a_layer_sees_so_many_frames_and_no_more(memory):
    ours, x = net(layers=1, memory=memory), torch.randn(1, 6, 6, 16)
    y = x.clone()
    y[:, 1] += 1
    moved = (ours(x, GRID) - ours(y, GRID)).abs().amax((0, 2, 3)) > 1e-6
    assert moved.tolist() == [1 <= t < 1 + memory for t in range(6)]


@pytest.mark.parametrize("cuts", [(9,), (1,) * 9, (3, 1, 4, 1), (2, 7), (6, 3)])
@pytest.mark.parametrize("memory", [1, 3, 20])
def test_frames_by_the_cache_equal_all_at_once(cuts, memory):
    ours, x = net(memory=memory, prefix=1), torch.randn(2, 9, 7, 16)
    cache, found = ours.cache(), []
    for part in x.split(cuts, 1):
        ours(torch.randn_like(part), GRID, cache)  # a draft that is not kept leaves nothing behind
        found.append(ours(part, GRID, cache))
        cache.keep()
    assert relative(torch.cat(found, 1), ours(x, GRID)) < 1e-5
    assert cache.seen == 9 and cache.held == min(9, memory - 1)


def test_only_the_memory_is_held():
    ours = net(memory=3)
    cache = ours.cache()
    with pytest.raises(ConfigError, match="no pass"):
        cache.keep()
    for _ in range(5):
        ours(torch.randn(2, 1, 6, 16), GRID, cache)
        cache.keep()
    assert all(kept.k.shape[:2] == (12, 2) for kept in cache.past)
    held = sum(t.numel() * 4 for kept in cache.past for t in kept)
    assert cost.bytes(ours, ours.work(1, 2, past=4)).cache == held


@pytest.mark.parametrize("memory", [2, 4])
def test_a_ring_goes_on_where_a_cache_is_full(memory):
    """Frames that are drawn in several passes, far beyond the memory; and a ring that begins anew."""
    ours, x = net(memory=memory, prefix=1), torch.randn(2, 14, 7, 16)
    with torch.no_grad():
        whole, ring = ours(x, GRID), None
        for begun in (5, memory - 1):
            cache = ours.cache()
            ours(x[:, :begun], GRID, cache)
            cache.keep()
            if ring is None:
                ring = FrameRing(cache)
                places = [t.data_ptr() for t in (*ring.k, *ring.v, ring.seen)]
            else:
                assert ring.fits(cache)
                ring.fill(cache)
            for t in range(begun, 14):
                ours(torch.randn(2, 1, 7, 16), GRID, ring)  # a draft
                assert relative(ours(x[:, t : t + 1], GRID, ring), whole[:, t : t + 1]) < 1e-5
                ring.keep()
    assert ring.seen == 14 and places == [t.data_ptr() for t in (*ring.k, *ring.v, ring.seen)]
    with pytest.raises(ConfigError, match="takes one"):
        ours(x, GRID, ring)
    with pytest.raises(ConfigError, match="fill the cache"):
        FrameRing(ours.cache())
    other = net(memory=memory).cache()
    assert not ring.fits(other)


@pytest.mark.parametrize("memory", [2, 4, 20])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_one_frame_after_the_other_in_few_operations(memory, kv_heads, norm):
    """From a cache that is full or not, far beyond the memory, in several passes a frame."""
    block = BLOCK.with_(norm=norm, attention=BLOCK.attention.with_(kv_heads=kv_heads))
    ours, x = net(memory=memory, prefix=1, block=block), torch.randn(2, 14, 7, 16)
    with torch.no_grad():
        whole = ours(x, GRID)
        for begun in (1, 6):
            cache = ours.cache()
            ours(x[:, :begun], GRID, cache)
            cache.keep()
            lean = ours.one_frame(cache)
            for t in range(begun, 14):
                ours(torch.randn(2, 1, 7, 16), GRID, lean)  # a draft
                assert relative(ours(x[:, t : t + 1], GRID, lean), whole[:, t : t + 1]) < 1e-5
                lean.keep()
    assert lean.seen == 14 and lean.held == min(14, memory - 1)
    with pytest.raises(ConfigError, match="2 frames at once"):
        ours(x[:, :2], GRID, lean)


def test_one_frame_in_half_precision_is_no_further_from_the_truth():
    ours, x = net(layers=4, memory=4), torch.randn(2, 12, 6, 16)
    half = copy.deepcopy(ours).bfloat16()
    ours.load_state_dict(half.state_dict())
    with torch.no_grad():
        whole, cache = ours(x.bfloat16().float(), GRID), half.cache()
        half(x[:, :3].bfloat16(), GRID, cache)
        cache.keep()
        found = {}
        for name, kept in (("usual", FrameRing(cache)), ("lean", half.one_frame(cache))):
            made = []
            for one in x[:, 3:].bfloat16().split(1, 1):
                made.append(half(one, GRID, kept))
                kept.keep()
            assert made[0].dtype == torch.bfloat16
            found[name] = relative(torch.cat(made, 1).float(), whole[:, 3:])
    assert found["lean"] < 1.1 * found["usual"] < 0.1


@pytest.mark.parametrize("grid", [(3, 2), (1, 6)])
def test_frames_of_another_grid_on_every_way(grid):
    """Of as many places, which nothing but the grid tells apart."""
    ours, x = net(memory=3, prefix=1), torch.randn(1, 6, 7, 16)
    with torch.no_grad():
        whole, cache = ours(x, grid), ours.cache()
        assert relative(ours(x, GRID), whole) > 1e-3
        ours(x[:, :5], grid, cache)
        cache.keep()
        for way in (FrameRing(cache), ours.one_frame(cache), cache):
            assert relative(ours(x[:, 5:], grid, way), whole[:, 5:]) < 1e-5


@pytest.mark.parametrize(
    "block",
    [
        BLOCK.with_(layer_scale=0.1),
        BLOCK.with_(gated=True),
        BLOCK.with_(norm_at="after"),
        BLOCK.with_(attention=AttentionConfig(heads=2)),
        BLOCK.with_(attention=AttentionConfig(heads=2, qk_norm="rms", qk_norm_over="heads")),
        BLOCK.with_(attention=AttentionConfig(heads=2, qk_norm="rms", inner_norm="rms")),
    ],
)
def test_other_blocks_go_the_usual_way(block):
    ours = net(block=block)
    cache = ours.cache()
    ours(torch.randn(1, 3, 6, 16), GRID, cache)
    cache.keep()
    assert ours.one_frame(cache) is None and net().one_frame(net().cache()) is None  # nor does an empty one


@pytest.mark.parametrize("groups", [1, 4])
def test_one_query_on_few_keys_is_the_textbooks(groups):
    """What a GPU takes for a frame on those before it."""
    q, k, v = torch.randn(5, 1, 4, 8), torch.randn(5, 6, groups, 8), torch.randn(5, 6, groups, 8)
    assert relative(_single(q, k, v), attend(q, k, v, Plan(), "plain")) < 1e-6


@pytest.mark.parametrize("memory", [2, 20])
def test_more_places_than_a_launch_has_rows(memory, monkeypatch):
    """Of which a video has as many as it has places, times the videos."""
    ours, x = net(memory=memory), torch.randn(3, 5, 6, 16)
    whole = ours(x, GRID)
    monkeypatch.setattr(sys.modules["vitrail.nn.attend"], "LAUNCH", 4)
    assert relative(ours(x, GRID), whole) < 1e-6


def test_time_has_no_first_frame():
    """Positions in time are relative: frames that can no longer be reached leave no trace but in what was made of
    them."""
    ours, x = net(layers=1, memory=3), torch.randn(1, 4, 6, 16)
    later = torch.cat([torch.randn(1, 50, 6, 16), x], 1)
    assert relative(ours(later, GRID)[:, -2:], ours(x, GRID)[:, -2:]) < 1e-5


def test_other_grids_and_gradients():
    ours = net()
    x = torch.randn(1, 3, 20, 16, requires_grad=True)
    ours(x, (4, 5))[:, -1].sum().backward()
    assert x.grad is not None and (x.grad.abs().amax((0, 2, 3)) > 0).all()


@pytest.mark.parametrize("past", [0, 2])
def test_operations_are_those_that_run(past):
    ours = net(memory=4, prefix=1)
    cache = ours.cache()
    if past:
        ours(torch.randn(2, past, 7, 16), GRID, cache)
        cache.keep()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        ours(torch.randn(2, 1, 7, 16), GRID, cache)
    assert cost.flops(ours, ours.work(1, 2, past=past)) == counter.get_total_flops()
    steps = sum(cost.flops(ours, ours.work(1, past=t)) for t in range(6))
    assert steps == cost.flops(ours, ours.work(6))
    weights = sum(p.numel() * 4 for p in ours.parameters())
    assert cost.bytes(ours, ours.work(3)) == (weights, weights, 0)


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="memory"):
        SpaceTimeConfig(layers=1, block=BLOCK, memory=0)
    with pytest.raises(ConfigError, match="self, mlp"):
        SpaceTimeConfig(layers=1, block=BLOCK.with_(chain=("self",)))
    with pytest.raises(ConfigError, match="in space and in time"):
        cost.flops(net(), Work.full(6))
