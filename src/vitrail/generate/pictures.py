"""Pictures from a unified model, in codes: one after another, or all at once by and by.

Chance is one stream a row, so that a row's picture depends on its own seed alone, whoever else is in the batch.

B rows, n tokens of the longest prompt, h × w codes, N = h·w, V vocabulary of a group
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrail.config import Config
from vitrail.errors import ConfigError
from vitrail.generate.masked import gumbel, hide_least, settles, still_hidden
from vitrail.generate.sampling import Dice, Sampling, choose, shape
from vitrail.models.unified import DRAW, Unified

Progress = Callable[[int, int], Any]
"""codes that are drawn, of how many"""
Watch = Callable[[Tensor, Tensor], Any]
"""ids (B, h, w) as they are, and which of them are yet hidden (B, h, w)"""


class _Told(NamedTuple):
    progress: Progress
    watch: Watch


class Drawing(Config):
    """
    sampling  how each group of digits is chosen; its seed is the first row's
    guidance  g leads away from the negative prompt, or from none: u + g·(c − u)
    steps     passes of masked drawing, in each of which the surest of the codes yet hidden are kept; one by one in
              raster order whatever it says
    wander    how much chance there is in which codes are kept; it falls to 0 with the last pass
    """

    sampling: Sampling = Sampling()
    guidance: float = 3.0
    steps: int = 24
    wander: float = 4.5

    def __post_init__(self) -> None:
        if self.steps < 1 or self.wander < 0 or not math.isfinite(self.guidance):
            raise ConfigError(
                f"steps = {self.steps}, wander = {self.wander:g}, guidance = {self.guidance:g}",
                "give at least one step, and finite numbers, wander not below 0",
            )
        if self.sampling.repetition != 1:
            raise ConfigError("codes may repeat: a sky is one code again and again", "leave repetition at 1")


@torch.no_grad()
def draw(
    model: Unified,
    prompts: Tensor,
    counts: Tensor,
    drawing: Drawing | None = None,
    *,
    negative: tuple[Tensor, Tensor] | None = None,
    given: tuple[Tensor, Tensor] | None = None,
    progress: Progress = lambda done, of: None,
    watch: Watch = lambda ids, hidden: None,
) -> Tensor:
    """Ids (B, h, w) of pictures for prompts (B, n), of which `counts` (B,) tokens each are there.

    negative  another prompt a row, and its counts; none at all unless given
    given     ids (B, h, w) and which of them (B, h, w) stay as they are: the rest is painted in. In raster order what
              is painted sees only what comes before it.
    watch     is told after every pass how far the pictures are
    """
    drawing = drawing or Drawing()
    h, w = model.grid if given is None else given[0].shape[1:]
    B, device = len(prompts), prompts.device
    if given is not None and not len(given[0]) == len(given[1]) == B:
        raise ConfigError(f"{B} prompts, and {len(given[0])} pictures that are given", "give one for each prompt")
    if negative is not None and drawing.guidance == 1:
        raise ConfigError("a guidance of 1 leads away from nothing", "leave the negative prompt out, or raise guidance")
    ids = torch.zeros(B, h, w, dtype=torch.long, device=device) if given is None else given[0].clone()
    open_ = torch.ones_like(ids, dtype=torch.bool) if given is None else ~given[1]
    if drawing.guidance != 1:
        other, length = negative or (prompts[:, :0], torch.zeros_like(counts))
        wide = max(prompts.shape[1], other.shape[1])
        pad = torch.nn.functional.pad
        prompts = torch.cat([pad(some, (0, wide - some.shape[1])) for some in (prompts, other)])
        counts = torch.cat([counts, length.expand_as(counts)])
    mode = model.training
    model.eval()
    try:
        way = _one_by_one if model.config.order == "raster" else _by_and_by
        return way(model, prompts, counts, ids, open_, drawing, _Told(progress, watch))
    finally:
        model.train(mode)


def guided(logits: Tensor, guidance: float) -> Tensor:
    """(B or 2B, …) → (B, …): those of the prompts, led away from the others"""
    if guidance == 1:
        return logits.float()
    c, u = logits.float().chunk(2)
    return u + guidance * (c - u)


def _codes(model: Unified, states: Tensor, drawing: Drawing, chance: Dice) -> tuple[Tensor, Tensor]:
    """states (B or 2B, N, W) → ids (B, N) and the log-probability of each (B, N), group after group"""
    twice = drawing.guidance != 1
    N = states.shape[1]
    parts = torch.empty(*states.shape[:2], 0, dtype=torch.long, device=states.device)
    sure = 0.0
    for _ in model.head.sizes:
        logits = guided(model.head.logits(states, parts), drawing.guidance)  # (B, N, V)
        rolled = chance.roll(N).flatten()
        part = choose(logits.flatten(0, 1), drawing.sampling, rolled).view(logits.shape[:2])
        said = shape(logits.flatten(0, 1), drawing.sampling).log_softmax(-1).view_as(logits)
        sure = sure + said.gather(-1, part[..., None])[..., 0]
        parts = torch.cat([parts, (torch.cat([part, part]) if twice else part)[..., None]], -1)
    kept = parts.chunk(2)[0] if twice else parts
    assert isinstance(sure, Tensor)
    return model.join(kept), sure


def _by_and_by(
    model: Unified, prompts: Tensor, counts: Tensor, ids: Tensor, open_: Tensor, drawing: Drawing, told: _Told
) -> Tensor:
    """Masked-parallel: all hidden codes are drawn in every pass, and the surest of them stay (MaskGIT)."""
    B, (h, w), twice = len(ids), ids.shape[1:], drawing.guidance != 1
    chance = Dice(B, drawing.sampling.seed, ids.device)
    hidden, total = open_, open_.flatten(1).sum(1)  # (B, h, w), (B,)
    words = model.words(prompts, counts)
    for step, settling in enumerate(settles(total, drawing.steps)):
        if not settling:  # what it would have drawn stays hidden; its chance is used up, so that a seed draws the same
            for _ in range(len(model.head.sizes) + 1):
                chance.roll(h * w)
            told.progress(int(h * w * B - still_hidden(total, step, drawing.steps).sum()), h * w * B)
            continue
        rows = (torch.cat([x, x]) if twice else x for x in (ids, hidden))
        laid = model.lay(words, model.drawn(*rows))
        found, sure = _codes(model, model.drawing_states(laid, model.hidden(laid)), drawing, chance)
        ids = torch.where(hidden, found.view(B, h, w), ids)
        left = still_hidden(total, step, drawing.steps)
        noise = gumbel(chance.roll(h * w))
        sure = sure + drawing.wander * (1 - (step + 1) / drawing.steps) * noise.to(sure)
        hidden = hide_least(sure, hidden.flatten(1), left).view(B, h, w)
        told.progress(int(h * w * B - left.sum()), h * w * B)
        told.watch(ids, hidden)
    return ids


def _one_by_one(
    model: Unified, prompts: Tensor, counts: Tensor, ids: Tensor, open_: Tensor, drawing: Drawing, told: _Told
) -> Tensor:
    """In raster order, with what was read and drawn kept in a cache."""
    B, (h, w), twice = len(ids), ids.shape[1:], drawing.guidance != 1
    chance = Dice(B, drawing.sampling.seed, ids.device)
    decoder, flat, fixed = model.decoder, ids.view(B, -1).clone(), ~open_.view(B, -1)
    places = torch.arange(h * w, device=ids.device).view(h, w)
    words = model.words(prompts, counts)
    # Where each code stands is the same whatever it will be, so that all places are known before the first is drawn.
    blank = model.drawn(torch.cat([ids, ids]) if twice else ids)
    laid = model.lay(words, blank)
    n = prompts.shape[1]
    cache = decoder.cache(len(prompts))
    if n:
        decoder.hidden(embeds=laid.x[:, :n], positions=laid.positions[:, :n], cache=cache, counts=counts)
    x = model.marks.weight[DRAW].expand(len(prompts), 1, -1)
    for i in range(h * w):
        state = decoder.hidden(embeds=x, positions=laid.positions[:, n + i : n + i + 1], cache=cache)  # (B, 1, W)
        found, _ = _codes(model, state, drawing, chance)
        flat[:, i] = torch.where(fixed[:, i], flat[:, i], found[:, 0])
        x = model.token(flat[:, i : i + 1], places.view(-1)[i : i + 1], (h, w))
        x = torch.cat([x, x]) if twice else x
        told.progress(i + 1, h * w)
        told.watch(flat.view(B, h, w), open_ & (places > i))
    return flat.view(B, h, w)


def varied(ids: Tensor, share: float, seed: int | None = None) -> tuple[Tensor, Tensor]:
    """What `draw` takes as `given` to make variations of pictures (B, h, w): a share of the codes is drawn anew."""
    if not 0 <= share <= 1:
        raise ConfigError(f"a share of {share:g} to be drawn anew", "give 0 … 1")
    B, h, w = ids.shape
    rank = Dice(B, seed, ids.device, use=1).roll(h * w).argsort(1).argsort(1)
    return ids, (rank >= round(share * h * w)).view(B, h, w)
