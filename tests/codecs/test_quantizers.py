"""Common behaviour of all quantizers: lookup, gradients, dtypes, and validation."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.codecs import quantizers
from vitrail.codecs.bit_packing import pack_ids, unpack_ids
from vitrail.codecs.quantizers import (
    BSQ,
    FSQ,
    IBQ,
    KL,
    LFQ,
    VQ,
    GroupedVQ,
    IdentityQuantizer,
    QuantizerConfig,
    ResidualVQ,
    SimVQ,
    make_quantizer,
)
from vitrail.config import Config
from vitrail.errors import ConfigError, DataError
from vitrail.registry import QUANTIZERS

MAKERS = {
    "vq": lambda: VQ(codebook_size=50, dim=6),
    "vq gradient": lambda: VQ(
        codebook_size=64, dim=6, codebook_update="gradient", dead_code_threshold=0.1, gradient_estimator="rotation"
    ),
    "vq cosine": lambda: VQ(codebook_size=64, dim=6, metric="cosine"),
    "vq cosine gradient": lambda: VQ(codebook_size=64, dim=6, metric="cosine", codebook_update="gradient"),
    "residual": lambda: ResidualVQ(codebook_size=16, dim=6, layers=3),
    "grouped": lambda: GroupedVQ(codebook_size=16, dim=6, groups=2),
    "simvq": lambda: SimVQ(codebook_size=64, dim=6),
    "ibq": lambda: IBQ(codebook_size=64, dim=6),
    "fsq": lambda: FSQ(levels=(8, 8, 8, 5, 5, 5)),
    "lfq": lambda: LFQ(bits=18),
    "bsq": lambda: BSQ(bits=28),
    "bsq 63": lambda: BSQ(bits=63),
}


@pytest.fixture(params=MAKERS)
def q(request):
    torch.manual_seed(0)
    return MAKERS[request.param]()


def test_meta_device_construction_and_loading(q):
    x = torch.randn(20, q.dim)
    q(x)  # some learn from a first batch
    twin = copy.deepcopy(q).to("meta").to_empty(device="cpu")
    twin.load_state_dict(q.state_dict())
    assert torch.equal(twin.eval()(x).ids, q.eval()(x).ids)


def test_lookup_equals_codes(q):
    x = torch.randn(3, 5, q.dim) * 2
    q(x)  # one training step, where there is one
    q.eval()
    found = q(x)
    shape = (3, 5) if len(q.vocab_sizes) == 1 else (3, 5, len(q.vocab_sizes))
    assert found.ids.shape == shape and found.ids.dtype == torch.int64
    assert found.codes.shape == (3, 5, q.width) and found.codes.dtype == x.dtype
    assert torch.equal(q.lookup(found.ids), found.codes)
    assert torch.equal(q(x.reshape(15, -1)).ids.view(shape), found.ids)  # whatever the axes
    assert all(loss.ndim == 0 and loss.isfinite() for loss in found.losses.values())
    bits = quantizers.bits_per_id(q.vocab_sizes[0])
    assert bits * len(q.vocab_sizes) == q.bits
    assert torch.equal(unpack_ids(pack_ids(found.ids, bits), bits, found.ids.numel()).view(shape), found.ids)


def test_quantizing_codes_is_idempotent(q):
    """Quantizing codes again gives the same ids."""
    q.eval()
    first = q(torch.randn(40, q.dim) * 2)
    if isinstance(q, ResidualVQ | FSQ | IBQ):  # the sum of layers may have a nearer one; FSQ reads before its bound
        return
    assert torch.equal(q(first.codes).ids, first.ids)


def test_gradients_reach_the_input(q):
    x = torch.randn(300, q.dim, requires_grad=True)
    found = q(x)
    (found.codes * torch.randn_like(found.codes)).sum().backward()
    assert x.grad.isfinite().all() and x.grad.abs().sum() > 0
    for name, loss in q(x).losses.items():
        targets = [p for p in q.parameters() if name == "codebook"] or [x]
        gradient = torch.autograd.grad(loss, targets, retain_graph=True)
        assert sum(g.abs().sum() for g in gradient) > 0, name


def test_half_precision_input_and_model(q):
    x = torch.randn(200, q.dim).bfloat16()
    with torch.no_grad():
        q(x)
    kept = {name: b.clone() for name, b in q.named_buffers()}
    q.to(torch.bfloat16).eval()
    for name, b in q.named_buffers():
        assert torch.equal(b, kept[name]) and b.dtype == kept[name].dtype
    found = q(x)
    assert found.codes.dtype == torch.bfloat16
    assert torch.equal(q.lookup(found.ids).to(torch.bfloat16), found.codes)
    assert torch.equal(q(x.float()).ids, found.ids)  # float32 inside
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(q(x).ids, found.ids)
    assert all(loss.dtype == torch.float32 for loss in found.losses.values())


def test_buffers_stay_float32_after_loading_half_precision(q):
    """Half-precision running means would not change, and `lookup` would return another dtype."""
    half = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in q.state_dict().items()}
    kinds = {name: b.dtype for name, b in q.named_buffers()}
    q.load_state_dict(half, assign=True)
    assert {name: b.dtype for name, b in q.named_buffers()} == kinds
    assert all(torch.equal(b, half[name].to(b.dtype)) for name, b in q.named_buffers() if name in half)


def test_state_dict_round_trip(q):
    x = torch.randn(300, q.dim)
    q(x)
    other = type(q)(q.config)
    other.load_state_dict(q.state_dict())
    other.train()
    a, b = q(x), other(x)  # a second step: k-means does not start again
    assert torch.equal(a.ids, b.ids)
    assert all(torch.equal(u, v) for u, v in zip(q.state_dict().values(), other.state_dict().values(), strict=True))


def test_empty_input(q):
    found = q(torch.randn(0, 4, q.dim))
    assert found.codes.shape == (0, 4, q.dim) and found.ids.shape[:2] == (0, 4)
    assert all(loss.isfinite() for loss in found.losses.values())
    assert all(b.isfinite().all() for b in q.buffers())


def test_invalid_input_raises(q):
    name = type(q).__name__
    with pytest.raises(ConfigError, match=f"{name} needs vectors of width {q.dim}"):
        q(torch.randn(2, q.dim + 1))
    with pytest.raises(ConfigError, match="not torch"):
        q(torch.ones(2, q.dim, dtype=torch.int64))
    x = torch.randn(4, q.dim)
    x[1, 0], x[3, 0] = math.nan, math.inf
    with pytest.raises(DataError, match=f"2 of 4 input vectors of {name} contain NaN or infinity"):
        q.eval()(x)
    ids = q(torch.randn(4, q.dim)).ids
    with pytest.raises(DataError, match="outside 0 …"):
        q.lookup(-1 - ids)
    if q.vocab_sizes[0] < 2**62:
        with pytest.raises(DataError, match=f"for example {q.vocab_sizes[0]}"):
            q.lookup(torch.full_like(ids, q.vocab_sizes[0]))
    with pytest.raises(ConfigError, match="not an integer type"):
        q.lookup(ids.float())


@pytest.mark.parametrize("name", [n if n in ("vq", "bsq") else pytest.param(n, marks=pytest.mark.slow) for n in MAKERS])
def test_compiles_without_graph_break(name):
    torch.compiler.reset()
    q = MAKERS[name]()
    q(torch.randn(300, q.dim))  # k-means, once
    x = torch.randn(100, q.dim)
    wanted = q.eval()(x)
    found = torch.compile(q, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(found.ids, wanted.ids) and torch.equal(found.codes, wanted.codes)
    q.train()
    found = torch.compile(q, backend="aot_eager", fullgraph=True)(x.requires_grad_())
    sum(found.losses.values(), found.codes.sum()).backward()


def test_config_from_recipe_tables(q):
    class Recipe(Config):
        quantizer: QuantizerConfig

    recipe = Recipe(quantizer=q.config)
    again = Recipe.from_dict(recipe.to_dict())
    assert again == recipe
    made = make_quantizer(again.quantizer)
    assert type(made) is type(q) and made.vocab_sizes == q.vocab_sizes


def test_make_quantizer_matches_config():
    assert len({kind.Config for kind in QUANTIZERS.values()}) == len(QUANTIZERS)


# ---- ids -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 63), st.data())
@settings(max_examples=150)
def test_binary_ids_are_exact(bits, data):
    """Compare with Python integers. Summed in float32, 82 of 100 random 28-bit ids are wrong."""
    wanted = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=1, max_size=5))
    for q in (BSQ(bits=bits), LFQ(bits=bits)):
        codes = q.lookup(torch.tensor(wanted))
        assert [[c > 0 for c in row] for row in codes.tolist()] == [
            [value >> b & 1 == 1 for b in reversed(range(bits))] for value in wanted
        ]
        assert q(codes).ids.tolist() == wanted
        groups = data.draw(st.sampled_from([g for g in range(1, bits + 1) if bits % g == 0]))
        parts = q.split_ids(torch.tensor(wanted), groups)
        assert parts.shape == (len(wanted), groups) and math.prod(q.group_sizes(groups)) == 2**bits
        each = bits // groups
        assert parts.tolist() == [
            [value >> each * g & 2**each - 1 for g in reversed(range(groups))] for value in wanted
        ]
        assert q.join_ids(parts).tolist() == wanted


def test_ids_of_28_bits_need_more_than_float32():
    q = BSQ(bits=28)
    ids = torch.randint(0, 2**28, (5000,), generator=torch.Generator().manual_seed(0))
    codes = q.lookup(ids)
    assert torch.equal(q(codes).ids, ids)
    as_floats = ((codes > 0).float() * 2.0 ** torch.arange(27, -1, -1)).sum(-1).long()
    assert (as_floats != ids).float().mean() > 0.5  # the defect this guards against


@given(st.lists(st.integers(2, 40), min_size=1, max_size=10), st.data())
@settings(max_examples=100)
def test_fsq_ids_are_mixed_radix_numbers(levels, data):
    q = FSQ(levels=tuple(levels))
    size = math.prod(levels)
    assert q.vocab_sizes == (size,) and 2**q.bits >= size > 2 ** (q.bits - 1) - (size == 1)
    wanted = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=5))
    ids = torch.tensor(wanted)
    codes = q.lookup(ids)
    assert codes.abs().max() <= 1
    digits, value = [], ids.clone()
    for level in levels:
        digits.append(value % level)
        value = value // level
    assert torch.equal(q.split_ids(ids, len(levels)), torch.stack(digits, -1))
    assert torch.equal((codes * torch.tensor(levels).div(2, rounding_mode="floor")).round().long(),
                       torch.stack(digits, -1) - torch.tensor(levels) // 2)  # fmt: skip
    groups = data.draw(st.sampled_from([g for g in range(1, len(levels) + 1) if len(levels) % g == 0]))
    parts = q.split_ids(ids, groups)
    assert all(parts[..., g].max() < size for g, size in enumerate(q.group_sizes(groups)))
    assert torch.equal(q.join_ids(parts), ids)


@pytest.mark.parametrize("levels", [(8, 8, 8, 5, 5, 5), (3,), (2, 7), (1500, 4)])
def test_fsq_reaches_every_level(levels):
    q = FSQ(levels=levels)
    x = torch.linspace(-20, 20, 40_001)[:, None].expand(-1, len(levels))
    found = q(x)
    for digit, level in zip(q.split_ids(found.ids, len(levels)).unbind(-1), levels, strict=True):
        assert (digit.diff() >= 0).all() and digit.unique().numel() == level
    assert q.group_sizes(1) == q.vocab_sizes


def test_vq_ids_split_by_bits():
    q = VQ(codebook_size=4096, dim=2)
    ids = torch.arange(4096)
    assert q.group_sizes(3) == (16, 16, 16) and torch.equal(q.join_ids(q.split_ids(ids, 3)), ids)
    with pytest.raises(ConfigError, match="cannot be split into 5"):
        q.split_ids(ids, 5)
    odd = VQ(codebook_size=1000, dim=2)
    assert odd.bits == 10 and torch.equal(odd.join_ids(odd.split_ids(ids[:1000], 1)), ids[:1000])
    with pytest.raises(ConfigError, match="choose from 1"):
        odd.split_ids(ids[:1000], 2)
    with pytest.raises(DataError, match="parts of VQ's ids are outside"):
        q.join_ids(torch.tensor([[16, 0, 0]]))


def test_bit_order():
    """BSQ and LFQ: the first dimension is the highest bit. FSQ: it is the lowest digit."""
    x = -torch.ones(1, 4)
    x[0, 0] = 1.0
    assert BSQ(bits=4)(x).ids.item() == LFQ(bits=4)(x).ids.item() == 8
    assert FSQ(levels=(3, 3)).lookup(torch.tensor([1])).tolist() == [[0.0, -1.0]]


# ---- gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vq", "lfq", "residual", "grouped"])
def test_straight_through_is_the_identity(name):
    q = MAKERS[name]()
    x, g = torch.randn(7, q.dim, requires_grad=True), torch.randn(7, q.dim)
    (q(x).codes * g).sum().backward()
    assert torch.equal(x.grad, g)


def test_bsq_gradient_is_that_of_normalization():
    q = BSQ(bits=5)
    x, g = torch.randn(7, 5, requires_grad=True, dtype=torch.double), torch.randn(7, 5, dtype=torch.double)
    (ours,) = torch.autograd.grad((q(x).codes * g).sum(), x)
    (plain,) = torch.autograd.grad((F.normalize(x, dim=-1) * g).sum(), x)
    torch.testing.assert_close(ours, plain)
    assert torch.allclose(q(x).codes.norm(dim=-1), torch.ones(7, dtype=torch.double))


def test_fsq_gradient_is_that_of_its_bound():
    q = FSQ(levels=(8, 5))
    x = torch.randn(9, 2, dtype=torch.double, requires_grad=True)
    (ours,) = torch.autograd.grad(q(x).codes.sum(), x)
    reach, offset = torch.tensor([7, 4]).double() * 1.001 / 2, torch.tensor([0.5, 0.0]).double()
    bounded = torch.tanh(x + torch.atanh(offset / reach)) * reach - offset
    (plain,) = torch.autograd.grad((bounded / torch.tensor([4, 2])).sum(), x)
    torch.testing.assert_close(ours, plain)


def test_rotation_trick_against_its_definition():
    q = VQ(codebook_size=12, dim=5, gradient_estimator="rotation", kmeans_iters=0).eval()
    x, g = torch.randn(6, 5, dtype=torch.double, requires_grad=True), torch.randn(6, 5, dtype=torch.double)
    found = q(x)
    (ours,) = torch.autograd.grad((found.codes * g).sum(), x)
    assert torch.equal(found.codes.float(), q.lookup(found.ids))
    for i in range(6):
        a, b = x[i].detach() / x[i].norm(), found.codes[i].detach() / found.codes[i].norm()
        angle = torch.acos(a @ b)  # the rotation of the plane of a and b by their angle, built another way
        side = F.normalize(b - (a @ b) * a, dim=0)
        plane = torch.outer(side, a) - torch.outer(a, side)
        R = torch.eye(5).double() + torch.sin(angle) * plane + (1 - torch.cos(angle)) * plane @ plane
        scale = found.codes[i].norm() / x[i].norm()
        torch.testing.assert_close(R @ a, b)
        torch.testing.assert_close(scale * R @ x[i], found.codes[i])
        torch.testing.assert_close(ours[i], scale * R.T @ g[i])


def test_ibq_matches_dense_soft_assignment():
    torch.manual_seed(0)
    q, x, g = (
        IBQ(codebook_size=20, dim=4, inv_temperature=2.0),
        torch.randn(9, 4, requires_grad=True),
        torch.randn(9, 4),
    )
    found = q(x)
    loss = (found.codes * g).sum() + 3 * found.losses["entropy"]
    ours = torch.autograd.grad(loss, [x, q.codebook])
    logits = x @ q.codebook.T
    soft = logits.softmax(1)
    hard = F.one_hot(logits.argmax(1), 20).float()
    codes = (hard + soft - soft.detach()) @ q.codebook
    p = (2 * logits).softmax(1)
    dense = -(torch.xlogy(p, p)).sum(1).mean() + torch.xlogy(p.mean(0), p.mean(0)).sum()
    plain = torch.autograd.grad((codes * g).sum() + 3 * dense, [x, q.codebook])
    torch.testing.assert_close(found.losses["entropy"], dense)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


# ---- continuous ----------------------------------------------------------------------------------------------------


def test_continuous_and_kl():
    x = torch.randn(3, 8)
    q = IdentityQuantizer(dim=8)
    assert torch.equal(q(x).codes, x) and q(x).ids is None and q(x).losses == {} and q.bits == 0
    with pytest.raises(ConfigError, match="no ids"):
        q.lookup(torch.tensor([0]))
    kl = KL(width=4)
    assert kl.dim == 8
    mean, log = x.chunk(2, -1)
    normal = torch.distributions.Normal
    wanted = torch.distributions.kl_divergence(normal(mean, (log / 2).exp()), normal(0.0, 1.0)).sum(-1).mean()
    torch.testing.assert_close(kl(x).losses["kl"], wanted)
    assert torch.equal(kl.eval()(x).codes, mean)
    kl.train()
    many = torch.stack([kl(x).codes for _ in range(4000)])
    torch.testing.assert_close(many.mean(0), mean, atol=0.3, rtol=0)
    torch.testing.assert_close(many.std(0), (log / 2).exp(), rtol=0.1, atol=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: BSQ(bits=64),
        lambda: LFQ(bits=18, entropy_group_size=4),
        lambda: FSQ(levels=(8, 1)),
        lambda: FSQ(levels=(2,) * 64),
        lambda: VQ(codebook_size=0, dim=3),
        lambda: VQ(codebook_size=8, dim=3, ema_decay=1.0),
        lambda: VQ(codebook_size=8, dim=3, metric="cosin"),
        lambda: GroupedVQ(codebook_size=8, dim=5, groups=2),
        lambda: ResidualVQ(codebook_size=8, dim=4, metric="cosine"),
        lambda: KL(width=0),
    ],
)
def test_invalid_configs_raise(make):
    with pytest.raises(ConfigError):
        make()


def test_sign_codes_of_bsq_are_unit_codes_times_the_root_of_bits():
    unit, sign = BSQ(bits=12, inv_temperature=3.0), BSQ(bits=12, inv_temperature=3.0, code_scale="sign")
    x, weight = torch.randn(50, 12), torch.randn(50, 12)
    found = []
    for quantizer in (unit, sign):
        y = x.clone().requires_grad_()
        output = quantizer(y)
        (output.codes * weight).sum().backward()
        assert torch.equal(quantizer.lookup(output.ids), output.codes)
        found.append((output, y.grad))
    (a, a_grad), (b, b_grad) = found
    assert torch.equal(a.ids, b.ids)
    assert {*b.codes.unique().tolist()} == {-1.0, 1.0}
    torch.testing.assert_close(b.codes, a.codes * 12**0.5)
    torch.testing.assert_close(b_grad, a_grad * 12**0.5)
    for name, loss in a.losses.items():
        assert torch.equal(loss, b.losses[name])
