"""Masked image model: masking, targets, gradients and the frozen teacher."""

import pytest
import torch

from vitrail import hub
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import ConfigError
from vitrail.models.masked_image_model import MaskedImageConfig, MaskedImageModel
from vitrail.nn import AttentionConfig, BlockConfig, cost
from vitrail.nn.mlp import PlainMLPConfig
from vitrail.objectives.masking import feature_loss, pixel_loss, sample_block_indices
from vitrail.training.stage_config import set_trainable_parts

BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=PlainMLPConfig(intermediate_size=32))
TOWER = ViTConfig(layers=2, block=BLOCK, image_size=24, patch_size=4, mask_token=True, pool="mean")
TEACHER = ViTConfig(layers=1, block=BLOCK.replace(width=24), image_size=16, patch_size=4, cls_token=True, pool="cls")


def model(teacher: ViTConfig | None = None) -> MaskedImageModel:
    torch.manual_seed(0)
    return MaskedImageModel(MaskedImageConfig(image=TOWER, teacher=teacher))


def draw_batch(B: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(B, 3, 24, 24), sample_block_indices(B, (6, 6), 14)


@pytest.mark.parametrize("teacher", [None, TEACHER])
def test_only_masked_patches_are_predicted(teacher):
    made = model(teacher)
    pixels, places = draw_batch(3)
    output, wanted = made(pixels, places)
    assert output.shape == wanted.shape == (3, 14, 24 if teacher else 48)
    other = pixels.clone()
    for b in range(3):  # change what is hidden: the guess stays, what is wanted does not
        for place in places[b].tolist():
            y, x = place // 6 * 4, place % 6 * 4
            other[b, :, y : y + 4, x : x + 4] = torch.randn(3, 4, 4)
    said_of_other, wanted_of_other = made(other, places)
    assert torch.equal(output, said_of_other) and not torch.allclose(wanted, wanted_of_other)


@pytest.mark.parametrize("teacher", [None, TEACHER])
def test_targets_do_not_depend_on_the_mask(teacher):
    made, (pixels, places) = model(teacher), draw_batch(2)
    whole = made.compute_targets(pixels)
    wanted = made(pixels, places)[1]
    for b in range(2):
        torch.testing.assert_close(wanted[b], whole[b, places[b]])
    assert not wanted.requires_grad


@pytest.mark.parametrize("teacher", [None, TEACHER])
def test_gradients_reach_the_mask_token_and_never_the_teacher(teacher):
    made = model(teacher)
    set_trainable_parts(made, ("*",))
    output, wanted = made(*draw_batch(2))
    (pixel_loss if teacher is None else feature_loss)(output, wanted).backward()
    trained = {name for name, p in made.named_parameters() if p.requires_grad}
    assert not any(name.startswith("teacher") for name in trained) and "image.mask" in trained
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for _, p in made.named_parameters())
    if made.teacher is not None:
        assert all(not t.requires_grad and t.grad is None for t in made.teacher.state_dict(keep_vars=True).values())


def test_training_the_teacher_raises():
    with pytest.raises(ConfigError, match="'teacher' matches nothing"):
        set_trainable_parts(model(TEACHER), ("image", "teacher"))


def test_teacher_from_another_model(tmp_path, monkeypatch):
    other = ViT(TEACHER).eval()
    made = model(TEACHER).train()
    assert made.teacher is not None
    made.teacher.load_state_dict(other.state_dict())
    pixels = torch.randn(2, 3, 24, 24)
    assert torch.equal(made.compute_targets(pixels), other(pixels))
    assert not made.teacher.training and made.image.training
    hub.save(made, tmp_path)
    again = hub.load(tmp_path)
    assert torch.equal(again.compute_targets(pixels), other(pixels)) and again.config == made.config


def test_costs():
    made = model(TEACHER)
    work = made.workload(5, 14)
    head = 2 * 16 * 24 * 5 * 14
    assert cost.count_flops(made, work) == cost.count_flops(made.image, made.image.workload(5)) + head
    both = sum(t.numel() * 4 for t in made.state_dict().values())
    assert cost.count_bytes(made, work).weights == both


def test_invalid_configs_raise():
    with pytest.raises(ConfigError, match="mask token"):
        MaskedImageConfig(image=TOWER.replace(mask_token=False))
    with pytest.raises(ConfigError, match="same size"):
        MaskedImageConfig(image=TOWER, teacher=TEACHER.replace(patch_size=8))
