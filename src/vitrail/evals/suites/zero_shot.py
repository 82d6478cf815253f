"""Zero-shot classification: assigns images to the class with the nearest prompt embedding.

Scores are named "zero-shot" only if the caller says that no class was in the training data, else "by prompt".

N images, C classes, T templates, E embedding width
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import ConfigError, DataError
from vitrail.evals.scores import NO_SUBSET, Proportion, Score

TEMPLATES = (
    "a photo of a {}.",
    "a picture that shows a {}.",
    "a small image of one {}.",
    "a blurred photo of the {}.",
    "a close view of the {}.",
    "the {}, seen from afar.",
    "a drawing of a {}.",
    "this is a {}.",
    "{}",
)


def build_prompts(names: Sequence[str], templates: Sequence[str] = TEMPLATES) -> list[str]:
    """Build C · T prompts, grouped by name."""
    if not names or not templates:
        raise ConfigError(f"{len(names)} classes and {len(templates)} templates", "pass at least one of each")
    for template in templates:
        if "{}" not in template:
            raise ConfigError(f"the template {template!r} has no {{}} for the class name", 'add "{}"')
    return [template.replace("{}", name) for name in names for template in templates]


def average_prompts(prompt_embeddings: Tensor, num_classes: int) -> Tensor:
    """Average prompt embeddings (C · T, E) per class and normalise: (C, E)."""
    each = F.normalize(prompt_embeddings, dim=-1).view(num_classes, -1, prompt_embeddings.shape[-1])  # (C, T, E)
    return F.normalize(each.mean(1), dim=-1)


def zero_shot_classifier(
    embed_texts: Callable[[Sequence[str]], Tensor], names: Sequence[str], templates: Sequence[str] = TEMPLATES
) -> Tensor:
    """Class embeddings (C, E) from prompts. `embed_texts` maps texts to embeddings (N, E)."""
    return average_prompts(embed_texts(build_prompts(names, templates)), len(names))


def evaluate_zero_shot(
    image_embeddings: Tensor,
    labels: Tensor,
    class_embeddings: Tensor,
    names: Sequence[str],
    *,
    zero_shot: bool = False,
    subset: Mapping[str, str | int] = NO_SUBSET,
) -> list[Score]:
    """Score top-1, top-5 (for more than 5 classes) and top-1 per class.

    image_embeddings (N, E), labels (N,), class_embeddings (C, E). `zero_shot` says that no class was in training.
    """
    N, C = len(image_embeddings), len(class_embeddings)
    if not N or len(labels) != N or len(names) != C or int(labels.min()) < 0 or int(labels.max()) >= C:
        raise DataError(f"{N} images, {len(labels)} labels and {len(names)} names do not match {C} classes")
    method = "zero-shot" if zero_shot else "by prompt"
    similarity = F.normalize(image_embeddings, dim=-1) @ class_embeddings.T  # (N, C)
    label_similarity = similarity.gather(1, labels[:, None])
    # Ties count half, so a model with constant embeddings gets no credit.
    rank = 1 + (similarity > label_similarity).sum(1) + ((similarity == label_similarity).sum(1) - 1) / 2  # (N,)
    majority = int(labels.bincount().max()) / N
    scores = [Score.from_proportion(f"{method}, top-1", _count_hits(rank <= 1), chance=1 / C, majority=majority)]
    if C > 5:
        top5_frequency = labels.bincount(minlength=C).topk(5).values.sum().item() / N
        scores.append(
            Score.from_proportion(f"{method}, top-5", _count_hits(rank <= 5), chance=5 / C, majority=top5_frequency)
        )
    class_scores = [
        Score.from_proportion(f"  {name}", _count_hits(rank[labels == c] <= 1), chance=1 / C)
        for c, name in enumerate(names)
    ]
    scores += [score for score in class_scores if score.count]
    return [replace(score, subset=subset) for score in scores]


def _count_hits(hits: Tensor) -> Proportion:
    return Proportion(int(hits.sum(dtype=torch.int64)), len(hits))
