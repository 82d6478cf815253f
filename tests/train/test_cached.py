"""Encoders run in chunks against the whole batch at once: the same loss and the same gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vitrail.errors import ConfigError
from vitrail.objectives import clip_loss, siglip_loss
from vitrail.train.cached import cached_backward


class Model(nn.Module):
    """Two towers with a shared last layer, and the numbers of the loss."""

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


def taken(model):
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return gradients


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (gradient is None) == (ours[name] is None), name
        if gradient is not None:
            torch.testing.assert_close(ours[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@pytest.mark.parametrize("sizes", [([12], [12]), ([4, 4, 4], [6, 6]), ([5, 1, 6], [12])])
def test_chunks_change_nothing(kind, sizes):
    model = Model().double()
    x, y = torch.randn(12, 5).double(), torch.randn(12, 7).double()
    loss = getattr(model, kind)
    whole = loss(model.encode_u(x), model.encode_v(y))
    whole.backward()
    wanted = taken(model)
    value = cached_backward(loss, model.encode_u, x.split(sizes[0]), model.encode_v, y.split(sizes[1]))
    torch.testing.assert_close(value, whole.detach())
    assert not value.requires_grad
    same(taken(model), wanted)


def test_dropout_draws_the_same_twice():
    """The whole batch is the chunks, each encoded with a graph of its own, from the same seed."""
    model = Model(dropout=0.5).double()
    x, y = torch.randn(12, 5).double().split(4), torch.randn(12, 7).double().split(3)
    torch.manual_seed(3)
    model.siglip(torch.cat([model.encode_u(c) for c in x]), torch.cat([model.encode_v(c) for c in y])).backward()
    after = torch.rand(1)
    wanted = taken(model)
    torch.manual_seed(3)
    cached_backward(model.siglip, model.encode_u, x, model.encode_v, y)
    same(taken(model), wanted)
    assert torch.equal(torch.rand(1), after)  # and what comes next draws as if nothing had run twice


def test_gradients_add_up_and_frozen_towers_rest():
    model = Model().double()
    model.u.requires_grad_(False)
    model.last.requires_grad_(False)
    runs = []

    def encode_u(x):
        runs.append(len(x))
        return model.encode_u(x)

    x, y = torch.randn(6, 5).double(), torch.randn(6, 7).double()
    for _ in range(2):
        cached_backward(model.siglip, encode_u, x.split(3), model.encode_v, y.split(2))
    twice = taken(model)
    (2 * model.siglip(model.encode_u(x), model.encode_v(y))).backward()
    same(twice, taken(model))


def test_chunks_may_be_anything():
    model = Model().double()
    x, y = torch.randn(4, 5).double(), torch.randn(4, 7).double()
    model.clip(model.encode_u(x), model.encode_v(y)).backward()
    wanted = taken(model)
    pictures = [{"pixels": part} for part in x.split(2)]
    cached_backward(model.clip, lambda c: model.encode_u(c["pixels"]), pictures, model.encode_v, [y])
    same(taken(model), wanted)


def test_only_one_graph_lives_at_a_time():
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
            cached_backward(model.siglip, model.encode_u, x.split(size), model.encode_v, y.split(size))
        return most

    assert peak(4) < peak(64) / 2


def test_nothing_to_encode_is_refused():
    model = Model()
    with pytest.raises(ConfigError, match="without chunks"):
        cached_backward(model.clip, model.encode_u, [], model.encode_v, [torch.zeros(1, 7)])
