"""Embedding pipeline of a contrastive model: images and texts in one space, and zero-shot classification.

Shapes: N images or texts, C classes, E embedding width.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail import hub
from vitrail.errors import CheckpointError, ConfigError
from vitrail.evals.contrastive_embedder import ContrastiveEmbedder, tokenize_texts
from vitrail.evals.image_feature_extractor import batch_images, to_finite_cpu
from vitrail.evals.suites.zero_shot import TEMPLATES, zero_shot_classifier
from vitrail.hub.checkpoint_info import resolve_path
from vitrail.models.contrastive_model import ContrastiveConfig, ContrastiveModel
from vitrail.models.qlip_model import QLIPConfig
from vitrail.pipelines.base import load_model, read_config_of
from vitrail.processing.image_loading import load_image
from vitrail.processing.image_preprocessor import ImagePreprocessor
from vitrail.processing.tokenizer import Tokenizer


class ZeroShotResult(NamedTuple):
    """Zero-shot classification of images.

    labels         class name of each image
    probabilities  (N, C), in the order of the class names
    """

    labels: list[str]
    probabilities: Tensor


def load_text_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """Load the tokenizer of a model that embeds texts."""
    if not (resolve_path(name_or_path) / "tokenizer.json").is_file():
        raise CheckpointError(
            f"{name_or_path} has no tokenizer.json", "copy the tokenizer of its training to the folder"
        )
    return hub.load_tokenizer(name_or_path)


class EmbeddingPipeline:
    """Embed images and texts with a CLIP or SigLIP model: `vitrail.load(folder)`.

    Embeddings are float32 on the CPU, with length 1. The tokenizer is loaded when the first text is embedded.
    `num_truncated` counts the texts that exceeded the context length.
    """

    def __init__(
        self, model: ContrastiveModel, preprocessing: ImagePreprocessor, load_tokenizer: Callable[[], Tokenizer]
    ):
        self.model, self.preprocessing, self._load_tokenizer = model.eval(), preprocessing, load_tokenizer
        self.num_truncated = 0

    @classmethod
    def load(
        cls,
        name_or_path: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "EmbeddingPipeline":
        """Load a contrastive model, or the contrastive part of a QLIP model."""
        config = read_config_of(name_or_path)
        if not isinstance(config, ContrastiveConfig | QLIPConfig):
            kind = type(config).__name__.removesuffix("Config")
            raise CheckpointError(f"{name_or_path} is a {kind}, not a contrastive model", "give a CLIP or a SigLIP")
        preprocessing = ImagePreprocessor.from_folder(resolve_path(name_or_path), config.image)
        model: Any = load_model(name_or_path, device, dtype)
        model = getattr(model, "contrastive_model", model)
        return cls(model, preprocessing, lambda: load_text_tokenizer(name_or_path))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the checkpoint."""
        return self._load_tokenizer()

    def build_embedder(self, batch_size: int = 256) -> ContrastiveEmbedder:
        """Build the embedder that suites use, which shows its progress."""
        return ContrastiveEmbedder(self.model, self.preprocessing, self.tokenizer, batch_size=batch_size)

    @torch.no_grad()
    def encode_images(self, images: Any) -> Tensor:
        """Embed one image or a list of images: (N, E)."""
        several = list(images) if isinstance(images, list | tuple) else [images]
        if not several:
            raise ConfigError("there is no image", "give at least one image")
        return self.encode_pixels([self.preprocessing(load_image(image)) for image in several])

    @torch.no_grad()
    def encode_pixels(self, pixels: Sequence[Tensor]) -> Tensor:
        """Embed preprocessed images (3, H, W), of unequal sizes for a NaFlex tower: (N, E)."""
        parameter = next(self.model.parameters())
        batch, grids = batch_images(self.model.image, pixels)
        batch = batch.to(parameter.device, parameter.dtype)
        return F.normalize(to_finite_cpu(self.model.encode_image(batch, grids)), dim=-1)

    @torch.no_grad()
    def encode_texts(self, texts: str | Sequence[str]) -> Tensor:
        """Embed one text or a list of texts: (N, E). Longer texts than the context are truncated and counted."""
        several = [texts] if isinstance(texts, str) else list(texts)
        if not several:
            raise ConfigError("there is no text", "give at least one text")
        ids, num_truncated = tokenize_texts(several, self.tokenizer, self.model.config.text)
        self.num_truncated += num_truncated
        device = next(self.model.parameters()).device
        return F.normalize(to_finite_cpu(self.model.encode_text(ids.to(device))), dim=-1)

    def zero_shot(
        self, images: Any, class_names: Sequence[str], templates: Sequence[str] = TEMPLATES
    ) -> ZeroShotResult:
        """Classify images by the nearest class embedding, the mean over prompt templates with {} for the class."""
        classes = zero_shot_classifier(self.encode_texts, list(class_names), templates)  # (C, E)
        logits = self.encode_images(images) @ classes.T * self.model.log_scale.exp().item()
        probabilities = logits.softmax(-1)
        return ZeroShotResult([class_names[int(i)] for i in probabilities.argmax(-1)], probabilities)
