"""Training task and reconstruction losses of image codecs.

B images, C channels, H, W pixels, h, w codes per side
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitrail.codecs.codec import Codec
from vitrail.codecs.quantizers import QuantizerOutput
from vitrail.config import Config, NonNegativeFloat, NonNegativeInt
from vitrail.data.augmentation import NO_AUGMENTATION
from vitrail.encoders.vgg import LPIPS, TrunkName
from vitrail.errors import ConfigError, suggest_name
from vitrail.hub.lpips_weights import load_lpips
from vitrail.models.masked_image_model import freeze_as_buffers
from vitrail.models.qlip_model import CodecTrainingModel
from vitrail.nn import cost
from vitrail.objectives.adversarial import GAN_LOSSES
from vitrail.objectives.loss_balancing import compute_adaptive_weight, compute_gradient_norms
from vitrail.objectives.perceptual_loss import cosine_distillation_loss, gram_loss, lpips_distance
from vitrail.objectives.reconstruction_loss import PUBLISHED_WEIGHTS, ReconstructionWeights, l1_loss, l2_loss
from vitrail.registry import TASKS
from vitrail.tasks.image_task import ImageTask, count_images, make_views
from vitrail.tasks.task_spec import TaskSpec
from vitrail.training.task import Batch, Task

PerceptualNetworkLoader = Callable[[TrunkName], LPIPS]
"""Loads LPIPS with pretrained weights by trunk name: `vitrail.hub.lpips_weights.load_lpips`."""


class QuantizerWeights(Config):
    """Weights of the quantizer losses. 0 disables a loss; a quantizer ignores weights of losses it does not have."""

    commit: float = 0.25
    codebook: float = 1.0
    entropy: float = 0.1
    kl: float = 1e-4

    def __post_init__(self) -> None:
        ReconstructionWeights.__post_init__(self)  # type: ignore[arg-type]


class CodecSettings(Config):
    """Settings of the codec task.

    weights              weights of the losses, or the name of a published set ("gaia-1", "qlip-stage-2")
    quantizer            weights of the quantizer losses, all multiplied by `weights.quantizer`
    image_size           size of square training images. Default: the codec's own height and width
    perceptual_network   trunk whose features LPIPS and the Gram loss compare
    gan_loss             kind of adversarial loss
    gan_start            number of forward passes of the run before both adversarial losses count; a step has
                         `gradient_accumulation_steps` passes
    critic_weight        weight of the discriminator loss
    adaptive_gan_weight  VQGAN's adaptive weight: scales the adversarial loss until its gradient at the decoder's last
                         layer is as large as that of the reconstruction losses. Not available in compiled stages
    """

    weights: str | ReconstructionWeights = ReconstructionWeights(l2=1.0, quantizer=1.0)
    quantizer: QuantizerWeights = QuantizerWeights()
    image_size: int | None = None
    perceptual_network: TrunkName = "vgg16"
    gan_loss: Literal["hinge", "non-saturating"] = "hinge"
    gan_start: NonNegativeInt = 0
    critic_weight: NonNegativeFloat = 1.0
    adaptive_gan_weight: bool = False

    @property
    def weight_table(self) -> ReconstructionWeights:
        return self.weights if isinstance(self.weights, ReconstructionWeights) else PUBLISHED_WEIGHTS[self.weights]

    def __post_init__(self) -> None:
        if isinstance(self.weights, str) and self.weights not in PUBLISHED_WEIGHTS:
            raise ConfigError(
                f"no published weights are named {self.weights!r}", suggest_name(self.weights, PUBLISHED_WEIGHTS)
            )


class ReconstructionLoss:
    """Losses between images and their reconstructions, each summed over the images.

    `psnr` is a metric with weight 0. The LPIPS network is added to the model as non-persistent buffers: it follows the
    model's device and dtype, is not trained, and is not saved.
    """

    def __init__(self, model: nn.Module, settings: CodecSettings, load_network: PerceptualNetworkLoader | None):
        self.model, self.settings, self.weight_table = model, settings, settings.weight_table
        self.codec = get_codec(model)
        self.image_size = (
            self.codec.image_size if settings.image_size is None else (settings.image_size, settings.image_size)
        )
        if any(side % self.codec.downsample_factor for side in self.image_size):
            raise ConfigError(
                f"images of {self.image_size[0]} × {self.image_size[1]} pixels are not divisible by "
                f"the codec's downsample factor {self.codec.downsample_factor}",
                "change image_size",
            )
        self._check_requirements(load_network)
        if self.weight_table.perceptual or self.weight_table.gram:
            assert load_network is not None
            network = load_network(settings.perceptual_network)
            model.add_module("perceptual", freeze_as_buffers(network, persistent=False))
        quantizer_weights = settings.quantizer.to_dict()
        self.quantizer_losses = [
            name
            for name in quantizer_loss_names(self.codec)
            if self.weight_table.quantizer and _quantizer_weight(quantizer_weights, name)
        ]
        weights_without_quantizer = {
            name: weight for name, weight in self.weight_table.to_dict().items() if weight and name != "quantizer"
        }
        self.loss_weights = weights_without_quantizer | {
            name: self.weight_table.quantizer * quantizer_weights[name] for name in self.quantizer_losses
        }
        self.loss_weights |= ({"critic": settings.critic_weight} if self.weight_table.gan else {}) | {"psnr": 0.0}

    def __call__(self, images: Tensor, reconstructions: Tensor, quantized: QuantizerOutput) -> dict[str, Tensor]:
        """Losses by name, from images (B, C, H, W) and their unclamped reconstructions."""
        images, reconstructions, table = images.float(), reconstructions.float(), self.weight_table
        losses: dict[str, Tensor] = {}
        if table.l1:
            losses["l1"] = l1_loss(reconstructions, images)
        if table.l2:
            losses["l2"] = l2_loss(reconstructions, images)
        if table.perceptual or table.gram:
            losses |= self._perceptual_losses(images, reconstructions)
        if table.gan:
            losses |= self._gan_losses(images, reconstructions, losses)
        if table.distillation:
            assert isinstance(self.model, CodecTrainingModel)
            quantized_codes = quantized.codes
            teacher_features = self.model.compute_teacher_features(
                images.to(quantized_codes.dtype), (quantized_codes.shape[1], quantized_codes.shape[2])
            )
            losses["distillation"] = cosine_distillation_loss(
                self.model.predict_teacher_features(quantized_codes), teacher_features
            )
        losses |= {name: quantized.losses[name] for name in self.quantizer_losses}
        losses["psnr"] = _psnr(images, reconstructions)
        return {name: losses[name] * len(images) for name in self.loss_weights}

    def _perceptual_losses(self, images: Tensor, reconstructions: Tensor) -> dict[str, Tensor]:
        network: Any = self.model.perceptual
        heads = list(network.heads)
        x, y = (network.trunk(batch.to(heads[0].dtype)) for batch in (reconstructions, images))
        losses = {}
        if self.weight_table.perceptual:
            losses["perceptual"] = lpips_distance(x, y, heads).mean()
        if self.weight_table.gram:
            losses["gram"] = gram_loss(x, y)
        return losses

    def _gan_losses(self, images: Tensor, reconstructions: Tensor, losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Generator and discriminator losses of one backward pass; each uses the other's weights before the step."""
        critic: Any = self.model.critic
        game, is_active = GAN_LOSSES[self.settings.gan_loss], (critic.passes >= self.settings.gan_start).float()
        generator_loss = game.generator(critic.forward_frozen(reconstructions))
        if self.settings.adaptive_gan_weight and torch.is_grad_enabled():
            if torch.compiler.is_compiling():
                _raise_not_compilable()
            total = sum(self.loss_weights[name] * loss for name, loss in losses.items())
            assert isinstance(total, Tensor)
            if not last_layer(self.codec.decoder).requires_grad:
                raise ConfigError(
                    "adaptive_gan_weight measures gradients at the decoder, which is frozen",
                    "remove adaptive_gan_weight",
                )
            generator_loss = generator_loss * compute_adaptive_weight(
                total, generator_loss, last_layer(self.codec.decoder)
            )
        critic_loss = game.discriminator(critic(images), critic(reconstructions.detach()))
        if self.model.training:
            critic.passes += 1
        return {"gan": is_active * generator_loss, "critic": is_active * critic_loss}

    def _check_requirements(self, load_network: PerceptualNetworkLoader | None) -> None:
        """Raise an error if a weighted loss lacks its network, discriminator or teacher."""
        table = self.weight_table
        critic: Any = getattr(self.model, "critic", None)
        if (table.perceptual or table.gram) and load_network is None:
            raise ConfigError("perceptual losses need a pretrained network", "pass `load_network`")
        if table.gan and critic is None:
            raise ConfigError("the adversarial loss needs a critic", "set model.config.critic, or weights.gan = 0")
        if table.gan and min(self.image_size) < critic.config.min_image_size:
            raise ConfigError(
                f"a critic of {critic.config.layers} layers needs images larger than {min(self.image_size)} pixels",
                f"use fewer layers, or images of at least {critic.config.min_image_size} pixels",
            )
        if table.distillation and getattr(self.model, "teacher", None) is None:
            raise ConfigError(
                "the distillation loss needs a teacher",
                "set model.config.teacher and its part, or weights.distillation = 0",
            )
        if self.settings.adaptive_gan_weight and not (table.gan and (table.l1 or table.l2 or table.perceptual)):
            raise ConfigError(
                "adaptive_gan_weight balances the adversarial loss against reconstruction losses",
                "set weights for gan and for l1, l2 or perceptual",
            )


class CodecTask(ImageTask):
    """Trains a codec to reconstruct images. Sources define the augmentation; validation uses images unchanged."""

    def __init__(
        self,
        model: Codec | CodecTrainingModel,
        sources: Mapping[str, Any],
        settings: CodecSettings | None = None,
        load_network: PerceptualNetworkLoader | None = None,
    ):
        self.model, self.sources = model, sources
        self.reconstruction_loss = ReconstructionLoss(model, settings or CodecSettings(), load_network)
        self.codec, self.image_size = self.reconstruction_loss.codec, self.reconstruction_loss.image_size
        self.loss_weights = self.reconstruction_loss.loss_weights
        if not any(self.loss_weights.values()):
            raise ConfigError("all loss weights are 0", "set a positive weight for at least one loss")
        self.views = {n: getattr(s.config, "augmentation", NO_AUGMENTATION) for n, s in sources.items()}

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        view_configs = self.views if self.model.training else dict.fromkeys(self.views, NO_AUGMENTATION)
        images = make_views(batch, self.sources, view_configs, self.image_size)
        reconstructions, quantized = self.codec(images.to(next(self.codec.encoder.parameters()).dtype))
        return self.reconstruction_loss(images, reconstructions, quantized)

    def count_flops(self, batch: Batch) -> int:
        """FLOPs of the codec, without discriminator, teacher and LPIPS."""
        return cost.count_flops(self.codec, self.codec.workload(count_images(batch), *self.image_size))


def get_codec(model: nn.Module) -> Codec:
    """The codec of a model, or the model itself if it is a codec."""
    codec = getattr(model, "codec", model)
    if not isinstance(codec, Codec):
        raise ConfigError(
            f"{type(model).__name__} has no codec", 'use a model of kind "codec", "codec-training" or "qlip"'
        )
    return codec


@torch.no_grad()
def quantizer_loss_names(codec: Any) -> list[str]:
    """Names of the losses of a codec's quantizer. `codec` is any module with `quantizer` and `device`."""
    quantizer, was_training = codec.quantizer, codec.quantizer.training
    quantizer.eval()  # training mode would update the codebook
    names = list(quantizer(torch.zeros(1, quantizer.dim, device=codec.device)).losses)
    quantizer.train(was_training)
    return names


def last_layer(part: nn.Module) -> nn.Parameter:
    """The last weight matrix of a module, or of its last block if it has blocks."""
    blocks = getattr(part, "blocks", None)
    return [p for p in (blocks[-1] if blocks is not None else part).parameters() if p.ndim > 1][-1]


def loss_gradient_norms(task: Task, batch: Batch, parameter: Tensor | None = None) -> dict[str, float]:
    """Gradient norm of each loss of a batch at the encoder's last layer, or at another parameter.

    Norms are of mean losses without weights; inverse norms are weights that balance the losses. Losses that do not
    depend on the parameter, such as the discriminator's, are omitted. The model is in eval mode and does not change.
    """
    model, was_training, norms = task.model, task.model.training, {}
    parameter = last_layer(get_codec(model).encoder) if parameter is None else parameter
    if not parameter.requires_grad:
        raise ConfigError("the parameter is frozen and has no gradient", "measure at a trainable parameter")
    model.eval()
    try:
        counts = task.count_loss_terms(batch)
        for name, loss in task(batch).items():
            try:
                norms |= compute_gradient_norms({name: loss / max(counts[name], 1)}, parameter)
            except ConfigError:
                continue
    finally:
        model.train(was_training)
    return {name: norm.item() for name, norm in norms.items()}


@torch.compiler.disable  # otherwise the raise would be traced
def _raise_not_compilable() -> None:
    raise ConfigError(
        "adaptive_gan_weight cannot be compiled", "set adaptive_gan_weight = false, or compile = false for the stage"
    )


def _quantizer_weight(inner: Mapping[str, float], name: str) -> float:
    if name not in inner:
        raise ConfigError(f"the quantizer loss {name!r} has no weight", f"known losses: {', '.join(inner)}")
    return inner[name]


@torch.no_grad()
def _psnr(images: Tensor, reconstructions: Tensor) -> Tensor:
    """Mean PSNR over the images in dB, of reconstructions clamped to −1 … 1."""
    error = ((reconstructions.clamp(-1, 1) - images) / 2).square().mean((1, 2, 3))
    return -10 * error.clamp_min(1e-10).log10().mean()


TASKS.register(
    "codec",
    TaskSpec(
        lambda model, sources, _tokenizer, settings: CodecTask(model, sources, settings, load_lpips),
        (Codec, CodecTrainingModel),
        ("images",),
        CodecSettings,
    ),
)
