"""Linear probe: logistic regression on frozen features.

N images, D feature width, C classes
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import DataError
from vitrail.evals.scores import Proportion, Score

PENALTIES = tuple(10.0**power for power in range(0, -7, -1))  # strongest first: each fit starts from the previous one
SEARCH_STEPS = 200  # steps of a fit during penalty search


class LinearClassifier(NamedTuple):
    """A linear classifier."""

    weight: Tensor  # (C, D)
    bias: Tensor  # (C,)

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class LinearProbeResult(NamedTuple):
    """Scores of a linear probe and the result of its penalty search."""

    scores: list[Score]
    penalty: float  # the chosen penalty
    penalty_scores: dict[float, Proportion]  # penalty → accuracy on the held-out tenth

    @property
    def range_warning(self) -> str:
        """A warning if the best penalty is at the end of the searched range."""
        ends = (max(self.penalty_scores), min(self.penalty_scores))
        return " (at the end of the searched range)" if self.penalty in ends else ""


def penalized_loss(classifier: LinearClassifier, x: Tensor, y: Tensor, penalty: float) -> Tensor:
    """Mean cross-entropy + penalty/2 · |weight|², without a penalty on the bias; convex."""
    return F.cross_entropy(classifier(x), y) + penalty / 2 * classifier.weight.square().sum()


def fit_classifier(
    x: Tensor,
    y: Tensor,
    num_classes: int,
    penalty: float,
    *,
    initial: LinearClassifier | None = None,
    max_steps: int = 1000,
) -> LinearClassifier:
    """Fit multinomial logistic regression to x (N, D) and labels y (N,) with L-BFGS, in the dtype of x."""
    if initial is None:
        initial = LinearClassifier(x.new_zeros(num_classes, x.shape[1]), x.new_zeros(num_classes))
    linear = LinearClassifier(*(part.clone().requires_grad_() for part in initial))
    solver = torch.optim.LBFGS(
        list(linear),
        max_iter=max_steps,
        max_eval=2 * max_steps,
        history_size=20,
        tolerance_grad=1e-7,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        solver.zero_grad()
        value = penalized_loss(linear, x, y, penalty)
        value.backward()
        return value

    with torch.enable_grad():
        solver.step(closure)
    return LinearClassifier(*(part.detach() for part in linear))


def train_linear_probe(
    train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, names: Sequence[str], *, seed: int = 0
) -> LinearProbeResult:
    """Train and test a linear probe on features (N, D) and labels (N,).

    Features are standardised by the training set. The penalty is chosen on a held-out tenth of the training set, from
    the strongest until two in a row are worse than the best. The test set is used once.
    """
    if len(train) < 20 or not len(test):
        raise DataError(
            f"{len(train)} training images and {len(test)} test images",
            "use at least 20 training images and 1 test image",
        )
    C = len(names)
    mean, deviation = train.double().mean(0), train.double().std(0)
    deviation = torch.where(deviation > 1e-8, deviation, 1.0)  # constant features
    x, z = ((part.double() - mean) / deviation for part in (train, test))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    validation_rows, training_rows = order[: len(x) // 10], order[len(x) // 10 :]
    penalty_scores: dict[float, Proportion] = {}
    best_penalty, classifier, best_classifier = PENALTIES[0], None, None
    for penalty in PENALTIES:
        classifier = fit_classifier(
            x[training_rows], train_labels[training_rows], C, penalty, initial=classifier, max_steps=SEARCH_STEPS
        )
        penalty_scores[penalty] = _accuracy(classifier, x[validation_rows], train_labels[validation_rows])
        if (
            best_classifier is None or penalty_scores[penalty].value > penalty_scores[best_penalty].value
        ):  # of equal accuracies the strongest penalty
            best_penalty, best_classifier = penalty, classifier
        if len(penalty_scores) > 2 and all(
            accuracy.value < penalty_scores[best_penalty].value for accuracy in list(penalty_scores.values())[-2:]
        ):
            break
    final = fit_classifier(x, train_labels, C, best_penalty, initial=best_classifier)
    # Test accuracy of always predicting the most common training class.
    most_common = train_labels.bincount(minlength=C).argmax()
    majority = float((test_labels == most_common).double().mean())
    scores = [
        Score.from_proportion("linear probe, top-1", _accuracy(final, z, test_labels), chance=1 / C, majority=majority)
    ]
    for c, name in enumerate(names):
        rows = test_labels == c
        if rows.any():
            scores.append(
                Score.from_proportion(f"  {name}", _accuracy(final, z[rows], test_labels[rows]), chance=1 / C)
            )
    return LinearProbeResult(scores, best_penalty, penalty_scores)


def _accuracy(classifier: LinearClassifier, x: Tensor, y: Tensor) -> Proportion:
    return Proportion(int((classifier(x).argmax(1) == y).sum()), len(y))
