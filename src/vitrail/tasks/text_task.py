"""Next-token prediction task on plain text.

B rows, L tokens
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vitrail.backbones.decoder import Decoder
from vitrail.config import Config, NonNegativeFloat
from vitrail.nn import Workload, cost
from vitrail.registry import TASKS
from vitrail.tasks.expert_balance import ExpertBalance
from vitrail.tasks.qa_tokens import answer_loss
from vitrail.tasks.task_spec import TaskSpec
from vitrail.training.task import Batch


class TextSettings(Config):
    """Settings of the text task.

    balancing_loss  weight of the load-balancing loss of a mixture of experts, in training only; default: the
                    router_aux_loss_coef of the model's config
    """

    balancing_loss: NonNegativeFloat | None = None


class TextTask:
    """Trains a decoder on windows of token ids (L + 1,) with the next-token loss, and balances its experts."""

    def __init__(self, model: Decoder, settings: TextSettings | None = None):
        self.model = model
        self.balance = ExpertBalance(model, (settings or TextSettings()).balancing_loss)
        self.loss_weights = {"text": 1.0, **self.balance.loss_weights}

    def collate(self, samples: Sequence[np.ndarray]) -> Batch:
        ids = torch.from_numpy(np.stack(samples))
        return {"ids": ids[:, :-1], "targets": ids[:, 1:].contiguous()}

    def count_loss_terms(self, batch: Batch) -> dict[str, int]:
        return {"text": batch["targets"].numel(), **self.balance.count_loss_terms()}

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        hidden = self.model.forward_hidden(batch["ids"])  # (B, L, W)
        loss = answer_loss(self.model, hidden, batch["targets"], "sum", 0.0)
        return {"text": loss, **self.balance.pop_losses()}

    def count_tokens(self, batch: Batch) -> int:
        return batch["ids"].numel()

    def count_flops(self, batch: Batch) -> int:
        rows, length = batch["ids"].shape
        return cost.count_flops(self.model, Workload.causal_attention(length, rows))


TASKS.register(
    "text",
    TaskSpec(lambda model, _sources, _tokenizer, settings: TextTask(model, settings), Decoder, ("text",), TextSettings),
)
