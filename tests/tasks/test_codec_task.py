"""Codec task: losses, gradient flow between codec, critic and teacher, and complete runs."""

import copy
import functools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from helpers import randomize
from vitrail.codecs import quantizers as q
from vitrail.codecs.codec import Codec, CodecConfig
from vitrail.codecs.conv_autoencoder import ConvAutoencoderConfig
from vitrail.codecs.discriminator import DiscriminatorConfig
from vitrail.codecs.presets import make_vit_codec_config
from vitrail.data.augmentation import AugmentationConfig
from vitrail.data.named_images import NamedImagesConfig
from vitrail.data.sampler import MixtureConfig
from vitrail.data.scenes.scene_source import SceneSample
from vitrail.encoders import ViTConfig
from vitrail.encoders.vgg import LPIPS
from vitrail.errors import ConfigError
from vitrail.evals.metrics import psnr
from vitrail.models.qlip_model import CodecTrainingConfig, CodecTrainingModel
from vitrail.nn import AttentionConfig, BlockConfig, PlainMLPConfig, cost
from vitrail.objectives.reconstruction_loss import ReconstructionWeights
from vitrail.tasks.codec_task import (
    CodecSettings,
    CodecTask,
    QuantizerWeights,
    last_layer,
    loss_gradient_norms,
    quantizer_loss_names,
)
from vitrail.training.lr_schedule import CosineSchedule
from vitrail.training.optimizer import OptimConfig
from vitrail.training.stage_config import StageConfig
from vitrail.training.trainer import Trainer

BLOCK = BlockConfig(width=32, attention=AttentionConfig(heads=2), mlp=PlainMLPConfig(intermediate_size=48))
TOWER = ViTConfig(image_size=16, patch_size=4, layers=1, block=BLOCK)
CRITIC = DiscriminatorConfig(width=16, layers=1, norm="group")
ALL = ReconstructionWeights(l1=0.2, l2=2.0, perceptual=0.1, gram=0.3, gan=0.7, quantizer=0.5, distillation=0.4)
QUICK = ALL.replace(perceptual=0.0, gram=0.0)  # VGG16 dominates the time of a step
QUANTIZERS = {
    "bsq": q.BSQConfig(bits=10),
    "lfq": q.LFQConfig(bits=10),
    "fsq": q.FSQConfig(levels=(8, 8, 8, 5)),
    "vq": q.VQConfig(codebook_size=64, dim=8, kmeans_iters=2),
    "gradient": q.VQConfig(codebook_size=64, dim=8, codebook_update="gradient", kmeans_iters=2),
    "residual": q.ResidualVQConfig(codebook_size=16, dim=8, layers=2, kmeans_iters=2),
    "grouped": q.GroupedVQConfig(codebook_size=16, dim=8, groups=2, kmeans_iters=2),
    "simvq": q.SimVQConfig(codebook_size=64, dim=8),
    "ibq": q.IBQConfig(codebook_size=64, dim=8),
    "kl": q.KLConfig(width=4),
    "continuous": q.IdentityQuantizerConfig(dim=6),
}


class SyntheticImageSource:
    """Source of images by index, like `NamedImageSource`: smooth blobs of a few colours."""

    def __init__(self, count: int = 60, side: int = 16, views: AugmentationConfig | None = None, seed: int = 1):
        made = torch.Generator().manual_seed(seed)
        coarse = torch.rand(count, 3, 3, 3, generator=made)
        smooth = F.interpolate(coarse, (side, side), mode="bicubic", align_corners=True).clamp(0, 1)
        self.table = (smooth * 255).round().to(torch.uint8)
        self.name, self.config = (
            "kept",
            NamedImagesConfig(datasets=("nothing",), image_size=side, augmentation=views or AugmentationConfig()),
        )
        self.fingerprint = self.name

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, item: int) -> SceneSample:
        return SceneSample(self.name, item)

    def pixels(self, index: torch.Tensor) -> torch.Tensor:
        return self.table[index]


@functools.cache
def _make_random_lpips(name: str) -> LPIPS:
    torch.manual_seed(9)
    return LPIPS(name)  # type: ignore[arg-type]


def load_random_lpips(name: str) -> LPIPS:
    """LPIPS with random weights."""
    return copy.deepcopy(_make_random_lpips(name))


def codec_config(kind: str = "bsq") -> CodecConfig:
    quantizer = QUANTIZERS[kind]
    return make_vit_codec_config(TOWER, quantizer, q.make_quantizer(quantizer).width)


def make_training_task(
    kind: str = "bsq", source: SyntheticImageSource | None = None, seed: int = 0, teacher=TOWER, **settings
) -> CodecTask:
    torch.manual_seed(seed)
    model = CodecTrainingModel(CodecTrainingConfig(codec=codec_config(kind), critic=CRITIC, teacher=teacher))
    return CodecTask(
        model,
        {"kept": source or SyntheticImageSource()},
        CodecSettings(**({"weights": ALL, "gan_start": 0} | settings)),
        load_random_lpips,
    )


def make_task(kind: str = "bsq", **settings) -> CodecTask:
    torch.manual_seed(0)
    return CodecTask(Codec(codec_config(kind)), {"kept": SyntheticImageSource()}, CodecSettings(**settings))


def make_stage(**more) -> StageConfig:
    settings = {
        "name": "learn",
        "task": "codec",
        "steps": 6,
        "batch_size": 8,
        "mixture": MixtureConfig(weights={"kept": 1.0}),
        "optim": OptimConfig(lr=3e-3, weight_decay=0.0),
        "schedule": CosineSchedule(warmup_steps=2),
        "save_every": 3,
    }
    return StageConfig(**(settings | more))


def make_trainer(task: CodecTask, folder: Path, **more) -> Trainer:
    return Trainer(make_stage(**more), task, task.sources, folder, seed=2, quiet=True)


BATCH = {"kept": torch.arange(5)}


# ---- losses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("game", ["hinge", "non-saturating"])
def test_losses_match_their_formulas(game):
    task = make_training_task(gan_loss=game, quantizer=QuantizerWeights(commit=0.5, entropy=0.25))
    model = randomize(task.model, spread=0.1).eval()
    losses = task(BATCH)
    x = SyntheticImageSource().pixels(torch.arange(5)) / 127.5 - 1
    y, found = model.codec(x)
    real, drawn = model.critic(x), model.critic(y)
    features = [network.trunk(z) for network in (load_random_lpips("vgg16"),) for z in (x, y)]
    heads = list(load_random_lpips("vgg16").heads)

    def unit(z):
        return z / (z.norm(dim=1, keepdim=True) + 1e-10)

    def grams(z):
        flat = z.flatten(2)
        return flat @ flat.mT / flat[0].numel()

    pairs = list(zip(*features, strict=True))
    perceptual = sum(
        ((unit(a) - unit(b)) ** 2 * h[:, None, None]).sum(1).mean() for (a, b), h in zip(pairs, heads, strict=True)
    )
    cosine = F.cosine_similarity(model.teacher_projection(found.codes), model.teacher(x).view(5, 4, 4, -1), dim=-1)
    wanted = {
        "l1": (x - y).abs().mean(),
        "l2": (x - y).square().mean(),
        "perceptual": perceptual,
        "gram": sum((grams(a) - grams(b)).abs().mean() for a, b in pairs) / len(pairs),
        "gan": -drawn.mean() if game == "hinge" else F.softplus(-drawn).mean(),
        "critic": (F.relu(1 - real).mean() + F.relu(1 + drawn).mean()) / 2
        if game == "hinge"
        else (F.softplus(-real).mean() + F.softplus(drawn).mean()) / 2,
        "commit": found.losses["commit"],
        "entropy": found.losses["entropy"],
        "distillation": (1 - cosine).mean(),
        "psnr": psnr(x, y.clamp(-1, 1)).mean(),
    }
    assert losses.keys() == wanted.keys() == task.loss_weights.keys() == task.count_loss_terms(BATCH).keys()
    for name, value in wanted.items():
        torch.testing.assert_close(losses[name], value * 5, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert task.loss_weights == pytest.approx(
        {"l1": 0.2, "l2": 2.0, "perceptual": 0.1, "gram": 0.3, "gan": 0.7, "distillation": 0.4}
        | {"commit": 0.25, "entropy": 0.125, "critic": 1.0, "psnr": 0.0}
    )
    assert set(task.count_loss_terms(BATCH).values()) == {5} and task.count_flops(BATCH) > 0


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_quantizer_losses(kind):
    task = make_task(kind)
    names = {
        "bsq": ["commit", "entropy"],
        "lfq": ["commit", "entropy"],
        "vq": ["commit"],
        "gradient": ["commit", "codebook"],
        "residual": ["commit"],
        "grouped": ["commit"],
        "simvq": ["commit", "codebook"],
        "ibq": ["commit", "codebook", "entropy"],
        "kl": ["kl"],
    }.get(kind, [])
    before = {name: t.clone() for name, t in task.model.state_dict().items()}
    assert sorted(quantizer_loss_names(task.codec)) == sorted(names)
    assert task.loss_weights.keys() == {"l2", *names, "psnr"} == task(BATCH).keys()
    assert all(torch.equal(before[n], t) for n, t in Codec(codec_config(kind)).state_dict().items() if n not in before)
    assert make_task(kind, weights=ReconstructionWeights(l2=1.0)).loss_weights.keys() == {"l2", "psnr"}
    assert "commit" not in make_task(kind, quantizer=QuantizerWeights(commit=0.0)).loss_weights


def test_published_weights_by_name():
    task = make_training_task(weights="gaia-1", quantizer=QuantizerWeights(commit=1.0))
    wanted = {"l1": 0.2, "l2": 2.0, "perceptual": 0.1, "gan": 1.0, "distillation": 0.1, "commit": 1.0}
    assert {name: task.loss_weights[name] for name in wanted} == wanted
    assert make_training_task(weights="qlip-stage-2").loss_weights["perceptual"] == 0.1
    with pytest.raises(ConfigError, match=r"gaia1[\s\S]*gaia-1"):
        CodecSettings(weights="gaia1")
    assert CodecSettings.from_dict({"weights": {"l1": 1.0}}).weight_table == ReconstructionWeights(l1=1.0)


def test_convolutional_codec_trains():
    net = ConvAutoencoderConfig(widths=(16, 16, 16), layers=1, latent_channels=8, norm_groups=8, image_size=(16, 24))
    codec = Codec(CodecConfig(net=net, quantizer=QUANTIZERS["vq"]))
    task = CodecTask(codec, {"kept": SyntheticImageSource(side=24)}, CodecSettings(image_size=16))
    task.model.to(torch.bfloat16)
    losses = task(BATCH)
    sum(losses.values()).backward()
    assert all(p.grad is not None for p in codec.parameters())


def test_images_have_the_codec_size():
    """A codec with critic, LPIPS network, and a teacher tower with one patch per code."""
    net = ConvAutoencoderConfig(widths=(16, 16, 16), layers=1, latent_channels=8, norm_groups=8, image_size=(16, 24))
    for side in (16, 24, 40):  # of square images
        codec = Codec(CodecConfig(net=net, quantizer=QUANTIZERS["vq"]))
        task = CodecTask(
            codec,
            {
                "kept": SyntheticImageSource(
                    side=side, views=AugmentationConfig(crop_area=(0.5, 1.0), max_rotation=10, erase_probability=1.0)
                )
            },
        )
        seen = []
        codec.encoder.register_forward_hook(lambda _, given, out, seen=seen: seen.append((given[0].shape, out.shape)))
        task(BATCH)["l2"].backward()
        task.model.eval()
        task(BATCH)
        count = sum(map(len, BATCH.values()))
        assert seen == [((count, 3, 16, 24), (count, 4, 6, 8))] * 2
        assert task.count_flops(BATCH) == cost.count_flops(codec, codec.workload(count, 16, 24))
    config = CodecTrainingConfig(
        codec=codec.config, critic=CRITIC, teacher=TOWER.replace(patch_size=2)
    )  # the network resizes
    settings = CodecSettings(weights="gaia-1", quantizer=QuantizerWeights(commit=1.0))
    taught_wide = CodecTask(
        CodecTrainingModel(config), {"kept": SyntheticImageSource(side=32)}, settings, load_random_lpips
    )
    for dtype in (torch.float32, torch.bfloat16):
        taught_wide.model.to(dtype)
        losses = taught_wide(BATCH)
        assert all(loss.isfinite() for loss in losses.values()) and losses["distillation"] > 0


def test_augmentation_only_in_training():
    task, shown = make_task(), []
    task = CodecTask(task.model, {"kept": SyntheticImageSource(views=AugmentationConfig(max_noise=1.0))})
    forward = task.codec.forward
    task.codec.forward = lambda pixels: (shown.append(pixels), forward(pixels))[1]
    for mode in (True, False):
        task.model.train(mode)
        task(BATCH)
    wanted = SyntheticImageSource().pixels(torch.arange(5)) / 127.5 - 1
    torch.testing.assert_close(shown[1], wanted)
    assert not torch.allclose(shown[0], wanted, atol=0.1)


@pytest.mark.parametrize("kind", [kind for kind in QUANTIZERS if kind not in ("kl", "continuous")])
def test_codes_do_not_depend_on_training_mode(kind):
    codec = Codec(codec_config(kind))
    x = SyntheticImageSource().pixels(torch.arange(8)) / 127.5 - 1
    codec.train().encode(x)  # a codebook is initialised from the first batch
    judged, trained = codec.eval().encode(x), codec.train().encode(x)
    assert torch.equal(judged.ids, trained.ids) and torch.equal(judged.codes, trained.codes)


# ---- gradient flow ----------------------------------------------------------------------------------------------


def gradients(task: CodecTask, name: str) -> dict[str, torch.Tensor | None]:
    task.model.zero_grad()
    task(BATCH)[name].backward()
    return {name: p.grad for name, p in task.model.named_parameters()}


def test_gan_losses_do_not_train_the_other_side():
    task = make_training_task()
    fooling, telling = gradients(task, "gan"), gradients(task, "critic")
    for name in fooling:
        if name.startswith("critic"):
            # The gradient of the last bias cancels between true and generated images.
            assert fooling[name] is None and (telling[name].abs().sum() > 0 or name.endswith("last.bias")), name
        else:
            assert telling[name] is None, name
    assert fooling["codec.encoder.embed.proj.weight"].abs().sum() > 0
    model = task.model.zero_grad() or task.model
    x = SyntheticImageSource().pixels(torch.arange(5)) / 127.5 - 1
    (-model.critic(model.codec(x)[0]).mean() * 5).backward()  # through a critic that is not frozen
    for name, p in model.codec.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(fooling[f"codec.{name}"], p.grad)


def test_one_backward_pass_gives_both_gradients():
    task = make_training_task()
    apart = {name: gradients(task, name) for name in task.loss_weights if name != "psnr"}
    task.model.zero_grad()
    losses = task(BATCH)
    sum(task.loss_weights[name] * loss for name, loss in losses.items()).backward()
    for name, p in task.model.named_parameters():
        parts = [task.loss_weights[k] * g[name] for k, g in apart.items() if g[name] is not None]
        if parts:
            torch.testing.assert_close(p.grad, sum(parts), rtol=1e-4, atol=1e-6)


def test_gan_losses_start_at_gan_start():
    task = make_training_task(gan_start=2)
    for step in range(4):
        losses = task(BATCH)
        assert int(task.model.critic.passes) == step + 1
        assert (losses["gan"] != 0) == (losses["critic"] != 0) == (step >= 2)
    task.model.eval()
    task(BATCH)
    assert int(task.model.critic.passes) == 4


def test_adaptive_weight_balances_gradients():
    task = make_training_task(adaptive_gan_weight=True)
    losses, bare = task(BATCH), make_training_task()
    there = bare(BATCH)
    last = last_layer(bare.codec.decoder)
    assert last is bare.codec.decoder.last.weight
    pixels = sum(bare.loss_weights[name] * there[name] / 5 for name in ("l1", "l2", "perceptual", "gram"))
    norms = [torch.autograd.grad(loss, last, retain_graph=True)[0].norm() for loss in (pixels, there["gan"] / 5)]
    torch.testing.assert_close(losses["gan"], there["gan"] * norms[0] / (norms[1] + 1e-4), rtol=1e-3, atol=1e-5)
    with torch.no_grad():
        task.model.eval()
        assert task(BATCH)["gan"].isfinite()


def test_loss_gradient_norms():
    task = make_training_task("ibq")
    before = {name: t.clone() for name, t in task.model.state_dict().items()}
    task.model.train()
    norms = loss_gradient_norms(task, BATCH)
    assert norms.keys() == task.loss_weights.keys() - {"critic", "codebook", "psnr"} and task.model.training
    assert all(torch.equal(before[name], t) for name, t in task.model.state_dict().items())
    at = task.codec.encoder.blocks[-1].branches["mlp"].op.down.weight
    task.model.eval()
    for name in ("l2", "gan", "commit"):
        task.model.zero_grad()
        (task(BATCH)[name] / 5).backward()
        assert norms[name] == pytest.approx(at.grad.norm().item(), rel=1e-5)
    at.requires_grad_(False)
    with pytest.raises(ConfigError, match="frozen"):
        loss_gradient_norms(task, BATCH)


def test_lpips_network_is_not_saved_or_trained():
    task = make_training_task()
    model = task.model
    assert isinstance(model.perceptual, LPIPS)
    assert not [name for name in model.state_dict() if name.startswith("perceptual")]
    assert not [name for name, _ in model.named_parameters() if name.startswith("perceptual")]
    model.to(torch.bfloat16)
    assert all(t.dtype == torch.bfloat16 for t in model.perceptual.buffers())
    assert all(loss.isfinite() for loss in task(BATCH).values())
    assert "perceptual" not in dict(model.final_model.named_modules())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": ReconstructionWeights()}, "all loss weights are 0"),
        ({"weights": ReconstructionWeights(gan=1.0)}, "critic"),
        ({"weights": ReconstructionWeights(perceptual=1.0)}, "network"),
        ({"weights": ReconstructionWeights(distillation=1.0)}, "teacher"),
        ({"adaptive_gan_weight": True}, "adaptive"),
        ({"gan_start": -1}, "start"),
        ({"image_size": 18}, "not divisible"),
        ({"quantizer": {"commit": -1.0}}, "commit"),
    ],
)
def test_invalid_arguments_raise(change, message):
    with pytest.raises(ConfigError, match=message):
        make_task(**change)


def test_invalid_critics_and_models_raise():
    model = CodecTrainingModel(CodecTrainingConfig(codec=codec_config(), critic=CRITIC.replace(layers=3)))
    with pytest.raises(ConfigError, match="24"):
        CodecTask(model, {"kept": SyntheticImageSource()}, CodecSettings(weights=ReconstructionWeights(gan=1.0)))
    with pytest.raises(ConfigError, match="codec"):
        CodecTask(torch.nn.Linear(2, 2), {"kept": SyntheticImageSource()})  # type: ignore[arg-type]


@pytest.mark.slow
def test_step_compiles_to_one_graph():
    """The step does not synchronize with the device, so it compiles to one graph."""
    task = make_training_task(gan_start=1)
    plainly = task(BATCH)
    sum(plainly.values()).backward()
    other = make_training_task(gan_start=1)
    torch._dynamo.reset()
    losses = torch.compile(other.__call__, fullgraph=True, backend="eager")(BATCH)
    sum(losses.values()).backward()
    for name, loss in plainly.items():
        torch.testing.assert_close(losses[name], loss)
    for (name, a), b in zip(task.model.named_parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=lambda m, n=name: f"{n}: {m}")
    assert int(other.model.critic.passes) == 1
    torch._dynamo.reset()
    with pytest.raises(ConfigError, match="adaptive"):
        torch.compile(make_training_task(adaptive_gan_weight=True).__call__, backend="eager")(BATCH)
