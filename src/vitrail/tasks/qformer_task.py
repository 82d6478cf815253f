"""Training task of a Q-Former with text: the first stage of BLIP-2, with three losses.

    itc  image-text contrast    best query of an image against the first token of a text, both ways, over all ranks
    itm  image-text matching    binary classification of true pairs and of two hard negatives for each
    itg  image-grounded text    next-token loss of the caption

B samples of this rank, G of all ranks, T tokens, Q queries, N features of an image, D feature width, E embedding width
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import Config, FractionBelowOne
from vitrail.data.image_captions import extract_caption_texts
from vitrail.data.named_images import NamedImageSource
from vitrail.data.scenes.scene_source import SceneSource
from vitrail.encoders.text_tower import TextSpecialTokens
from vitrail.errors import ConfigError
from vitrail.models.text_qformer import TextQFormer
from vitrail.nn import Workload, cost
from vitrail.objectives import distributed_contrastive
from vitrail.objectives.query_losses import (
    LABEL_SMOOTHING,
    max_query_similarity,
    sample_hard_negatives,
    smoothed_cross_entropy,
)
from vitrail.processing.tokenizer import Tokenizer
from vitrail.registry import TASKS
from vitrail.tasks.contrastive_task import cap_logit_scale
from vitrail.tasks.image_text_task import ImageTextTask, InputShape
from vitrail.tasks.task_spec import TaskSpec
from vitrail.training.task import Batch

LOSS_NAMES = ("itc", "itm", "itg")
PAD_ID = -1  # padding of token ids


class QFormerSettings(Config):
    """Settings of the Q-Former task.

    weights          loss weights of "itc", "itm" and "itg"; 1 by default
    label_smoothing  of targets, in training only: spread over all texts of the batch (itc) or all tokens (itg)
    """

    weights: dict[str, float] = {}
    label_smoothing: FractionBelowOne = LABEL_SMOOTHING

    def __post_init__(self) -> None:
        if any(name not in LOSS_NAMES for name in self.weights) or any(weight < 0 for weight in self.weights.values()):
            raise ConfigError(f"weights = {self.weights}", f"use the keys {', '.join(LOSS_NAMES)} with values >= 0")


class QFormerTask(ImageTextTask):
    """Trains a Q-Former with the losses itc, itm and itg.

    Each loss is a mean over images (itc), pairs (itm) or tokens (itg), times the number of images. Ranks compare the
    samples of all ranks and take hard negatives from all; matching pairs are never negatives.
    """

    model: TextQFormer

    def __init__(
        self,
        model: TextQFormer,
        sources: Mapping[str, NamedImageSource | SceneSource],
        tokenizer: Tokenizer | None,
        settings: QFormerSettings,
    ):
        config = model.config
        if tokenizer is None:
            raise ConfigError("Q-Former training needs captions, but there is no tokenizer", "add a [tokenizer] table")
        if config.decoder_start_token_id is None or model.log_scale is None:
            raise ConfigError("training needs a text generation head and a logit scale", "set dec and log_scale")
        for name, id in {
            "cls_token_id": config.cls_token_id,
            "eos_token_id": config.eos_token_id,
            "decoder_start_token_id": config.decoder_start_token_id,
        }.items():
            if id >= tokenizer.vocab_size or tokenizer.id_to_token(id) not in tokenizer.special_tokens:
                raise ConfigError(
                    f"model.config.{name} = {id} is not a special token of the tokenizer",
                    f"use the id of one of {tokenizer.special_tokens}, or add one to tokenizer.specials",
                )
        self.settings = settings
        self.loss_weights = {name: settings.weights.get(name, 1.0) for name in LOSS_NAMES}
        shape = InputShape(config.tower.image_size, config.context_length, "model.config.context_length")
        super().__init__(
            model, sources, tokenizer, TextSpecialTokens((config.cls_token_id,), (config.eos_token_id,), PAD_ID), shape
        )

    def count_flops(self, batch: Batch) -> int:
        """FLOPs of a forward pass: tower 1×; Q-Former 1× for itg and queries, 1× for texts, 3× for itm."""
        B, model, qformer = self.count_loss_terms(batch)["itc"], self.model, self.model.qformer
        N, T, Q = model.config.features_per_image, model.config.context_length, qformer.config.num_queries
        total = cost.count_flops(model, model.workload(B))  # images and texts
        # Plus the caption tokens.
        total += qformer.count_pass_flops("itg", B, N, T) - qformer.count_pass_flops("itg", B, N, 0)
        total += qformer.count_pass_flops("itm", 3 * B, N, T)
        heads = {model.matcher: 3 * B * Q, model.writer: B * T}
        total += sum(
            cost.count_flops(head, Workload(tokens=n, attention_pairs=0))
            for head, n in heads.items()
            if head is not None
        )
        return total

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        inputs, model = self._make_batch(batch), self.model
        ids, B = self._trim_padding(inputs.caption_ids), len(inputs.caption_ids)
        features = model.forward_features(inputs.pixels)  # (B, N, D)
        # Queries do not attend to the text, so itc uses them too.
        query_states, text_states = model.encode_for_generation(features, ids)
        u = F.normalize(model.qformer.project(query_states).float(), dim=-1)  # (B, Q, E)
        v = F.normalize(model.encode_text(ids).float(), dim=-1)  # (B, E)
        assert model.log_scale is not None
        scale = cap_logit_scale(model.log_scale)
        to_texts = scale * max_query_similarity(u, self._gather_ranks(v))  # (B, G), per image
        to_images = scale * max_query_similarity(self._gather_ranks(u), v).T  # (B, G), per text
        is_match = inputs.labels[:, None] == self._gather_ranks(inputs.labels)
        smoothing = self.settings.label_smoothing if model.training else 0.0  # validation reports the plain loss
        itc = [smoothed_cross_entropy(logits, is_match, smoothing).sum() for logits in (to_texts, to_images)]
        negatives = sample_hard_negatives(to_images, is_match), sample_hard_negatives(to_texts, is_match)
        return {
            "itc": torch.stack(itc).sum() / 2,
            "itm": self._matching_loss(features, ids, *negatives) * B,
            "itg": self._captioning_loss(text_states, ids, smoothing) * B,
        }

    def _matching_loss(self, features: Tensor, ids: Tensor, negative_images: Tensor, negative_texts: Tensor) -> Tensor:
        """Mean matching loss of true pairs, of texts with a negative image, and of images with a negative text.

        `negative_images` and `negative_texts` (B,) index the samples of all ranks; −1 is none.
        """
        pair_images = torch.cat([features, self._gather_ranks(features)[negative_images.clamp_min(0)], features])
        pair_texts = torch.cat([ids, ids, self._gather_ranks(ids)[negative_texts.clamp_min(0)]])
        labels = torch.cat([torch.ones_like(negative_texts), negative_images.clamp_max(0), negative_texts.clamp_max(0)])
        return F.cross_entropy(
            self.model.compute_match_logits(pair_images, pair_texts).float(), labels, ignore_index=-1
        )

    def _captioning_loss(self, hidden: Tensor, ids: Tensor, smoothing: float) -> Tensor:
        """Mean next-token loss over caption tokens, end token included, from hidden states (B, T, V)."""
        states, targets = hidden[:, :-1], ids[:, 1:]
        if not torch.compiler.is_compiling():  # compiled batches must have one shape
            is_token = targets != PAD_ID
            states, targets = states[is_token], targets[is_token]
        logits = self.model.compute_logits(states).flatten(0, -2).float()
        return F.cross_entropy(logits, targets.flatten(), label_smoothing=smoothing, ignore_index=PAD_ID)

    def _trim_padding(self, ids: Tensor) -> Tensor:
        """Trim padding to the longest text. Compiled and distributed runs keep one shape for all batches."""
        if self._is_distributed or torch.compiler.is_compiling():
            return ids
        return ids[:, : int((ids != PAD_ID).sum(1).max())]

    def _gather_ranks(self, x: Tensor) -> Tensor:
        """Gather the samples of all ranks, (B, …) → (G, …)."""
        return distributed_contrastive.gather_with_gradient(x) if self._is_distributed else x


TASKS.register("qformer", TaskSpec(QFormerTask, TextQFormer, ("captions",), QFormerSettings, extract_caption_texts))
