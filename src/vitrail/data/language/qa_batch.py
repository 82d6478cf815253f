"""Questions and answers as tensors of text pieces.

Shapes: B sentences, P pieces of a question, Q pieces of an answer, K kinds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from vitrail.data.language.compiled_templates import ObjectGroups, ObjectPhrase
from vitrail.data.language.scene_facts import LanguageRandom
from vitrail.data.language.scene_language import SceneLanguage
from vitrail.data.language.templates import CAPTION_KINDS, FOLLOW_UP_KINDS, OPTIONAL_KINDS, QUESTION_KINDS
from vitrail.data.scenes.scene import TensorBatch

# A kind's id is its index.
QA_KINDS = (
    *(kind for kind in QUESTION_KINDS if kind not in OPTIONAL_KINDS),
    *CAPTION_KINDS,
    *FOLLOW_UP_KINDS,
    *OPTIONAL_KINDS,
)

TemplateValues = dict[str, Tensor | ObjectPhrase | ObjectGroups]


@dataclass(frozen=True, eq=False)
class SceneQABatch(TensorBatch):
    """Questions and answers as rows of pieces. Both are empty if `valid` is False."""

    question: Tensor  # (B, P)
    answer: Tensor  # (B, Q)
    kind: Tensor  # (B,) row of KINDS
    template: Tensor  # (B,) index of the question template; held-out ones come last
    label: Tensor  # (B,) the answer as a number: no/yes, count, colour, ninth, concept, letter …
    box: Tensor  # (B, 4) box of the object for grounding, in 1/GRID; −1 for other kinds
    valid: Tensor  # (B,)

    def __len__(self) -> int:
        return len(self.valid)


class QADraft(NamedTuple):
    """Content of questions and answers of one kind, before rendering."""

    question_values: TemplateValues
    label: Tensor  # (B,)
    valid: Tensor  # (B,)
    answer_values: TemplateValues = {}
    answer_template: Tensor | None = None  # (B,) index of the answer template; default: random
    answer_suffix: Tensor | None = None  # (B, …) pieces after the answer
    box: Tensor | None = None  # (B, 4)


def render_qa(language: SceneLanguage, rng: LanguageRandom, kind: str, draft: QADraft) -> SceneQABatch:
    """Render a draft to pieces, with a random template per sentence."""
    sort, valid = language.qa_templates[kind], draft.valid
    template = rng.choose_template("question", sort.question)
    template_index = (
        rng.choose_template("answer", sort.answer) if draft.answer_template is None else draft.answer_template
    )
    answer = sort.answer.fill(template_index, **draft.answer_values)
    if draft.answer_suffix is not None:
        answer = torch.cat([answer, draft.answer_suffix], 1)
    box = template.new_full((len(template), 4), -1)
    return SceneQABatch(
        question=sort.question.fill(template, **draft.question_values) * valid[:, None],
        answer=answer * valid[:, None],
        kind=torch.full_like(template, QA_KINDS.index(kind)),
        template=template,
        label=draft.label * valid,
        box=box if draft.box is None else torch.where(valid[:, None], draft.box, box),
        valid=valid,
    )


def concat_qa(batches: Sequence[SceneQABatch]) -> SceneQABatch:
    """Concatenate batches. Shorter sentences are padded with empty pieces."""
    widths = {name: max(getattr(part, name).shape[1] for part in batches) for name in ("question", "answer")}
    padded = [
        replace(
            part,
            **{name: pad(getattr(part, name), (0, n - getattr(part, name).shape[1])) for name, n in widths.items()},
        )
        for part in batches
    ]
    return SceneQABatch(*(torch.cat([getattr(part, f.name) for part in padded]) for f in fields(SceneQABatch)))


def select_qa(batches: Sequence[SceneQABatch], sort_key: Tensor, per_scene: int) -> SceneQABatch:
    """Select the first n of K batches per scene by key (B, K), valid ones first.

    The result is ordered by scene: sentence s·n + i is the i-th about scene s.
    """
    scenes = len(batches[0])
    valid = torch.stack([part.valid for part in batches], 1)
    first = (sort_key + (~valid).long() * (1 << 40)).argsort(dim=1, stable=True)[:, :per_scene]  # (B, n)
    return concat_qa(batches)[(first * scenes + torch.arange(scenes, device=sort_key.device)[:, None]).flatten()]
