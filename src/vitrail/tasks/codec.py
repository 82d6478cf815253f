"""Pictures through their codes and back: what a codec is trained by.

B pictures, C channels, H, W pixels, h, w codes along a side
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitrail.codecs.codec import Codec
from vitrail.codecs.quantizers import Quantized
from vitrail.config import Config
from vitrail.data.scenes.source import Asked, by_source
from vitrail.data.views import PLAIN
from vitrail.encoders.vgg import LPIPS, Name
from vitrail.errors import ConfigError, nearest
from vitrail.models.qlip import TaughtCodec
from vitrail.nn import cost
from vitrail.objectives.adversarial import GAMES
from vitrail.objectives.balance import adaptive_weight, gradient_norms
from vitrail.objectives.perceptual import cosine_distillation, gram_loss, lpips
from vitrail.objectives.reconstruction import WEIGHTS, Weights, l1, l2
from vitrail.tasks.pictures import size, viewed
from vitrail.train.task import Batch, Task

Networks = Callable[[Name], LPIPS]
"""name → LPIPS with real weights: `vitrail.hub.lpips.load_lpips`"""


class QuantizerWeights(Config):
    """What each of a quantizer's losses counts, of which no quantizer has all; 0 leaves it out."""

    commit: float = 0.25
    codebook: float = 1.0
    entropy: float = 0.1
    kl: float = 1e-4

    def __post_init__(self) -> None:
        Weights.__post_init__(self)  # type: ignore[arg-type]


class CodecSettings(Config):
    """
    weights    a published table by its name (`gaia-1`, `qlip-stage-2`), or what each loss counts
    quantizer  what each of the quantizer's losses counts, before all of them count as `weights.quantizer`
    side       of the pictures, which are then square; the codec's own height and width unless given
    network    whose features LPIPS and Gram matrices compare
    game       the kind of adversarial loss
    start      passes of the whole run before which both sides' losses count nothing; a step has `accumulate` of them
    critic     weight of the critic's own loss
    adaptive   VQGAN's further weight of the adversarial loss, at which it pulls at the decoder's last layer as hard as
               the reconstruction does; not in compiled stages
    """

    weights: str | Weights = Weights(l2=1.0, quantizer=1.0)
    quantizer: QuantizerWeights = QuantizerWeights()
    side: int | None = None
    network: Name = "vgg16"
    game: Literal["hinge", "non-saturating"] = "hinge"
    start: int = 0
    critic: float = 1.0
    adaptive: bool = False

    @property
    def table(self) -> Weights:
        return self.weights if isinstance(self.weights, Weights) else WEIGHTS[self.weights]

    def __post_init__(self) -> None:
        if isinstance(self.weights, str) and self.weights not in WEIGHTS:
            raise ConfigError(f"no weights are called {self.weights!r}", nearest(self.weights, WEIGHTS))
        if self.start < 0 or self.critic < 0:
            raise ConfigError(f"start = {self.start} and critic = {self.critic:g} cannot be", "give 0 or more")


class Reconstruction:
    """The losses of pictures against what a codec made of them, each as a sum over the pictures.

    `psnr` weighs nothing and is there to be looked at. A network that LPIPS needs becomes a part of the model, as
    buffers that no checkpoint keeps: so it follows the model's device and type, and no stage trains it.
    """

    def __init__(self, model: nn.Module, settings: CodecSettings, networks: Networks | None):
        self.model, self.settings, self.table = model, settings, settings.table
        self.codec = codec_of(model)
        self.size = self.codec.size if settings.side is None else (settings.side, settings.side)
        if any(side % self.codec.factor for side in self.size):
            raise ConfigError(
                f"pictures of {self.size[0]} × {self.size[1]} do not divide into codes of {self.codec.factor} pixels",
                "change side",
            )
        self._check(networks)
        if self.table.perceptual or self.table.gram:
            assert networks is not None
            model.add_module("perceptual", _unsaved(networks(settings.network)))
        inner = settings.quantizer.plain()
        self.inner = [name for name in loss_names(self.codec) if self.table.quantizer and _weight(inner, name)]
        outer = {name: weight for name, weight in self.table.plain().items() if weight and name != "quantizer"}
        self.weights = outer | {name: self.table.quantizer * inner[name] for name in self.inner}
        self.weights |= ({"critic": settings.critic} if self.table.gan else {}) | {"psnr": 0.0}

    def __call__(self, shown: Tensor, drawn: Tensor, found: Quantized) -> dict[str, Tensor]:
        """Pictures (B, C, H, W) and reconstructions, not clamped → losses by the names of `weights`"""
        shown, drawn, table = shown.float(), drawn.float(), self.table
        losses: dict[str, Tensor] = {}
        if table.l1:
            losses["l1"] = l1(drawn, shown)
        if table.l2:
            losses["l2"] = l2(drawn, shown)
        if table.perceptual or table.gram:
            losses |= self._perceptual(shown, drawn)
        if table.gan:
            losses |= self._game(shown, drawn, losses)
        if table.distillation:
            assert isinstance(self.model, TaughtCodec)
            codes = found.codes
            lesson = self.model.lesson(shown.to(codes.dtype), (codes.shape[1], codes.shape[2]))
            losses["distillation"] = cosine_distillation(self.model.told(codes), lesson)
        losses |= {name: found.losses[name] for name in self.inner}
        losses["psnr"] = _psnr(shown, drawn)
        return {name: losses[name] * len(shown) for name in self.weights}

    def _perceptual(self, shown: Tensor, drawn: Tensor) -> dict[str, Tensor]:
        network: Any = self.model.perceptual
        heads = list(network.heads)
        x, y = (network.trunk(some.to(heads[0].dtype)) for some in (drawn, shown))
        found = {}
        if self.table.perceptual:
            found["perceptual"] = lpips(x, y, heads).mean()
        if self.table.gram:
            found["gram"] = gram_loss(x, y)
        return found

    def _game(self, shown: Tensor, drawn: Tensor, losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Both sides of one step in one backward pass: each sees the other as it was before the step."""
        critic: Any = self.model.critic
        game, joined = GAMES[self.settings.game], (critic.passes >= self.settings.start).float()
        fooled = game.generator(critic.held(drawn))
        if self.settings.adaptive and torch.is_grad_enabled():
            if torch.compiler.is_compiling():
                _refuse()
            together = sum(self.weights[name] * loss for name, loss in losses.items())
            assert isinstance(together, Tensor)
            if not last_layer(self.codec.decoder).requires_grad:
                raise ConfigError(
                    "an adaptive weight is measured at the decoder, which is frozen", "leave adaptive out"
                )
            fooled = fooled * adaptive_weight(together, fooled, last_layer(self.codec.decoder))
        told_apart = game.discriminator(critic(shown), critic(drawn.detach()))
        if self.model.training:
            critic.passes += 1
        return {"gan": joined * fooled, "critic": joined * told_apart}

    def _check(self, networks: Networks | None) -> None:
        """Every loss has what it needs."""
        table = self.table
        critic: Any = getattr(self.model, "critic", None)
        if (table.perceptual or table.gram) and networks is None:
            raise ConfigError("perceptual losses compare features, and there is no network", "give `networks`")
        if table.gan and critic is None:
            raise ConfigError("an adversarial loss needs a critic", "set model.config.critic, or weights.gan = 0")
        if table.gan and min(self.size) < critic.config.minimum:
            raise ConfigError(
                f"a critic of {critic.config.layers} layers judges nothing of {min(self.size)} pixels",
                f"give it fewer, or pictures of {critic.config.minimum} or more",
            )
        if table.distillation and getattr(self.model, "teacher", None) is None:
            raise ConfigError(
                "distillation needs a teacher", "set model.config.teacher and its part, or weights.distillation = 0"
            )
        if self.settings.adaptive and not (table.gan and (table.l1 or table.l2 or table.perceptual)):
            raise ConfigError("an adaptive weight stands between an adversarial loss and others", "give both a weight")


class CodecTask:
    """A `Codec`, or one with those who teach it, on pictures, viewed as their source says (judged, as they are)."""

    def __init__(
        self,
        model: Codec | TaughtCodec,
        sources: Mapping[str, Any],
        settings: CodecSettings | None = None,
        networks: Networks | None = None,
    ):
        self.model, self.sources = model, sources
        self.losses = Reconstruction(model, settings or CodecSettings(), networks)
        self.codec, self.size = self.losses.codec, self.losses.size
        if not any(self.losses.weights.values()):
            raise ConfigError("every weight is 0, so nothing would be learned", "give at least one loss a weight")
        self.views = {n: getattr(s.config, "views", PLAIN) for n, s in sources.items()}

    @property
    def weights(self) -> dict[str, float]:
        return self.losses.weights

    def collate(self, samples: Sequence[Asked]) -> Batch:
        return by_source(samples)

    def counts(self, batch: Batch) -> dict[str, int]:
        """Pictures."""
        return dict.fromkeys(self.weights, size(batch))

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        how = self.views if self.model.training else dict.fromkeys(self.views, PLAIN)
        shown = viewed(batch, self.sources, how, self.size)
        drawn, found = self.codec(shown.to(next(self.codec.encoder.parameters()).dtype))
        return self.losses(shown, drawn, found)

    def flops(self, batch: Batch) -> int:
        """Of the codec; critic, teacher and LPIPS are not counted."""
        return cost.flops(self.codec, self.codec.work(size(batch), *self.size))


def codec_of(model: nn.Module) -> Codec:
    codec = getattr(model, "codec", model)
    if not isinstance(codec, Codec):
        raise ConfigError(
            f"a {type(model).__name__} has no codec", 'give a model of kind "codec", "taught-codec", "qlip"'
        )
    return codec


@torch.no_grad()
def loss_names(codec: Any) -> list[str]:
    """The losses that its quantizer gives: of a codec, or of another that has a quantizer and a device."""
    quantizer, mode = codec.quantizer, codec.quantizer.training
    quantizer.eval()  # or it would learn
    names = list(quantizer(torch.zeros(1, quantizer.dim, device=codec.device)).losses)
    quantizer.train(mode)
    return names


def last_layer(part: nn.Module) -> nn.Parameter:
    """The last matrix of a part; of a tower, that of its last block."""
    blocks = getattr(part, "blocks", None)
    return [p for p in (blocks[-1] if blocks is not None else part).parameters() if p.ndim > 1][-1]


def pulls(task: Task, batch: Batch, at: Tensor | None = None) -> dict[str, float]:
    """How hard each loss of a batch pulls at the last layer of the encoder, or at another tensor: the length of the
    gradient of its mean, before any weight. Weights that balance two losses are as one over this. Losses that do not
    reach it (the critic's, a codebook's) are left out. Pictures are as they are judged, and nothing is learned."""
    model, mode, norms = task.model, task.model.training, {}
    at = last_layer(codec_of(model).encoder) if at is None else at
    if not at.requires_grad:
        raise ConfigError("what is frozen is pulled at by nothing", "measure where something trains")
    model.eval()
    try:
        counts = task.counts(batch)
        for name, loss in task(batch).items():
            try:
                norms |= gradient_norms({name: loss / max(counts[name], 1)}, at)
            except ConfigError:
                continue
    finally:
        model.train(mode)
    return {name: norm.item() for name, norm in norms.items()}


@torch.compiler.disable  # or it would be traced, and not raised
def _refuse() -> None:
    raise ConfigError("an adaptive weight cannot be compiled", "set adaptive, or the stage's compile, to false")


def _unsaved(network: nn.Module) -> nn.Module:
    """A frozen network whose weights no checkpoint keeps."""
    for part in network.modules():
        for name, weight in [*part.named_parameters(recurse=False)]:
            delattr(part, name)
            part.register_buffer(name, weight.detach(), persistent=False)
    return network.eval()


def _weight(inner: Mapping[str, float], name: str) -> float:
    if name not in inner:
        raise ConfigError(f"nothing says what the quantizer's loss {name!r} counts", f"known: {', '.join(inner)}")
    return inner[name]


@torch.no_grad()
def _psnr(shown: Tensor, drawn: Tensor) -> Tensor:
    """The mean over the pictures, in dB, of reconstructions within −1 … 1"""
    error = ((drawn.clamp(-1, 1) - shown) / 2).square().mean((1, 2, 3))
    return -10 * error.clamp_min(1e-10).log10().mean()
