"""Codecs with those who teach them, and QLIP: what is shared, what is kept, what is refused."""

import pytest
import torch
import torch.nn.functional as F

from helpers import randomize
from vitrail import hub
from vitrail.codecs.codec import Codec, CodecConfig
from vitrail.codecs.conv import ConvPairConfig
from vitrail.codecs.discriminator import DiscriminatorConfig
from vitrail.codecs.presets import vit_codec
from vitrail.codecs.quantizers import BSQConfig
from vitrail.encoders import TextConfig, ViTConfig
from vitrail.encoders.vit import ViT
from vitrail.errors import ConfigError
from vitrail.evals.viewer import tower_of
from vitrail.models.clip import Contrastive
from vitrail.models.qlip import QLIP, Critic, QLIPConfig, TaughtCodec, TaughtCodecConfig, pooled
from vitrail.nn import AttentionConfig, BlockConfig, PlainConfig

BLOCK = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=PlainConfig(hidden=20))
TOWER = ViTConfig(image=16, patch=4, layers=2, block=BLOCK, pool="mean")
TEXT = TextConfig(vocab=50, layers=1, block=BLOCK, context=8, eos=0)
CODEC = vit_codec(TOWER, BSQConfig(bits=6), 6)
CRITIC = DiscriminatorConfig(width=16, layers=1, norm="group")

TOWERS = {
    "mean": TOWER,
    "cls": TOWER.with_(cls=True, pool="cls", positions="cls_and_patches", norm_last="pooled", head=12),
    "attention": TOWER.with_(pool="attention", registers=2),
    "registers": TOWER.with_(cls=True, registers=2, pool="mean", norm_last="pooled"),
}


def qlip(tower: ViTConfig = TOWER, **more) -> QLIP:
    config = QLIPConfig(codec=vit_codec(tower, BSQConfig(bits=6), 6), text=TEXT, **({"embed": 10} | more))
    return randomize(QLIP(config)).eval()


def pictures(count: int = 3) -> torch.Tensor:
    return torch.rand(count, 3, 16, 16) * 2 - 1


def ids(count: int = 4) -> torch.Tensor:
    return torch.randint(1, 50, (count, 8)).index_fill(1, torch.tensor([7]), 0)


# ---- one pass for both ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TOWERS)
def test_tokens_are_pooled_as_the_tower_pools_pictures(kind):
    tower = randomize(ViT(TOWERS[kind])).eval()
    assert torch.equal(pooled(tower, tower.tokens(x := pictures())), tower.pool(x))


@pytest.mark.parametrize("kind", TOWERS)
def test_one_look_gives_what_the_codec_and_the_towers_give(kind):
    model, x = qlip(TOWERS[kind]), pictures()
    features, embeddings = model.look(x)
    assert torch.equal(features, model.codec.features(x)) and features.shape == (3, 4, 4, 16)
    assert torch.equal(embeddings, model.contrastive.encode_image(x)) and embeddings.shape == (3, 10)
    assert torch.equal(model.encode_image(x), embeddings)
    found = model.codec.quantize(features)
    assert torch.equal(found.ids, model.codec.encode(x).ids)


def test_pictures_of_other_sizes_are_looked_at_too():
    model, x = qlip(), torch.rand(2, 3, 24, 32) * 2 - 1
    features, _ = model.look(x)
    assert torch.equal(features, model.codec.features(x)) and features.shape == (2, 6, 8, 16)


# ---- views of one model -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"bias": -2.0, "embed": None}])
def test_the_towers_are_a_contrastive_model_with_the_same_weights(more):
    model, x, texts = qlip(**more), pictures(), ids()
    towers = model.contrastive
    assert isinstance(towers, Contrastive) and towers.config == model.config.contrastive and not towers.training
    assert towers.config.width == model.config.width
    u, v = (F.normalize(each, dim=-1) for each in (model.encode_image(x), model.encode_text(texts)))
    wanted = model.scale * u @ v.T + (0 if model.bias is None else model.bias)
    torch.testing.assert_close(towers(x, texts), wanted)
    mine = {p.data_ptr() for p in model.parameters()}
    assert all(p.data_ptr() in mine for p in towers.parameters())
    assert model.train().contrastive.training


def test_suites_find_the_tower():
    assert tower_of(model := qlip()) is model.codec.encoder
    taught = TaughtCodec(TaughtCodecConfig(codec=CODEC))
    assert tower_of(taught) is taught.codec.encoder


def test_what_is_kept_of_a_taught_codec_is_the_codec(tmp_path):
    taught = TaughtCodec(TaughtCodecConfig(codec=CODEC, critic=CRITIC, teacher=TOWER)).eval()
    hub.save(taught.product, tmp_path)
    again = hub.load(tmp_path)
    assert isinstance(again, Codec)
    assert torch.equal(again.encode(x := pictures()).ids, taught.codec.encode(x).ids)


def test_what_is_kept_of_qlip_is_the_codec_and_the_words(tmp_path):
    model = qlip(critic=CRITIC, teacher=TOWER)
    kept = model.product
    assert isinstance(kept, QLIP) and kept.product is kept and not kept.training
    assert not any(name.startswith(("critic", "teacher", "tell")) for name in kept.state_dict())
    hub.save(kept, tmp_path)
    again, x, texts = hub.load(tmp_path), pictures(), ids()
    assert isinstance(again, QLIP) and again.config == model.config.with_(critic=None, teacher=None)
    assert torch.equal(again.codec.reconstruct(x), model.codec.reconstruct(x))
    assert torch.equal(again.contrastive(x, texts), model.contrastive(x, texts))


@pytest.mark.parametrize("critic", [None, CRITIC])
def test_all_of_it_can_be_saved_too(tmp_path, critic):
    taught = TaughtCodec(TaughtCodecConfig(codec=CODEC, critic=critic, teacher=TOWER))
    hub.save(taught, tmp_path)
    again = hub.load(tmp_path)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in taught.state_dict().items())


# ---- those who teach --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["group", "none", "batch"])
def test_a_critic_held_says_the_same_and_learns_nothing(norm):
    critic = Critic(DiscriminatorConfig(width=16, layers=1, norm=norm))
    x = pictures().requires_grad_()
    y = x.detach().clone().requires_grad_()
    torch.testing.assert_close(critic.held(x), critic(y), rtol=0, atol=0)
    critic.held(x).sum().backward()
    assert all(p.grad is None for p in critic.parameters())
    critic(y).sum().backward()
    assert all(p.grad is not None for p in critic.parameters())
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("patch", [4, 8, 3])
def test_a_teacher_has_a_patch_for_every_code_and_is_never_trained(patch):
    teacher = TOWER.with_(patch=patch, image=12 * patch)
    taught = TaughtCodec(TaughtCodecConfig(codec=CODEC, teacher=teacher)).train()
    lesson = taught.lesson(pictures(), (4, 4))
    assert lesson.shape == (3, 4, 4, 16) == taught.told(taught.codec.encode(pictures()).codes).shape
    assert not lesson.requires_grad and not taught.teacher.training
    assert not [name for name, _ in taught.named_parameters() if name.startswith("teacher")]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"codec": CodecConfig(net=ConvPairConfig(widths=(32,), size=(16, 16)), quantizer=BSQConfig(bits=6))}, "ViT"),
        ({"codec": CODEC.with_(mean=(0.4, 0.4, 0.4))}, "mean and std"),
        ({"codec": vit_codec(TOWER.with_(pool="none"), BSQConfig(bits=6), 6)}, "pool"),
        ({"embed": None, "text": TEXT.with_(head=7)}, "width 7"),
    ],
)
def test_what_cannot_be_is_refused(change, says):
    with pytest.raises(ConfigError, match=says):
        QLIPConfig(**({"codec": CODEC, "text": TEXT, "embed": 10} | change))
