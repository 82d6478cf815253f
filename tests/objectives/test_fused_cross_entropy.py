"""Fused cross-entropy against the float64 reference for any size, and its memory."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from helpers import relative
from vitrail.errors import ConfigError
from vitrail.objectives import cross_entropy, linear_cross_entropy, linear_token_losses


def problem(N, V, D, ignored=0.3, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, D, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[torch.rand(N, generator=generator) < ignored] = -100
    return hidden, weight, targets


def reference(hidden, weight, targets, **given):
    """Return values and gradients of the float64 formula."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    loss = cross_entropy(hidden @ weight.T, targets, **given)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy_equals_torch(reduction):
    hidden, weight, targets = problem(9, 7, 4)
    logits = hidden @ weight.T
    assert torch.allclose(
        cross_entropy(logits, targets, reduction=reduction), F.cross_entropy(logits, targets, reduction=reduction)
    )
    z = 0.1 * logits.logsumexp(-1).square()[targets != -100]
    both = cross_entropy(logits, targets, z_loss=0.1, reduction=reduction)
    assert torch.allclose(both - cross_entropy(logits, targets, reduction=reduction), getattr(z, reduction)())


@settings(max_examples=80)
@given(
    N=st.integers(1, 30),
    V=st.integers(1, 40),
    D=st.integers(1, 9),
    chunk=st.integers(1, 35),
    ignored=st.sampled_from([0.0, 0.5, 1.0]),
    z=st.sampled_from([0.0, 0.01]),
    reduction=st.sampled_from(["mean", "sum"]),
    upstream=st.sampled_from([1.0, 0.25, -3.0]),
)
def test_values_and_gradients_for_any_size(N, V, D, chunk, ignored, z, reduction, upstream):
    hidden, weight, targets = problem(N, V, D, ignored)
    loss, each = linear_token_losses(hidden, weight, targets, chunk_size=chunk, z_loss=z, reduction=reduction)
    wanted, *gradients = reference(hidden, weight, targets, z_loss=z, reduction=reduction)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(torch.autograd.grad(upstream * loss, (hidden, weight)), gradients, strict=True):
        torch.testing.assert_close(ours.double(), upstream * theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(each, F.cross_entropy(hidden @ weight.T, targets, reduction="none"))
    assert not each.requires_grad


def test_gradients_by_finite_differences():
    hidden, weight, targets = problem(5, 6, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, targets, chunk_size=2, z_loss=0.05), (hidden, weight)
    )


def test_all_ignored_gives_zero_loss_and_gradient():
    hidden, weight, targets = problem(5, 6, 3, ignored=1.1)
    loss = linear_cross_entropy(hidden, weight, targets, chunk_size=2, z_loss=0.1)
    assert loss.item() == 0
    for gradient in torch.autograd.grad(loss, (hidden, weight)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_no_tokens_at_all():
    hidden, weight, targets = problem(0, 6, 3)
    assert linear_cross_entropy(hidden, weight, targets).item() == 0


def test_batches_and_another_ignore_index():
    hidden, weight, targets = problem(12, 6, 3)
    ours = linear_token_losses(
        hidden.view(3, 4, 3),
        weight,
        targets.where(targets >= 0, -1).view(3, 4),
        chunk_size=5,
        ignore_index=-1,
        reduction="sum",
    )
    assert torch.allclose(ours.loss, cross_entropy(hidden @ weight.T, targets, reduction="sum"))
    assert ours.per_token.shape == (3, 4) and torch.equal(ours.per_token.flatten() == 0, targets == -100)


def test_bf16_weight_gradient_is_summed_in_float32():
    """512 chunks of one token: a sum in bf16 would stop growing at 8 bits."""
    hidden, weight, targets = problem(512, 5, 4, ignored=0, dtype=torch.bfloat16)
    hidden.data.abs_()  # equal signs, so that nothing cancels
    loss = linear_cross_entropy(hidden, weight, targets, chunk_size=1, reduction="sum")
    assert loss.dtype == torch.float32
    _, *wanted = reference(hidden, weight, targets, reduction="sum")
    for ours, theirs in zip(torch.autograd.grad(loss, (hidden, weight)), wanted, strict=True):
        assert ours.dtype == torch.bfloat16
        assert relative(ours.double(), theirs) < 2e-2
    whole = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets, chunk_size=512, reduction="sum"), weight)[
        0
    ]
    pieces = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets, chunk_size=1, reduction="sum"), weight)[
        0
    ]
    assert relative(pieces.float(), whole.float()) < 2**-7  # only the last rounding


def test_a_scaled_bf16_loss_scales_in_float32():
    """The sum is divided by a count as in the trainer; 1 / 300 rounded to bf16 would bias all gradients."""
    hidden, weight, targets = problem(64, 5, 4, ignored=0, dtype=torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, targets, reduction="sum")
    whole = torch.autograd.grad(loss, weight, retain_graph=True)[0]
    assert torch.equal(
        torch.autograd.grad(loss / 300, weight)[0], (whole.float() * (1 / torch.tensor(300.0))).bfloat16()
    )


def operations(run):
    """Return (name, largest input) of all operations, also inside custom operators."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        run()
    return [
        (e.name, max((math.prod(shape) for shape in e.input_shapes if shape), default=0))
        for e in seen.events()
        if e.name.startswith("aten::")
    ]


def test_logits_are_never_in_memory_at_once():
    N, V, D, chunk = 120, 500, 6, 16
    hidden, weight, targets = problem(N, V, D)
    saved = []

    def chunked():
        linear_cross_entropy(hidden, weight, targets, chunk_size=chunk, z_loss=1e-3).backward()

    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        made = operations(chunked)
    assert max(size for _, size in made) == chunk * V
    assert sum(saved) == (N + V) * D  # the two gradients
    assert max(size for _, size in operations(lambda: cross_entropy(hidden @ weight.T, targets))) == N * V


@pytest.mark.parametrize(("hidden_learns", "weight_learns", "products"), [(1, 1, 3), (1, 0, 2), (0, 1, 2), (0, 0, 1)])
def test_unneeded_gradients_cost_nothing(hidden_learns, weight_learns, products):
    hidden, weight, targets = problem(8, 6, 3)
    wanted = reference(hidden, weight, targets)
    hidden.requires_grad_(bool(hidden_learns))
    weight.requires_grad_(bool(weight_learns))

    def count():
        made = operations(lambda: linear_cross_entropy(hidden, weight, targets))
        return sum(name in ("aten::mm", "aten::addmm_") for name, _ in made)

    assert count() == products
    loss = linear_cross_entropy(hidden, weight, targets)
    if loss.requires_grad:
        loss.backward()
    for x, theirs in zip((hidden, weight), wanted[1:], strict=True):
        assert (x.grad is not None) == x.requires_grad
        assert x.grad is None or relative(x.grad.double(), theirs) < 1e-5
    with torch.no_grad():
        assert count() == 1


def test_tied_weights():
    """The output layer is the embedding: its gradient is the sum of both."""
    _, weight, targets = problem(20, 11, 6)
    ids = torch.randint(0, 11, (20,))

    def run(loss):
        return torch.autograd.grad(loss(F.embedding(ids, weight).tanh()), weight)[0]

    ours = run(lambda h: linear_cross_entropy(h, weight, targets, chunk_size=7))
    assert relative(ours, run(lambda h: cross_entropy(h @ weight.T, targets))) < 1e-5


def test_activation_checkpointing():
    hidden, weight, targets = problem(20, 11, 6)
    _, *wanted = reference(hidden.tanh(), weight, targets)
    loss = checkpoint(
        lambda h: linear_cross_entropy(h.tanh(), weight, targets, chunk_size=7), hidden, use_reentrant=False
    )
    ours, for_weight = torch.autograd.grad(loss, (hidden, weight))
    assert relative(for_weight.double(), wanted[1]) < 1e-5
    assert relative(ours.double(), wanted[0] * (1 - hidden.detach().double().tanh() ** 2)) < 1e-5


@pytest.mark.parametrize("learns", [True, False])
def test_compiled_in_one_graph(learns):
    hidden, weight, targets = problem(20, 11, 6)
    weight.requires_grad_(learns)

    def loss(h, w, t):
        return linear_cross_entropy(h.tanh(), w, t, chunk_size=7, z_loss=1e-3)

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    ours, plain = compiled(hidden, weight, targets), loss(hidden, weight, targets)
    assert torch.allclose(ours, plain)
    learners = (hidden, weight) if learns else (hidden,)
    for a, b in zip(torch.autograd.grad(ours, learners), torch.autograd.grad(plain, learners), strict=True):
        assert relative(a, b) < 1e-5


def test_twice_backward_and_second_derivatives():
    hidden, weight, targets = problem(8, 6, 3)
    loss = linear_cross_entropy(hidden, weight, targets, chunk_size=3)
    first, again = (torch.autograd.grad(loss, weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss + weight.square().sum(), weight, create_graph=True)


def test_empty_chunk_raises():
    with pytest.raises(ConfigError, match="chunk_size is 0"):
        linear_cross_entropy(*problem(2, 3, 4), chunk_size=0)
