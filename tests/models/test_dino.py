"""A tower and its average: what is averaged and how exactly, what learns, what is compared with what."""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitrail import hub
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import ConfigError
from vitrail.hub.families import MODELS
from vitrail.models.dino import Dino, DinoConfig
from vitrail.nn import AttentionConfig, BlockConfig, RotaryConfig, cost
from vitrail.nn.mlp import PlainConfig
from vitrail.train.stage import choose_trainable

BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=PlainConfig(hidden=32))
TOWER = ViTConfig(layers=2, block=BLOCK, image=24, patch=4, cls=True, pool="cls", mask=True, registers=1)
SMALL = {"image": TOWER, "steps": 40, "prototypes": 12, "hidden": 20, "bottleneck": 8}
MASKED = 11


def model(**more) -> Dino:
    torch.manual_seed(0)
    return Dino(DinoConfig(**(SMALL | more)))


def some(B: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two views, three local ones, and the patches to mask"""
    places = torch.stack([torch.randperm(36)[:MASKED] for _ in range(B)])
    return torch.randn(2, B, 3, 24, 24), torch.randn(3, B, 3, 12, 12), places


def jolt(made: Dino) -> None:
    """A step of some optimizer."""
    with torch.no_grad():
        for p in made.parameters():
            p.add_(torch.randn(p.shape).to(p.dtype), alpha=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_teacher_is_the_average_exact_in_float32(dtype):
    made = model(momentum=0.99, steps=8).to(dtype)
    names = [name for name, _ in made.named_parameters()]
    plain = {}
    for t in range(12):
        weights = {name: p.detach().double() for name, p in made.named_parameters()}
        share = 0.01 * (1 + math.cos(math.pi * min(t / 8, 1))) / 2 if t else 1.0
        plain = {n: (1 - share) * plain.get(n, 0) + share * weights[n] for n in names}
        made.follow()
        jolt(made)
    averages = made.averages()
    assert averages.keys() == plain.keys() and int(made.steps) == 12
    for name, average in averages.items():
        assert average.dtype == torch.float32
        torch.testing.assert_close(average.double(), plain[name], rtol=1e-5, atol=1e-6)
    if dtype is torch.bfloat16:  # which could not hold it
        assert all((a.bfloat16() != a).float().mean() > 0.9 for a in averages.values())


def test_casts_and_moves_leave_the_average_as_it_is():
    made = model()
    made.follow()
    jolt(made)
    made.follow()
    before = {name: a.clone() for name, a in made.averages().items()}
    made.to(torch.bfloat16)
    assert made.head.up.weight.dtype == torch.bfloat16
    assert made.float().half().to("cpu").float().averages().keys() == before.keys()
    assert all(torch.equal(a, before[name]) for name, a in made.averages().items())
    assert all(a.dtype == torch.float64 for a in made.double().averages().values())


def test_passes_of_one_step_move_the_teacher_once():
    made = model(momentum=0.5)
    made.follow()
    jolt(made)
    made.follow()
    before = {name: a.clone() for name, a in made.averages().items()}
    made.follow()
    made.follow()
    assert int(made.steps) == 2 and all(torch.equal(a, before[name]) for name, a in made.averages().items())


def test_momentum_rises_to_one_and_stays():
    made = model(momentum=0.0, steps=3)
    for _ in range(4):
        made.follow()
        jolt(made)
    before = {name: a.clone() for name, a in made.averages().items()}
    made.follow()
    assert all(torch.equal(a, before[name]) for name, a in made.averages().items())


def test_a_student_put_in_from_elsewhere_is_what_the_teacher_starts_from():
    made = model()
    jolt(made)
    made.follow()
    assert all(torch.equal(made.averages()[name], p) for name, p in made.named_parameters())


def test_no_gradient_reaches_the_teacher_and_no_stage_trains_it():
    made = model()
    choose_trainable(made, ("*",))
    assert {name.split(".")[0] for name, _ in made.named_parameters()} == {"image", "head"}
    with pytest.raises(ConfigError, match="'teacher' matches nothing"):
        choose_trainable(made, ("teacher",))
    seen = made(*some())
    assert not seen.teacher.requires_grad and not seen.hidden.requires_grad
    (seen.student.square().sum() + seen.guessed.square().sum()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in made.parameters())
    assert all(t.grad is None for t in made.averages().values())


def test_views_and_patches_are_where_they_should_be():
    made = model()
    made.follow()  # student and teacher are one now
    wide, near, places = some()
    seen = made(wide, near, places)
    assert seen.student.shape == (5, 2, 12) and seen.teacher.shape == (2, 2, 12)
    assert seen.guessed.shape == seen.hidden.shape == (2 * MASKED, 12)

    def alone(pixels, **more):
        return made.image.tokens(pixels, **more)

    masked = torch.zeros(2, 36, dtype=torch.bool).scatter(1, places, True)
    whole, hidden = alone(wide[0]), alone(wide[0], masked=masked)
    torch.testing.assert_close(seen.teacher[0], made.head(whole[:, 0]))
    torch.testing.assert_close(seen.student[0], made.head(hidden[:, 0]))  # the first view is masked,
    torch.testing.assert_close(seen.student[1], made.head(alone(wide[1])[:, 0]))  # the second is not,
    torch.testing.assert_close(seen.student[4], made.head(alone(near[2])[:, 0]))  # nor are local ones
    for b in range(2):
        rows = slice(b * MASKED, (b + 1) * MASKED)
        torch.testing.assert_close(seen.guessed[rows], made.head(hidden[b, 2:][places[b]]))
        torch.testing.assert_close(seen.hidden[rows], made.head(whole[b, 2:][places[b]]))


def test_without_patches_and_local_views_two_views_are_left():
    made = model(image=TOWER.with_(mask=False))
    seen = made(torch.randn(2, 3, 3, 24, 24), torch.empty(0))
    assert seen.student.shape == seen.teacher.shape == (2, 3, 12) and len(seen.hidden) == 0


def test_cosines_are_as_exact_in_bfloat16_as_the_weights_are():
    made = model().to(torch.bfloat16)
    made.follow()
    x = torch.randn(6, 16).bfloat16()
    said = made.head(x)
    assert said.dtype == torch.float32 and said.abs().max().item() <= 1
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(made.teacher_head(x), said, atol=0.02, rtol=0)
        assert (made.teacher_head(x).bfloat16() != made.teacher_head(x)).any()
    seen = made(*some())
    assert seen.teacher.dtype == seen.student.dtype == torch.float32


def test_the_tower_is_the_teacher_and_is_saved(tmp_path, monkeypatch):
    made = model(image=TOWER.with_(rotary=RotaryConfig(head_dim=8, layout="2d")))
    made.follow()
    jolt(made)
    made.follow()
    monkeypatch.setitem(MODELS, "dino", (DinoConfig, Dino))
    hub.save(made, tmp_path)
    again = hub.load(tmp_path)
    pixels = torch.randn(2, 3, 24, 24)
    assert again.tower is again.teacher
    assert torch.equal(again.tower.pool(pixels), made.teacher.pool(pixels))
    assert not torch.allclose(again.tower.pool(pixels), again.image.pool(pixels), atol=1e-3)
    before = made.averages()["image.embed.proj.weight"].clone()
    again.train()
    again.follow()  # what was saved says which weights it followed last: these
    assert torch.equal(again.averages()["image.embed.proj.weight"], before) and int(again.steps) == 2
    assert not again.teacher.training


def test_what_it_costs():
    made = model()
    # The CPU's fused attention is not counted by torch.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        made(*some(3))
    wide = cost.flops(made, made.work(6).with_(asked=6 + 3 * MASKED))
    assert 2 * wide + cost.flops(made, made.work(9, 12)) == counter.get_total_flops()
    floats = sum(t.numel() * t.element_size() for t in made.state_dict().values())
    assert cost.bytes(made, made.work(3)).weights == floats


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"image": TOWER.with_(pool="mean")}, "CLS token"),
        ({"steps": 0}, "at least 1"),
        ({"momentum": 1.5}, "momentum"),
    ],
)
def test_what_cannot_be_is_refused(change, says):
    with pytest.raises(ConfigError, match=says):
        DinoConfig(**(SMALL | change))
