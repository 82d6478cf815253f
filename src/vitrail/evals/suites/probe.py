"""Linear probe: how much of the classes a straight cut through frozen features finds.

N pictures, D width of the features, C classes
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import DataError
from vitrail.evals.shares import Score, Share

STRENGTHS = tuple(10.0**power for power in range(0, -7, -1))  # strongest first: each fit starts from the one before
TRIAL = 200  # steps of a fit that only chooses the strength


class Linear(NamedTuple):
    weight: Tensor  # (C, D)
    bias: Tensor  # (C,)

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class Probe(NamedTuple):
    scores: list[Score]
    strength: float  # of the penalty that was chosen
    tried: dict[float, Share]  # each strength's score on the held-out tenth

    @property
    def edge(self) -> str:
        """A warning where the best strength may lie beyond those tried."""
        ends = (max(self.tried), min(self.tried))
        return " (the end of what was tried)" if self.strength in ends else ""


def loss(linear: Linear, x: Tensor, y: Tensor, strength: float) -> Tensor:
    """Mean cross-entropy + strength/2 · |weight|²; the bias is free. Convex, so its minimum is the only one."""
    return F.cross_entropy(linear(x), y) + strength / 2 * linear.weight.square().sum()


def fit(
    x: Tensor, y: Tensor, classes: int, strength: float, *, start: Linear | None = None, steps: int = 1000
) -> Linear:
    """Multinomial logistic regression by L-BFGS, in the type of x (N, D); y (N,)."""
    if start is None:
        start = Linear(x.new_zeros(classes, x.shape[1]), x.new_zeros(classes))
    linear = Linear(*(part.clone().requires_grad_() for part in start))
    solver = torch.optim.LBFGS(
        list(linear),
        max_iter=steps,
        max_eval=2 * steps,
        history_size=20,
        tolerance_grad=1e-7,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        solver.zero_grad()
        value = loss(linear, x, y, strength)
        value.backward()
        return value

    with torch.enable_grad():
        solver.step(closure)
    return Linear(*(part.detach() for part in linear))


def probe(
    train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, names: Sequence[str], *, seed: int = 0
) -> Probe:
    """Features (N, D) and labels (N,) of both parts. Features are centred and scaled by the training part's deviation;
    the penalty is chosen on a tenth of the training part, from the strongest on until two in a row did worse than the
    best before them, and the test part is looked at once."""
    if len(train) < 20 or not len(test):
        raise DataError(f"{len(train)} pictures to train a probe, {len(test)} to test it", "give at least 20 and 1")
    C = len(names)
    mean, deviation = train.double().mean(0), train.double().std(0)
    deviation = torch.where(deviation > 1e-8, deviation, 1.0)  # a feature that never changes says nothing
    x, z = ((part.double() - mean) / deviation for part in (train, test))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    held, kept = order[: len(x) // 10], order[len(x) // 10 :]
    tried: dict[float, Share] = {}
    best, linear, found = STRENGTHS[0], None, None
    for strength in STRENGTHS:
        linear = fit(x[kept], train_labels[kept], C, strength, start=linear, steps=TRIAL)
        tried[strength] = _right(linear, x[held], train_labels[held])
        if found is None or tried[strength].value > tried[best].value:  # of equals the strongest
            best, found = strength, linear
        if len(tried) > 2 and all(share.value < tried[best].value for share in list(tried.values())[-2:]):
            break
    final = fit(x, train_labels, C, best, start=found)
    # What always answering the training part's commonest class scores on the test part.
    common = train_labels.bincount(minlength=C).argmax()
    majority = float((test_labels == common).double().mean())
    scores = [Score.counted("linear probe, top-1", _right(final, z, test_labels), chance=1 / C, majority=majority)]
    for c, name in enumerate(names):
        rows = test_labels == c
        if rows.any():
            scores.append(Score.counted(f"  {name}", _right(final, z[rows], test_labels[rows]), chance=1 / C))
    return Probe(scores, best, tried)


def _right(linear: Linear, x: Tensor, y: Tensor) -> Share:
    return Share(int((linear(x).argmax(1) == y).sum()), len(y))
