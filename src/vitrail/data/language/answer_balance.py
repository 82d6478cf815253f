"""Balance the answers of questions, and measure blind baselines.

Shapes: B scenes, N candidates, n sentences.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.data.language.concept_names import ConceptPools
from vitrail.data.language.open_questions import list_countable
from vitrail.data.language.qa_batch import QA_KINDS, SceneQABatch
from vitrail.data.language.scene_facts import LanguageRandom, SceneFacts
from vitrail.data.language.scene_language import CERTAIN, NUM_LABELS, SceneLanguage
from vitrail.data.scenes import counter_rng
from vitrail.data.scenes.scene import SceneBatch

FIT_ROUNDS = 60  # iterations of fitting the weights, which converge quickly


def balance_answers(
    language: SceneLanguage, scenes: SceneBatch, seed: int = 0, min_fraction: float = 0.05
) -> SceneLanguage:
    """Return the language with balanced answers: each count, colour and position is equally frequent in such scenes.

    Candidates are weighted by their answer, and questions with answers that are still too frequent are dropped at
    random. Answers that fewer than `min_fraction` of the scenes support are excluded, because balancing them would
    drop almost all other questions. The function also measures the frequency of each concept.
    """
    facts = SceneFacts(language, scenes)
    labels, mask, _ = list_countable(facts, LanguageRandom(seed, scenes.index, "balance"))
    candidates = {
        "counting": (labels, mask),
        "colour": (facts.colour, facts.has_unique_name & (facts.colour > 0)),
        "position": (facts.image_ninth.clamp(min=0), facts.is_describable & (facts.image_ninth >= 0)),
    }
    fitted = {kind: _fit_weights(*candidates[kind], NUM_LABELS[kind], min_fraction) for kind in NUM_LABELS}
    counts = torch.bincount(facts.concept[facts.is_filled], minlength=language.num_concepts).cpu()
    return replace(
        language,
        answer_weights={kind: weight for kind, (weight, _) in fitted.items()},
        keep_thresholds={kind: keep for kind, (_, keep) in fitted.items()},
        frequency_pools=ConceptPools.from_weights(language.names, (counts + 1) * language.names.is_used).to(
            language.concept.device
        ),
    )


def _fit_weights(labels: Tensor, mask: Tensor, count: int, min_fraction: float) -> tuple[Tensor, Tensor]:
    """Fit sampling weights and keep thresholds (labels,) to candidates (B, N)."""
    has = torch.zeros(len(labels), count, device=labels.device).scatter_add_(1, labels, mask.float()) > 0
    is_frequent = has.sum(0) >= min_fraction * has.any(1).sum()
    is_frequent = is_frequent & has.any(0)
    weight = is_frequent.double()
    for _ in range(FIT_ROUNDS):
        share = _expected_counts(weight, labels, mask, count)
        weight = torch.where(is_frequent, weight / share.clamp(min=1e-9), 0)
        weight = weight / weight.max().clamp(min=1e-9)
    integer_weight = torch.where(is_frequent, (weight * (1 << 20)).round().clamp(min=1), 0)
    share = _expected_counts(integer_weight, labels, mask, count)
    rarest = torch.where(is_frequent, share, torch.inf).min()
    keep = torch.where(is_frequent, CERTAIN * (rarest / share.clamp(min=1e-9)), 0)
    return integer_weight.long(), keep.clamp(max=CERTAIN).long()


def _expected_counts(weight: Tensor, labels: Tensor, mask: Tensor, count: int) -> Tensor:
    """Return the expected number of choices of each label (labels,)."""
    each = weight[labels] * mask
    each = each / each.sum(1, keepdim=True).clamp(min=1e-30)
    return torch.zeros(count, dtype=torch.double, device=labels.device).scatter_add_(
        0, labels.flatten(), each.flatten()
    )


class BlindBaseline(NamedTuple):
    """Accuracy without the image."""

    kind: str
    num_questions: int  # number of test questions: every second one
    num_answers: int  # number of different answers
    majority: float  # accuracy of the most frequent answer
    blind: float  # best accuracy from the question alone

    @property
    def margin(self) -> float:
        """Half the width of the 95 % confidence interval."""
        return 1.96 * (self.blind * (1 - self.blind) / self.num_questions) ** 0.5


def measure_baselines(questions: SceneQABatch) -> list[BlindBaseline]:
    """Measure blind baselines per kind, fitted to every other question and tested on the rest.

    The blind accuracy is the best of the most frequent answer, the most frequent answer to the same question (or its
    template), and naive Bayes over the pieces of the question. For boxes, the prediction is the median box, which
    counts as correct at an IoU of at least 0.5.
    """
    found = []
    for number in questions.kind[questions.valid].unique().tolist():
        subset = questions.to("cpu")[(questions.valid & (questions.kind == number)).cpu()]
        if len(subset) < 2:
            continue
        answer = subset.label.unique(return_inverse=True)[1]
        classes = int(answer.max()) + 1
        common = answer[::2].bincount(minlength=classes).argmax().expand(len(subset))
        if QA_KINDS[number] == "grounding":
            guessed = subset.box[::2].double().quantile(0.5, 0)
            right = [(_box_iou(subset.box[1::2], guessed) >= 0.5).double().mean().item()]
        else:
            # Identify questions by a random hash sum, because sorting rows is slow.
            factors = counter_rng.random_bits(0, torch.arange(subset.question.shape[1]), "row", 1)[:, 0] * 2 + 1
            question = (subset.question * factors).sum(1).unique(return_inverse=True)[1]
            by_template = _predict_by_lookup(subset.template, answer, classes, common)
            guesses = (
                common,
                _predict_by_lookup(question, answer, classes, by_template),
                _predict_by_bayes(subset.question, answer, classes),
            )
            right = [(guess[1::2] == answer[1::2]).double().mean().item() for guess in guesses]
        found.append(BlindBaseline(QA_KINDS[number], len(answer[1::2]), classes, right[0], max(right)))
    return found


def _box_iou(boxes: Tensor, box: Tensor) -> Tensor:
    """Return the IoU (n,) of boxes (n, 4) with one box (4,)."""
    common = (torch.minimum(boxes[:, 2:], box[2:]) - torch.maximum(boxes[:, :2], box[:2])).clamp(min=0).prod(1)
    return common / ((boxes[:, 2:] - boxes[:, :2]).prod(1) + (box[2:] - box[:2]).prod() - common)


def _predict_by_lookup(key: Tensor, answer: Tensor, classes: int, otherwise: Tensor) -> Tensor:
    """Return the most frequent training answer of each key, or `otherwise` for new keys."""
    pairs, times = (key[::2] * classes + answer[::2]).unique(return_counts=True)
    order = times.argsort(stable=True)  # the most frequent is written last
    best = torch.full((int(key.max()) + 1,), -1)
    for pair in pairs[order].tolist():
        best[pair // classes] = pair % classes
    return torch.where(best[key] >= 0, best[key], otherwise)


def _predict_by_bayes(question: Tensor, answer: Tensor, classes: int) -> Tensor:
    score = (answer[::2].bincount(minlength=classes) + 1).double().log().expand(len(answer), classes).clone()
    for column in question.unbind(1):
        values = column.unique(return_inverse=True)[1]
        count = int(values.max()) + 1
        counts = (values[::2] * classes + answer[::2]).bincount(minlength=count * classes).view(count, classes) + 0.5
        score += (counts / counts.sum(0)).log()[values]
    return score.argmax(1)


def format_baselines(baselines: list[BlindBaseline]) -> str:
    """Format baselines as a text table."""
    lines = [f"{'kind':<24}{'questions':>10}{'answers':>9}{'majority':>10}{'blind':>8}{'±':>6}"]
    lines += [
        f"{b.kind:<24}{b.num_questions:>10,}{b.num_answers:>9,}{b.majority:>10.1%}{b.blind:>8.1%}{b.margin:>6.1%}"
        for b in baselines
    ]
    return "\n".join(lines)
