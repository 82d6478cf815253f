"""Codec training models and QLIP: shared weights, saved parts and validation."""

import pytest
import torch
import torch.nn.functional as F

from helpers import randomize
from vitrail import hub
from vitrail.codecs.codec import Codec, CodecConfig
from vitrail.codecs.conv_autoencoder import ConvAutoencoderConfig
from vitrail.codecs.discriminator import DiscriminatorConfig
from vitrail.codecs.presets import make_vit_codec_config
from vitrail.codecs.quantizers import BSQConfig
from vitrail.encoders import TextTowerConfig, ViTConfig
from vitrail.encoders.vit import ViT
from vitrail.errors import ConfigError
from vitrail.evals.image_feature_extractor import find_image_tower
from vitrail.models.contrastive_model import ContrastiveModel
from vitrail.models.qlip_model import QLIP, CodecTrainingConfig, CodecTrainingModel, Critic, QLIPConfig, pool_tokens
from vitrail.nn import AttentionConfig, BlockConfig, PlainMLPConfig

BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=PlainMLPConfig(intermediate_size=20))
TOWER = ViTConfig(image_size=16, patch_size=4, layers=2, block=BLOCK, pool="mean")
TEXT = TextTowerConfig(vocab_size=50, layers=1, block=BLOCK, context_length=8, eos_token_id=0)
CODEC = make_vit_codec_config(TOWER, BSQConfig(bits=6), 6)
CRITIC = DiscriminatorConfig(width=16, layers=1, norm="group")

TOWERS = {
    "mean": TOWER,
    "cls": TOWER.replace(cls_token=True, pool="cls", positions="cls_and_patches", norm_last="pooled", head_width=12),
    "attention": TOWER.replace(pool="attention", register_tokens=2),
    "registers": TOWER.replace(cls_token=True, register_tokens=2, pool="mean", norm_last="pooled"),
}


def qlip(tower: ViTConfig = TOWER, **more) -> QLIP:
    config = QLIPConfig(
        codec=make_vit_codec_config(tower, BSQConfig(bits=6), 6), text=TEXT, **({"embed_dim": 10} | more)
    )
    return randomize(QLIP(config)).eval()


def pictures(count: int = 3) -> torch.Tensor:
    return torch.rand(count, 3, 16, 16) * 2 - 1


def ids(count: int = 4) -> torch.Tensor:
    return torch.randint(1, 50, (count, 8)).index_fill(1, torch.tensor([7]), 0)


# ---- one pass for both ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TOWERS)
def test_pooling_matches_the_tower(kind):
    tower = randomize(ViT(TOWERS[kind])).eval()
    assert torch.equal(pool_tokens(tower, tower.forward_tokens(x := pictures())), tower.forward_pooled(x))


@pytest.mark.parametrize("kind", TOWERS)
def test_joint_encoding_equals_codec_and_tower(kind):
    model, x = qlip(TOWERS[kind]), pictures()
    features, embeddings = model.encode_features_and_image(x)
    assert torch.equal(features, model.codec.forward_features(x)) and features.shape == (3, 4, 4, 16)
    assert torch.equal(embeddings, model.contrastive_model.encode_image(x)) and embeddings.shape == (3, 10)
    assert torch.equal(model.encode_image(x), embeddings)
    found = model.codec.quantize(features)
    assert torch.equal(found.ids, model.codec.encode(x).ids)


def test_other_image_sizes():
    model, x = qlip(), torch.rand(2, 3, 24, 32) * 2 - 1
    features, _ = model.encode_features_and_image(x)
    assert torch.equal(features, model.codec.forward_features(x)) and features.shape == (2, 6, 8, 16)


# ---- views of one model -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"bias": -2.0, "embed_dim": None}])
def test_contrastive_model_shares_weights(more):
    model, x, texts = qlip(**more), pictures(), ids()
    towers = model.contrastive_model
    assert (
        isinstance(towers, ContrastiveModel)
        and towers.config == model.config.contrastive_config
        and not towers.training
    )
    assert towers.config.width == model.config.width
    u, v = (F.normalize(each, dim=-1) for each in (model.encode_image(x), model.encode_text(texts)))
    wanted = model.scale * u @ v.T + (0 if model.bias is None else model.bias)
    torch.testing.assert_close(towers(x, texts), wanted)
    mine = {p.data_ptr() for p in model.parameters()}
    assert all(p.data_ptr() in mine for p in towers.parameters())
    assert model.train().contrastive_model.training


def test_evaluation_finds_the_tower():
    assert find_image_tower(model := qlip()) is model.codec.encoder
    taught = CodecTrainingModel(CodecTrainingConfig(codec=CODEC))
    assert find_image_tower(taught) is taught.codec.encoder


def test_final_model_of_codec_training_is_the_codec(tmp_path):
    taught = CodecTrainingModel(CodecTrainingConfig(codec=CODEC, critic=CRITIC, teacher=TOWER)).eval()
    hub.save(taught.final_model, tmp_path)
    again = hub.load(tmp_path)
    assert isinstance(again, Codec)
    assert torch.equal(again.encode(x := pictures()).ids, taught.codec.encode(x).ids)


def test_final_model_of_qlip(tmp_path):
    model = qlip(critic=CRITIC, teacher=TOWER)
    kept = model.final_model
    assert isinstance(kept, QLIP) and kept.final_model is kept and not kept.training
    assert not any(name.startswith(("critic", "teacher", "tell")) for name in kept.state_dict())
    hub.save(kept, tmp_path)
    again, x, texts = hub.load(tmp_path), pictures(), ids()
    assert isinstance(again, QLIP) and again.config == model.config.replace(critic=None, teacher=None)
    assert torch.equal(again.codec.reconstruct(x), model.codec.reconstruct(x))
    assert torch.equal(again.contrastive_model(x, texts), model.contrastive_model(x, texts))


@pytest.mark.parametrize("critic", [None, CRITIC])
def test_save_and_load_all_parts(tmp_path, critic):
    taught = CodecTrainingModel(CodecTrainingConfig(codec=CODEC, critic=critic, teacher=TOWER))
    hub.save(taught, tmp_path)
    again = hub.load(tmp_path)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in taught.state_dict().items())


# ---- those who teach --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["group", "none", "batch"])
def test_frozen_discriminator_pass(norm):
    critic = Critic(DiscriminatorConfig(width=16, layers=1, norm=norm))
    x = pictures().requires_grad_()
    y = x.detach().clone().requires_grad_()
    torch.testing.assert_close(critic.forward_frozen(x), critic(y), rtol=0, atol=0)
    critic.forward_frozen(x).sum().backward()
    assert all(p.grad is None for p in critic.parameters())
    critic(y).sum().backward()
    assert all(p.grad is not None for p in critic.parameters())
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("patch", [4, 8, 3])
def test_teacher_resolution_and_freezing(patch):
    teacher = TOWER.replace(patch_size=patch, image_size=12 * patch)
    taught = CodecTrainingModel(CodecTrainingConfig(codec=CODEC, teacher=teacher)).train()
    lesson = taught.compute_teacher_features(pictures(), (4, 4))
    assert lesson.shape == (3, 4, 4, 16) == taught.predict_teacher_features(taught.codec.encode(pictures()).codes).shape
    assert not lesson.requires_grad and not taught.teacher.training
    assert not [name for name, _ in taught.named_parameters() if name.startswith("teacher.")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {
                "codec": CodecConfig(
                    net=ConvAutoencoderConfig(widths=(32,), image_size=(16, 16)), quantizer=BSQConfig(bits=6)
                )
            },
            "ViT",
        ),
        ({"codec": CODEC.replace(mean=(0.4, 0.4, 0.4))}, "mean and std"),
        ({"codec": make_vit_codec_config(TOWER.replace(pool="none"), BSQConfig(bits=6), 6)}, "pool"),
        ({"embed_dim": None, "text": TEXT.replace(head_width=7)}, "text tower 7"),
    ],
)
def test_invalid_configs_raise(change, message):
    with pytest.raises(ConfigError, match=message):
        QLIPConfig(**({"codec": CODEC, "text": TEXT, "embed_dim": 10} | change))
