"""Contrastive image-text training task with CLIP's or SigLIP's loss.

B samples, M texts, L tokens, E embedding width
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import Config, NonNegativeFloat, PositiveInt
from vitrail.data.image_captions import extract_caption_texts
from vitrail.data.named_images import NamedImageSource
from vitrail.data.scenes.scene_source import SceneSource
from vitrail.encoders.text_tower import find_special_tokens
from vitrail.errors import ConfigError
from vitrail.models.contrastive_model import ContrastiveModel
from vitrail.nn import cost
from vitrail.objectives import clip_loss, siglip_loss
from vitrail.objectives.contrastive_gradients import LOCAL_EXCHANGE
from vitrail.objectives.distributed_contrastive import GatherExchange, RingExchange
from vitrail.processing.tokenizer import Tokenizer
from vitrail.registry import TASKS
from vitrail.tasks.image_text_task import ImageTextBatch, ImageTextTask, InputShape
from vitrail.tasks.task_spec import TaskSpec
from vitrail.training.task import Batch

MAX_LOG_SCALE = math.log(100)  # CLIP limits its logit scale to 100


class ContrastiveSettings(Config):
    """Settings of the contrastive task.

    matryoshka_widths  prefix lengths at which embeddings are compared too, so that they can be truncated
    text_text_weight   weight of a loss between two captions of one image, for text-to-text retrieval
    swap_negatives     add captions with swapped colours, positions, counts or sizes as negatives
    patch_counts       for NaFlex towers: largest numbers of patches of an image, one of which is drawn for each batch;
                       validation uses the first. Empty for that of the native image
    """

    matryoshka_widths: tuple[PositiveInt, ...] = ()
    text_text_weight: NonNegativeFloat = 0.0
    swap_negatives: bool = False
    patch_counts: tuple[PositiveInt, ...] = ()


class ContrastiveTask(ImageTextTask):
    """Trains with CLIP's loss if the model has no logit bias, and with SigLIP's loss if it has one."""

    def __init__(
        self,
        model: ContrastiveModel,
        sources: Mapping[str, NamedImageSource | SceneSource],
        tokenizer: Tokenizer | None,
        settings: ContrastiveSettings,
    ):
        if tokenizer is None:
            raise ConfigError(
                "contrastive training needs captions, but there is no tokenizer", "add a [tokenizer] table"
            )
        if tokenizer.eos_token_id is not None and model.config.text.eos_token_id not in (None, tokenizer.eos_token_id):
            raise ConfigError(
                f"the model's end token is {model.config.text.eos_token_id}, "
                f"the tokenizer's is {tokenizer.eos_token_id}",
                f"set model.config.text.eos_token_id to {tokenizer.eos_token_id}",
            )
        text, width = model.config.text, model.config.width
        if any(prefix >= width for prefix in settings.matryoshka_widths):
            raise ConfigError(
                f"matryoshka width {max(settings.matryoshka_widths)} is not below the embedding width {width}",
                f"set widths below {width}",
            )
        self.settings = settings
        self.loss_weights = {"pairs": 1.0} | ({"texts": settings.text_text_weight} if settings.text_text_weight else {})
        shape = InputShape(
            model.config.image.image_size,
            text.context_length,
            "model.config.text.context_length",
            resolve_patch_counts(model.config.image, settings),
        )
        special_tokens = find_special_tokens(tokenizer, text)
        super().__init__(
            model,
            sources,
            tokenizer,
            special_tokens,
            shape,
            swap_negatives=settings.swap_negatives,
            second_captions=settings.text_text_weight > 0,
        )
        if settings.swap_negatives and not any(source.has_negatives for source in self.captions.values()):
            raise ConfigError(
                "swap_negatives needs scenes or pairs, but the stage has none",
                'add a scene source, or shards with contents = "pairs"',
            )

    def count_flops(self, batch: Batch) -> int:
        """FLOPs of a forward pass, including second captions and negative captions.

        A NaFlex image counts as a square of the mean number of patches.
        """
        B = self.count_loss_terms(batch)["pairs"]
        extra_texts = B if self.settings.text_text_weight else 0
        if self.settings.swap_negatives:
            extra_texts += sum(len(index) for name, index in batch.items() if self.captions[name].has_negatives)
        text = self.model.text
        counts, side = self.input_shape.patch_counts, None
        if counts:
            side = self.model.config.image.patch_size * math.isqrt(sum(counts) // len(counts))
        return cost.count_flops(self.model, self.model.workload(B, side)) + (
            cost.count_flops(text, text.workload(extra_texts)) if extra_texts else 0
        )

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        inputs = self._make_batch(batch)
        return self.contrastive_losses(inputs, self.model.encode_image(inputs.pixels, inputs.grids).float())

    def contrastive_losses(self, inputs: ImageTextBatch, image_embeddings: Tensor) -> dict[str, Tensor]:
        """Contrastive losses of image embeddings (B, E), summed over the images."""
        texts = [
            part for part in (inputs.caption_ids, inputs.negative_ids, inputs.second_caption_ids) if part is not None
        ]
        v = self.model.encode_text(torch.cat(texts)).float()
        second_captions = v[-len(image_embeddings) :] if inputs.second_caption_ids is not None else None
        v = v if second_captions is None else v[: -len(image_embeddings)]  # captions, then negative captions
        columns = (
            inputs.labels if inputs.negative_labels is None else torch.cat([inputs.labels, inputs.negative_labels])
        )
        losses = {"pairs": self._matryoshka_loss(image_embeddings, v, inputs.labels, columns)}
        if second_captions is not None:
            losses["texts"] = self._matryoshka_loss(second_captions, v, inputs.labels, columns)
        return {
            name: _scale_to_global(value, len(image_embeddings))
            if self._is_distributed
            else value * len(image_embeddings)
            for name, value in losses.items()
        }

    def _matryoshka_loss(self, u: Tensor, v: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Mean of the pair loss over the full width and the Matryoshka widths."""
        total = u.new_zeros(())
        for width in (None, *self.settings.matryoshka_widths):
            a, b = (F.normalize(x[:, :width], dim=-1) for x in (u, v))
            total = total + self._pair_loss(a, b, (rows, columns))
        return total / (1 + len(self.settings.matryoshka_widths))

    def _pair_loss(self, u: Tensor, v: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
        model, distributed = self.model, self._is_distributed
        if model.bias is None:
            exchange = GatherExchange(v, "sum") if distributed else LOCAL_EXCHANGE
            return clip_loss(u, v, cap_logit_scale(model.log_scale), labels, exchange=exchange)
        exchange = RingExchange(v, "sum") if distributed else LOCAL_EXCHANGE
        return siglip_loss(u, v, model.scale.float(), model.bias.float(), labels, exchange=exchange)


def resolve_patch_counts(config: Any, settings: ContrastiveSettings) -> tuple[int, ...]:
    """Return the numbers of patches of a NaFlex tower; () for a tower of squares."""
    if getattr(config, "keeps_aspect_ratio", False):
        return settings.patch_counts or (config.grid_size**2,)
    if settings.patch_counts:
        raise ConfigError(
            "patch_counts needs a NaFlex tower, but this tower takes squares",
            'set model.config.image.patch_order = "channels_last", or remove patch_counts',
        )
    return ()


def _scale_to_global(loss: Tensor, rows: int) -> Tensor:
    """Scale a mean loss to a sum over this rank's rows, with the gradient of the sum over all ranks' rows.

    Each rank computes its part of that gradient, and the trainer adds the parts.
    """
    global_rows = torch.tensor(float(rows), device=loss.device)
    dist.all_reduce(global_rows)
    return loss * global_rows - (loss * (global_rows - rows)).detach()


def cap_logit_scale(log_scale: Tensor) -> Tensor:
    """The factor of the similarities: exp(log_scale), at most 100."""
    return _ClampWithGradient.apply(log_scale.float(), MAX_LOG_SCALE).exp()


class _ClampWithGradient(torch.autograd.Function):
    """Clamp to a maximum. At the maximum, gradients that would raise the value are 0; others pass through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, maximum: float) -> Tensor:
        ctx.beyond = x >= maximum
        return x.clamp(max=maximum)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore
        return torch.where(ctx.beyond & (gradient < 0), 0, gradient), None


TASKS.register(
    "contrastive",
    TaskSpec(ContrastiveTask, ContrastiveModel, ("captions",), ContrastiveSettings, extract_caption_texts),
)
