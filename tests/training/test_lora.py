"""LoRA: initial outputs, slices, merging, saving and costs."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers import randomize, relative
from vitrail.backbones.decoder import Decoder, DecoderConfig
from vitrail.errors import CheckpointError, ConfigError
from vitrail.nn import (
    Attention,
    AttentionConfig,
    AttentionPlan,
    BlockConfig,
    GatedMLPConfig,
    RotaryConfig,
    Workload,
    cost,
)
from vitrail.nn.blockwise_quantization import NF4Linear
from vitrail.training.ema import EMA
from vitrail.training.lora import (
    LoRAConfig,
    LoRALinear,
    add_lora,
    load_lora_state_dict,
    lora_state_dict,
    merge_lora,
    quantize_base,
)
from vitrail.training.optimizer import OptimConfig, Optimizer, ParamGroupConfig

IDS = torch.tensor([[1, 5, 2, 7, 7, 0]])


def decoder(dtype=torch.float32):
    block = BlockConfig(
        width=24,
        attention=AttentionConfig(heads=4, kv_heads=2, head_dim=8),
        mlp=GatedMLPConfig(intermediate_size=20),
        norm="rms",
    )
    config = DecoderConfig(vocab_size=11, layers=2, block=block, rotary=RotaryConfig(head_dim=8))
    return randomize(Decoder(config)).to(dtype).eval()


def config(*targets, rank=3, alpha=6.0, **more):
    return LoRAConfig(rank=rank, alpha=alpha, target_modules=targets, **more)


def randomize_adapters(model, seed=1):
    """Set random adapter weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in lora_state_dict(model).values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    return model


TARGETS = [("*.qkv",), ("*.q", "*.v"), ("*.gate_up.up", "*.down"), ("blocks.1",), ("*",), ("head", "*.k", "*.gate")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("targets", TARGETS)
def test_initial_outputs_are_unchanged(targets, dtype):
    model = decoder(dtype)
    before = model(IDS)
    assert torch.equal(add_lora(model, config(*targets))(IDS), before)
    for name, p in model.named_parameters():
        assert p.requires_grad == (".lora." in name)
        assert p.dtype == dtype


@pytest.mark.parametrize("targets", TARGETS)
def test_merging_gives_plain_weights(targets):
    plain = decoder()
    model = randomize_adapters(add_lora(copy.deepcopy(plain), config(*targets)))
    with_adapters = model(IDS)
    assert relative(with_adapters, plain(IDS)) > 1e-2
    assert merge_lora(model) is model
    assert relative(model(IDS), with_adapters) < 1e-5
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert not any(isinstance(module, LoRALinear) for module in model.modules())


def test_slice_changes_only_its_rows():
    plain = decoder()
    model = merge_lora(randomize_adapters(add_lora(copy.deepcopy(plain), config("*.qkv.v", "blocks.0.*.up"))))
    for name, p in plain.named_parameters():
        moved = (model.get_parameter(name) != p).any(-1).nonzero().flatten().tolist()
        if name.endswith("qkv.weight"):
            assert moved == list(range(48, 64))  # q 0 … 32, k 32 … 48, v 48 … 64
        elif name == "blocks.0.branches.mlp.op.gate_up.weight":
            assert moved == list(range(20, 40))
        else:
            assert not moved


def test_slices_of_cross_attention():
    layer = randomize(Attention(12, AttentionConfig(heads=3, kv_heads=1), "cross", 10))
    model = randomize_adapters(add_lora(layer, config("kv.v", "q")))
    assert {name for name, _ in model.named_modules() if name.endswith((".v", ".all"))} == {"kv.lora.v", "q.lora.all"}
    assert model.kv.lora["v"].b.shape == (4, 3)
    x, context = torch.randn(1, 2, 12), torch.randn(1, 5, 10)
    before = model(x, AttentionPlan(), context=context)
    assert relative(merge_lora(model)(x, AttentionPlan(), context=context), before) < 1e-5


def test_values_and_gradients_in_closed_form():
    model = nn.Sequential(nn.Linear(5, 4)).double()
    add_lora(model, config("0", rank=2, alpha=3.0))
    randomize_adapters(model)
    W, bias, x, g = (
        model[0].base_weight,
        model[0].bias,
        torch.randn(7, 5).double().requires_grad_(),
        torch.randn(7, 4).double(),
    )
    A, B = model[0].lora["all"].a, model[0].lora["all"].b
    y = model(x)
    torch.testing.assert_close(y, x @ W.T + bias + 1.5 * x @ A.T @ B.T)
    for_x, for_a, for_b = torch.autograd.grad(y, (x, A, B), g)
    torch.testing.assert_close(for_x, g @ (W + 1.5 * B @ A))
    torch.testing.assert_close(for_a, 1.5 * B.T @ g.T @ x)
    torch.testing.assert_close(for_b, 1.5 * g.T @ x @ A.T)


def test_gradients_of_slices_by_finite_differences():
    layer = add_lora(randomize(Attention(4, AttentionConfig(heads=2))).double(), config("qkv.q", "qkv.v", rank=2))
    randomize_adapters(layer)
    x = torch.randn(1, 3, 4).double()
    adapters = [p for p in layer.parameters() if p.requires_grad]
    assert len(adapters) == 4
    assert torch.autograd.gradcheck(lambda x, *_: layer(x, AttentionPlan()), (x.requires_grad_(), *adapters))


def test_weight_property_is_merged():
    """Such as attention without k bias, a tied output layer, and fused kernels."""
    layer = randomize(Attention(12, AttentionConfig(heads=3, bias="all_but_k")))
    randomize_adapters(add_lora(layer, config("qkv.q", "out")))
    x = torch.randn(1, 4, 12)
    before = layer(x, AttentionPlan())
    for_b = torch.autograd.grad(before.sum(), layer.qkv.lora["q"].b)[0]
    assert for_b.abs().max() > 0
    assert relative(F.linear(x, layer.out.weight, layer.out.bias), layer.out(x)) < 1e-5
    assert relative(merge_lora(layer)(x, AttentionPlan()), before) < 1e-5


def test_bf16_layers_train_with_float32_masters():
    model = add_lora(decoder(torch.bfloat16), config("*.q", "*.v"))
    base = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = Optimizer(model, OptimConfig(lr=3e-2, weight_decay=0))
    assert all(slot.master.dtype == torch.float32 for slot in optimizer.parameter_states.values())
    assert len(optimizer.parameter_states) == 2 * 2 * 2
    losses = []
    for _ in range(30):
        loss = F.cross_entropy(model(IDS)[0, :-1].float(), IDS[0, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    now = dict(model.named_parameters())
    assert all(torch.equal(now[name], p) for name, p in base.items())
    before = model(IDS)
    assert relative(merge_lora(model)(IDS).float(), before.float()) < 0.1  # merged weights are rounded to bf16


def test_base_can_be_frozen_by_rate_and_averaged():
    """The base weights keep their names."""
    model = add_lora(decoder(), config("*.q")).requires_grad_(True)
    ema = EMA(model, 0.5)
    ema.update(model)
    with ema.swap_weights(model):
        pass
    rates = (ParamGroupConfig(part="*.lora", lr_multiplier=1.0), ParamGroupConfig(part="*", lr=0.0))
    assert set(Optimizer(model, OptimConfig(lr=1e-2, param_groups=rates)).parameter_states) == set(
        lora_state_dict(model)
    )


def test_dropout_acts_on_the_update_in_training():
    model = randomize_adapters(add_lora(decoder(), config("*.qkv", dropout=0.5)))
    still = model(IDS)
    assert torch.equal(model(IDS), still)
    model.train()
    assert not torch.equal(model(IDS), model(IDS))
    layer = next(m for m in model.modules() if isinstance(m, LoRALinear))
    x = torch.ones(1, 24)
    mean = torch.stack([layer(x) for _ in range(4000)]).mean(0)
    assert relative(mean, layer.eval()(x)) < 0.1


def test_state_of_adapters_and_of_the_model():
    setting = config("*.q", "*.down")
    model = randomize_adapters(add_lora(decoder(), setting))
    alone = {name: value.clone() for name, value in lora_state_dict(model).items()}
    assert alone.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    assert alone.keys() <= model.state_dict().keys()

    other = add_lora(decoder(), setting)
    load_lora_state_dict(other, alone)
    assert torch.equal(other(IDS), model(IDS))

    third = add_lora(randomize(decoder(), seed=9), setting)
    third.load_state_dict(model.state_dict())
    assert torch.equal(third(IDS), model(IDS))
    assert decoder().state_dict().keys() == {name for name in model.state_dict() if ".lora." not in name}

    with pytest.raises(CheckpointError, match=r"adapters.*differ in 4 of 8"):
        load_lora_state_dict(add_lora(decoder(), config("*.q")), alone)


def test_compiled():
    model = randomize_adapters(add_lora(decoder(), config("*.q", "*.v", "*.down")))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ours, plain = compiled(IDS), model(IDS)
    assert relative(ours, plain) < 1e-5
    learners = [p for p in model.parameters() if p.requires_grad]
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), learners) for y in (ours, plain)), strict=True):
        assert relative(a, b) < 1e-4


def test_cost_is_counted():
    model = decoder()
    before, work = cost.count_flops(model, Workload.causal_attention(6)), Workload.causal_attention(6)
    add_lora(model, config("*.q"))
    assert cost.count_flops(model, work) - before == 2 * 6 * sum(v.numel() for v in lora_state_dict(model).values())
    assert cost.count_bytes(model, work).weights == sum(p.numel() * 4 for p in model.parameters())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: add_lora(decoder(), config("*.qvk")), r"matches nothing.*did you mean '\*\.qkv'"),
        (lambda: add_lora(decoder(), config("*.q", "embed")), "'embed' matches nothing"),
        (lambda: add_lora(add_lora(decoder(), config("*.q")), config("*.v")), "merge them first"),
        (lambda: config(), "no target"),
        (lambda: config("*.q", rank=0), "rank is 0"),
        (lambda: config("*.q", dropout=1.0), "dropout"),
    ],
)
def test_invalid_configs_raise(make, words):
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        make()


def quantized(targets=("*.q", "*.v", "*.down")):
    """A decoder with random adapters over NF4 weights, and one with the same adapters over the dequantized weights."""
    model = add_lora(decoder(), config(*targets))
    quantize_base(randomize_adapters(model))
    plain = add_lora(decoder(), config(*targets))
    load_lora_state_dict(plain, lora_state_dict(model))
    with torch.no_grad():
        for name, layer in model.named_modules():
            if isinstance(layer, LoRALinear | NF4Linear):
                other = plain.get_submodule(name)
                base = layer.base_weight if isinstance(layer, LoRALinear) else layer.weight
                other._parameters["weight"].copy_(base)
    return model, plain


def test_adapters_over_nf4_weights():
    """All linear layers of the blocks are packed; outputs and gradients are those over the dequantized weights."""
    model, plain = quantized()
    names = {name for name, _ in model.named_parameters()}
    assert not [name for name in names if name.startswith("blocks.") and name.endswith(("qkv.weight", "up.weight"))]
    assert {"embed.weight", "head.weight"} <= names  # these are no layers of blocks
    ours, expected = model(IDS), plain(IDS)
    assert relative(ours, expected) < 1e-5
    weights = [[p for p in one.parameters() if p.requires_grad] for one in (model, plain)]
    gradients = [torch.autograd.grad(y.square().sum(), p) for y, p in zip((ours, expected), weights, strict=True)]
    assert len(weights[0]) == len(weights[1]) == 12
    for a, b in zip(*gradients, strict=True):
        assert relative(a, b) < 1e-4


def test_merging_nf4_weights():
    model, plain = quantized()
    before = model(IDS)
    assert relative(merge_lora(model)(IDS), before) < 1e-5
    assert model.state_dict().keys() == decoder().state_dict().keys()
    assert all(type(layer) is nn.Linear for layer in model.modules() if isinstance(layer, nn.Linear))
    merge_lora(plain)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, plain.state_dict()[name])


def test_routers_and_layers_without_adapters():
    model = add_lora(decoder(), config("blocks.0.*.q"))
    quantize_base(model)
    kinds = {name: type(layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    assert kinds["blocks.0.branches.self.op.qkv"] is LoRALinear
    assert kinds["blocks.0.branches.mlp.op.down"] is NF4Linear
    assert kinds["blocks.1.branches.mlp.op.down"] is nn.Linear  # a block without adapters


@pytest.mark.slow
def test_nf4_weights_compile():
    model, _ = quantized(("*.q",))
    compiled = torch.compile(model, backend="eager")
    assert relative(compiled(IDS), model(IDS)) < 1e-5
