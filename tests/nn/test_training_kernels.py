"""Triton kernels of a training step against torch: interpreted, compiled, and on a GPU."""

import copy
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers import interpreted

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

SCRIPT = """
import torch
import torch.nn.functional as F
from vitrail.nn.kernels import training_kernels
from vitrail.objectives.fused_cross_entropy import _compute_softmax_gradient

torch.manual_seed(0)
training_kernels.VOCABULARY_BLOCK = training_kernels.UPDATE_BLOCK = training_kernels.GATE_BLOCK = 64
for N, V in ((1, 1), (7, 300), (3, 64), (0, 5)):
    for z, needs_gradient in ((0.0, True), (1e-2, True), (0.0, False)):
        logits, targets, shares = 9 * torch.randn(N, V), torch.randint(0, V, (N,)), torch.rand(N).round()
        ours, theirs = logits.clone(), logits.clone()
        values = training_kernels.compute_softmax_gradient(ours, targets, shares, z, needs_gradient)
        expected = _compute_softmax_gradient(theirs, targets[:, None], shares, z, needs_gradient)
        for a, b in zip(values, expected):
            torch.testing.assert_close(a, b)
        torch.testing.assert_close(ours, theirs)
        assert needs_gradient or torch.equal(ours, logits)

for shape in ((1,), (200,), (9, 33)):
    weight, master = torch.empty(shape, dtype=torch.float16), torch.randn(shape)
    mean, square = torch.zeros(shape), torch.zeros(shape)
    reference = torch.nn.Parameter(master.clone())
    optimizer = torch.optim.AdamW([reference], lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    for step in range(1, 6):
        grad = torch.randn(shape).half()
        reference.grad = grad.float()
        optimizer.step()
        training_kernels.update_adamw(
            weight, master, grad, mean, square, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, step=step
        )
        torch.testing.assert_close(master, reference.detach(), rtol=1e-6, atol=1e-6)
        assert torch.equal(weight, master.half())

for shape in ((3, 10), (2, 3, 200), (0, 8), (4, 128)):
    x = torch.randn(shape, requires_grad=True)
    gate, up = x.chunk(2, -1)
    upstream = torch.randn(*shape[:-1], shape[-1] // 2)
    expected = F.silu(gate) * up
    ours = training_kernels.swiglu(x)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(y, x, upstream)[0] for y in (ours, expected)), rtol=1e-5, atol=1e-5
    )
print("agreed")
"""


def test_kernels_agree_with_torch():
    interpreted(SCRIPT)


@pytest.mark.parametrize("generation", [80, 90])
@pytest.mark.parametrize("name", ["_softmax_gradient", "_adamw", "_swiglu_gradient"])
def test_kernels_compile_without_a_gpu(name, generation):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vitrail.nn.kernels import training_kernels

    kernel = getattr(training_kernels, name)
    floats = {"share_ptr", "loss_ptr", "lse_ptr", "master_ptr", "mean_ptr", "square_ptr"}
    kinds = {arg: "i32" if arg in ("V", "F", "count") else "fp32" for arg in kernel.arg_names}
    kinds |= {arg: "*fp32" if arg in floats else "*bf16" for arg in kinds if arg.endswith("_ptr")}
    kinds |= {arg: "*i64" for arg in kinds if arg == "target_ptr"}
    constants = {arg: value for arg, value in {"GRADIENT": True, "BLOCK": 1024}.items() if arg in kinds}
    source = ASTSource(kernel, signature=kinds | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", generation, 32))
    assert len(made.asm["cubin"]) > 1000


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.gpu
def test_losses_on_a_gpu():
    from vitrail.objectives.fused_cross_entropy import linear_cross_entropy

    hidden, weight = (torch.randn(n, 64, device="cuda", dtype=torch.bfloat16) for n in (700, 5000))
    targets = torch.randint(0, 5000, (700,), device="cuda")
    targets[::3] = -100
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        inputs = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
        loss = linear_cross_entropy(*inputs, targets, z_loss=1e-3, chunk_size=256)
        found.append((loss, *torch.autograd.grad(loss, inputs)))
    assert all(relative(ours, exact) < 1e-2 for ours, exact in zip(*found, strict=True))


@pytest.mark.gpu
def test_gated_mlp_on_a_gpu():
    from vitrail.nn import GatedMLPConfig
    from vitrail.nn.mlp import GatedMLP

    mlp = GatedMLP(64, GatedMLPConfig(intermediate_size=176)).cuda()
    x = torch.randn(3, 50, 64, device="cuda")
    half = copy.deepcopy(mlp).bfloat16()
    for run in (half, torch.compile(half)):
        half.zero_grad()
        mlp.zero_grad()
        for model, inputs in ((run, x.bfloat16()), (mlp, x)):
            model(inputs).float().square().sum().backward()
        assert relative(run(x.bfloat16()), mlp(x)) < 1e-2
        for ours, exact in zip(half.parameters(), mlp.parameters(), strict=True):
            assert relative(ours.grad, exact.grad) < 2e-2


@pytest.mark.gpu
def test_updates_on_a_gpu():
    """Weights that the kernel updates equal those of torch's AdamW in float32."""
    from vitrail.training.optimizer import OptimConfig, Optimizer

    model = nn.Sequential(nn.Linear(40, 70), nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)).cuda()
    reference, model = copy.deepcopy(model.bfloat16().float()), model.bfloat16()
    optimizer = Optimizer(model, OptimConfig(lr=1e-2, max_grad_norm=0.0, no_decay=()))
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for _ in range(4):
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.float()
        optimizer.step()
        theirs.step()
    masters = optimizer.master_weights()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(masters[name], q.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(p, masters[name].bfloat16())


@pytest.mark.gpu
def test_swiglu_of_many_rows():
    from vitrail.nn.kernels.training_kernels import swiglu

    x = torch.randn(70_000, 34, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gate, up = x.double().chunk(2, -1)
    (ours,) = torch.autograd.grad(swiglu(x).float().sum(), x)
    (exact,) = torch.autograd.grad((F.silu(gate) * up).sum(), x)
    assert relative(ours, exact) < 5e-3
