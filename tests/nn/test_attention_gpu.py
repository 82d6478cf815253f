"""CUDA attention backends against the reference on the CPU: values, gradients and segments."""

from importlib import import_module

import pytest
import torch

from helpers import randomize, relative
from vitrail.nn import (
    AttentionConfig,
    AttentionPlan,
    Block,
    BlockConfig,
    GatedMLPConfig,
    KVCache,
    MoEConfig,
    RotaryConfig,
    RotaryEmbedding,
    attention_plan,
    compute_attention,
    disable_cudnn_attention,
    make_mlp,
)
from vitrail.nn.attention_backends import choose_backend

pytestmark = pytest.mark.gpu

# bfloat16 has 8 bits; float32 without TF32 has 24.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}

LENGTHS = [(70, 130, 1, 55), (256,)]


def make_segments(lengths, rows=2):
    """Segments, and spans over the middle third of each."""
    segments = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    spans = torch.cat([(torch.arange(n) * 3 // n == 1).long() * (i + 1) for i, n in enumerate(lengths)])
    return segments.expand(rows, -1).contiguous(), spans.expand(rows, -1).contiguous()


def make_prefix_plan(segments):
    """The first fifth is a prefix. The following turns do not attend to each other."""
    n = segments.shape[1] // 5
    turns = torch.where(torch.arange(segments.shape[1]) < n, 0, segments + 1)
    spans = (turns == 0).long()
    output = {"segments": turns, "key_segments": turns, "spans": spans, "key_spans": spans, "shares_segment_zero": True}
    return AttentionPlan(causal=True, prefix_length=n, **output)


def iter_plans(lengths):
    segments, spans = make_segments(lengths)
    yield "packed", attention_plan(segments)
    yield "packed causal", attention_plan(segments, causal=True)
    yield "packed window", attention_plan(segments, causal=True, window=(20, -1))
    yield "spans", attention_plan(segments, spans, causal=True)
    yield "spans window", attention_plan(segments, spans, causal=True, window=(15, -1))
    yield "prefix", make_prefix_plan(segments)
    yield "permuted", attention_plan(segments[:, torch.randperm(segments.shape[1])], causal=True)
    yield "causal", AttentionPlan(causal=True)
    yield "full", AttentionPlan()


def run(backend, plan, inputs, device, dtype, **options):
    inputs = [x.to(device, dtype).detach().requires_grad_() for x in inputs]
    out = compute_attention(*inputs, plan.to(device), backend, **options)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out)
    return [x.float().cpu() for x in (out, *torch.autograd.grad((out * weight).sum(), inputs))]


@pytest.mark.parametrize("keys", [64, 96, 128, 192, 448])
@pytest.mark.parametrize(
    "plan", [AttentionPlan(), AttentionPlan(causal=True), "masked"], ids=["full", "causal", "masked"]
)
def test_queries_with_very_low_scores_have_gradients(keys, plan):
    """cuDNN's kernel returns NaN gradients here (pytorch/pytorch#196678)."""
    if plan == "masked":
        plan = attention_plan((torch.arange(keys) % 7 == 6).long().expand(2, -1).contiguous() * -1)
    q, k, v = (torch.randn(2, keys, 4, 64) for _ in range(3))
    q, k = q * 0.1, k * 0.1
    q[..., 0], k[..., 0] = 1.0, -120.0 * 64**0.5  # every score near −120
    q, k, v = (x.bfloat16().float() for x in (q, k, v))
    with disable_cudnn_attention():
        found = run(None, plan, (q, k, v), "cuda", torch.bfloat16)
    expected = run("plain", plan, (q, k, v), "cpu", torch.float32)
    for a, b in zip(found, expected, strict=True):
        assert a.isfinite().all()
        # the gradient of q's channel 0 is a sum of large terms that cancel, so bfloat16 rounding dominates it
        assert relative(a[..., 1:], b[..., 1:]) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_backends_agree_with_the_cpu(dtype, heads, lengths, monkeypatch):
    backends = import_module("vitrail.nn.attention_backends")
    monkeypatch.setattr(backends, "MAX_DENSE_MASK_KEYS", 0)  # short rows would use dense masks
    L = sum(lengths)
    inputs = [torch.randn(2, L, h, 64).to(dtype) for h in (heads[0], heads[1], heads[1])]
    used = set()
    for name, plan in iter_plans(lengths):
        reference = run("plain", plan, inputs, "cpu", torch.float32)
        chosen = choose_backend(inputs[0].to("cuda"), inputs[1].to("cuda"), plan)
        used.add(chosen)
        for backend in {chosen, "sdpa"}:
            for ours, theirs in zip(run(backend, plan, inputs, "cuda", dtype), reference, strict=True):
                assert relative(ours, theirs) <= TOLERANCE[dtype], (name, backend)
        capped = run("flex", plan, inputs, "cuda", dtype, logit_softcap=0.7)
        for ours, theirs in zip(
            capped, run("plain", plan, inputs, "cpu", torch.float32, logit_softcap=0.7), strict=True
        ):
            assert relative(ours, theirs) <= TOLERANCE[dtype], (name, "softcap")
    assert used == ({"sdpa", "flex", "packed"} if dtype == torch.bfloat16 else {"sdpa", "flex"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_text_without_images_has_finite_gradients(dtype):
    segments = torch.tensor([[0] * 3 + [1] * 70, [1] * 73])
    plan = attention_plan(segments, key_segments=torch.tensor([[1] * 64, [1] * 64]))
    inputs = [torch.randn(2, length, 6, 48).to(dtype) for length in (73, 64, 64)]
    reference = run("plain", plan, inputs, "cpu", torch.float32)
    for ours, theirs in zip(run("sdpa", plan, inputs, "cuda", dtype), reference, strict=True):
        assert relative(ours, theirs) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_spans", [True, False])
def test_no_gradient_crosses_a_segment(dtype, with_spans):
    segments, spans = make_segments((70, 130, 56), rows=1)
    plan = attention_plan(segments, spans if with_spans else None, causal=True).to("cuda")
    q, k, v = (torch.randn(1, 256, 4, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    out = compute_attention(q, k, v, plan)
    for gradient in torch.autograd.grad(out[:, 70:200].square().sum(), (q, k, v)):
        assert not gradient[:, :70].any()
        assert not gradient[:, 200:].any()
        assert gradient[:, 70:200].any()


def test_block_agrees_with_the_cpu():
    config = BlockConfig(
        width=256,
        attention=AttentionConfig(heads=4, kv_heads=2, qk_norm="rms"),
        mlp=GatedMLPConfig(intermediate_size=384),
        norm="rms",
    )
    block, rotary = randomize(Block(config), spread=0.05), RotaryEmbedding(RotaryConfig(head_dim=64))
    segments, spans = make_segments((70, 130, 56))
    plan, x, at = attention_plan(segments, spans, causal=True), torch.randn(2, 256, 256), torch.arange(256)[None]
    reference = block(x, plan, rotation=rotary(at))
    block, rotary = block.cuda(), rotary.cuda()
    ours = block(x.cuda(), plan.to("cuda"), rotation=rotary(at.cuda()))
    assert relative(ours.cpu(), reference) <= 1e-4
    compiled = torch.compile(block)
    ours = compiled(x.cuda(), plan.to("cuda"), rotation=rotary(at.cuda()))
    assert relative(ours.cpu(), reference) <= 1e-4


def test_cache_agrees_with_no_cache():
    config = BlockConfig(
        width=256, attention=AttentionConfig(heads=4, kv_heads=2), mlp=GatedMLPConfig(intermediate_size=64)
    )
    block, rotary = randomize(Block(config), spread=0.05).cuda(), RotaryEmbedding(RotaryConfig(head_dim=64)).cuda()
    x = torch.randn(2, 60, 256, device="cuda")
    whole = block(x, AttentionPlan(causal=True), rotation=rotary(torch.arange(60, device="cuda")[None]))
    cache, outs, start = KVCache([(2, 64)], 2, device="cuda"), [], 0
    for n in (40, 17, 1, 1, 1):
        at = cache.lengths[:, None] + torch.arange(n, device="cuda")
        outs.append(block(x[:, start : start + n], cache.extend(n), rotation=rotary(at), cache=cache.layer(0)))
        start += n
    assert relative(torch.cat(outs, 1), whole) <= 1e-4


def test_grouped_experts_agree_with_the_loop():
    """Compare the products only, because bfloat16 rounding may change the selected experts."""
    experts = make_mlp(256, MoEConfig(num_experts=8, experts_per_token=2, intermediate_size=128)).bfloat16()
    counts = torch.tensor([30, 0, 1, 99, 16, 7, 40, 7])
    x = torch.randn(200, 256).bfloat16()

    def compute_gradients(module, x):
        x = x.detach().requires_grad_()
        out = module._run(x, counts.to(x.device))
        return out, *torch.autograd.grad(out.square().sum(), (x, module.gate_up, module.down))

    reference = compute_gradients(experts.float(), x.float())
    ours = compute_gradients(experts.bfloat16().cuda(), x.cuda())
    for a, b in zip(ours, reference, strict=True):
        assert relative(a.float().cpu(), b) <= 2e-2
