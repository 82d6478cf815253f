"""The token-scaling paper's first stage: queries that are fused with a question learn what its answer will be about,
and to differ from each other, before any language model reads them.

    contrast    the end of each group of queries and the answer to its question, in one space, over the whole batch
    orthogonal  the queries of a group, each at right angles to the others

B samples, L tokens of a talk, K questions, A tokens of an answer, n queries of a question, V their width
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import Config
from vitrail.data.named import NamedSource
from vitrail.data.scenes.source import SceneSource
from vitrail.data.talks import QUESTIONS
from vitrail.errors import ConfigError
from vitrail.models.answered import Answered
from vitrail.models.rows import turn_of
from vitrail.nn import cost
from vitrail.objectives import ranks
from vitrail.objectives.contrastive import plain_clip_loss
from vitrail.objectives.queries import joint_loss, orthogonality
from vitrail.processing.text import Tokenizer
from vitrail.tasks.captioned import mark
from vitrail.tasks.contrast import capped_scale
from vitrail.tasks.vlm import MADE, VLMSettings, VLMTask
from vitrail.train.task import Batch


class FuseSettings(Config):
    """
    questions, kinds  as of the task "vlm"; questions about one picture are asked together
    length            tokens of a talk at most
    form              of the contrast: "symmetric", CLIP's, as in the paper's code, or "joint", as the paper writes it
    orthogonal        weight of the queries' loss among themselves
    """

    questions: int = 1
    kinds: tuple[str, ...] = QUESTIONS
    length: int = 40
    form: Literal["symmetric", "joint"] = "symmetric"
    orthogonal: float = 1.0

    def __post_init__(self) -> None:
        if self.orthogonal < 0:
            raise ConfigError(f"a weight of {self.orthogonal:g}", "give 0 or more")


class FuseTask:
    """Questions with the same answer belong to it alike: of "yes" there are many in a batch. Losses are means times the
    pictures."""

    def __init__(
        self,
        model: Answered,
        sources: Mapping[str, NamedSource | SceneSource],
        words: Tokenizer | None,
        settings: FuseSettings,
    ):
        self.model, self.settings = model, settings
        asked: dict[str, Any] = {"questions": settings.questions, "kinds": settings.kinds, "length": settings.length}
        self.talks = VLMTask(model.vlm, sources, words, VLMSettings(turns="together", **asked))
        self.spoken, text = self.talks.spoken, model.config.text
        if text.eos != self.talks.end:
            raise ConfigError(
                f"answers end with {text.eos} to the text tower, and with {self.talks.end} to the tokenizer",
                f"set model.config.text.eos to {self.talks.end}",
            )
        if text.context < settings.length:
            raise ConfigError(
                f"talks of {settings.length} tokens, and a text tower of {text.context}",
                f"set model.config.text.context to {settings.length}: an answer is no longer than its talk",
            )
        self.weights = {"contrast": 1.0, "orthogonal": settings.orthogonal}

    def collate(self, samples: Sequence[Any]) -> Batch:
        return self.talks.collate(samples)

    def counts(self, batch: Batch) -> dict[str, int]:
        return dict.fromkeys(self.weights, sum(len(index) for index in batch.values()))

    def flops(self, batch: Batch) -> int:
        """All but the decoder, which nobody asks, and the text tower for every question."""
        B, vlm, text = self.counts(batch)["contrast"], self.model.vlm, self.model.text
        legs = vlm.legs(self.talks.rows.work(B))
        answers = text.work(B * self.talks.rows.questions, self.settings.length)
        return sum(leg.flops for name, leg in legs.items() if name != "decoder") + cost.flops(text, answers)

    def made(self, batch: Batch) -> Batch:
        return self.talks.made(batch)

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        if MADE + "ids" not in batch:
            batch = self.made(batch)
        model, (pixels, ids, asked) = self.model, (batch[MADE + part] for part in ("pixels", "ids", "asked"))
        B = len(ids)
        groups = model.fuse(pixels, asked)
        answers, labels = self._answers(ids, batch.get(MADE + "since"))  # (B·K, A), (B·K,)
        u = F.normalize(model.end_projection(groups.ends.flatten(0, 1)).float(), dim=-1)
        v = F.normalize(model.encode_answers(answers).float(), dim=-1)
        apart = torch.stack([orthogonality(queries.float()) for queries in groups.queries])  # (K, B)
        return {"contrast": self._contrast(u, v, labels) * B, "orthogonal": apart.mean(0).sum()}

    def _contrast(self, u: Tensor, v: Tensor, labels: Tensor) -> Tensor:
        """Every rank has the loss of the whole batch, and of its gradient as much as makes the whole when all ranks'
        are added up."""
        share = 1.0
        if self.model.training and dist.is_initialized() and dist.get_world_size() > 1:
            mine = len(u)
            u, v, labels = (ranks.gather(x) for x in (u, v, labels))
            share = len(u) / mine / dist.get_world_size()
        scale = capped_scale(self.model.log_scale)
        if self.settings.form == "symmetric":
            return plain_clip_loss(u, v, scale, (labels, labels)) * share
        u, v, labels = (x[labels >= 0] for x in (u, v, labels))
        return joint_loss(scale * u @ v.T, labels[:, None] == labels) * share

    def _answers(self, ids: Tensor, since: Tensor | None) -> tuple[Tensor, Tensor]:
        """What is said behind each question, its end included, of talks (B, L) whose turns begin where `since` says:
        (B·K, A), filled up with ends, and labels of them (B·K,), alike where answers are; −1 where nothing is said."""
        K, L, end = self.talks.rows.questions, ids.shape[1], self.talks.end
        since = torch.zeros_like(ids) if since is None else since.clamp(max=L - 1)
        ends = (ids == end).long()
        before = ends.cumsum(1) - ends
        turn = turn_of(since)
        answer = ((before - before.gather(1, since) == 1) & (turn < K)).long()  # behind the question's end, to its own
        done = answer.cumsum(1)
        place = done - 1 - (done - answer).gather(1, since)
        slot = torch.where(answer > 0, turn * L + place, K * L)  # what is no answer goes behind, and away
        found = (
            ids.new_full((len(ids), K * L + 1), end).scatter(1, slot, ids)[:, :-1].unflatten(1, (K, L)).flatten(0, 1)
        )
        there = (found != end).any(1)
        return found, torch.where(there, mark(found), -1)
