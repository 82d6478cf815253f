"""Texts about pictures, from a unified model: the picture is read first, then the question, then the answer is written.

B rows, n tokens of the longest question, h × w codes
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.generate.sampling import GREEDY, Sampling
from vitrail.generate.text import Written, generate
from vitrail.models.unified import Unified
from vitrail.processing.text import Tokenizer


class Reading:
    """A stepper that has seen the pictures (B, h, w, ·), as `Unified.look` gives them, before the words."""

    def __init__(self, model: Unified, seen: Tensor | None, rows: int):
        self.model, self.seen = model, seen
        self.cache = model.decoder.cache(rows)
        self.next = torch.zeros(rows, 1, dtype=torch.long)  # where the next token of each row stands

    def prefill(self, ids: Tensor, counts: Tensor) -> Tensor:
        model, decoder = self.model, self.model.decoder
        ids, counts = (x.to(decoder.embed.weight.device) for x in (ids, counts))
        pieces = [model.words(ids, counts)]
        if self.seen is not None:
            pieces.insert(0, model.shown(self.seen))
        laid = model.lay(*pieces)
        last = laid.x.shape[1] - ids.shape[1] + counts - 1  # (B,) of the last token that is there
        rows = torch.arange(len(ids), device=ids.device)
        hidden = decoder.hidden(
            embeds=laid.x, positions=laid.positions, cache=self.cache, counts=last + 1, spans=laid.plan.spans
        )
        flat = laid.positions if laid.positions.ndim == 2 else laid.positions.amax(-1)
        self.next = flat[rows, last][:, None] + 1
        return decoder.logits(hidden[rows, last])

    def step(self, ids: Tensor) -> Tensor:
        decoder = self.model.decoder
        hidden = decoder.hidden(ids[:, None], positions=self.next, cache=self.cache)
        self.next = self.next + 1
        return decoder.logits(hidden)[:, 0]


@torch.no_grad()
def answer(
    model: Unified,
    seen: Tensor | None,
    questions: Sequence[str],
    tokenizer: Tokenizer,
    *,
    max_new: int = 64,
    sampling: Sampling = GREEDY,
    stop_strings: Sequence[str] = (),
) -> list[Written]:
    """What the model says to each question about its picture: `seen` (B, h, w, ·), or about none."""
    if seen is not None and len(seen) != len(questions):
        raise ConfigError(f"{len(seen)} pictures and {len(questions)} questions", "give a picture for each question")
    if tokenizer.eos is None:
        raise ConfigError("an answer ends with an end token, and the tokenizer has none", "give the model's own")
    prompts = [[*tokenizer.encode(question), tokenizer.eos] for question in questions]
    return generate(
        model.decoder,
        prompts,
        max_new=max_new,
        sampling=sampling,
        tokenizer=tokenizer,
        stop_ids=[tokenizer.eos],
        stop_strings=stop_strings,
        stepper=lambda _decoder, rows, _capacity: Reading(model, seen, rows),
    )
