"""Measure the information about an image at every bottleneck of a model.

Tokens, bits and ranks bound the information. Effective rank and intrinsic dimension measure how much of the bound is
used. Linear probes for known properties (position, colour, count, identity) show whether they are still decodable.

Shapes: B images, N tokens, D token width, F = N·D features, K columns of a property.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.config import Config
from vitrail.errors import DataError
from vitrail.evals.metrics import estimate_mean
from vitrail.evals.scores import Proportion

BITS_PER_FEATURE = 16
"""Bits per feature of a continuous token: those of bf16."""

RIDGE_PENALTIES = tuple(10.0**power for power in range(-6, 4))
MAX_TIE_FRACTION = 0.1  # fraction of tied distances above which the intrinsic dimension is undefined
CHUNK_SIZE = 2048  # features or tokens converted to double precision at a time
NUM_RANK_IMAGES = 64  # images to average ranks over
NUM_DIMENSION_IMAGES = 1000  # maximum images to estimate a dimension from


class Bottleneck(NamedTuple):
    """Activations of one bottleneck.

    tokens          (B, N, D)
    bits_per_token  bits of a discrete token; 0 if tokens are continuous
    source          the bottleneck they are computed from; default: the previous one in the list
    """

    name: str
    tokens: Tensor
    bits_per_token: int = 0
    source: str = ""


class GroundTruth(NamedTuple):
    """A known property of B images: numbers (B, K) if num_classes is 0, else class ids (B,)."""

    values: Tensor
    num_classes: int = 0


class ProbeResult(Config):
    """Test score of a linear probe: the accuracy for classes, or the explained variance for numbers.

    `blind` is the score without the image, `count` the number of test images.
    """

    value: float
    interval: tuple[float, float]
    blind: float
    count: int


class BottleneckRecord(Config):
    """Measurements of one bottleneck.

    after       the bottleneck it is computed from; empty for the first
    bits        bits of the tokens of an image
    ratio       bits of the image / bits of its tokens
    max_bits    upper bound on the bits that reach this bottleneck: the minimum over all bottlenecks before it
    bound       upper bound on the rank of an image's tokens: min(N, D)
    rank        effective rank of an image's tokens, averaged over images
    spread      effective rank of the centred tokens of all images, at most D
    dimension   intrinsic dimension of the set of images; None if it cannot be estimated
    probes      property → score of a linear probe
    """

    name: str
    after: str
    tokens: int
    width: int
    bits: int
    ratio: float
    max_bits: int
    bound: int
    rank: float
    spread: float
    dimension: float | None
    probes: dict[str, ProbeResult]


# ---- measures ---------------------------------------------------------------------------------------------------


def compute_effective_rank(x: Tensor) -> float:
    """Compute the effective rank of x (N, D): exp of the entropy of its normalized singular values (Roy and Vetterli).

    x is not centred.
    """
    if not x.isfinite().all():
        raise DataError("tokens contain NaN or infinite values", "check the model's weights")
    values = torch.linalg.svdvals(x.double())
    total = values.sum()
    if not total > 0:
        return 0.0
    shares = values / total
    return math.exp(-torch.special.xlogy(shares, shares).sum().item())


def estimate_intrinsic_dimension(x: Tensor) -> float | None:
    """Estimate the intrinsic dimension of points x (B, F) by TwoNN (Facco et al.), in its maximum-likelihood form.

    The estimate is (n − 1) / Σ ln(r₂ / r₁) over the distances of each point to its two nearest neighbours. Duplicate
    points count once. Returns None for fewer than ten points, or if many distances are tied.
    """
    x = x.double() - x.double().mean(0)
    squares = x.square().sum(1)
    squared_distances = (squares[:, None] + squares - 2 * x @ x.T).clamp(min=0)  # (B, B)
    same = squared_distances <= 1e-9 * squares.mean()
    is_first = ~(same.tril(-1).any(1))  # the first of each set of duplicates
    squared_distances, n = squared_distances[is_first][:, is_first], int(is_first.sum())
    if n < 10:
        return None
    # (n, 2), without the point itself
    nearest = squared_distances.fill_diagonal_(0).topk(3, largest=False).values[:, 1:]
    logs = 0.5 * (nearest[:, 1] / nearest[:, 0]).log()
    if (logs < 1e-9).double().mean() > MAX_TIE_FRACTION:
        return None
    return (n - 1) / logs.sum().item()


def run_linear_probe(train: Tensor, train_truth: GroundTruth, test: Tensor, test_truth: GroundTruth) -> ProbeResult:
    """Fit a ridge regression on standardized features (B, F) and score it on test features.

    Classes are regressed as one-hot columns. The penalty minimizes the closed-form leave-one-out error on the training
    images, so that the test images are used once.
    """
    if len(train) < 20 or not len(test):
        raise DataError(f"{len(train)} training and {len(test)} test images for a probe", "give at least 20 and 1")
    classes = train_truth.num_classes
    targets = torch.eye(classes).double()[train_truth.values] if classes else train_truth.values.double()  # (B, K)
    guess = _predict_ridge(train, targets, test)
    if classes:
        right = Proportion(int((guess.argmax(1) == test_truth.values).sum()), len(test))
        common = train_truth.values.bincount(minlength=classes).argmax()
        blind = (test_truth.values == common).double().mean().item()
        return ProbeResult(value=right.value, interval=right.interval, blind=blind, count=len(test))
    known = test_truth.values.double()
    spread = (known - known.mean(0)).square().mean(0)
    share = 1 - ((known - guess).square() / spread).mean(1)  # per image
    found = estimate_mean("R²", share)
    return ProbeResult(value=found.value, interval=found.interval, blind=0.0, count=len(test))


def _predict_ridge(train: Tensor, targets: Tensor, test: Tensor) -> Tensor:
    """Predict targets by kernel ridge regression: train (B, F), targets (B, K), test (T, F) → (T, K)."""
    gram, across = _compute_gram_matrices(train, test)  # (B, B), (T, B)
    values, vectors = torch.linalg.eigh(gram)
    values = values.clamp(min=0)
    mean = targets.mean(0)
    rotated_targets = vectors.T @ (targets - mean)
    strengths = [strength * values.mean() + 1e-12 for strength in RIDGE_PENALTIES]
    best = min(
        strengths,
        key=lambda strength: _compute_loo_residuals(values, vectors, targets, strength).square().mean().item(),
    )
    return mean + across @ (vectors @ (rotated_targets / (values + best)[:, None]))


def _compute_loo_residuals(values: Tensor, vectors: Tensor, targets: Tensor, penalty: Tensor) -> Tensor:
    """Compute leave-one-out residuals (B, K) in closed form. The fitted mean adds 1/B to every leverage."""
    shrinkage = values / (values + penalty)
    mean = targets.mean(0)
    lever = 1 / len(targets) + (vectors.square() * shrinkage).sum(1)
    missed = targets - mean - vectors @ (shrinkage[:, None] * (vectors.T @ (targets - mean)))
    return missed / (1 - lever).clamp(min=1e-9)[:, None]


def _compute_gram_matrices(train: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """Compute Gram matrices of standardized features in chunks, since an image may have a million features."""
    gram = train.new_zeros(len(train), len(train), dtype=torch.float64)
    across = train.new_zeros(len(test), len(train), dtype=torch.float64)
    for start in range(0, train.shape[1], CHUNK_SIZE):
        some, more = (x[:, start : start + CHUNK_SIZE].double() for x in (train, test))
        mean, deviation = some.mean(0), some.std(0)
        deviation = torch.where(deviation > 1e-8, deviation, 1.0)  # constant features are only centred
        some, more = (some - mean) / deviation, (more - mean) / deviation
        gram += some @ some.T
        across += more @ some.T
    return gram / train.shape[1], across / train.shape[1]


# ---- all bottlenecks -------------------------------------------------------------------------------------------------


def measure_bottlenecks(
    bottlenecks: Sequence[Bottleneck],
    image_bits: int,
    ground_truths: Mapping[str, tuple[slice, GroundTruth]],
    *,
    test_fraction: float = 0.25,
) -> list[BottleneckRecord]:
    """Measure all bottlenecks, in the order that an image passes through them.

    image_bits     bits of an image
    ground_truths  property → (the images it is known for, its values)
    test_fraction  fraction of these images, taken from the end, that probes are tested on
    """
    lines: list[BottleneckRecord] = []
    max_bits: dict[str, int] = {"": image_bits}  # name → upper bound on its bits; "" is the previous one
    for name, tokens, bits, after in bottlenecks:
        _, N, D = tokens.shape
        bits_here = N * (bits or D * BITS_PER_FEATURE)
        max_bits[name] = min(bits_here, max_bits[after])
        max_bits[""] = max_bits[name]
        flat, all_tokens = tokens.flatten(1).float(), tokens.flatten(0, 1).float()
        probes = {}
        for property_name, (rows, truth) in ground_truths.items():
            x, y = flat[rows], truth.values
            split = len(x) - round(test_fraction * len(x))
            parts = GroundTruth(y[:split], truth.num_classes), GroundTruth(y[split:], truth.num_classes)
            probes[property_name] = run_linear_probe(x[:split], parts[0], x[split:], parts[1])
        lines.append(
            BottleneckRecord(
                name=name,
                after=after or (lines[-1].name if lines else ""),
                tokens=N,
                width=D,
                bits=bits_here,
                ratio=image_bits / bits_here,
                max_bits=max_bits[name],
                bound=min(N, D),
                rank=sum(compute_effective_rank(picture) for picture in tokens[:NUM_RANK_IMAGES])
                / len(tokens[:NUM_RANK_IMAGES]),
                spread=_compute_token_spread(all_tokens),
                dimension=estimate_intrinsic_dimension(flat[:: math.ceil(len(flat) / NUM_DIMENSION_IMAGES)]),
                probes=probes,
            )
        )
    return lines


def _compute_token_spread(tokens: Tensor) -> float:
    """Compute the effective rank of centred tokens (B·N, D).

    With more tokens than columns, the squared singular values are the eigenvalues of a small matrix.
    """
    mean = tokens.mean(0, dtype=torch.float64)
    if len(tokens) <= tokens.shape[1]:
        return compute_effective_rank(tokens - mean)
    parts = (some - mean for some in tokens.split(CHUNK_SIZE))
    squares = torch.linalg.eigvalsh(sum(part.T @ part for part in parts))
    return compute_effective_rank(squares.clamp(min=0).sqrt().diag())
