"""Mixture of experts and its load-balancing loss against transformers; gated MLP."""

import pytest
import torch
from transformers import Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from helpers import put, randomize, relative
from vitrail.errors import ConfigError
from vitrail.nn import GatedMLPConfig, MoEConfig, make_mlp, pop_load_balancing_loss


def output(result):
    return result[0] if isinstance(result, tuple) else result


def load(ours, theirs):
    with torch.no_grad():
        ours.router.weight.copy_(theirs.gate.weight)
        ours.gate_up.copy_(theirs.experts.gate_up_proj)
        ours.down.copy_(theirs.experts.down_proj)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("count", "active"), [(8, 2), (5, 5), (16, 1)])
def test_experts_agree_with_qwen3(count, active, renormalize):
    config = Qwen3MoeConfig(
        hidden_size=24,
        moe_intermediate_size=20,
        num_experts=count,
        num_experts_per_tok=active,
        norm_topk_prob=renormalize,
    )
    reference = randomize(Qwen3MoeSparseMoeBlock(config))
    ours = make_mlp(
        24, MoEConfig(num_experts=count, experts_per_token=active, intermediate_size=20, renormalize=renormalize)
    )
    load(ours, reference)
    x = torch.randn(2, 9, 24, requires_grad=True)
    a, b = ours(x), output(reference(x))
    assert relative(a, b) <= 1e-5
    weight = torch.randn_like(a)
    (ga,), (gb,) = (torch.autograd.grad((y * weight).sum(), x) for y in (a, b))
    assert relative(ga, gb) <= 1e-4


def test_shared_expert_agrees_with_qwen2():
    config = Qwen2MoeConfig(
        hidden_size=24,
        moe_intermediate_size=20,
        num_experts=6,
        num_experts_per_tok=2,
        shared_expert_intermediate_size=30,
        norm_topk_prob=False,
    )
    reference = randomize(Qwen2MoeSparseMoeBlock(config))
    ours = make_mlp(
        24,
        MoEConfig(
            num_experts=6,
            experts_per_token=2,
            intermediate_size=20,
            shared_intermediate_size=30,
            shared_gate=True,
            renormalize=False,
        ),
    )
    load(ours, reference)
    put(ours.shared.gate_up, reference.shared_expert.gate_proj, reference.shared_expert.up_proj)
    put(ours.shared.down, reference.shared_expert.down_proj)
    put(ours.shared_gate, reference.shared_expert_gate)
    x = torch.randn(3, 5, 24)
    assert relative(ours(x), output(reference(x))) <= 1e-5


def test_balance_loss_value_and_gradient():
    torch.manual_seed(3)
    ours = make_mlp(24, MoEConfig(num_experts=6, experts_per_token=2, intermediate_size=8)).train()
    x = torch.randn(40, 24)
    ours(x)
    loss = pop_load_balancing_loss(ours)
    logits = ours.router(x)
    reference = load_balancing_loss_func((logits,), num_experts=6, top_k=2)
    assert loss.item() == pytest.approx(reference.item(), rel=1e-5)
    a, b = (torch.autograd.grad(v, ours.router.weight)[0] for v in (loss, reference))
    assert relative(a, b) <= 1e-4
    assert pop_load_balancing_loss(ours) is None  # cleared by the first call


def test_balance_loss_is_smallest_for_even_load():
    ours = make_mlp(8, MoEConfig(num_experts=4, experts_per_token=1, intermediate_size=8)).train()
    with torch.no_grad():
        ours.router.weight.zero_()[0] = 5.0  # all tokens to the first expert
    ours(torch.rand(64, 8))
    assert pop_load_balancing_loss(ours).item() > 3.9  # E if one expert gets all tokens, 1 if the load is even


def test_balance_survives_activation_checkpointing():
    from torch.utils.checkpoint import checkpoint

    ours = make_mlp(24, MoEConfig(num_experts=6, experts_per_token=2, intermediate_size=8)).train()
    x = torch.randn(10, 24, requires_grad=True)
    checkpoint(ours, x, use_reentrant=False).sum()
    (a,) = torch.autograd.grad(pop_load_balancing_loss(ours), ours.router.weight)
    ours(x)
    (b,) = torch.autograd.grad(pop_load_balancing_loss(ours), ours.router.weight)
    assert relative(a, b) <= 1e-6


def test_invalid_experts_raise():
    with pytest.raises(ConfigError):
        MoEConfig(num_experts=4, experts_per_token=5, intermediate_size=8)
    with pytest.raises(ConfigError, match="shared"):
        MoEConfig(num_experts=4, experts_per_token=1, intermediate_size=8, shared_gate=True)
    for groups in (
        {"num_groups": 4},
        {"num_groups": 3},
        {"num_groups": 2, "top_groups": 3},
        {"num_groups": 0},
        {"num_groups": 2, "experts_per_token": 3},
    ):
        with pytest.raises(ConfigError, match="groups of 4 experts"):
            MoEConfig(**{"num_experts": 4, "experts_per_token": 1, "intermediate_size": 8, **groups})


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("inner", [None, "layer"])
def test_gated_mlp_is_equal_with_and_without_gradients(bias, inner):
    """On the CPU, inference uses two products and training one."""
    ours = randomize(make_mlp(24, GatedMLPConfig(intermediate_size=40, bias=bias, inner_norm=inner)))
    x = torch.randn(3, 5, 24)
    with torch.no_grad():
        lean = ours(x)
    assert relative(lean, ours(x)) <= 1e-6
