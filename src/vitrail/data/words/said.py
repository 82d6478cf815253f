"""Questions and answers as tensors.

B sentences, P pieces of a question, Q pieces of an answer, K kinds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from vitrail.data.words.facts import Draws
from vitrail.data.words.frames import Group, Thing
from vitrail.data.words.templates import CAPTIONS, FOLLOW_UPS, QUESTIONS
from vitrail.data.words.words import Words

KINDS = (*QUESTIONS, *CAPTIONS, *FOLLOW_UPS)  # a kind's number is its place here

Slots = dict[str, Tensor | Thing | Group]


@dataclass(frozen=True, eq=False)
class Said:
    """Questions and answers as rows of pieces; both are empty where `valid` is False."""

    question: Tensor  # (B, P)
    answer: Tensor  # (B, Q)
    kind: Tensor  # (B,) row of KINDS
    template: Tensor  # (B,) row of the kind's questions, the held-out ones behind the others
    label: Tensor  # (B,) the answer as a number: no and yes, a count, a colour, a ninth, a concept, a letter …
    box: Tensor  # (B, 4) of what is to be found, in 1/GRID; −1 in all other kinds
    valid: Tensor  # (B,)

    def __len__(self) -> int:
        return len(self.valid)

    def __getitem__(self, rows: slice | Tensor) -> "Said":
        return Said(*(getattr(self, f.name)[rows] for f in fields(self)))

    def to(self, device: torch.device | str) -> "Said":
        return Said(*(getattr(self, f.name).to(device) for f in fields(self)))


class Draft(NamedTuple):
    """What a kind has decided, before it is put into words."""

    slots: Slots
    label: Tensor  # (B,)
    valid: Tensor  # (B,)
    answer: Slots = {}
    says: Tensor | None = None  # (B,) which of the kind's answers; drawn, if not said
    more: Tensor | None = None  # (B, …) pieces behind the answer
    box: Tensor | None = None  # (B, 4)


def said(words: Words, draws: Draws, kind: str, draft: Draft) -> Said:
    """A draft in words, each in a template of its own."""
    sort, valid = words.sorts[kind], draft.valid
    template = draws.template("question", sort.question)
    says = draws.template("answer", sort.answer) if draft.says is None else draft.says
    answer = sort.answer.fill(says, **draft.answer)
    if draft.more is not None:
        answer = torch.cat([answer, draft.more], 1)
    box = template.new_full((len(template), 4), -1)
    return Said(
        question=sort.question.fill(template, **draft.slots) * valid[:, None],
        answer=answer * valid[:, None],
        kind=torch.full_like(template, KINDS.index(kind)),
        template=template,
        label=draft.label * valid,
        box=box if draft.box is None else torch.where(valid[:, None], draft.box, box),
        valid=valid,
    )


def joined(parts: Sequence[Said]) -> Said:
    """Batches one behind the other; shorter sentences are filled up with empty pieces."""
    wide = {name: max(getattr(part, name).shape[1] for part in parts) for name in ("question", "answer")}
    filled = [
        replace(
            part, **{name: pad(getattr(part, name), (0, n - getattr(part, name).shape[1])) for name, n in wide.items()}
        )
        for part in parts
    ]
    return Said(*(torch.cat([getattr(part, f.name) for part in filled]) for f in fields(Said)))


def arranged(parts: Sequence[Said], key: Tensor, n: int) -> Said:
    """Of K batches about the same scenes, the n first of each scene by key (B, K), valid ones before the others. Scene
    by scene: sentence s·n + i is the i-th about scene s."""
    scenes = len(parts[0])
    valid = torch.stack([part.valid for part in parts], 1)
    first = (key + (~valid).long() * (1 << 40)).argsort(dim=1, stable=True)[:, :n]  # (B, n)
    return joined(parts)[(first * scenes + torch.arange(scenes, device=key.device)[:, None]).flatten()]
