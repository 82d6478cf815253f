"""Tiled contrastive losses against float64 references and transformers, and their memory."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from helpers import relative
from vitrail.errors import ConfigError
from vitrail.objectives import clip_loss, reference_clip_loss, reference_siglip_loss, siglip_loss

LOSSES = {"clip": (clip_loss, reference_clip_loss, 1), "siglip": (siglip_loss, reference_siglip_loss, 2)}


def problem(N, M, D, scale=10.0, bias=-3.0, dtype=torch.float32, seed=0):
    """Return u, v, scale and bias, all with gradients."""
    generator = torch.Generator().manual_seed(seed)
    u, v = (F.normalize(torch.randn(n, D, generator=generator, dtype=torch.float64), dim=1) for n in (N, M))
    numbers = [torch.tensor(x, dtype=torch.promote_types(dtype, torch.float32)) for x in (scale, bias)]
    return [x.requires_grad_() for x in (u.to(dtype), v.to(dtype), *numbers)]


def labels_of(kind, N, M, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if kind == "ids":
        return tuple(torch.randint(-1, 5, (n,), generator=generator) for n in (N, M))
    if kind == "signs":
        return torch.randint(-1, 2, (N, M), generator=generator).to(torch.int8)
    return torch.rand(N, M, generator=generator) < 0.3 if kind == "bools" else None


def both(name, inputs, labels=None, upstream=1.0, **more):
    """Return loss and gradients of the tiled loss and of the float64 reference."""
    ours, plain, numbers = LOSSES[name]
    inputs = inputs[: 2 + numbers]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out = []
    for loss, given_ in ((ours(*inputs, labels=labels, **more), inputs), (plain(*exact, labels=labels), exact)):
        out.append([loss.detach(), *torch.autograd.grad(upstream * loss, given_)])
    return out


# ---- closed forms and transformers ----------------------------------------------------------------------------------


def test_siglip_at_zero_similarity():
    """8 dissimilar pairs: each costs log 2 without bias; with bias −10 each positive costs 10."""
    u, v = torch.eye(16)[:8], torch.eye(16)[8:]
    assert siglip_loss(u, v, 10.0, 0.0).item() == pytest.approx(8 * math.log(2), abs=1e-5)
    assert siglip_loss(u, v, 10.0, -10.0).item() == pytest.approx(10.0, abs=1e-3)


def test_clip_of_dissimilar_pairs_is_log_n():
    u, v = torch.eye(16)[:8], torch.eye(16)[8:]
    assert clip_loss(u, v, 10.0).item() == pytest.approx(math.log(8))
    assert math.log(8) - clip_loss(u, u, 100.0).item() == pytest.approx(math.log(8))  # perfectly separated


@pytest.mark.parametrize("name", LOSSES)
def test_agrees_with_transformers(name):
    if name == "clip":
        from transformers import CLIPConfig as Config
        from transformers import CLIPModel as Model
    else:
        from transformers import SiglipConfig as Config
        from transformers import SiglipModel as Model
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**size, "vocab_size": 20, "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 2}
    vision = {**size, "image_size": 8, "patch_size": 4}
    more = {"projection_dim": 16} if name == "clip" else {}
    model = Model(Config(text_config=text, vision_config=vision, **more)).eval()
    pixels, ids = torch.randn(6, 3, 8, 8), torch.randint(3, 20, (6, 8))
    out = model(input_ids=ids, pixel_values=pixels, return_loss=True)
    u, v = (F.normalize(x, dim=1) for x in (out.image_embeds, out.text_embeds))
    numbers = [model.logit_scale.exp()] + ([model.logit_bias] if name == "siglip" else [])
    ours = LOSSES[name][0](u, v, *numbers)
    torch.testing.assert_close(ours, out.loss)
    trainable = [p for p in model.parameters() if p.requires_grad]
    theirs = torch.autograd.grad(out.loss, trainable, retain_graph=True, allow_unused=True)
    for a, b in zip(torch.autograd.grad(ours, trainable, allow_unused=True), theirs, strict=True):
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


# ---- values and gradients -------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(
    name=st.sampled_from(sorted(LOSSES)),
    N=st.integers(1, 20),
    M=st.integers(1, 20),
    D=st.integers(1, 9),
    tile=st.integers(1, 24),
    kind=st.sampled_from(["none", "ids", "signs", "bools"]),
    scale=st.sampled_from([0.0, 1.0, 20.0, 100.0, -5.0]),
    upstream=st.sampled_from([1.0, 0.25, -3.0]),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_for_any_size(name, N, M, D, tile, kind, scale, upstream, seed):
    M = N if kind == "none" else M
    inputs = problem(N, M, D, scale, dtype=torch.float64, seed=seed)
    ours, theirs = both(name, inputs, labels_of(kind, N, M, seed), upstream, tile_size=tile)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", ["none", "ids", "signs"])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_by_finite_differences(name, kind):
    loss, _, numbers = LOSSES[name]
    inputs = problem(4, 4, 3, 3.0, dtype=torch.float64)[: 2 + numbers]
    labels = labels_of(kind, 4, 4)
    assert torch.autograd.gradcheck(lambda *x: loss(*x, labels=labels, tile_size=3), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("aligned", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("scale", [10.0, 100.0])
def test_unrelated_and_aligned_pairs(name, dtype, aligned, scale):
    """Unrelated pairs, whose logits a fixed shift would lose, and pairs with 1 − p below rounding."""
    u, v, s, b = problem(300, 300, 64, scale, -10.0, torch.float64)
    v = F.normalize(v + aligned * u, dim=1)
    inputs = [x.detach().to(dtype if x.ndim else torch.float32).requires_grad_() for x in (u, v, s, b)]
    ours, theirs = both(name, inputs, tile_size=128)
    assert ours[0].item() == pytest.approx(theirs[0].item(), rel=1e-4)
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        assert torch.linalg.vector_norm(a.double() - b) <= 5e-3 * torch.linalg.vector_norm(b)


def test_aligned_pairs_with_ids():
    u, v, s, _ = problem(100, 100, 64, 100.0, dtype=torch.float64)
    v = F.normalize(v + 0.95 * u, dim=1)
    inputs = [x.detach().float().requires_grad_() for x in (u, v, s)]
    ids = torch.randperm(100)
    ours, theirs = both("clip", inputs, (ids, ids), tile_size=64)
    assert 1e-12 < theirs[0].item() < 1e-6  # p of the positives is 1 in float32
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        assert relative(a.double(), b) < 1e-3


@pytest.mark.parametrize("name", LOSSES)
def test_exponents_do_not_overflow(name):
    """Logits of ±3,000, where exp overflows."""
    inputs = problem(9, 9, 4, 3000.0, 1000.0)
    ours, theirs = both(name, inputs, tile_size=4)
    for a, b in zip(ours, theirs, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", LOSSES)
def test_one_pair(name):
    inputs = problem(1, 1, 5)
    ours, theirs = both(name, inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-7)
    if name == "clip":
        assert ours[0].item() == 0 and not ours[1].any()


@pytest.mark.parametrize("name", LOSSES)
def test_ignored_pairs_have_no_effect(name):
    """Padding does not change loss and gradients, and gets no gradient."""
    inputs = problem(6, 6, 4, dtype=torch.float64)
    ids = torch.tensor([3, -1, 0, 7, -5, 2])
    whole, _ = both(name, inputs, (ids, ids), tile_size=4)
    few = [x.detach()[ids >= 0].requires_grad_() if x.ndim else x for x in inputs]
    part, _ = both(name, few)
    torch.testing.assert_close(whole[0], part[0])
    for a, b in zip(whole[1:3], part[1:3], strict=True):
        torch.testing.assert_close(a[ids >= 0], b)
        assert not a[ids < 0].any()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("kind", ["ids", "signs"])
def test_all_ignored_gives_zero_loss_and_gradient(name, kind):
    inputs = problem(4, 5, 3)
    labels = (torch.full((4,), -1), torch.arange(5)) if kind == "ids" else torch.zeros(4, 5, dtype=torch.int8)
    ours, _ = both(name, inputs, labels)
    for x in ours:
        assert not x.any()


def test_ids_equal_tables():
    inputs = problem(7, 9, 4)
    rows, columns = labels_of("ids", 7, 9)
    table = torch.where((rows[:, None] < 0) | (columns < 0), 0, 2 * (rows[:, None] == columns).int() - 1).to(torch.int8)
    for name in LOSSES:
        for a, b in zip(both(name, inputs, (rows, columns))[0], both(name, inputs, table)[0], strict=True):
            torch.testing.assert_close(a, b)


# ---- compute and memory ---------------------------------------------------------------------------------------------


def operations(run):
    """Return (name, largest input) of all operations."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        run()
    return [
        (e.name, max((math.prod(shape) for shape in e.input_shapes if shape), default=0))
        for e in seen.events()
        if e.name.startswith("aten::")
    ]


@pytest.mark.parametrize("kind", ["none", "ids"])
@pytest.mark.parametrize("name", LOSSES)
def test_tiles_are_not_saved(name, kind):
    """Unlike a loop over chunks under autograd, which would save every tile."""
    N, D, tile = 96, 5, 16
    loss, plain, numbers = LOSSES[name]
    inputs, labels, saved = problem(N, N, D)[: 2 + numbers], labels_of(kind, N, N), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        made = operations(lambda: loss(*inputs, labels=labels, tile_size=tile).backward())
    assert max(size for _, size in made) == N * D  # larger than a tile
    assert sum(saved) == 2 * N * D + numbers  # the gradients
    assert max(size for _, size in operations(lambda: plain(*inputs, labels=labels))) == N * N


@pytest.mark.parametrize(
    "trainable", [(1, 1, 1, 1), (1, 0, 0, 0), (0, 1, 0, 1), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 0, 0)]
)
@pytest.mark.parametrize("name", LOSSES)
def test_unneeded_gradients_cost_nothing(name, trainable):
    loss, _, numbers = LOSSES[name]
    inputs = problem(8, 8, 3)
    _, wanted = both(name, inputs)
    inputs, trainable = inputs[: 2 + numbers], trainable[: 2 + numbers]
    for x, learn in zip(inputs, trainable, strict=True):
        x.requires_grad_(bool(learn))

    def products():
        made = operations(lambda: loss(*inputs))
        return sum(name in ("aten::mm", "aten::addmm_") for name, _ in made)

    logits = 2 if name == "clip" and any(trainable) else 1
    assert products() == logits + (trainable[1] + max(trainable[0], trainable[2] - trainable[1]))
    with torch.no_grad():
        assert products() == 1
    value = loss(*inputs)
    assert value.requires_grad == any(trainable)
    if any(trainable):
        value.backward()
        for x, theirs in zip(inputs, wanted[1:], strict=True):
            assert (x.grad is not None) == x.requires_grad
            assert x.grad is None or relative(x.grad.double(), theirs) < 1e-5


# ---- integration ----------------------------------------------------------------------------------------------------


def test_numbers_and_parameters_of_one_element():
    u, v, s, b = problem(5, 5, 3)
    torch.testing.assert_close(siglip_loss(u, v, 10.0, -3.0), siglip_loss(u, v, s, b))
    torch.testing.assert_close(clip_loss(u, v, 10.0), clip_loss(u, v, s))
    one = torch.full((1,), 10.0, dtype=torch.bfloat16, requires_grad=True)
    (gradient,) = torch.autograd.grad(clip_loss(u, v, one), one)
    assert gradient.shape == (1,) and gradient.dtype == torch.bfloat16


def test_autocast_does_not_round_the_logits():
    inputs = problem(50, 50, 32, 100.0)[:3]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = clip_loss(*inputs)
    torch.testing.assert_close(loss, clip_loss(*inputs))


def test_compiled():
    u, v, s, b = problem(9, 9, 4)

    def step(x, y):
        return siglip_loss(F.normalize(x, dim=1), F.normalize(y, dim=1), s, b, tile_size=4) * 2

    ours = torch.autograd.grad(torch.compile(step, backend="aot_eager")(u, v), (u, v, s))
    for a, b in zip(ours, torch.autograd.grad(step(u, v), (u, v, s)), strict=True):
        torch.testing.assert_close(a, b)


def test_twice_backward_but_no_second_derivative():
    inputs = problem(5, 5, 3)[:3]
    loss = clip_loss(*inputs)
    first, again = (torch.autograd.grad(loss, inputs[0], retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss + inputs[0].square().sum(), inputs[0], create_graph=True)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"v": torch.zeros(4, 3)}, r"5 rows and 4 columns"),
        ({"v": torch.zeros(5, 2)}, r"\(5, 3\) of float32 and \(5, 2\) of float32"),
        ({"v": torch.zeros(5, 3).half()}, "of float16"),
        ({"scale": torch.ones(5)}, r"scale has shape \(5,\)"),
        ({"labels": (torch.arange(5), torch.arange(4))}, r"\(4,\) of int64"),
        ({"labels": torch.ones(5, 4, dtype=torch.int8)}, r"\(5, 4\) of int8"),
        ({"labels": torch.ones(5, 5)}, "of float32"),
        ({"tile_size": 0}, "tile_size is 0"),
    ],
)
def test_errors_name_the_argument(change, named):
    arguments = {"u": torch.zeros(5, 3), "v": torch.zeros(5, 3), "scale": 1.0, "bias": 0.0, **change}
    with pytest.raises(ConfigError, match=named):
        siglip_loss(**arguments)


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_half_precision_keeps_small_gradients(name):
    """Gradients can be below the range of float16, which is why a loss scaler multiplies the loss."""
    ours, plain = {"clip": (clip_loss, reference_clip_loss), "siglip": (siglip_loss, reference_siglip_loss)}[name]
    generator = torch.Generator().manual_seed(0)
    u = torch.nn.functional.normalize(torch.randn(256, 64, generator=generator), dim=1).half()
    more = (torch.tensor(40.0),) if name == "clip" else (torch.tensor(40.0), torch.tensor(-25.0))
    grads = []
    for loss, dtype in ((ours, torch.float16), (plain, torch.float64)):
        a, b = (u.to(dtype).clone().requires_grad_() for _ in range(2))
        (loss(a, b, *more) * 2.0**20).backward()
        grads.append(a.grad.double())
    assert float((grads[0] - grads[1]).norm() / grads[1].norm()) < 5e-3
