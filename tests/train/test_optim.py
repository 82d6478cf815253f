"""AdamW against torch's, LAMB against the paper's equations in float64; masters, groups, clipping, resuming."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import nn

from helpers import randomize, relative
from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.nn import AttentionConfig, BlockConfig, GatedConfig, RotaryConfig
from vitrail.train import optim
from vitrail.train.optim import OptimConfig, Optimizer, Rate, group_parameters


class Net(nn.Module):
    """Parts of several kinds, as QLIP has."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6))
        self.text = nn.Embedding(5, 6)
        self.decoder = nn.Linear(6, 3)
        self.positions = nn.Parameter(torch.randn(7, 6))
        self.gate = nn.Parameter(torch.zeros(1))


def net(dtype=torch.float32, seed=0):
    return randomize(Net(), seed).to(dtype)


def give_gradients(model, step, skip=()):
    """Gradients that depend on the step alone, or on nothing at all for what is skipped."""
    generator = torch.Generator().manual_seed(step)
    for name, p in model.named_parameters():
        grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad = grad if p.requires_grad and name not in skip else None


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- AdamW ------------------------------------------------------------------------------------------------------


def test_adamw_is_torchs():
    ours, theirs = net(), net()
    config = OptimConfig(lr=3e-2, betas=(0.9, 0.99), eps=1e-7, decay=0.2, rates=(Rate(part="decoder", times=2),))
    optimizer = Optimizer(ours, config)
    named = dict(theirs.named_parameters())
    reference = torch.optim.AdamW(
        [
            {"params": [named[name] for name in group.names], "lr": group.lr, "weight_decay": group.decay}
            for group in optimizer.groups
        ],
        betas=(0.9, 0.99),
        eps=1e-7,
        foreach=False,
    )
    peaks = [group["lr"] for group in reference.param_groups]
    for step in range(60):
        scale = 0.5 + 0.5 * math.cos(step)
        for group, peak in zip(reference.param_groups, peaks, strict=True):
            group["lr"] = scale * peak
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step(scale)
        reference.step()
    for name, p in theirs.named_parameters():
        assert relative(ours.get_parameter(name), p) < 2e-6


@pytest.mark.parametrize("kind", ["adamw", "lamb"])
def test_half_precision_steps_masters_as_float32_would(kind):
    config = OptimConfig(kind=kind, lr=1e-3)
    half = net(torch.bfloat16)
    wide = net(torch.bfloat16).float()  # the same start
    a, b = Optimizer(half, config), Optimizer(wide, config)
    for step in range(20):
        give_gradients(half, step)
        for name, p in half.named_parameters():
            wide.get_parameter(name).grad = p.grad.float()
        a.step()
        b.step()
    for name, slot in a.slots.items():
        assert slot.mean.dtype == slot.square.dtype == slot.master.dtype == torch.float32
        assert torch.equal(slot.master, wide.get_parameter(name))
        assert torch.equal(half.get_parameter(name), slot.master.bfloat16())


def test_steps_too_small_for_bf16_are_not_lost():
    model = nn.Linear(4, 4, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    optimizer = Optimizer(model, OptimConfig(lr=1e-4, decay=0))  # bf16 has nothing between 0.996 and 1
    for _ in range(100):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    torch.testing.assert_close(optimizer.slots["weight"].master, torch.full((4, 4), 0.99), rtol=1e-5, atol=0)
    assert torch.equal(model.weight, torch.full((4, 4), 0.99).bfloat16())


# ---- Muon -------------------------------------------------------------------------------------------------------


def blocks(seed=0, dtype=torch.float32):
    block = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=GatedConfig(hidden=24), norm="rms")
    config = DecoderConfig(vocab=30, layers=2, block=block, rotary=RotaryConfig(8))
    return randomize(Decoder(config), seed).to(dtype)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch < 2.9 has none")
def test_muon_is_torchs():
    """Matrices of blocks by torch's Muon, the rest by its AdamW."""
    ours, theirs = blocks(), blocks()
    optimizer = Optimizer(ours, OptimConfig(kind="muon", lr=3e-2, betas=(0.9, 0.95), decay=0.1, clip=0))
    named = dict(theirs.named_parameters())
    inner = {name: p for name, p in named.items() if p.ndim == 2 and name.startswith("blocks.")}
    assert len(inner) == 8
    muon = torch.optim.Muon(list(inner.values()), lr=3e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    rest = [p for name, p in named.items() if name not in inner]
    vectors = [
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0},
        {"params": [p for p in rest if p.ndim > 1]},
    ]
    adamw = torch.optim.AdamW(vectors, lr=3e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(6):
        for model in (ours, theirs):
            give_gradients(model, step)
        optimizer.step()
        muon.step()
        adamw.step()
    for name, p in ours.named_parameters():
        # Steps are rounded to bf16, and products of several matrices at once may add in another order.
        torch.testing.assert_close(p, named[name], rtol=0, atol=2e-2 if name in inner else 1e-6)
        assert relative(p - blocks().get_parameter(name), named[name] - blocks().get_parameter(name)) < 1e-2


@pytest.mark.parametrize("shape", [(3, 4, 4), (2, 5, 9), (1, 9, 5), (4, 1, 7)])
def test_what_is_orthogonal(shape):
    torch.manual_seed(0)
    found = optim.orthogonal(torch.randn(shape)).float()
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.3 and values.max() < 1.4
    assert not optim.orthogonal(torch.zeros(shape)).any()


def test_a_convolution_is_a_matrix_of_filters():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Conv2d(6, 5, 3, bias=False), nn.Linear(54, 5, bias=False)])

    model = Both()
    with torch.no_grad():
        model.blocks[1].weight.copy_(model.blocks[0].weight.flatten(1))
    optimizer = Optimizer(model, OptimConfig(kind="muon", lr=1e-2, clip=0))
    for step in range(3):
        give_gradients(model, step)
        model.blocks[1].weight.grad = model.blocks[0].weight.grad.flatten(1).clone()
        optimizer.step()
    assert torch.equal(model.blocks[0].weight.flatten(1), model.blocks[1].weight)


def test_muon_refuses_what_has_no_blocks():
    with pytest.raises(ConfigError, match="matrices of blocks"):
        Optimizer(net(), OptimConfig(kind="muon", lr=1e-3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_goes_on_bit_for_bit(dtype):
    config = OptimConfig(kind="muon", lr=1e-2)
    whole, first = blocks(dtype=dtype), blocks(dtype=dtype)
    one, two = Optimizer(whole, config), Optimizer(first, config)
    for step in range(3):
        for model, optimizer in ((whole, one), (first, two)):
            give_gradients(model, step)
            optimizer.step()
    kept = load(save({name: t.clone().contiguous() for name, t in two.state_dict().items()}))
    again = blocks(1, dtype)
    again.load_state_dict(first.state_dict())
    three = Optimizer(again, config)
    three.load_state_dict(kept)
    for model, optimizer in ((whole, one), (again, three)):
        give_gradients(model, 3)
        optimizer.step()
    assert equal(weights(whole), weights(again))


# ---- LAMB -------------------------------------------------------------------------------------------------------


class Lamb:
    """You et al. 2020, algorithm 2, for one parameter in float64."""

    def __init__(self, w, lr, betas, eps, decay, adapts):
        self.w, self.m, self.v, self.t = w.double(), torch.zeros(()), torch.zeros(()), 0
        self.lr, self.betas, self.eps, self.decay, self.adapts = lr, betas, eps, decay, adapts

    def step(self, g, scale):
        g, (b1, b2) = g.double(), self.betas
        self.t += 1
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g * g
        r = (self.m / (1 - b1**self.t)) / ((self.v / (1 - b2**self.t)).sqrt() + self.eps)
        u = r + self.decay * self.w
        w_norm, u_norm = self.w.norm(), u.norm()
        ratio = w_norm / u_norm if self.adapts and w_norm > 0 and u_norm > 0 else 1.0
        self.w = self.w - scale * self.lr * ratio * u


QLIP = OptimConfig(
    kind="lamb",
    lr=5e-4,
    betas=(0.9, 0.95),
    eps=1e-6,
    decay=0.05,
    clip=5,
    rates=(Rate(part="encoder", lr=2e-4), Rate(part="text", lr=2e-5), Rate(part="decoder", lr=2e-3)),
)


@pytest.mark.parametrize("config", [QLIP, OptimConfig(kind="lamb", lr=0.1, decay=0, clip=0, no_decay=())])
def test_lamb_is_the_papers(config):
    model = net()
    with torch.no_grad():
        model.decoder.weight.zero_()  # a norm of 0: the ratio is 1
    optimizer = Optimizer(model, config)
    start = weights(model)
    references = {
        name: Lamb(start[name], group.lr, config.betas, config.eps, group.decay, not group.spared)
        for group in optimizer.groups
        for name in group.names
    }
    for step in range(40):
        scale = 1 / (1 + step)
        give_gradients(model, step)
        model.text.weight.grad.zero_()  # without decay an update of 0
        norm = optimizer.clip()
        assert norm > 5
        for name, reference in references.items():
            reference.step(model.get_parameter(name).grad, scale)
        optimizer.step(scale)
    for name, reference in references.items():
        assert relative(model.get_parameter(name).double(), reference.w) < 1e-5, name
    if config is not QLIP:
        assert torch.equal(model.text.weight, start["text.weight"])


def test_qlips_rates():
    rates = {name: group.lr for group in group_parameters(Net(), QLIP) for name in group.names}
    assert rates["encoder.0.weight"] == rates["encoder.1.bias"] == 2e-4
    assert (rates["text.weight"], rates["decoder.bias"], rates["gate"]) == (2e-5, 2e-3, 5e-4)


# ---- groups -----------------------------------------------------------------------------------------------------


BLOCK = BlockConfig(
    width=16, attention=AttentionConfig(heads=2, bias="qkv", qk_norm="rms"), mlp=GatedConfig(hidden=8), norm="rms"
)


def decayed(model, **settings):
    groups = group_parameters(model, OptimConfig(lr=1.0, **settings))
    return {name for group in groups if group.decay for name in group.names}


def test_matrices_decay_and_the_rest_does_not():
    decoder = Decoder(DecoderConfig(vocab=8, layers=1, block=BLOCK, rotary=RotaryConfig(head_dim=8)))
    layer = "blocks.0.branches."
    matrices = {f"{layer}self.op.qkv.weight", f"{layer}self.op.out.weight"} | {
        f"{layer}mlp.op.gate_up.weight",
        f"{layer}mlp.op.down.weight",
        "head.weight",
    }
    assert decayed(decoder) == matrices | {"embed.weight"}
    assert decayed(decoder, no_decay=("vectors", "embeddings")) == matrices
    assert decayed(decoder, no_decay=("vectors", "embeddings", "*.mlp")) == {n for n in matrices if ".mlp." not in n}
    assert decayed(decoder, no_decay=()) == {name for name, _ in decoder.named_parameters()}


def test_positions_do_not_decay_unless_asked():
    vit = ViT(ViTConfig(layers=1, block=BLOCK.with_(gated=True), image=32, patch=16, cls=True))
    assert not {"positions.table", "cls", "blocks.0.branches.self.gate"} & decayed(vit)
    assert "positions.table" in decayed(vit, no_decay=("vectors",))
    assert "positions" not in decayed(Net())


def test_the_first_row_that_matches_decides():
    rates = (Rate(part="encoder.0.bias", lr=5.0), Rate(part="encoder.0", times=0), Rate(part="*bias", times=3))
    groups = group_parameters(Net(), OptimConfig(lr=1.0, rates=rates))
    found = {name: group.lr for group in groups for name in group.names}
    assert found["encoder.0.bias"] == 5 and found["encoder.0.weight"] == 0
    assert found["encoder.1.bias"] == found["decoder.bias"] == 3
    assert found["encoder.1.weight"] == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rates": (Rate(part="encodr", lr=1.0),)}, "encodr.*did you mean 'encoder'"),
        ({"rates": (Rate(part="encoder.0.wieght", lr=1.0),)}, "did you mean 'encoder.0.weight'"),
        ({"rates": (Rate(part="*.wieght", lr=1.0),)}, r"did you mean '\*\.weight'"),
        ({"rates": (Rate(part="xyzzy", lr=1.0),)}, "its parts are positions, gate, encoder, text, decoder"),
        ({"no_decay": ("norms",)}, "no_decay: part 'norms' matches nothing"),
        ({"rates": (Rate(part="encoder", lr=1.0), Rate(part="encoder.0", lr=2.0))}, "encoder.0.*move it up"),
        ({"rates": (Rate(part="*", lr=0.0),)}, "nothing is left to train"),
    ],
)
def test_rules_that_decide_nothing_are_refused(settings, words):
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        Optimizer(Net(), OptimConfig(lr=1e-3, **settings))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Rate(part="x"),
        lambda: Rate(part="x", lr=1.0, times=2.0),
        lambda: Rate(part="x", lr=-1.0),
        lambda: OptimConfig(lr=-1e-3),
        lambda: OptimConfig(lr=math.nan),
        lambda: OptimConfig(lr=1e-3, betas=(0.9, 1.0)),
        lambda: OptimConfig.read({"lr": 1e-3, "kind": "sgd"}),
        lambda: OptimConfig.read({"lr": 1e-3, "rates": [{"prat": "x", "lr": 1.0}]}),
    ],
)
def test_what_cannot_be_is_refused(make):
    with pytest.raises(ConfigError):
        make()


def test_frozen_parts_have_no_gradient_and_no_state():
    model = net()
    model.text.requires_grad_(False)
    optimizer = Optimizer(model, OptimConfig(lr=1e-2, rates=(Rate(part="encoder", lr=0.0),)))
    assert not any(p.requires_grad for p in model.encoder.parameters())
    assert {key.partition(".")[2].split(".")[0] for key in optimizer.state_dict()} == {"decoder", "positions", "gate"}
    start = weights(model)
    give_gradients(model, 0)
    optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, start[name])}
    assert {name.split(".")[0] for name in moved} == {"decoder", "positions", "gate"}


@pytest.mark.parametrize("kind", ["adamw", "lamb"])
def test_what_has_no_gradient_is_left_as_it_is(kind):
    """A tower in a batch of mere text: no step, no decay, and its bias correction waits."""
    model, other = net(), net()
    a, b = (Optimizer(m, OptimConfig(kind=kind, lr=1e-2)) for m in (model, other))
    give_gradients(model, 0, skip=("decoder.weight",))
    a.step()
    assert torch.equal(model.decoder.weight, other.decoder.weight)
    give_gradients(model, 1)
    give_gradients(other, 1)
    a.step()
    b.step()
    assert torch.equal(model.decoder.weight, other.decoder.weight)
    assert (a.slots["decoder.weight"].steps, a.slots["decoder.bias"].steps) == (1, 2)


@pytest.mark.parametrize("kind", ["adamw", "lamb"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buckets_change_nothing(kind, dtype, monkeypatch):
    results = []
    for size in (1, 30, optim.BUCKET):
        monkeypatch.setattr(optim, "BUCKET", size)
        model = net(dtype)
        optimizer = Optimizer(model, OptimConfig(kind=kind, lr=1e-2))
        for step in range(3):
            give_gradients(model, step)
            optimizer.step()
        results.append(weights(model))
    assert equal(results[0], results[1]) and equal(results[0], results[2])


# ---- gradients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [0.1, 5.0, 1e9])
def test_clipping_is_torchs(max_norm):
    ours, theirs = net(), net()
    optimizer = Optimizer(ours, OptimConfig(lr=1e-3, clip=max_norm))
    give_gradients(ours, 0)
    give_gradients(theirs, 0)
    norm = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
    assert optimizer.clip() == pytest.approx(norm.item(), rel=1e-6)
    for name, p in theirs.named_parameters():
        assert relative(ours.get_parameter(name).grad, p.grad) < 1e-5
    assert optimizer.clip(0) == pytest.approx(min(norm.item(), max_norm), rel=1e-5)  # 0 only measures


def test_the_norm_of_bf16_gradients_is_taken_in_float32():
    model = nn.Linear(1000, 100, bias=False).bfloat16()
    optimizer = Optimizer(model, OptimConfig(lr=1e-3))
    model.weight.grad = torch.randn(100, 1000).bfloat16()
    wanted = model.weight.grad.double().norm().item()
    assert optimizer.clip(math.inf) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_that_is_not_finite_is_reported_and_changes_nothing(bad, dtype):
    model = net(dtype)
    optimizer = Optimizer(model, OptimConfig(lr=1e-3))
    give_gradients(model, 0)
    model.text.weight.grad[0, 0] = bad
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert not math.isfinite(optimizer.clip())
    for name, p in model.named_parameters():
        assert torch.equal(p.grad.nan_to_num(7.0), before[name].nan_to_num(7.0))
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert optimizer.clip() == 0


def test_passes_of_one_step_are_summed_in_float32():
    model = nn.Linear(3, 2, bias=False).bfloat16()
    optimizer = Optimizer(model, OptimConfig(lr=1e-3))
    pieces = [torch.full((2, 3), value).bfloat16() for value in (256.0, *[0.5] * 8)]
    for i, piece in enumerate(pieces):
        model.weight.grad = piece.clone()
        if i < len(pieces) - 1:  # the last may stay on the weight
            optimizer.accumulate()
            assert model.weight.grad is None
    assert optimizer.clip(math.inf) == pytest.approx(260 * math.sqrt(6))  # bf16 would have stayed at 256
    optimizer.step()
    torch.testing.assert_close(optimizer.slots["weight"].mean, torch.full((2, 3), 0.1 * 260))
    optimizer.zero_grad()
    assert optimizer.clip() == 0


def test_float32_gradients_accumulate_where_they_are():
    model = net()
    optimizer = Optimizer(model, OptimConfig(lr=1e-3))
    give_gradients(model, 0)
    grads = [p.grad for p in model.parameters()]
    optimizer.accumulate()
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))


# ---- resuming ---------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    kind=st.sampled_from(["adamw", "lamb"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    before=st.integers(0, 4),
    after=st.integers(1, 4),
    skip=st.sets(st.sampled_from(["text.weight", "decoder.bias", "gate"])),
)
def test_resumes_bit_for_bit(kind, dtype, before, after, skip):
    config = OptimConfig(kind=kind, lr=1e-2, rates=(Rate(part="positions", lr=0.0),))

    def go(model, optimizer, first, last):
        for step in range(first, last):
            give_gradients(model, step, skip if step % 2 else ())
            optimizer.clip()
            optimizer.step(1 / (1 + step))
            optimizer.zero_grad()

    whole = net(dtype)
    optimizer = Optimizer(whole, config)
    go(whole, optimizer, 0, before)
    files = save(whole.state_dict()), save(optimizer.state_dict())
    go(whole, optimizer, before, before + after)

    resumed = net(dtype, seed=1)
    again = Optimizer(resumed, config)
    resumed.load_state_dict(load(files[0]))
    again.load_state_dict(load(files[1]))
    go(resumed, again, before, before + after)
    assert equal(weights(whole), weights(resumed))
    assert equal(optimizer.state_dict(), again.state_dict())


def test_another_models_state_is_refused():
    state = Optimizer(net(), OptimConfig(lr=1e-3)).state_dict()
    other = Optimizer(net(torch.bfloat16), OptimConfig(lr=1e-3))
    with pytest.raises(CheckpointError, match=r"master\.decoder\.bias"):
        other.load_state_dict(state)
