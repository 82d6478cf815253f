"""EMA of weights: closed forms, swapping and resuming."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vitrail.errors import CheckpointError, ConfigError
from vitrail.training.ema import EMA


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2)).to(dtype)


def move(net, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            p += torch.randn(p.shape, generator=generator).to(p.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("warmup", [False, True])
def test_closed_form(dtype, warmup):
    net = model(dtype)
    ema = EMA(net, 0.8, warmup=warmup)
    wanted = {name: p.detach().double() for name, p in net.named_parameters()}
    for t in range(40):
        move(net, t)
        ema.update(net)
        decay = min(0.8, (1 + t) / (10 + t)) if warmup else 0.8
        wanted = {n: decay * wanted[n] + (1 - decay) * p.detach().double() for n, p in net.named_parameters()}
    for name, average in ema.averages.items():
        assert average.dtype == torch.float32
        torch.testing.assert_close(average.double(), wanted[name], rtol=1e-5, atol=1e-5)


def test_average_of_constant_weights_is_exact():
    net = model()
    ema = EMA(net, 0.9)
    for _ in range(50):
        ema.update(net)
    assert all(torch.equal(ema.averages[name], p) for name, p in net.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swap_restores_weights_after_an_error(dtype):
    net = model(dtype)
    ema = EMA(net, 0.9)
    move(net, 1)
    net[0].bias.data[0] = float("nan")  # NaN weights are restored bit for bit
    live = {name: p.detach().clone().view(torch.uint8) for name, p in net.named_parameters()}
    places = {name: p.data_ptr() for name, p in net.named_parameters()}
    with pytest.raises(ZeroDivisionError), ema.swap_weights(net):
        assert all(torch.equal(p, ema.averages[name].to(dtype)) for name, p in net.named_parameters())
        _ = 1 / 0
    for name, p in net.named_parameters():
        assert torch.equal(p.detach().view(torch.uint8), live[name])
        assert p.data_ptr() == places[name] and p.requires_grad  # pointers of CUDA graphs stay valid


def test_frozen_parts_are_not_averaged():
    net = model()
    net[0].requires_grad_(False)
    ema = EMA(net, 0.9)
    assert set(ema.averages) == {"1.weight", "1.bias", "2.weight", "2.bias"}
    net[0].requires_grad_(True)
    ema.update(net)  # the averaged parameters are fixed at creation


@settings(max_examples=20)
@given(before=st.integers(0, 6), after=st.integers(0, 6), bf16=st.booleans(), warmup=st.booleans())
def test_resumes_bit_for_bit(before, after, bf16, warmup):
    net = model(torch.bfloat16 if bf16 else torch.float32)
    ema = EMA(net, 0.97, warmup=warmup)
    for t in range(before):
        move(net, t)
        ema.update(net)
    saved = {name: value.clone() for name, value in ema.state_dict().items()}
    other = EMA(model(net[0].weight.dtype), 0.97, warmup=warmup)
    other.load_state_dict(saved)
    for t in range(after):
        move(net, 100 + t)
        ema.update(net)
        other.update(net)
    assert ema.updates == other.updates
    assert all(torch.equal(ema.averages[name], other.averages[name]) for name in ema.averages)


def test_mismatched_state_raises():
    ema = EMA(model(), 0.9)
    with pytest.raises(CheckpointError, match=r"average\.2\.weight"):
        EMA(nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5)), 0.9).load_state_dict(
            {k: v for k, v in ema.state_dict().items() if "2.bias" not in k}
        )
    with pytest.raises(ConfigError, match="decay"):
        EMA(model(), 1.0)
