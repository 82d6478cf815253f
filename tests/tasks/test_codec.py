"""Training a codec: what it loses by, who learns from what, and that a run ends as it should."""

import copy
import functools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from helpers import randomize
from vitrail.codecs import quantizers as q
from vitrail.codecs.codec import Codec, CodecConfig
from vitrail.codecs.conv import ConvPairConfig
from vitrail.codecs.discriminator import DiscriminatorConfig
from vitrail.codecs.presets import vit_codec
from vitrail.data.named import NamedConfig
from vitrail.data.order import Mixture
from vitrail.data.scenes.source import Asked
from vitrail.data.views import ViewsConfig
from vitrail.encoders import ViTConfig
from vitrail.encoders.vgg import LPIPS
from vitrail.errors import ConfigError
from vitrail.evals.metrics import psnr
from vitrail.models.qlip import TaughtCodec, TaughtCodecConfig
from vitrail.nn import AttentionConfig, BlockConfig, PlainConfig, cost
from vitrail.objectives.reconstruction import Weights
from vitrail.tasks.codec import CodecSettings, CodecTask, QuantizerWeights, last_layer, loss_names, pulls
from vitrail.train.optim import OptimConfig
from vitrail.train.schedule import Cosine
from vitrail.train.stage import StageConfig
from vitrail.train.trainer import Trainer

BLOCK = BlockConfig(width=32, attention=AttentionConfig(heads=2), mlp=PlainConfig(hidden=48))
TOWER = ViTConfig(image=16, patch=4, layers=1, block=BLOCK)
CRITIC = DiscriminatorConfig(width=16, layers=1, norm="group")
ALL = Weights(l1=0.2, l2=2.0, perceptual=0.1, gram=0.3, gan=0.7, quantizer=0.5, distillation=0.4)
QUICK = ALL.with_(perceptual=0.0, gram=0.0)  # VGG16 is most of a step
QUANTIZERS = {
    "bsq": q.BSQConfig(bits=10),
    "lfq": q.LFQConfig(bits=10),
    "fsq": q.FSQConfig(levels=(8, 8, 8, 5)),
    "vq": q.VQConfig(codes=64, dim=8, start=2),
    "gradient": q.VQConfig(codes=64, dim=8, learn="gradient", start=2),
    "residual": q.ResidualVQConfig(codes=16, dim=8, layers=2, start=2),
    "grouped": q.GroupedVQConfig(codes=16, dim=8, groups=2, start=2),
    "simvq": q.SimVQConfig(codes=64, dim=8),
    "ibq": q.IBQConfig(codes=64, dim=8),
    "kl": q.KLConfig(width=4),
    "continuous": q.ContinuousConfig(dim=6),
}


class Kept:
    """Pictures by number, as `NamedSource` gives them: smooth blobs of a few colours."""

    def __init__(self, count: int = 60, side: int = 16, views: ViewsConfig | None = None, seed: int = 1):
        made = torch.Generator().manual_seed(seed)
        coarse = torch.rand(count, 3, 3, 3, generator=made)
        smooth = F.interpolate(coarse, (side, side), mode="bicubic", align_corners=True).clamp(0, 1)
        self.table = (smooth * 255).round().to(torch.uint8)
        self.name, self.config = "kept", NamedConfig(data=("nothing",), side=side, views=views or ViewsConfig())
        self.fingerprint = self.name

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, item: int) -> Asked:
        return Asked(self.name, item)

    def pixels(self, index: torch.Tensor) -> torch.Tensor:
        return self.table[index]


@functools.cache
def _network(name: str) -> LPIPS:
    torch.manual_seed(9)
    return LPIPS(name)  # type: ignore[arg-type]


def networks(name: str) -> LPIPS:
    """LPIPS with weights that nobody trained."""
    return copy.deepcopy(_network(name))


def codec_config(kind: str = "bsq") -> CodecConfig:
    quantizer = QUANTIZERS[kind]
    return vit_codec(TOWER, quantizer, q.make_quantizer(quantizer).width)


def taught(kind: str = "bsq", source: Kept | None = None, seed: int = 0, teacher=TOWER, **settings) -> CodecTask:
    torch.manual_seed(seed)
    model = TaughtCodec(TaughtCodecConfig(codec=codec_config(kind), critic=CRITIC, teacher=teacher))
    return CodecTask(
        model, {"kept": source or Kept()}, CodecSettings(**({"weights": ALL, "start": 0} | settings)), networks
    )


def plain(kind: str = "bsq", **settings) -> CodecTask:
    torch.manual_seed(0)
    return CodecTask(Codec(codec_config(kind)), {"kept": Kept()}, CodecSettings(**settings))


def stage(**more) -> StageConfig:
    settings = {
        "name": "learn",
        "task": "codec",
        "steps": 6,
        "batch": 8,
        "mixture": Mixture(weights={"kept": 1.0}),
        "optim": OptimConfig(lr=3e-3, decay=0.0),
        "schedule": Cosine(warmup=2),
        "save_every": 3,
    }
    return StageConfig(**(settings | more))


def trainer(task: CodecTask, folder: Path, **more) -> Trainer:
    return Trainer(stage(**more), task, task.sources, folder, seed=2, quiet=True)


BATCH = {"kept": torch.arange(5)}


# ---- losses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("game", ["hinge", "non-saturating"])
def test_every_loss_is_its_formula(game):
    task = taught(game=game, quantizer=QuantizerWeights(commit=0.5, entropy=0.25))
    model = randomize(task.model, spread=0.1).eval()
    losses = task(BATCH)
    x = Kept().pixels(torch.arange(5)) / 127.5 - 1
    y, found = model.codec(x)
    real, drawn = model.critic(x), model.critic(y)
    features = [network.trunk(z) for network in (networks("vgg16"),) for z in (x, y)]
    heads = list(networks("vgg16").heads)

    def unit(z):
        return z / (z.norm(dim=1, keepdim=True) + 1e-10)

    def grams(z):
        flat = z.flatten(2)
        return flat @ flat.mT / flat[0].numel()

    pairs = list(zip(*features, strict=True))
    perceptual = sum(
        ((unit(a) - unit(b)) ** 2 * h[:, None, None]).sum(1).mean() for (a, b), h in zip(pairs, heads, strict=True)
    )
    cosine = F.cosine_similarity(model.tell(found.codes), model.teacher(x).view(5, 4, 4, -1), dim=-1)
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
    assert losses.keys() == wanted.keys() == task.weights.keys() == task.counts(BATCH).keys()
    for name, value in wanted.items():
        torch.testing.assert_close(losses[name], value * 5, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert task.weights == pytest.approx(
        {"l1": 0.2, "l2": 2.0, "perceptual": 0.1, "gram": 0.3, "gan": 0.7, "distillation": 0.4}
        | {"commit": 0.25, "entropy": 0.125, "critic": 1.0, "psnr": 0.0}
    )
    assert set(task.counts(BATCH).values()) == {5} and task.flops(BATCH) > 0


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_a_quantizer_brings_the_losses_it_has(kind):
    task = plain(kind)
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
    assert sorted(loss_names(task.codec)) == sorted(names)
    assert task.weights.keys() == {"l2", *names, "psnr"} == task(BATCH).keys()
    assert all(torch.equal(before[n], t) for n, t in Codec(codec_config(kind)).state_dict().items() if n not in before)
    assert plain(kind, weights=Weights(l2=1.0)).weights.keys() == {"l2", "psnr"}
    assert "commit" not in plain(kind, quantizer=QuantizerWeights(commit=0.0)).weights


def test_published_weights_go_by_their_name():
    task = taught(weights="gaia-1", quantizer=QuantizerWeights(commit=1.0))
    wanted = {"l1": 0.2, "l2": 2.0, "perceptual": 0.1, "gan": 1.0, "distillation": 0.1, "commit": 1.0}
    assert {name: task.weights[name] for name in wanted} == wanted
    assert taught(weights="qlip-stage-2").weights["perceptual"] == 0.1
    with pytest.raises(ConfigError, match=r"gaia1[\s\S]*gaia-1"):
        CodecSettings(weights="gaia1")
    assert CodecSettings.read({"weights": {"l1": 1.0}}).table == Weights(l1=1.0)


def test_a_convolutional_codec_trains_too():
    net = ConvPairConfig(widths=(16, 16, 16), layers=1, latent=8, groups=8, size=(16, 24))
    codec = Codec(CodecConfig(net=net, quantizer=QUANTIZERS["vq"]))
    task = CodecTask(codec, {"kept": Kept(side=24)}, CodecSettings(side=16))
    task.model.to(torch.bfloat16)
    losses = task(BATCH)
    sum(losses.values()).backward()
    assert all(p.grad is not None for p in codec.parameters())


def test_pictures_are_as_high_and_wide_as_the_codecs():
    """Also those that teach it: a critic, a network, and a tower that has a patch for every code."""
    net = ConvPairConfig(widths=(16, 16, 16), layers=1, latent=8, groups=8, size=(16, 24))
    for side in (16, 24, 40):  # of square ones
        codec = Codec(CodecConfig(net=net, quantizer=QUANTIZERS["vq"]))
        task = CodecTask(codec, {"kept": Kept(side=side, views=ViewsConfig(area=(0.5, 1.0), turn=10, erase=1.0))})
        seen = []
        codec.encoder.register_forward_hook(lambda _, given, out, seen=seen: seen.append((given[0].shape, out.shape)))
        task(BATCH)["l2"].backward()
        task.model.eval()
        task(BATCH)
        count = sum(map(len, BATCH.values()))
        assert seen == [((count, 3, 16, 24), (count, 4, 6, 8))] * 2
        assert task.flops(BATCH) == cost.flops(codec, codec.work(count, 16, 24))
    config = TaughtCodecConfig(codec=codec.config, critic=CRITIC, teacher=TOWER.with_(patch=2))  # it resizes
    settings = CodecSettings(weights="gaia-1", quantizer=QuantizerWeights(commit=1.0))
    taught_wide = CodecTask(TaughtCodec(config), {"kept": Kept(side=32)}, settings, networks)
    for dtype in (torch.float32, torch.bfloat16):
        taught_wide.model.to(dtype)
        losses = taught_wide(BATCH)
        assert all(loss.isfinite() for loss in losses.values()) and losses["distillation"] > 0


def test_pictures_are_varied_in_training_and_shown_as_they_are_when_judged():
    task, shown = plain(), []
    task = CodecTask(task.model, {"kept": Kept(views=ViewsConfig(noise=1.0))})
    forward = task.codec.forward
    task.codec.forward = lambda pixels: (shown.append(pixels), forward(pixels))[1]
    for mode in (True, False):
        task.model.train(mode)
        task(BATCH)
    wanted = Kept().pixels(torch.arange(5)) / 127.5 - 1
    torch.testing.assert_close(shown[1], wanted)
    assert not torch.allclose(shown[0], wanted, atol=0.1)


@pytest.mark.parametrize("kind", [kind for kind in QUANTIZERS if kind not in ("kl", "continuous")])
def test_codes_and_ids_do_not_depend_on_training(kind):
    codec = Codec(codec_config(kind))
    x = Kept().pixels(torch.arange(8)) / 127.5 - 1
    codec.train().encode(x)  # a codebook starts at its first batch
    judged, trained = codec.eval().encode(x), codec.train().encode(x)
    assert torch.equal(judged.ids, trained.ids) and torch.equal(judged.codes, trained.codes)


# ---- who learns from what ---------------------------------------------------------------------------------------


def gradients(task: CodecTask, name: str) -> dict[str, torch.Tensor | None]:
    task.model.zero_grad()
    task(BATCH)[name].backward()
    return {name: p.grad for name, p in task.model.named_parameters()}


def test_neither_side_of_the_game_moves_the_other():
    task = taught()
    fooling, telling = gradients(task, "gan"), gradients(task, "critic")
    for name in fooling:
        if name.startswith("critic"):
            # That of the last bias cancels between the two kinds of pictures.
            assert fooling[name] is None and (telling[name].abs().sum() > 0 or name.endswith("last.bias")), name
        else:
            assert telling[name] is None, name
    assert fooling["codec.encoder.embed.proj.weight"].abs().sum() > 0
    model = task.model.zero_grad() or task.model
    x = Kept().pixels(torch.arange(5)) / 127.5 - 1
    (-model.critic(model.codec(x)[0]).mean() * 5).backward()  # through a critic that is not held
    for name, p in model.codec.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(fooling[f"codec.{name}"], p.grad)


def test_one_backward_pass_gives_both_sides_their_own_gradients():
    task = taught()
    apart = {name: gradients(task, name) for name in task.weights if name != "psnr"}
    task.model.zero_grad()
    losses = task(BATCH)
    sum(task.weights[name] * loss for name, loss in losses.items()).backward()
    for name, p in task.model.named_parameters():
        parts = [task.weights[k] * g[name] for k, g in apart.items() if g[name] is not None]
        if parts:
            torch.testing.assert_close(p.grad, sum(parts), rtol=1e-4, atol=1e-6)


def test_the_critic_joins_at_its_step():
    task = taught(start=2)
    for step in range(4):
        losses = task(BATCH)
        assert int(task.model.critic.passes) == step + 1
        assert (losses["gan"] != 0) == (losses["critic"] != 0) == (step >= 2)
    task.model.eval()
    task(BATCH)
    assert int(task.model.critic.passes) == 4


def test_the_adaptive_weight_makes_both_pull_alike():
    task = taught(adaptive=True)
    losses, bare = task(BATCH), taught()
    there = bare(BATCH)
    last = last_layer(bare.codec.decoder)
    assert last is bare.codec.decoder.last.weight
    pixels = sum(bare.weights[name] * there[name] / 5 for name in ("l1", "l2", "perceptual", "gram"))
    norms = [torch.autograd.grad(loss, last, retain_graph=True)[0].norm() for loss in (pixels, there["gan"] / 5)]
    torch.testing.assert_close(losses["gan"], there["gan"] * norms[0] / (norms[1] + 1e-4), rtol=1e-3, atol=1e-5)
    with torch.no_grad():
        task.model.eval()
        assert task(BATCH)["gan"].isfinite()


def test_pulls_are_the_norms_of_gradients_at_the_last_layer_of_the_encoder():
    task = taught("ibq")
    before = {name: t.clone() for name, t in task.model.state_dict().items()}
    task.model.train()
    norms = pulls(task, BATCH)
    assert norms.keys() == task.weights.keys() - {"critic", "codebook", "psnr"} and task.model.training
    assert all(torch.equal(before[name], t) for name, t in task.model.state_dict().items())
    at = task.codec.encoder.blocks[-1].branches["mlp"].op.down.weight
    task.model.eval()
    for name in ("l2", "gan", "commit"):
        task.model.zero_grad()
        (task(BATCH)[name] / 5).backward()
        assert norms[name] == pytest.approx(at.grad.norm().item(), rel=1e-5)
    at.requires_grad_(False)
    with pytest.raises(ConfigError, match="frozen"):
        pulls(task, BATCH)


def test_the_network_is_neither_saved_nor_trained_and_follows_the_model():
    task = taught()
    model = task.model
    assert isinstance(model.perceptual, LPIPS)
    assert not [name for name in model.state_dict() if name.startswith("perceptual")]
    assert not [name for name, _ in model.named_parameters() if name.startswith("perceptual")]
    model.to(torch.bfloat16)
    assert all(t.dtype == torch.bfloat16 for t in model.perceptual.buffers())
    assert all(loss.isfinite() for loss in task(BATCH).values())
    assert "perceptual" not in dict(model.product.named_modules())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weights": Weights()}, "every weight is 0"),
        ({"weights": Weights(gan=1.0)}, "critic"),
        ({"weights": Weights(perceptual=1.0)}, "network"),
        ({"weights": Weights(distillation=1.0)}, "teacher"),
        ({"adaptive": True}, "adaptive"),
        ({"start": -1}, "start"),
        ({"side": 18}, "divide"),
        ({"quantizer": {"commit": -1.0}}, "commit"),
    ],
)
def test_what_cannot_be_is_refused(change, says):
    with pytest.raises(ConfigError, match=says):
        plain(**change)


def test_a_critic_that_would_judge_nothing_and_a_model_without_a_codec_are_refused():
    model = TaughtCodec(TaughtCodecConfig(codec=codec_config(), critic=CRITIC.with_(layers=3)))
    with pytest.raises(ConfigError, match="24"):
        CodecTask(model, {"kept": Kept()}, CodecSettings(weights=Weights(gan=1.0)))
    with pytest.raises(ConfigError, match="codec"):
        CodecTask(torch.nn.Linear(2, 2), {"kept": Kept()})  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_step_is_one_graph():
    """Nothing in it asks the device for a number: no host waits, and the compiler sees it whole."""
    task = taught(start=1)
    plainly = task(BATCH)
    sum(plainly.values()).backward()
    other = taught(start=1)
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
        torch.compile(taught(adaptive=True).__call__, backend="eager")(BATCH)
