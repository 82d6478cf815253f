"""Texts about pictures, from a unified model: the picture is read first, then the question, then the answer is written.

B rows, n tokens of the longest question, h × w codes
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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


@torch.no_grad()
def likelihoods(
    model: Unified, seen: Tensor, questions: Sequence[str], answers: Sequence[str], tokenizer: Tokenizer
) -> Tensor:
    """(B,): how likely each answer is as the whole of what is said to a question about a picture `seen` (B, h, w, ·):
    the sum of the logarithms of the probabilities of its tokens and of the end."""
    if not len(seen) == len(questions) == len(answers):
        raise ConfigError(
            f"{len(seen)} pictures, {len(questions)} questions, {len(answers)} answers", "give one of each a row"
        )
    if tokenizer.eos is None:
        raise ConfigError("an answer ends with an end token, and the tokenizer has none", "give the model's own")
    asked = [[*tokenizer.encode(text), tokenizer.eos] for text in questions]
    said = [[*tokenizer.encode(text), tokenizer.eos] for text in answers]
    rows = [torch.tensor(a + b) for a, b in zip(asked, said, strict=True)]
    ids = pad_sequence(rows, batch_first=True, padding_value=tokenizer.eos).to(seen.device)  # (B, n)
    counts = torch.tensor([len(row) for row in rows], device=ids.device)
    begins = torch.tensor([len(row) for row in asked], device=ids.device)
    hidden = model(model.shown(seen), model.words(ids, counts))[:, -ids.shape[1] :]
    # The token at i is foretold by what is known at i − 1; of every row only those of its answer count.
    told = model.decoder.logits(hidden[:, :-1]).float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    place = torch.arange(1, ids.shape[1], device=ids.device)
    return told.masked_fill((place < begins[:, None]) | (place >= counts[:, None]), 0).sum(1)
