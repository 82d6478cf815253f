"""Next-token prediction on text.

B rows, L tokens
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vitrail.backbones.decoder import Decoder
from vitrail.nn import Work, cost
from vitrail.objectives.cross_entropy import linear_cross_entropy
from vitrail.train.task import Batch


class TextTask:
    """Windows of ids (L + 1,) → the loss of each token given those before it."""

    def __init__(self, model: Decoder):
        self.model = model
        self.weights = {"text": 1.0}

    def collate(self, samples: Sequence[np.ndarray]) -> Batch:
        ids = torch.from_numpy(np.stack(samples))
        return {"ids": ids[:, :-1], "targets": ids[:, 1:].contiguous()}

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"text": batch["targets"].numel()}

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        hidden = self.model.hidden(batch["ids"])  # (B, L, W)
        head = self.model.embed.weight if self.model.head is None else self.model.head.weight
        return {"text": linear_cross_entropy(hidden.flatten(0, 1), head, batch["targets"].flatten(), reduction="sum")}

    def flops(self, batch: Batch) -> int:
        rows, length = batch["ids"].shape
        return cost.flops(self.model, Work.causal(length, rows))
