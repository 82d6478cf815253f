"""Recognition in reconstructions: classifies reconstructed images by prompt and with a linear probe.

N images, B batch size, H, W pixels, C classes, E embedding width, D feature width
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import DataError
from vitrail.evals.contrastive_embedder import ContrastiveEmbedder
from vitrail.evals.scores import Proportion, Score
from vitrail.evals.suites.linear_probe import LinearClassifier, fit_classifier, train_linear_probe
from vitrail.evals.suites.zero_shot import TEMPLATES, evaluate_zero_shot, zero_shot_classifier


class LabelledBatches(NamedTuple):
    """Batches of images, and the class index of each image."""

    batches: Iterable[Tensor]  # uint8 (B, 3, H, W)
    labels: Tensor  # (N,)


class ReconstructionRecognizer:
    """Classifies original images once, then the reconstructions of each coder in the same order (`start_pass`).

    With `train`, a linear probe is trained on original images of the training split and applied to reconstructions.
    """

    def __init__(
        self,
        embedder: ContrastiveEmbedder,
        test: LabelledBatches,
        names: Sequence[str],
        *,
        templates: Sequence[str] = TEMPLATES,
        train: LabelledBatches | None = None,
    ):
        self.embedder, self.labels, self.names = embedder, test.labels, tuple(names)
        self.class_embeddings = zero_shot_classifier(embedder.embed_texts, names, templates)
        self.probe_classifier: LinearClassifier | None = None
        self._mean = torch.zeros(0)
        self._deviation = self._mean
        original = RecognitionPass(self, has_probe=train is not None)
        for pictures in test.batches:
            original.add_images(pictures)
        embeddings, features = original.collect()
        self.originals_correct = self.is_recognized(embeddings)  # (N,) whether each original is recognised
        self.original_scores = {"by prompt, top-1": float(self.originals_correct.double().mean())}
        if train is not None:
            train_features = torch.cat([embedder.extract_features(list(pictures)) for pictures in train.batches])
            probe_result = train_linear_probe(train_features, train.labels, features, test.labels, self.names)
            self._mean, self._deviation = train_features.double().mean(0), train_features.double().std(0)
            self._deviation = torch.where(self._deviation > 1e-8, self._deviation, 1.0)
            self.probe_classifier = fit_classifier(
                self.standardize(train_features), train.labels, len(self.names), probe_result.penalty
            )
            self.original_scores["linear probe, top-1"] = probe_result.scores[0].value
            self.majority_accuracy = probe_result.scores[0].baselines["majority"]

    def start_pass(self) -> "RecognitionPass":
        """Start a pass over the reconstructions of one coder."""
        return RecognitionPass(self, has_probe=self.probe_classifier is not None)

    def is_recognized(self, embeddings: Tensor) -> Tensor:
        """Whether each embedding (N, E) is nearest to its own class: (N,) bool."""
        similarity = F.normalize(embeddings, dim=-1) @ self.class_embeddings.T  # (N, C)
        label_similarity = similarity.gather(1, self.labels[:, None])
        return (similarity.scatter(1, self.labels[:, None], -torch.inf).amax(1, keepdim=True) < label_similarity)[:, 0]

    def standardize(self, features: Tensor) -> Tensor:
        """Standardise features (N, D) by the training set."""
        return (features.double() - self._mean) / self._deviation


class RecognitionPass:
    """Collects embeddings and features of one set of images, batch by batch."""

    def __init__(self, recognizer: ReconstructionRecognizer, *, has_probe: bool):
        self.recognizer, self.has_probe = recognizer, has_probe
        self._embedded: list[Tensor] = []
        self._features: list[Tensor] = []

    def add_images(self, images: Tensor) -> None:
        """Add images, uint8 (B, 3, H, W)."""
        each = list(images.cpu())
        self._embedded.append(self.recognizer.embedder.embed_images(each))
        if self.has_probe:
            self._features.append(self.recognizer.embedder.extract_features(each))

    def collect(self) -> tuple[Tensor, Tensor]:
        """Embeddings (N, E), and features (N, D) if there is a probe."""
        embeddings = torch.cat(self._embedded) if self._embedded else torch.zeros(0, 0)
        if len(embeddings) != len(self.recognizer.labels):
            raise DataError(
                f"{len(embeddings)} images but {len(self.recognizer.labels)} labels", "pass the same images again"
            )
        return embeddings, torch.cat(self._features) if self.has_probe else embeddings

    def compute_scores(self) -> list[Score]:
        """Accuracy by prompt; fraction of recognised originals that are still recognised; accuracy of the probe."""
        reader = self.recognizer
        embeddings, features = self.collect()
        prompted = evaluate_zero_shot(embeddings, reader.labels, reader.class_embeddings, reader.names)[0]
        scores = [_with_original_score(prompted, reader)]
        if reader.originals_correct.any():
            still_recognized = reader.is_recognized(embeddings)[reader.originals_correct]
            scores.append(
                Score.from_proportion(
                    "still named right", Proportion(int(still_recognized.sum()), len(still_recognized))
                )
            )
        if reader.probe_classifier is not None:
            hits = reader.probe_classifier(reader.standardize(features)).argmax(1) == reader.labels
            accuracy, chance = Proportion(int(hits.sum()), len(hits)), 1 / len(reader.names)
            probe_score = Score.from_proportion(
                "linear probe, top-1", accuracy, chance=chance, majority=reader.majority_accuracy
            )
            scores.append(_with_original_score(probe_score, reader))
        return scores


def _with_original_score(score: Score, recognizer: ReconstructionRecognizer) -> Score:
    return replace(score, baselines={"originals": recognizer.original_scores[score.name], **score.baselines})
