"""Pretraining task of queries that are fused with questions: the first stage of the token-scaling paper.

It trains the queries before a language model uses them, with two losses:

    contrast    contrastive loss between the last query of each question and the answer, over the whole batch
    orthogonal  pushes the queries of one question to be orthogonal to each other

B samples, L text tokens of a row, K questions, A tokens of an answer, n queries of a question, V their width
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from vitrail.config import Config, NonNegativeFloat
from vitrail.data.named_images import NamedImageSource
from vitrail.data.qa import QUESTION_KINDS, extract_qa_texts
from vitrail.data.scenes.scene_source import SceneSource
from vitrail.errors import ConfigError
from vitrail.models.query_pretraining import QueryPretrainingModel
from vitrail.models.vlm_cost import make_row_workload
from vitrail.nn import cost
from vitrail.objectives import distributed_contrastive
from vitrail.objectives.contrastive_loss import reference_clip_loss
from vitrail.objectives.query_losses import joint_contrastive_loss, query_orthogonality_loss
from vitrail.processing.tokenizer import Tokenizer
from vitrail.registry import TASKS
from vitrail.stream import count_turns
from vitrail.tasks.contrastive_task import cap_logit_scale
from vitrail.tasks.image_text_task import hash_texts
from vitrail.tasks.task_spec import TaskSpec
from vitrail.tasks.vlm_task import PREPARED_PREFIX, VLMSettings, VLMTask
from vitrail.training.task import Batch


class QueryPretrainingSettings(Config):
    """Settings of the query pretraining task.

    num_questions         questions per scene; questions about one image form one conversation
    question_kinds        kinds of questions
    max_length            tokens of the questions and answers at most
    contrastive_form      "symmetric": CLIP's loss, as in the paper's code; "joint": the formula of the paper
    orthogonality_weight  weight of the orthogonality loss
    """

    num_questions: int = 1
    question_kinds: tuple[str, ...] = QUESTION_KINDS
    max_length: int = 40
    contrastive_form: Literal["symmetric", "joint"] = "symmetric"
    orthogonality_weight: NonNegativeFloat = 1.0


class QueryPretrainingTask:
    """Trains queries against the answers to their questions.

    Questions with equal answers are positives of each other: a batch contains many "yes". Losses are means times the
    number of images.
    """

    def __init__(
        self,
        model: QueryPretrainingModel,
        sources: Mapping[str, NamedImageSource | SceneSource],
        tokenizer: Tokenizer | None,
        settings: QueryPretrainingSettings,
    ):
        self.model, self.settings = model, settings
        vlm_settings = VLMSettings(
            turns="together",
            num_questions=settings.num_questions,
            question_kinds=settings.question_kinds,
            max_length=settings.max_length,
        )
        self.vlm_task = VLMTask(model.vlm, sources, tokenizer, vlm_settings)
        self.chat_tokenizer, text = self.vlm_task.chat_tokenizer, model.config.text
        if text.eos_token_id != self.vlm_task.eos_token_id:
            raise ConfigError(
                f"the text tower's end token is {text.eos_token_id}, the tokenizer's is {self.vlm_task.eos_token_id}",
                f"set model.config.text.eos_token_id to {self.vlm_task.eos_token_id}",
            )
        if text.context_length < settings.max_length:
            raise ConfigError(
                f"max_length = {settings.max_length} exceeds the text tower's context length of {text.context_length}",
                f"set model.config.text.context_length to {settings.max_length}: answers can be that long",
            )
        self.loss_weights = {"contrast": 1.0, "orthogonal": settings.orthogonality_weight}

    def collate(self, samples: Sequence[Any]) -> Batch:
        return self.vlm_task.collate(samples)

    def count_loss_terms(self, batch: Batch) -> dict[str, int]:
        return dict.fromkeys(self.loss_weights, sum(len(index) for index in batch.values()))

    def count_flops(self, batch: Batch) -> int:
        """FLOPs of a forward pass: all components except the decoder, and the text tower for every question."""
        B, vlm, text = self.count_loss_terms(batch)["contrast"], self.model.vlm, self.model.text
        components = vlm.cost_components(make_row_workload(vlm, self.vlm_task.row_template, B))
        answers = text.workload(B * self.vlm_task.row_template.num_questions, self.settings.max_length)
        return sum(component.flops for name, component in components.items() if name != "decoder") + cost.count_flops(
            text, answers
        )

    def prepare_batch(self, batch: Batch) -> Batch:
        return self.vlm_task.prepare_batch(batch)

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        if PREPARED_PREFIX + "ids" not in batch:
            batch = self.prepare_batch(batch)
        model, (pixels, ids, questions) = (
            self.model,
            (batch[PREPARED_PREFIX + part] for part in ("pixels", "ids", "question_ids")),
        )
        B = len(ids)
        groups = model.encode_queries(pixels, questions)
        answers, labels = self._split_answers(ids, batch.get(PREPARED_PREFIX + "turn_starts"))  # (B·K, A), (B·K,)
        u = F.normalize(model.end_projection(groups.end_states.flatten(0, 1)).float(), dim=-1)
        v = F.normalize(model.encode_answers(answers).float(), dim=-1)
        orthogonal = torch.stack([query_orthogonality_loss(queries.float()) for queries in groups.queries])  # (K, B)
        return {"contrast": self._contrastive_loss(u, v, labels) * B, "orthogonal": orthogonal.mean(0).sum()}

    def _contrastive_loss(self, u: Tensor, v: Tensor, labels: Tensor) -> Tensor:
        """Contrastive loss over the batches of all ranks, scaled so that gradients summed over ranks are exact."""
        gradient_scale = 1.0
        if self.model.training and dist.is_initialized() and dist.get_world_size() > 1:
            num_local = len(u)
            u, v, labels = (distributed_contrastive.gather_with_gradient(x) for x in (u, v, labels))
            gradient_scale = len(u) / num_local / dist.get_world_size()
        scale = cap_logit_scale(self.model.log_scale)
        if self.settings.contrastive_form == "symmetric":
            return reference_clip_loss(u, v, scale, (labels, labels)) * gradient_scale
        u, v, labels = (x[labels >= 0] for x in (u, v, labels))
        return joint_contrastive_loss(scale * u @ v.T, labels[:, None] == labels) * gradient_scale

    def _split_answers(self, ids: Tensor, turn_starts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Split rows (B, L) into answers (B·K, A), end token included, and their labels (B·K,).

        Answers are padded with end tokens. Equal answers have equal labels; a missing answer has label −1.
        """
        K, L, end = self.vlm_task.row_template.num_questions, ids.shape[1], self.vlm_task.eos_token_id
        turn_starts = torch.zeros_like(ids) if turn_starts is None else turn_starts.clamp(max=L - 1)
        is_end = (ids == end).long()
        ends_before = is_end.cumsum(1) - is_end
        turn = count_turns(turn_starts)
        is_answer = (
            (ends_before - ends_before.gather(1, turn_starts) == 1) & (turn < K)
        ).long()  # from the question's end token to the answer's
        answer_tokens = is_answer.cumsum(1)
        position = answer_tokens - 1 - (answer_tokens - is_answer).gather(1, turn_starts)
        # Other tokens go to an extra column that is dropped.
        slot = torch.where(is_answer > 0, turn * L + position, K * L)
        answers = (
            ids.new_full((len(ids), K * L + 1), end).scatter(1, slot, ids)[:, :-1].unflatten(1, (K, L)).flatten(0, 1)
        )
        has_answer = (answers != end).any(1)
        return answers, torch.where(has_answer, hash_texts(answers), -1)


TASKS.register(
    "query-pretraining",
    TaskSpec(QueryPretrainingTask, QueryPretrainingModel, ("questions",), QueryPretrainingSettings, extract_qa_texts),
)
