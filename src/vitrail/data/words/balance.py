"""How even the answers are: made so, and measured.

B scenes, N candidates, n sentences.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.data.scenes import chance
from vitrail.data.scenes.scene import Scenes
from vitrail.data.words.facts import Draws, Facts
from vitrail.data.words.names import Pools
from vitrail.data.words.questions import counts
from vitrail.data.words.said import KINDS, Said
from vitrail.data.words.words import ALWAYS, LABELS, Words

ROUNDS = 60  # of fitting the weights; they settle in a few


def balanced(words: Words, scenes: Scenes, seed: int = 0, least: float = 0.05) -> Words:
    """Words that ask scenes like these so that every count, every colour and every place is the answer equally often.

    Candidates are weighed by their answer, and what is still asked too often is dropped at random. An answer that
    fewer than `least` of the scenes with any answer admit is not asked for: evening it out would cost almost all other
    questions. How popular each concept is gets measured, too."""
    facts = Facts(words, scenes)
    labels, mask, _ = counts(facts, Draws(seed, scenes.index, "balance"))
    candidates = {
        "counting": (labels, mask),
        "colour": (facts.colour, facts.plain & (facts.colour > 0)),
        "position": (facts.third.clamp(min=0), facts.named & (facts.third >= 0)),
    }
    fitted = {kind: _even(*candidates[kind], LABELS[kind], least) for kind in LABELS}
    seen = torch.bincount(facts.concept[facts.filled], minlength=words.concepts).cpu()
    return replace(
        words,
        weight={kind: weight for kind, (weight, _) in fitted.items()},
        keep={kind: keep for kind, (_, keep) in fitted.items()},
        popular=Pools.of(words.names, (seen + 1) * words.names.used).to(words.concept.device),
    )


def _even(labels: Tensor, mask: Tensor, count: int, least: float) -> tuple[Tensor, Tensor]:
    """Weights and chances (labels,), fitted to candidates (B, N)"""
    has = torch.zeros(len(labels), count, device=labels.device).scatter_add_(1, labels, mask.float()) > 0
    asked = has.sum(0) >= least * has.any(1).sum()
    asked = asked & has.any(0)
    weight = asked.double()
    for _ in range(ROUNDS):
        share = _shares(weight, labels, mask, count)
        weight = torch.where(asked, weight / share.clamp(min=1e-9), 0)
        weight = weight / weight.max().clamp(min=1e-9)
    whole = torch.where(asked, (weight * (1 << 20)).round().clamp(min=1), 0)
    share = _shares(whole, labels, mask, count)
    rarest = torch.where(asked, share, torch.inf).min()
    keep = torch.where(asked, ALWAYS * (rarest / share.clamp(min=1e-9)), 0)
    return whole.long(), keep.clamp(max=ALWAYS).long()


def _shares(weight: Tensor, labels: Tensor, mask: Tensor, count: int) -> Tensor:
    """How often each label would be chosen (labels,): expected, not drawn"""
    each = weight[labels] * mask
    each = each / each.sum(1, keepdim=True).clamp(min=1e-30)
    return torch.zeros(count, dtype=torch.double, device=labels.device).scatter_add_(
        0, labels.flatten(), each.flatten()
    )


class Baseline(NamedTuple):
    """What can be had without looking at the picture."""

    kind: str
    n: int  # questions it is measured on: the second half of those given
    answers: int  # different ones
    majority: float  # the commonest answer of the first half, given always
    blind: float  # the best that was found from the question alone

    @property
    def margin(self) -> float:
        """Half the width of a 95 % interval"""
        return 1.96 * (self.blind * (1 - self.blind) / self.n) ** 0.5


def baselines(said: Said) -> list[Baseline]:
    """Per kind: fitted to every other question, tested on the rest. Blind is the better of two: the commonest answer to
    this very question (else to its template), and naive Bayes over the question's pieces in their places. Boxes are
    found, without looking, by the median box, and count where they overlap it by half (intersection over union)."""
    found = []
    for number in said.kind[said.valid].unique().tolist():
        mine = said.to("cpu")[(said.valid & (said.kind == number)).cpu()]
        if len(mine) < 2:
            continue
        answer = mine.label.unique(return_inverse=True)[1]
        classes = int(answer.max()) + 1
        common = answer[::2].bincount(minlength=classes).argmax().expand(len(mine))
        if KINDS[number] == "grounding":
            guessed = mine.box[::2].double().quantile(0.5, 0)
            right = [(_overlap(mine.box[1::2], guessed) >= 0.5).double().mean().item()]
        else:
            # Questions are told apart by a sum that no two share but by a freak chance: rows cost a long sort.
            factors = chance.bits(0, torch.arange(mine.question.shape[1]), "row", 1)[:, 0] * 2 + 1
            question = (mine.question * factors).sum(1).unique(return_inverse=True)[1]
            by_template = _lookup(mine.template, answer, classes, common)
            guesses = (common, _lookup(question, answer, classes, by_template), _bayes(mine.question, answer, classes))
            right = [(guess[1::2] == answer[1::2]).double().mean().item() for guess in guesses]
        found.append(Baseline(KINDS[number], len(answer[1::2]), classes, right[0], max(right)))
    return found


def _overlap(boxes: Tensor, box: Tensor) -> Tensor:
    """(n, 4) and (4,) → intersection over union (n,)"""
    common = (torch.minimum(boxes[:, 2:], box[2:]) - torch.maximum(boxes[:, :2], box[:2])).clamp(min=0).prod(1)
    return common / ((boxes[:, 2:] - boxes[:, :2]).prod(1) + (box[2:] - box[:2]).prod() - common)


def _lookup(key: Tensor, answer: Tensor, classes: int, otherwise: Tensor) -> Tensor:
    """The commonest answer of the first half to each key, where there was one"""
    pairs, times = (key[::2] * classes + answer[::2]).unique(return_counts=True)
    order = times.argsort(stable=True)  # the commonest is written last
    best = torch.full((int(key.max()) + 1,), -1)
    for pair in pairs[order].tolist():
        best[pair // classes] = pair % classes
    return torch.where(best[key] >= 0, best[key], otherwise)


def _bayes(question: Tensor, answer: Tensor, classes: int) -> Tensor:
    score = (answer[::2].bincount(minlength=classes) + 1).double().log().expand(len(answer), classes).clone()
    for column in question.unbind(1):
        values = column.unique(return_inverse=True)[1]
        count = int(values.max()) + 1
        seen = (values[::2] * classes + answer[::2]).bincount(minlength=count * classes).view(count, classes) + 0.5
        score += (seen / seen.sum(0)).log()[values]
    return score.argmax(1)


def table(found: list[Baseline]) -> str:
    """The baselines to be printed beside a score"""
    lines = [f"{'kind':<24}{'questions':>10}{'answers':>9}{'majority':>10}{'blind':>8}{'±':>6}"]
    lines += [f"{b.kind:<24}{b.n:>10,}{b.answers:>9,}{b.majority:>10.1%}{b.blind:>8.1%}{b.margin:>6.1%}" for b in found]
    return "\n".join(lines)
