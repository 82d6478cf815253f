"""Speculative drawing: a small model draws a few codes ahead, and the large one looks at all of them in one pass.

A digit that the small one chose with chance q is kept with chance min(1, p / q); the first that is not is drawn from
what p has more than q, and the rest is dropped. So the pictures have the large model's distribution, whatever the small
one is like (Leviathan et al. 2023, Chen et al. 2023).

B rows, n tokens of the longest prompt, N codes, G groups of an id, V vocabulary of a group
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.generate.pictures import Drawing, guided
from vitrail.generate.sampling import Dice, Sampling, pick, shape
from vitrail.models.unified import DRAW, Unified


class Ahead(NamedTuple):
    ids: Tensor  # (B, h, w)
    passes: int  # of the large model
    kept: float  # share of what the small one proposed


class _Side:
    """A model with what it has read and drawn so far. Rows are twice as many where they are led away from something."""

    def __init__(self, model: Unified, prompts: Tensor, counts: Tensor, guidance: float):
        self.model, self.guidance = model, guidance
        self.twice = guidance != 1
        h, w = model.grid
        blank = torch.zeros(len(prompts), h, w, dtype=torch.long, device=prompts.device)
        laid = model.lay(model.words(prompts, counts), model.drawn(blank))
        n = prompts.shape[1]
        self.places = laid.positions[:, n:]  # (rows, 1 + N, …)
        self.words, self.cache = counts, model.decoder.cache(len(prompts))
        if n:
            model.decoder.hidden(embeds=laid.x[:, :n], positions=laid.positions[:, :n], cache=self.cache, counts=counts)

    def read(self, ids: Tensor, first: Tensor, count: int) -> Tensor:
        """`count` tokens of the picture from the `first` (B,) on, of ids (B, N), where token 0 is the mark → states
        (rows, count, W), each of which says the code that follows"""
        at = first[:, None] + torch.arange(count, device=ids.device)  # (B, count)
        place, last = (at - 1).clamp(min=0), math.prod(self.model.grid) - 1
        x = self.model.token(ids.gather(1, place), place.clamp(max=last), self.model.grid)
        x = torch.where((at == 0)[..., None], self.model.marks.weight[DRAW], x)
        at = at.clamp(max=self.places.shape[1] - 1)  # what lies past the end is dropped
        if self.twice:
            x, at = torch.cat([x, x]), torch.cat([at, at])
        where = at if self.places.ndim == 2 else at[..., None].expand(-1, -1, 3)
        return self.model.decoder.hidden(embeds=x, positions=self.places.gather(1, where), cache=self.cache)

    def chances(self, states: Tensor, before: Tensor, sampling: Sampling) -> Tensor:
        """states (rows, W), digits so far (B, g) → (B, V) of the next, float64"""
        logits = guided(
            self.model.head.logits(states, torch.cat([before, before]) if self.twice else before), self.guidance
        )
        if sampling.greedy:
            return F.one_hot(logits.argmax(-1), logits.shape[-1]).double()
        return shape(logits, sampling).double().softmax(-1)

    def keep(self, tokens: Tensor) -> None:
        """So many tokens (B,) of the picture."""
        self.cache.rewind(self.words + (torch.cat([tokens, tokens]) if self.twice else tokens))


@torch.no_grad()
def draw_ahead(
    model: Unified,
    draft: Unified,
    prompts: Tensor,
    counts: Tensor,
    drawing: Drawing | None = None,
    *,
    ahead: int = 4,
) -> Ahead:
    """What `draw` gives of a model in raster order, faster where a smaller one guesses well."""
    drawing = drawing or Drawing()
    if model.config.order != "raster" or draft.config.order != "raster":
        raise ConfigError("only what is drawn code after code can be drawn ahead", 'give models of order = "raster"')
    if model.head.sizes != draft.head.sizes or model.grid != draft.grid:
        raise ConfigError("the two models draw in other codes", "train both with one codec and as many groups")
    if ahead < 1:
        raise ConfigError(f"{ahead} codes ahead", "give at least 1")
    B, (h, w), device = len(prompts), model.grid, prompts.device
    N, sampling = h * w, drawing.sampling
    if drawing.guidance != 1:
        prompts, counts = torch.cat([prompts, prompts]), torch.cat([counts, torch.zeros_like(counts)])
    modes = model.training, draft.training
    large, small = (_Side(side.eval(), prompts, counts, drawing.guidance) for side in (model, draft))
    chance = Dice(B, sampling.seed, device)
    ids = torch.zeros(B, N + ahead + 1, dtype=torch.long, device=device)  # with room for what is proposed past the end
    done = torch.zeros(B, dtype=torch.long, device=device)
    passes = proposed = kept = 0
    while bool((done < N).any()):
        guesses = []  # digits (B, G) and their chances, G of (B, V)
        for i in range(ahead + 1):  # the last only reads what was proposed before it
            state = small.read(ids[:, : N + ahead], done + i, 1)[:, 0]
            if i < ahead:
                digits, odds = _drawn(small, state, sampling, chance)
                guesses.append((digits, odds))
                ids.scatter_(1, (done + i)[:, None], model.join(digits)[:, None])
        states = large.read(ids[:, : N + ahead], done, ahead + 1)  # (rows, ahead + 1, W)
        passes += 1
        alive, start = done < N, done
        for i, (digits, odds) in enumerate(guesses):
            active = alive & (start + i < N)
            found, ok = _checked(large, states[:, i], digits, odds, sampling, chance)
            own = ids.gather(1, (start + i)[:, None])[:, 0]
            ids.scatter_(1, (start + i)[:, None], torch.where(active, model.join(found), own)[:, None])
            done = done + active
            proposed, kept = proposed + int(active.sum()), kept + int((active & ok).sum())
            alive = active & ok
        more = alive & (start + ahead < N)  # all were kept: the last state says one more
        digits, _ = _drawn(large, states[:, ahead], sampling, chance)
        own = ids.gather(1, (start + ahead)[:, None])[:, 0]
        ids.scatter_(1, (start + ahead)[:, None], torch.where(more, model.join(digits), own)[:, None])
        done = done + more
        for side in (large, small):
            side.keep(done)
    model.train(modes[0])
    draft.train(modes[1])
    return Ahead(ids[:, :N].view(B, h, w), passes, kept / max(proposed, 1))


def _drawn(side: _Side, state: Tensor, sampling: Sampling, chance: Dice) -> tuple[Tensor, list[Tensor]]:
    """A code's digits (B, G), and the chances that each was drawn from."""
    digits = torch.empty(len(state) // (1 + side.twice), 0, dtype=torch.long, device=state.device)
    odds = []
    for _ in side.model.head.sizes:
        odds.append(side.chances(state, digits, sampling))
        digits = torch.cat([digits, pick(odds[-1], chance.roll())[:, None]], 1)
    return digits, odds


def _checked(
    side: _Side, state: Tensor, digits: Tensor, odds: list[Tensor], sampling: Sampling, chance: Dice
) -> tuple[Tensor, Tensor]:
    """Digits (B, G) of the large model's distribution, and (B,) whether they are those proposed."""
    ok = torch.ones(len(digits), dtype=torch.bool, device=digits.device)
    found = digits[:, :0]
    for g, q in enumerate(odds):
        p = side.chances(state, found, sampling)
        given = digits[:, g : g + 1]
        taken = chance.roll() * q.gather(1, given)[:, 0] < p.gather(1, given)[:, 0]
        left = (p - q).clamp(min=0)
        left = torch.where(left.sum(1, keepdim=True) > 0, left, p)  # only rounding leaves nothing where one was refused
        fresh = pick(torch.where(ok[:, None], left, p), chance.roll())
        found = torch.cat([found, torch.where(ok & taken, given[:, 0], fresh)[:, None]], 1)
        ok = ok & taken
    return found, ok
