"""Gradient cache: encoders in chunks give the loss and gradients of the whole batch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vitrail.errors import ConfigError
from vitrail.objectives import clip_loss, siglip_loss
from vitrail.training.gradient_cache import run_cached_backward


class Model(nn.Module):
    """Two towers with a shared last layer and the parameters of the loss."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.u = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Dropout(dropout))
        self.v = nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Dropout(dropout))
        self.last = nn.Linear(8, 6)
        self.log_scale, self.bias = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(-3.0))

    def encode_u(self, x):
        return F.normalize(self.last(self.u(x)), dim=1)

    def encode_v(self, y):
        return F.normalize(self.last(self.v(y)), dim=1)

    def siglip(self, u, v):
        return siglip_loss(u, v, self.log_scale.exp(), self.bias)

    def clip(self, u, v):
        return clip_loss(u, v, self.log_scale.exp())


def pop_gradients(model):
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return gradients


def assert_equal_gradients(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (gradient is None) == (ours[name] is None), name
        if gradient is not None:
            torch.testing.assert_close(ours[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@pytest.mark.parametrize("sizes", [([12], [12]), ([4, 4, 4], [6, 6]), ([5, 1, 6], [12])])
def test_chunks_have_no_effect(kind, sizes):
    model = Model().double()
    x, y = torch.randn(12, 5).double(), torch.randn(12, 7).double()
    loss = getattr(model, kind)
    whole = loss(model.encode_u(x), model.encode_v(y))
    whole.backward()
    wanted = pop_gradients(model)
    value = run_cached_backward(loss, model.encode_u, x.split(sizes[0]), model.encode_v, y.split(sizes[1]))
    torch.testing.assert_close(value, whole.detach())
    assert not value.requires_grad
    assert_equal_gradients(pop_gradients(model), wanted)


def test_dropout_draws_the_same_twice():
    """Reference: all chunks encoded with a graph, from the assert_equal_gradients seed."""
    model = Model(dropout=0.5).double()
    x, y = torch.randn(12, 5).double().split(4), torch.randn(12, 7).double().split(3)
    torch.manual_seed(3)
    model.siglip(torch.cat([model.encode_u(c) for c in x]), torch.cat([model.encode_v(c) for c in y])).backward()
    after = torch.rand(1)
    wanted = pop_gradients(model)
    torch.manual_seed(3)
    run_cached_backward(model.siglip, model.encode_u, x, model.encode_v, y)
    assert_equal_gradients(pop_gradients(model), wanted)
    assert torch.equal(torch.rand(1), after)  # the random state is as after a single pass


def test_gradients_accumulate_and_frozen_towers_run_once():
    model = Model().double()
    model.u.requires_grad_(False)
    model.last.requires_grad_(False)
    runs = []

    def encode_u(x):
        runs.append(len(x))
        return model.encode_u(x)

    x, y = torch.randn(6, 5).double(), torch.randn(6, 7).double()
    for _ in range(2):
        run_cached_backward(model.siglip, encode_u, x.split(3), model.encode_v, y.split(2))
    twice = pop_gradients(model)
    (2 * model.siglip(model.encode_u(x), model.encode_v(y))).backward()
    assert_equal_gradients(twice, pop_gradients(model))


def test_chunks_may_be_of_any_type():
    model = Model().double()
    x, y = torch.randn(4, 5).double(), torch.randn(4, 7).double()
    model.clip(model.encode_u(x), model.encode_v(y)).backward()
    wanted = pop_gradients(model)
    images = [{"pixels": part} for part in x.split(2)]
    run_cached_backward(model.clip, lambda c: model.encode_u(c["pixels"]), images, model.encode_v, [y])
    assert_equal_gradients(pop_gradients(model), wanted)


def test_only_one_graph_is_in_memory():
    model, alive, most = Model().double(), 0, 0

    def pack(x):
        nonlocal alive, most
        alive += x.numel()
        most = max(most, alive)
        return x

    def unpack(x):
        nonlocal alive
        alive -= x.numel()
        return x

    x, y = torch.randn(64, 5).double(), torch.randn(64, 7).double()

    def peak(size):
        nonlocal alive, most
        alive, most = 0, 0
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            run_cached_backward(model.siglip, model.encode_u, x.split(size), model.encode_v, y.split(size))
        return most

    assert peak(4) < peak(64) / 2


def test_empty_chunks_raise():
    model = Model()
    with pytest.raises(ConfigError, match="no chunks"):
        run_cached_backward(model.clip, model.encode_u, [], model.encode_v, [torch.zeros(1, 7)])
