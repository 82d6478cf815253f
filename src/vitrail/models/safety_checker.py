"""Safety checker of Stable Diffusion: flags images whose CLIP embedding is near that of a concept.

Shapes: B images, E embedding width, C concepts, S special concepts.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.encoders.vit import ViT, ViTConfig
from vitrail.nn import Workload, cost
from vitrail.registry import MODELS

SPECIAL_MARGIN = 0.01  # added to all scores of an image that is near a special concept


class SafetyCheckerConfig(Config):
    """Config of a `SafetyChecker`: its tower, the width of the embeddings, and the numbers of concepts."""

    image: ViTConfig
    embed_dim: int
    num_concepts: int = 17
    num_special_concepts: int = 3


@MODELS.register("safety-checker")
class SafetyChecker(nn.Module):
    """Compares images (B, 3, H, W) with embeddings of concepts; each concept has a threshold of its cosine."""

    Config = SafetyCheckerConfig

    def __init__(self, config: SafetyCheckerConfig):
        super().__init__()
        self.config = config
        self.image = ViT(config.image)
        self.image_projection = nn.Linear(config.image.pooled_width, config.embed_dim, bias=False)
        for kind, count in (("concepts", config.num_concepts), ("special", config.num_special_concepts)):
            embeddings = nn.Parameter(torch.ones(count, config.embed_dim), requires_grad=False)
            setattr(self, kind, embeddings)
            setattr(self, f"{kind}_thresholds", nn.Parameter(torch.ones(count), requires_grad=False))

    @torch.no_grad()
    def forward(self, pixels: Tensor) -> Tensor:
        """Return the scores of the concepts (B, C): positive where an image shows one."""
        embeddings = self.image_projection(self.image.forward_pooled(pixels))
        special = self._compute_scores(embeddings, "special")
        margin = SPECIAL_MARGIN * (special.round(decimals=3) > 0).any(-1, keepdim=True)
        return (self._compute_scores(embeddings, "concepts") + margin).round(decimals=3)

    def is_flagged(self, pixels: Tensor) -> Tensor:
        """Return whether an image shows a concept, (B,). Scores that are not finite count as one."""
        scores = self(pixels)
        return ((scores > 0) | ~scores.isfinite()).any(-1)

    def _compute_scores(self, embeddings: Tensor, kind: str) -> Tensor:
        """Return cosines above the thresholds of one kind of concepts, in float32."""
        concepts: Any = getattr(self, kind)
        thresholds: Any = getattr(self, f"{kind}_thresholds")
        cosine = F.normalize(embeddings, dim=-1) @ F.normalize(concepts, dim=-1).T
        return cosine.float() - thresholds.float()

    def workload(self, batch_size: int = 1) -> Workload:
        """Return the workload of a batch of images of the native size."""
        return self.image.workload(batch_size)


@cost.count_flops.register
def _(module: SafetyChecker, work: Workload) -> int:
    pooled = Workload(tokens=work.sequences, attention_pairs=0)
    comparisons = 2 * work.sequences * module.config.embed_dim
    concepts = module.config.num_concepts + module.config.num_special_concepts
    towers = cost.count_flops(module.image, work) + cost.count_flops(module.image_projection, pooled)
    return towers + comparisons * concepts


@cost.count_bytes.register
def _(module: SafetyChecker, work: Workload) -> cost.MemoryBytes:
    memory = sum(p.numel() * p.element_size() for p in module.parameters())
    return cost.MemoryBytes(weights=memory, read=memory)
