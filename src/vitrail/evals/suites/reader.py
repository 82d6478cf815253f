"""What a contrastive model still reads in reconstructions: their classes by prompt, and by a linear probe.

N pictures, B of them at once, H, W pixels, C classes, E width of an embedding, D of a feature
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import DataError
from vitrail.evals.contrastive import Embedder
from vitrail.evals.shares import Score, Share
from vitrail.evals.suites.probe import Linear, fit, probe
from vitrail.evals.suites.zeroshot import TEMPLATES, classifier, zeroshot


class Told(NamedTuple):
    """Pictures, and the number of each one's class."""

    batches: Iterable[Tensor]  # uint8 (B, 3, H, W)
    labels: Tensor  # (N,)


class Reader:
    """Looks at the originals once; then at each coder's reconstructions of them, in the same order: see `look`.

    With `train`, a linear probe is trained on the originals of another part, and asked about the reconstructions.
    """

    def __init__(
        self,
        embedder: Embedder,
        test: Told,
        names: Sequence[str],
        *,
        templates: Sequence[str] = TEMPLATES,
        train: Told | None = None,
    ):
        self.embedder, self.labels, self.names = embedder, test.labels, tuple(names)
        self.classes = classifier(embedder.texts, names, templates)
        self.linear: Linear | None = None
        self._mean = self._deviation = torch.zeros(0)
        original = Look(self, probed=train is not None)
        for pictures in test.batches:
            original.add(pictures)
        u, z = original.seen()
        self.right = self.named(u)  # (N,) of the originals
        self.before = {"by prompt, top-1": float(self.right.double().mean())}
        if train is not None:
            x = torch.cat([embedder.features(list(pictures)) for pictures in train.batches])
            found = probe(x, train.labels, z, test.labels, self.names)
            self._mean, self._deviation = x.double().mean(0), x.double().std(0)
            self._deviation = torch.where(self._deviation > 1e-8, self._deviation, 1.0)
            self.linear = fit(self.scaled(x), train.labels, len(self.names), found.strength)
            self.before["linear probe, top-1"] = found.scores[0].value
            self.majority = found.scores[0].beside["majority"]

    def look(self) -> "Look":
        """A coder's reconstructions, batch after batch."""
        return Look(self, probed=self.linear is not None)

    def named(self, u: Tensor) -> Tensor:
        """(N, E) → (N,) whether the own class lies nearer than all others"""
        near = F.normalize(u, dim=-1) @ self.classes.T  # (N, C)
        own = near.gather(1, self.labels[:, None])
        return (near.scatter(1, self.labels[:, None], -torch.inf).amax(1, keepdim=True) < own)[:, 0]

    def scaled(self, x: Tensor) -> Tensor:
        """(N, D) by mean and deviation of the training part"""
        return (x.double() - self._mean) / self._deviation


class Look:
    def __init__(self, reader: Reader, *, probed: bool):
        self.reader, self.probed = reader, probed
        self._embedded: list[Tensor] = []
        self._features: list[Tensor] = []

    def add(self, pictures: Tensor) -> None:
        """uint8 (B, 3, H, W)"""
        each = list(pictures.cpu())
        self._embedded.append(self.reader.embedder.images(each))
        if self.probed:
            self._features.append(self.reader.embedder.features(each))

    def seen(self) -> tuple[Tensor, Tensor]:
        """Embeddings (N, E), and features (N, D) where there is a probe."""
        u = torch.cat(self._embedded) if self._embedded else torch.zeros(0, 0)
        if len(u) != len(self.reader.labels):
            raise DataError(f"{len(u)} pictures and {len(self.reader.labels)} labels", "give the same pictures again")
        return u, torch.cat(self._features) if self.probed else u

    def scores(self) -> list[Score]:
        """Named right by prompt; of those whose original was named right, named right still; right by the probe."""
        reader = self.reader
        u, z = self.seen()
        prompted = zeroshot(u, reader.labels, reader.classes, reader.names)[0]
        scores = [_beside(prompted, reader)]
        if reader.right.any():
            still = reader.named(u)[reader.right]
            scores.append(Score.counted("still named right", Share(int(still.sum()), len(still))))
        if reader.linear is not None:
            hits = reader.linear(reader.scaled(z)).argmax(1) == reader.labels
            share, chance = Share(int(hits.sum()), len(hits)), 1 / len(reader.names)
            counted = Score.counted("linear probe, top-1", share, chance=chance, majority=reader.majority)
            scores.append(_beside(counted, reader))
        return scores


def _beside(score: Score, reader: Reader) -> Score:
    return replace(score, beside={"originals": reader.before[score.name], **score.beside})
