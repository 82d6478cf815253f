"""A tower that guesses what is hidden: what counts, what learns, and what stays as it is."""

import pytest
import torch

from vitrail import hub
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import ConfigError
from vitrail.hub.families import MODELS
from vitrail.models.masked import Masked, MaskedConfig
from vitrail.nn import AttentionConfig, BlockConfig, cost
from vitrail.nn.mlp import PlainConfig
from vitrail.objectives.masked import block_places, feature_loss, pixel_loss
from vitrail.train.stage import choose_trainable

BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=PlainConfig(hidden=32))
TOWER = ViTConfig(layers=2, block=BLOCK, image=24, patch=4, mask=True, pool="mean")
TEACHER = ViTConfig(layers=1, block=BLOCK.with_(width=24), image=16, patch=4, cls=True, pool="cls")


def model(teacher: ViTConfig | None = None) -> Masked:
    torch.manual_seed(0)
    return Masked(MaskedConfig(image=TOWER, teacher=teacher))


def some(B: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(B, 3, 24, 24), block_places(B, (6, 6), 14)


@pytest.mark.parametrize("teacher", [None, TEACHER])
def test_the_masked_patches_alone_are_guessed_and_they_are_not_seen(teacher):
    made = model(teacher)
    pixels, places = some(3)
    said, wanted = made(pixels, places)
    assert said.shape == wanted.shape == (3, 14, 24 if teacher else 48)
    other = pixels.clone()
    for b in range(3):  # change what is hidden: the guess stays, what is wanted does not
        for place in places[b].tolist():
            y, x = place // 6 * 4, place % 6 * 4
            other[b, :, y : y + 4, x : x + 4] = torch.randn(3, 4, 4)
    said_of_other, wanted_of_other = made(other, places)
    assert torch.equal(said, said_of_other) and not torch.allclose(wanted, wanted_of_other)


@pytest.mark.parametrize("teacher", [None, TEACHER])
def test_targets_do_not_depend_on_the_mask(teacher):
    made, (pixels, places) = model(teacher), some(2)
    whole = made.targets(pixels)
    wanted = made(pixels, places)[1]
    for b in range(2):
        torch.testing.assert_close(wanted[b], whole[b, places[b]])
    assert not wanted.requires_grad


@pytest.mark.parametrize("teacher", [None, TEACHER])
def test_gradients_reach_the_mask_token_and_never_the_teacher(teacher):
    made = model(teacher)
    choose_trainable(made, ("*",))
    said, wanted = made(*some(2))
    (pixel_loss if teacher is None else feature_loss)(said, wanted).backward()
    trained = {name for name, p in made.named_parameters() if p.requires_grad}
    assert not any(name.startswith("teacher") for name in trained) and "image.mask" in trained
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for _, p in made.named_parameters())
    if made.teacher is not None:
        assert all(not t.requires_grad and t.grad is None for t in made.teacher.state_dict(keep_vars=True).values())


def test_a_stage_that_asks_for_the_teacher_is_refused():
    with pytest.raises(ConfigError, match="'teacher' matches nothing"):
        choose_trainable(model(TEACHER), ("image", "teacher"))


def test_the_teacher_is_that_of_another_model_put_in(tmp_path, monkeypatch):
    other = ViT(TEACHER).eval()
    made = model(TEACHER).train()
    assert made.teacher is not None
    made.teacher.load_state_dict(other.state_dict())
    pixels = torch.randn(2, 3, 24, 24)
    assert torch.equal(made.targets(pixels), other(pixels))
    assert not made.teacher.training and made.image.training
    monkeypatch.setitem(MODELS, "masked", (MaskedConfig, Masked))
    hub.save(made, tmp_path)
    again = hub.load(tmp_path)
    assert torch.equal(again.targets(pixels), other(pixels)) and again.config == made.config


def test_what_it_costs_is_the_tower_and_a_head_for_what_is_masked():
    made = model(TEACHER)
    work = made.work(5, 14)
    head = 2 * 16 * 24 * 5 * 14
    assert cost.flops(made, work) == cost.flops(made.image, made.image.work(5)) + head
    both = sum(t.numel() * 4 for t in made.state_dict().values())
    assert cost.bytes(made, work).weights == both


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="mask token"):
        MaskedConfig(image=TOWER.with_(mask=False))
    with pytest.raises(ConfigError, match="same size"):
        MaskedConfig(image=TOWER, teacher=TEACHER.with_(patch=8))
