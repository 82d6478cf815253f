"""Codec training with a discriminator and a teacher, and QLIP, which also aligns the encoder with text.

Shapes: B images, T texts, S side, X prefix tokens, h, w codes along a side, d width of a code, D width of the features,
E width of the embedding.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from vitrail.codecs.codec import Codec, CodecConfig
from vitrail.codecs.discriminator import Discriminator, DiscriminatorConfig
from vitrail.codecs.vit_autoencoder import ViTAutoencoderConfig
from vitrail.config import Config
from vitrail.encoders.text_tower import TextTower, TextTowerConfig
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.errors import ConfigError
from vitrail.models.contrastive_model import ContrastiveConfig, ContrastiveModel
from vitrail.models.masked_image_model import freeze_as_buffers
from vitrail.nn import Workload, cost
from vitrail.registry import MODELS


class CodecTrainingConfig(Config):
    """Config of a `CodecTrainingModel`.

    codec    the trained codec
    critic   discriminator; None: no adversarial loss
    teacher  frozen tower whose features are predicted from the codes (GAIA-1: DINO); None: no distillation
    """

    codec: CodecConfig
    critic: DiscriminatorConfig | None = None
    teacher: ViTConfig | None = None


class Critic(nn.Module):
    """Discriminator with a counter of its training passes: pixels (B, C, H, W) in −1 … 1 to logits (B, 1, h, w)."""

    passes: Tensor

    def __init__(self, config: DiscriminatorConfig):
        super().__init__()
        self.config, self.net = config, Discriminator(config)
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.net(pixels.to(self.net.last.weight.dtype)).float()

    def forward_frozen(self, pixels: Tensor) -> Tensor:
        """Return the same logits, with gradients to the pixels and not to the discriminator.

        The weights are passed as constants. Toggling `requires_grad` would need to know which weights a stage trains,
        and does not compile; this leaves the module unchanged, sharded or not.
        """
        weights = {name: weight.detach() for name, weight in self.net.named_parameters()}
        inputs = pixels.to(self.net.last.weight.dtype)
        return functional_call(self.net, weights, (inputs,)).float()


@MODELS.register("codec-training")
class CodecTrainingModel(nn.Module):
    """Codec with its discriminator and teacher. `final_model` is the codec alone."""

    Config = CodecTrainingConfig

    def __init__(self, config: CodecTrainingConfig):
        super().__init__()
        self.config = config
        self.codec = Codec(config.codec)
        self.critic = None if config.critic is None else Critic(config.critic)
        self.teacher = None if config.teacher is None else freeze_as_buffers(ViT(config.teacher))
        width = self.codec.quantizer.width
        self.teacher_projection = None if config.teacher is None else nn.Linear(width, config.teacher.block.width)

    @property
    def pretrained_parts(self) -> tuple[str, ...]:
        """Parts that are not trained here and need pretrained weights."""
        return () if self.teacher is None else ("teacher",)

    @property
    def final_model(self) -> nn.Module:
        """The model that is saved after training."""
        return self.codec

    @property
    def tower(self) -> nn.Module:
        return self.codec.encoder

    def train(self, mode: bool = True) -> "CodecTrainingModel":
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        return self

    def predict_teacher_features(self, codes: Tensor) -> Tensor:
        """Predict the teacher's features (B, h, w, D) from codes (B, h, w, d)."""
        assert self.teacher_projection is not None
        return self.teacher_projection(codes)

    @torch.no_grad()
    def compute_teacher_features(self, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
        """Compute the teacher's features (B, h, w, D) of pixels (B, C, H, W), resized to one patch for each code."""
        assert self.teacher is not None
        size = [side * self.teacher.config.patch_size for side in grid]
        if list(pixels.shape[2:]) != size:
            # In float32: a CPU has no kernel for half precision.
            pixels = F.interpolate(pixels.float(), size, mode="bilinear", antialias=True).to(pixels.dtype)
        return self.teacher(pixels).unflatten(1, grid)


class QLIPConfig(CodecTrainingConfig, kw_only=True):
    """Config of a `QLIP`.

    The codec's encoder is the image tower too; its `pool` computes the image embedding from the quantizer's input
    features. The other fields are those of `ContrastiveConfig`.
    """

    text: TextTowerConfig
    embed_dim: int | None = None
    log_scale: float = math.log(1 / 0.07)
    bias: float | None = None

    @property
    def image(self) -> ViTConfig:
        assert isinstance(self.codec.net, ViTAutoencoderConfig)
        return self.codec.net.encoder

    @property
    def contrastive_config(self) -> ContrastiveConfig:
        return ContrastiveConfig(
            image=self.image, text=self.text, embed_dim=self.embed_dim, log_scale=self.log_scale, bias=self.bias
        )

    @property
    def width(self) -> int:
        """Width of the embeddings."""
        return self.contrastive_config.width

    def __post_init__(self) -> None:
        if not isinstance(self.codec.net, ViTAutoencoderConfig):
            raise ConfigError("codec.net is not a ViT", 'set codec.net.kind = "vit"')
        if not self.codec.has_default_normalization:
            raise ConfigError(
                f"codec.mean is {self.codec.mean} and codec.std is {self.codec.std}, but QLIP needs pixels in −1 … 1",
                "remove mean and std",
            )
        _ = self.contrastive_config  # validates the towers


@MODELS.register("qlip")
class QLIP(CodecTrainingModel):
    """Codec whose encoder is aligned with text."""

    Config = QLIPConfig

    config: QLIPConfig  # pyrefly: ignore

    def __init__(self, config: QLIPConfig):
        super().__init__(config)
        self.text = TextTower(config.text)
        E = config.embed_dim
        self.image_projection = nn.Linear(config.image.pooled_width, E, bias=False) if E else nn.Identity()
        self.text_projection = nn.Linear(config.text.pooled_width, E, bias=False) if E else nn.Identity()
        self.log_scale = nn.Parameter(torch.tensor([config.log_scale]))
        self.bias = None if config.bias is None else nn.Parameter(torch.tensor([config.bias]))

    @property
    def scale(self) -> Tensor:
        return self.log_scale.exp()

    @property
    def final_model(self) -> "QLIP":
        """QLIP without discriminator and teacher; the weights are shared."""
        if self.critic is None and self.teacher is None:
            return self
        with torch.device("meta"):
            model = QLIP(self.config.replace(critic=None, teacher=None))
        return _share_weights(model, self, codec=self.codec, log_scale=self.log_scale, bias=self.bias)

    @property
    def contrastive_model(self) -> ContrastiveModel:
        """Contrastive model of both towers, for evaluation; the weights are shared."""
        with torch.device("meta"):
            towers = ContrastiveModel(self.config.contrastive_config)
        return _share_weights(towers, self, image=self.codec.encoder, log_scale=self.log_scale, bias=self.bias)

    def encode_features_and_image(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Encode pixels (B, C, S, S) to features (B, h, w, D) before quantization and embeddings (B, E), not
        normalized, in one pass.
        """
        encoder, patch = self.codec.encoder, self.config.image.patch_size
        assert isinstance(encoder, ViT)
        tokens = encoder.forward_tokens(pixels)  # (B, X + h·w, D)
        h, w = (side // patch for side in pixels.shape[2:])
        return tokens[:, encoder.config.num_prefix_tokens :].unflatten(1, (h, w)), self.image_projection(
            pool_tokens(encoder, tokens)
        )

    def encode_image(self, pixels: Tensor) -> Tensor:
        """Encode pixels to embeddings (B, E), not normalized."""
        return self.encode_features_and_image(pixels)[1]

    def encode_text(self, ids: Tensor) -> Tensor:
        """Encode texts to embeddings (T, E), not normalized."""
        return self.text_projection(self.text.forward_pooled(ids))

    def workload(self, batch_size: int = 1, text_length: int | None = None) -> Workload:
        """Return the workload of images with texts of `text_length` tokens; texts are the context of the workload."""
        texts = self.text.workload(batch_size, text_length)
        return self.codec.workload(batch_size).replace(context_tokens=texts.tokens, context_pairs=texts.attention_pairs)


def pool_tokens(tower: ViT, tokens: Tensor) -> Tensor:
    """Pool tokens (B, X + N, D) as `tower.forward_pooled` does."""
    config = tower.config
    patches = tokens[:, config.num_prefix_tokens :]
    if tower.pooler is not None:
        one = tower.pooler(patches)
    elif config.pool == "cls":
        one = tokens[:, 0]
    else:  # sums in half precision can overflow
        one = patches.mean(1, dtype=torch.promote_types(tokens.dtype, torch.float32)).to(tokens.dtype)
    one = tower.norm_last(one) if config.norm_last == "pooled" else one
    return one if tower.head is None else tower.head(one)


@cost.count_flops.register
def _(module: QLIP, work: Workload) -> int:
    """Count reconstruction and comparison with texts, with the workload of `QLIP.workload`, without discriminator and
    teacher.
    """
    image_work = Workload(tokens=work.tokens, attention_pairs=work.attention_pairs, sequences=work.sequences)
    text_work = Workload(tokens=work.context_tokens, attention_pairs=work.context_pairs, sequences=work.sequences)
    total = cost.count_flops(module.codec, image_work) + cost.count_flops(module.text, text_work)
    heads = module.codec.encoder.head, module.text.head, module.image_projection, module.text_projection
    one = Workload(tokens=work.sequences, attention_pairs=0)  # one vector for each image or text
    return (
        total
        + sum(cost.count_flops(head, one) for head in heads if head is not None)
        + (2 * module.config.width * work.sequences**2)
    )


cost.count_bytes.register(CodecTrainingModel, cost.sum_tensor_bytes)  # the teacher's weights are buffers


def _share_weights(into, qlip: QLIP, **parts: nn.Module | nn.Parameter | None):
    """Assign QLIP's weights to a model without weights."""
    same = {name: getattr(qlip, name) for name in ("text", "image_projection", "text_projection")}
    for name, part in {**same, **parts}.items():
        setattr(into, name, part)
    into.training = qlip.training
    return into
