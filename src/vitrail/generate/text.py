"""Text from a decoder, token by token: unequal prompts side by side, each ending where it should.

The loop knows a model only through two calls, `prefill` and `step`, which give the logits of the next token. `Eager`
makes them with a cache that grows, `Captured` (see captured.py) with a CUDA graph.

B rows, L tokens of the longest prompt, V vocabulary
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from vitrail.backbones.decoder import Decoder
from vitrail.errors import ConfigError, TextError
from vitrail.generate.rows import Ended, Row
from vitrail.generate.sampling import Dice, Sampling, choose

if TYPE_CHECKING:  # a machine that only computes has no tokenizers
    from vitrail.processing.text import Tokenizer

Prompt = str | Sequence[int]


class Stepper(Protocol):
    """What the loop asks of a model. The rows are the same in every call; a row that has ended is still fed. Prompts
    come on the host, which a stepper that has no need of them on the device is not made to wait for."""

    def prefill(self, ids: Tensor, counts: Tensor) -> Tensor:
        """Take the prompts, ids (B, L) of which counts (B,) are real, and give each row's next logits (B, V)."""
        ...

    def step(self, ids: Tensor) -> Tensor:
        """Take one more token a row, (B,), and give the next logits (B, V)."""
        ...


class Eager:
    """The plain stepper. Its cache grows, so that a short answer costs little where the context is long."""

    def __init__(self, model: Decoder, rows: int, capacity: int):
        self.model, self.cache = model, model.cache(rows)

    def prefill(self, ids: Tensor, counts: Tensor) -> Tensor:
        ids = ids.to(self.model.embed.weight.device)
        hidden = self.model.hidden(ids, cache=self.cache, counts=counts)  # (B, L, W)
        last = hidden[torch.arange(len(counts), device=counts.device), counts - 1]  # (B, W)
        return self.model.logits(last)

    def step(self, ids: Tensor) -> Tensor:
        return self.model(ids[:, None], cache=self.cache)[:, 0]


MakeStepper = Callable[[Decoder, int, int], Stepper]
"""model, rows, the most tokens a row will hold → a stepper"""


def fastest(model: Decoder, rows: int, capacity: int) -> Stepper:
    """On a GPU a captured step, where the model can be captured."""
    from vitrail.generate.captured import Captured, capturable  # which imports Eager from here

    return Captured.of(model, rows, capacity) if capturable(model, rows, capacity) else Eager(model, rows, capacity)


class Piece(NamedTuple):
    """One token of one row as it is chosen, and the text that may now be shown: often none, sometimes a few words.

    `text` leaves out special tokens and never shows a part of a stop string; `ended` is set on a row's last piece.
    """

    row: int
    id: int
    text: str
    ended: Ended | None


class Written(NamedTuple):
    """A whole continuation: every id chosen, the one that ended it included; the text before any stop; why it ended."""

    ids: list[int]
    text: str
    ended: Ended


def generate(
    model: Decoder,
    prompts: Sequence[Prompt],
    *,
    max_new: int | None = None,
    sampling: Sampling | None = None,
    tokenizer: "Tokenizer | None" = None,
    stop_ids: Sequence[int] | None = None,
    stop_strings: Sequence[str] = (),
    guidance: float = 1.0,
    negative: Sequence[Prompt] | None = None,
    stepper: MakeStepper | None = None,
) -> list[Written]:
    """Continue each prompt; takes what `stream` takes, and gives one `Written` a prompt."""
    ids: list[list[int]] = [[] for _ in prompts]
    texts: list[list[str]] = [[] for _ in prompts]
    ends: dict[int, Ended] = {}
    pieces = stream(
        model,
        prompts,
        max_new=max_new,
        sampling=sampling,
        tokenizer=tokenizer,
        stop_ids=stop_ids,
        stop_strings=stop_strings,
        guidance=guidance,
        negative=negative,
        stepper=stepper,
    )
    for row, id, text, ended in pieces:
        ids[row].append(id)
        texts[row].append(text)
        if ended is not None:
            ends[row] = ended
    return [Written(ids[row], "".join(texts[row]), ends[row]) for row in range(len(prompts))]


def stream(
    model: Decoder,
    prompts: Sequence[Prompt],
    *,
    max_new: int | None = None,
    sampling: Sampling | None = None,
    tokenizer: "Tokenizer | None" = None,
    stop_ids: Sequence[int] | None = None,
    stop_strings: Sequence[str] = (),
    guidance: float = 1.0,
    negative: Sequence[Prompt] | None = None,
    stepper: MakeStepper | None = None,
) -> Iterator[Piece]:
    """Continue each prompt, giving every token as it is chosen.

    prompts       ids, or texts for the tokenizer; a row's result does not depend on the other rows
    max_new       new tokens a row; as many as the model's context has room for unless given
    sampling      how tokens are drawn; `Sampling()` unless given
    stop_ids      end a row; the tokenizer's own unless given
    stop_strings  end a row where its text spells one, also across tokens
    guidance      g leads away from the `negative` prompt: u + g·(c − u), of its logits u and the prompt's own c
    negative      a prompt for each row, or one for all
    stepper       what takes the steps: on a GPU a captured graph where that is possible, unless given
    """
    sampling = sampling or Sampling()
    plan = _plan(model, prompts, max_new, tokenizer, guidance, negative)
    stop_ids = (() if tokenizer is None else tokenizer.stops) if stop_ids is None else stop_ids
    rows = [Row(p, n, stop_ids, stop_strings, tokenizer) for p, n in zip(plan.prompts, plan.limits, strict=True)]
    known = model.config.vocab if tokenizer is None else min(tokenizer.size, model.config.vocab)
    return _run(model, plan, rows, sampling, known, guidance, stepper or fastest)


@torch.no_grad()
def _run(
    model: Decoder,
    plan: "_Plan",
    rows: list[Row],
    sampling: Sampling,
    known: int,
    guidance: float,
    stepper: MakeStepper,
) -> Iterator[Piece]:
    device = next(model.parameters()).device
    B, fed = len(rows), [*plan.prompts, *plan.negative]
    dice = None if sampling.greedy else Dice(B, sampling.seed, device)

    counts = torch.tensor([len(ids) for ids in fed])
    padded = torch.zeros(len(fed), max(map(len, fed)), dtype=torch.long)  # (B or 2B, L)
    for row, ids in zip(padded, fed, strict=True):
        row[: len(ids)] = torch.from_numpy(np.array(ids))  # which reads a list several times as fast
    seen = None if sampling.repetition == 1 else _held(plan.prompts, model.config.vocab).to(device)  # (B, V)

    steps = stepper(model, len(fed), padded.shape[1] + max(plan.limits))
    logits = steps.prefill(padded, counts)
    while True:
        if plan.negative:
            c, u = logits.float().chunk(2)
            logits = u + guidance * (c - u)
        chance = None if dice is None else dice.roll()
        # Rows of the vocabulary that only pad the table to a round size have no text.
        token = choose(logits[:, :known], sampling, chance, None if seen is None else seen[:, :known])  # (B,)
        for i, id in enumerate(token.tolist()):
            if rows[i].ended is None:
                yield Piece(i, id, rows[i].push(id), rows[i].ended)
        if all(row.ended for row in rows):
            return
        if seen is not None:
            seen.scatter_(1, token[:, None], True)
        logits = steps.step(torch.cat([token, token]) if plan.negative else token)


def _held(prompts: Sequence[Sequence[int]], vocab: int) -> Tensor:
    """(B, V) which tokens each row holds"""
    held = torch.zeros(len(prompts), vocab, dtype=torch.bool)
    for row, ids in zip(held, prompts, strict=True):
        row[[id for id in ids if id < vocab]] = True  # marks of pictures may lie beyond what is said
    return held


# ---- before the loop --------------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    prompts: list[list[int]]
    negative: list[list[int]]  # empty without guidance
    limits: list[int]  # new tokens of each row


def _plan(
    model: Decoder,
    prompts: Sequence[Prompt],
    max_new: int | None,
    tokenizer: "Tokenizer | None",
    guidance: float,
    negative: Sequence[Prompt] | None,
) -> _Plan:
    """Everything that can be wrong with a request, found before any work is done."""
    vocab, context = model.config.vocab + model.config.extra, model.config.context
    given = _encoded("prompt", prompts, tokenizer, vocab)
    if not math.isfinite(guidance):
        raise ConfigError(f"guidance is {guidance}", "use a number; 1 leaves the logits as they are")
    if guidance != 1 and negative is None:
        raise ConfigError(
            f"guidance {guidance} has nothing to lead away from", "give a negative prompt, such as [[bos]]"
        )
    against = [] if negative is None else _encoded("negative prompt", negative, tokenizer, vocab)
    if len(against) == 1:
        against *= len(given)
    if against and len(against) != len(given):
        raise ConfigError(f"{len(against)} negative prompts do not fit {len(given)} prompts", "give one, or one each")
    if max_new is not None and max_new < 1:
        raise ConfigError(f"max_new is {max_new}", "ask for at least one token, or leave it out")
    limits = []
    for i, ids in enumerate(given):
        held = max(len(ids), len(against[i]) if against else 0)
        room = context - held
        if room < (max_new or 1):
            raise ConfigError(
                f"prompt {i} has {held} tokens, and {max_new or 1} more pass the {context} the model was made for",
                f"ask for at most {room} new tokens" if room > 0 else "shorten the prompt",
            )
        limits.append(max_new or room)
    return _Plan(given, against, limits)


def _encoded(what: str, prompts: Sequence[Prompt], tokenizer: "Tokenizer | None", vocab: int) -> list[list[int]]:
    if isinstance(prompts, str) or not len(prompts):
        raise ConfigError(f"no list of {what}s was given", f"give a list, for one {what} too")
    found = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            if tokenizer is None:
                raise ConfigError(f"{what} {i} is text", "give the tokenizer too, or ids")
            prompt = tokenizer.encode(prompt, specials=True)
        ids = list(map(int, prompt))
        if not ids:
            raise TextError(f"{what} {i} is empty", "give at least one token, such as the tokenizer's bos")
        if min(ids) < 0 or max(ids) >= vocab:
            wrong = next(id for id in ids if not 0 <= id < vocab)
            raise TextError(f"{what} {i} holds id {wrong}, the model's go from 0 to {vocab - 1}")
        found.append(ids)
    return found
