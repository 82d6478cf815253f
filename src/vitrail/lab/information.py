"""The information ledger: what is left of a picture at every bottleneck of a model.

Tokens, bits and ranks bound what can be left; effective rank and intrinsic dimension are what is used of that; and
straight readings of a truth that is known (where, which colour, how many, what) say whether it is still there.

B pictures, N tokens, D width of a token, F = N·D, K columns of a truth
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.config import Config
from vitrail.errors import DataError
from vitrail.evals.metrics import estimate
from vitrail.evals.shares import Share

HALF = 16
"""Bits that a number of a continuous token is kept in: those of bf16."""

PENALTIES = tuple(10.0**power for power in range(-6, 4))
TIES = 0.1  # share of equal distances beyond which ratios of distances say nothing of a dimension
AT_ONCE = 2048  # features or tokens in double precision at a time
RANKED, POINTS = 64, 1000  # pictures whose ranks are averaged; at most those that a dimension is told from


class Bottleneck(NamedTuple):
    """tokens (B, N, D), the bits of one token where it is one of so many, 0 where it is continuous, and the bottleneck
    that they are made from: the one before in the list unless it is named."""

    name: str
    tokens: Tensor
    bits: int = 0
    after: str = ""


class Truth(NamedTuple):
    """What is known of B pictures: numbers (B, K) that are read off, or classes (B,), of which there are so many."""

    values: Tensor
    classes: int = 0


class Reading(Config):
    """How much of a truth a straight reading finds in pictures it was not fitted to: the share of classes that are
    right, or the share of the numbers' variance that is explained; `blind` is what is had without looking."""

    value: float
    interval: tuple[float, float]
    blind: float
    of: int


class Line(Config):
    """One bottleneck.

    after       the bottleneck that it is made from; of the first nothing
    bits        of a picture's tokens
    ratio       how many times fewer bits than the picture has
    at_most     bits that this and the bottlenecks that it is made from let through: what is lost does not come back
    bound       on the rank of a picture's tokens: min(N, D)
    rank        effective rank of a picture's tokens, the mean over pictures
    spread      effective rank of all tokens of all pictures around their mean, at most D
    dimension   intrinsic dimension of the pictures as points; none where it cannot be told
    """

    name: str
    after: str
    tokens: int
    width: int
    bits: int
    ratio: float
    at_most: int
    bound: int
    rank: float
    spread: float
    dimension: float | None
    readings: dict[str, Reading]


# ---- measures ---------------------------------------------------------------------------------------------------


def effective_rank(x: Tensor) -> float:
    """exp of the entropy of the singular values as shares of their sum (Roy and Vetterli): that many directions, used
    equally, would have this entropy. x (N, D), not centred here."""
    if not x.isfinite().all():
        raise DataError("there are numbers among the tokens that are none", "are the weights whole?")
    values = torch.linalg.svdvals(x.double())
    total = values.sum()
    if not total > 0:
        return 0.0
    shares = values / total
    return math.exp(-torch.special.xlogy(shares, shares).sum().item())


def intrinsic_dimension(x: Tensor) -> float | None:
    """TwoNN (Facco et al.) in its form of most likelihood: (n − 1) / Σ ln(r₂ / r₁) over the distances of each point to
    its two nearest. x (B, F); points that occur twice count once. None of fewer than ten points, or where many have
    two neighbours equally near, as codes of a few bits have."""
    x = x.double() - x.double().mean(0)
    squares = x.square().sum(1)
    far = (squares[:, None] + squares - 2 * x @ x.T).clamp(min=0)  # (B, B)
    same = far <= 1e-9 * squares.mean()
    first = ~(same.tril(-1).any(1))  # of those that are alike
    far, n = far[first][:, first], int(first.sum())
    if n < 10:
        return None
    near = far.fill_diagonal_(0).topk(3, largest=False).values[:, 1:]  # (n, 2), itself left out
    logs = 0.5 * (near[:, 1] / near[:, 0]).log()
    if (logs < 1e-9).double().mean() > TIES:
        return None
    return (n - 1) / logs.sum().item()


def read(train: Tensor, truth: Truth, test: Tensor, tested: Truth) -> Reading:
    """A ridge regression on all features (B, F), each scaled by its deviation: of numbers, or of classes as columns of
    ones and zeros. Its penalty is the one with the least error of pictures left out one at a time, which has a closed
    form, so that the test pictures are looked at once."""
    if len(train) < 20 or not len(test):
        raise DataError(f"{len(train)} pictures to fit a reading, {len(test)} to test it", "give at least 20 and 1")
    classes = truth.classes
    targets = torch.eye(classes).double()[truth.values] if classes else truth.values.double()  # (B, K)
    guess = _ridge(train, targets, test)
    if classes:
        right = Share(int((guess.argmax(1) == tested.values).sum()), len(test))
        common = truth.values.bincount(minlength=classes).argmax()
        blind = (tested.values == common).double().mean().item()
        return Reading(value=right.value, interval=right.interval, blind=blind, of=len(test))
    known = tested.values.double()
    spread = (known - known.mean(0)).square().mean(0)
    share = 1 - ((known - guess).square() / spread).mean(1)  # a picture's; their mean is the mean R² of the columns
    found = estimate("R²", share)
    return Reading(value=found.value, interval=found.interval, blind=0.0, of=len(test))


def _ridge(train: Tensor, targets: Tensor, test: Tensor) -> Tensor:
    """(B, F), (B, K), (T, F) → (T, K), by way of the products of pictures, of which there are fewer than features."""
    gram, across = _products(train, test)  # (B, B), (T, B)
    values, vectors = torch.linalg.eigh(gram)
    values = values.clamp(min=0)
    mean = targets.mean(0)
    turned = vectors.T @ (targets - mean)
    strengths = [strength * values.mean() + 1e-12 for strength in PENALTIES]
    best = min(strengths, key=lambda strength: _left_out(values, vectors, targets, strength).square().mean().item())
    return mean + across @ (vectors @ (turned / (values + best)[:, None]))


def _left_out(values: Tensor, vectors: Tensor, targets: Tensor, strength: Tensor) -> Tensor:
    """(B, K) what each picture would be missed by if it had been left out of the fit. The mean is fitted too, which
    gives every picture 1/B of its own weight."""
    kept = values / (values + strength)
    mean = targets.mean(0)
    lever = 1 / len(targets) + (vectors.square() * kept).sum(1)
    missed = targets - mean - vectors @ (kept[:, None] * (vectors.T @ (targets - mean)))
    return missed / (1 - lever).clamp(min=1e-9)[:, None]


def _products(train: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """Of standardised features, some at a time: a picture may have a million."""
    gram = train.new_zeros(len(train), len(train), dtype=torch.float64)
    across = train.new_zeros(len(test), len(train), dtype=torch.float64)
    for start in range(0, train.shape[1], AT_ONCE):
        some, more = (x[:, start : start + AT_ONCE].double() for x in (train, test))
        mean, deviation = some.mean(0), some.std(0)
        deviation = torch.where(deviation > 1e-8, deviation, 1.0)  # a feature that never changes says nothing
        some, more = (some - mean) / deviation, (more - mean) / deviation
        gram += some @ some.T
        across += more @ some.T
    return gram / train.shape[1], across / train.shape[1]


# ---- the ledger -------------------------------------------------------------------------------------------------


def information(
    bottlenecks: Sequence[Bottleneck], raw: int, sets: Mapping[str, tuple[slice, Truth]], *, tested: float = 0.25
) -> list[Line]:
    """A line a bottleneck, in the order that a picture goes through them. `raw` are the bits of a picture. `sets` name
    truths, each with the pictures it is of; the last `tested` of these are kept for the test."""
    lines: list[Line] = []
    passed: dict[str, int] = {"": raw}  # the bits that reach the one before
    for name, tokens, bits, after in bottlenecks:
        _, N, D = tokens.shape
        own = N * (bits or D * HALF)
        passed[name] = passed[""] = min(own, passed[after])
        flat, every = tokens.flatten(1).float(), tokens.flatten(0, 1).float()
        readings = {}
        for what, (rows, truth) in sets.items():
            x, y = flat[rows], truth.values
            cut = len(x) - round(tested * len(x))
            parts = Truth(y[:cut], truth.classes), Truth(y[cut:], truth.classes)
            readings[what] = read(x[:cut], parts[0], x[cut:], parts[1])
        lines.append(
            Line(
                name=name,
                after=after or (lines[-1].name if lines else ""),
                tokens=N,
                width=D,
                bits=own,
                ratio=raw / own,
                at_most=passed[name],
                bound=min(N, D),
                rank=sum(effective_rank(picture) for picture in tokens[:RANKED]) / len(tokens[:RANKED]),
                spread=_spread(every),
                dimension=intrinsic_dimension(flat[:: math.ceil(len(flat) / POINTS)]),
                readings=readings,
            )
        )
    return lines


def _spread(every: Tensor) -> float:
    """Of all tokens (B·N, D) around their mean. Where there are more of them than columns, the squares of the singular
    values are the eigenvalues of a small matrix."""
    mean = every.mean(0, dtype=torch.float64)
    if len(every) <= every.shape[1]:
        return effective_rank(every - mean)
    parts = (some - mean for some in every.split(AT_ONCE))
    squares = torch.linalg.eigvalsh(sum(part.T @ part for part in parts))
    return effective_rank(squares.clamp(min=0).sqrt().diag())
