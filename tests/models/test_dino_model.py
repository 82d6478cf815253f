"""DINO model: teacher updates and precision, gradients, and the pairing of views."""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitrail import hub
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import ConfigError
from vitrail.models.dino_model import DINOConfig, DINOModel
from vitrail.nn import AttentionConfig, BlockConfig, RotaryConfig, cost
from vitrail.nn.mlp import PlainMLPConfig
from vitrail.training.stage_config import set_trainable_parts

BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=PlainMLPConfig(intermediate_size=32))
TOWER = ViTConfig(
    layers=2, block=BLOCK, image_size=24, patch_size=4, cls_token=True, pool="cls", mask_token=True, register_tokens=1
)
SMALL = {"image": TOWER, "momentum_steps": 40, "num_prototypes": 12, "intermediate_size": 20, "bottleneck_width": 8}
MASKED = 11


def model(**more) -> DINOModel:
    torch.manual_seed(0)
    return DINOModel(DINOConfig(**(SMALL | more)))


def draw_views(B: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two global views, three local ones, and masked indices."""
    places = torch.stack([torch.randperm(36)[:MASKED] for _ in range(B)])
    return torch.randn(2, B, 3, 24, 24), torch.randn(3, B, 3, 12, 12), places


def perturb_student(made: DINOModel) -> None:
    """Change the student's weights as an optimizer step does."""
    with torch.no_grad():
        for p in made.parameters():
            p.add_(torch.randn(p.shape).to(p.dtype), alpha=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_teacher_is_the_float32_average(dtype):
    made = model(momentum=0.99, momentum_steps=8).to(dtype)
    names = [name for name, _ in made.named_parameters()]
    plain = {}
    for t in range(12):
        weights = {name: p.detach().double() for name, p in made.named_parameters()}
        share = 0.01 * (1 + math.cos(math.pi * min(t / 8, 1))) / 2 if t else 1.0
        plain = {n: (1 - share) * plain.get(n, 0) + share * weights[n] for n in names}
        made.update_teacher()
        perturb_student(made)
    averages = made.teacher_weights()
    assert averages.keys() == plain.keys() and int(made.steps) == 12
    for name, average in averages.items():
        assert average.dtype == torch.float32
        torch.testing.assert_close(average.double(), plain[name], rtol=1e-5, atol=1e-6)
    if dtype is torch.bfloat16:  # which could not hold it
        assert all((a.bfloat16() != a).float().mean() > 0.9 for a in averages.values())


def test_casts_do_not_change_the_teacher():
    made = model()
    made.update_teacher()
    perturb_student(made)
    made.update_teacher()
    before = {name: a.clone() for name, a in made.teacher_weights().items()}
    made.to(torch.bfloat16)
    assert made.head.up.weight.dtype == torch.bfloat16
    assert made.float().half().to("cpu").float().teacher_weights().keys() == before.keys()
    assert all(torch.equal(a, before[name]) for name, a in made.teacher_weights().items())
    assert all(a.dtype == torch.float64 for a in made.double().teacher_weights().values())


def test_gradient_accumulation_updates_the_teacher_once():
    made = model(momentum=0.5)
    made.update_teacher()
    perturb_student(made)
    made.update_teacher()
    before = {name: a.clone() for name, a in made.teacher_weights().items()}
    made.update_teacher()
    made.update_teacher()
    assert int(made.steps) == 2 and all(torch.equal(a, before[name]) for name, a in made.teacher_weights().items())


def test_momentum_schedule():
    made = model(momentum=0.0, momentum_steps=3)
    for _ in range(4):
        made.update_teacher()
        perturb_student(made)
    before = {name: a.clone() for name, a in made.teacher_weights().items()}
    made.update_teacher()
    assert all(torch.equal(a, before[name]) for name, a in made.teacher_weights().items())


def test_teacher_starts_from_loaded_student():
    made = model()
    perturb_student(made)
    made.update_teacher()
    assert all(torch.equal(made.teacher_weights()[name], p) for name, p in made.named_parameters())


def test_teacher_is_not_trainable():
    made = model()
    set_trainable_parts(made, ("*",))
    assert {name.split(".")[0] for name, _ in made.named_parameters()} == {"image", "head"}
    with pytest.raises(ConfigError, match="'teacher' matches nothing"):
        set_trainable_parts(made, ("teacher",))
    seen = made(*draw_views())
    assert not seen.teacher.requires_grad and not seen.masked_teacher.requires_grad
    (seen.student.square().sum() + seen.masked_student.square().sum()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in made.parameters())
    assert all(t.grad is None for t in made.teacher_weights().values())


def test_order_of_views_and_patches():
    made = model()
    made.update_teacher()  # student and teacher are one now
    wide, near, places = draw_views()
    seen = made(wide, near, places)
    assert seen.student.shape == (5, 2, 12) and seen.teacher.shape == (2, 2, 12)
    assert seen.masked_student.shape == seen.masked_teacher.shape == (2 * MASKED, 12)

    def alone(pixels, **more):
        return made.image.forward_tokens(pixels, **more)

    patch_mask = torch.zeros(2, 36, dtype=torch.bool).scatter(1, places, True)
    whole, hidden = alone(wide[0]), alone(wide[0], patch_mask=patch_mask)
    torch.testing.assert_close(seen.teacher[0], made.head(whole[:, 0]))
    torch.testing.assert_close(seen.student[0], made.head(hidden[:, 0]))  # the first view is masked,
    torch.testing.assert_close(seen.student[1], made.head(alone(wide[1])[:, 0]))  # the second is not,
    torch.testing.assert_close(seen.student[4], made.head(alone(near[2])[:, 0]))  # nor are local ones
    for b in range(2):
        rows = slice(b * MASKED, (b + 1) * MASKED)
        torch.testing.assert_close(seen.masked_student[rows], made.head(hidden[b, 2:][places[b]]))
        torch.testing.assert_close(seen.masked_teacher[rows], made.head(whole[b, 2:][places[b]]))


def test_without_masked_patches_and_local_views():
    made = model(image=TOWER.replace(mask_token=False))
    seen = made(torch.randn(2, 3, 3, 24, 24), torch.empty(0))
    assert seen.student.shape == seen.teacher.shape == (2, 3, 12) and len(seen.masked_teacher) == 0


def test_cosines_are_computed_in_float32():
    made = model().to(torch.bfloat16)
    made.update_teacher()
    x = torch.randn(6, 16).bfloat16()
    output = made.head(x)
    assert output.dtype == torch.float32 and output.abs().max().item() <= 1
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(made.teacher_head(x), output, atol=0.02, rtol=0)
        assert (made.teacher_head(x).bfloat16() != made.teacher_head(x)).any()
    seen = made(*draw_views())
    assert seen.teacher.dtype == seen.student.dtype == torch.float32


def test_tower_is_the_teacher(tmp_path, monkeypatch):
    made = model(image=TOWER.replace(rotary=RotaryConfig(head_dim=8, layout="2d")))
    made.update_teacher()
    perturb_student(made)
    made.update_teacher()
    hub.save(made, tmp_path)
    again = hub.load(tmp_path)
    pixels = torch.randn(2, 3, 24, 24)
    assert again.tower is again.teacher
    assert torch.equal(again.tower.forward_pooled(pixels), made.teacher.forward_pooled(pixels))
    assert not torch.allclose(again.tower.forward_pooled(pixels), again.image.forward_pooled(pixels), atol=1e-3)
    before = made.teacher_weights()["image.embed.proj.weight"].clone()
    again.train()
    again.update_teacher()  # what was saved says which weights it followed last: these
    assert torch.equal(again.teacher_weights()["image.embed.proj.weight"], before) and int(again.steps) == 2
    assert not again.teacher.training


def test_costs():
    made = model()
    # The CPU's fused attention is not counted by torch.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        made(*draw_views(3))
    wide = cost.count_flops(made, made.workload(6).replace(logit_tokens=6 + 3 * MASKED))
    assert 2 * wide + cost.count_flops(made, made.workload(9, 12)) == counter.get_total_flops()
    floats = sum(t.numel() * t.element_size() for t in made.state_dict().values())
    assert cost.count_bytes(made, made.workload(3)).weights == floats


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": TOWER.replace(pool="mean")}, "CLS token"),
        ({"momentum_steps": 0}, "at least 1"),
        ({"momentum": 1.5}, "momentum"),
    ],
)
def test_invalid_configs_raise(change, message):
    with pytest.raises(ConfigError, match=message):
        DINOConfig(**(SMALL | change))
