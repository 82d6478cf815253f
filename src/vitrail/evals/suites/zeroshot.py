"""Classes by prompt: the class whose prompts lie nearest to a picture.

Whether that is zero-shot depends on training: a model that was trained on the classes it is tested on is only asked by
prompt. Nothing here can know, so the caller says it.

N pictures, C classes, T templates, E width of the embedding
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import ConfigError, DataError
from vitrail.evals.shares import Score, Share

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


def classifier(
    embed: Callable[[Sequence[str]], Tensor], names: Sequence[str], templates: Sequence[str] = TEMPLATES
) -> Tensor:
    """(C, E): the mean of a class's prompts, each of length 1, brought to length 1 again. `embed` is texts → (N, E)."""
    if not names or not templates:
        raise ConfigError(f"{len(names)} classes and {len(templates)} templates", "give at least one of each")
    for template in templates:
        if "{}" not in template:
            raise ConfigError(f"the template {template!r} has no place for the name", 'write "{}" where it goes')
    texts = [template.replace("{}", name) for name in names for template in templates]
    prompts = F.normalize(embed(texts), dim=-1).view(len(names), len(templates), -1)  # (C, T, E)
    return F.normalize(prompts.mean(1), dim=-1)


def zeroshot(
    pictures: Tensor, labels: Tensor, classes: Tensor, names: Sequence[str], *, unseen: bool = False
) -> list[Score]:
    """pictures (N, E), labels (N,), classes (C, E) → top-1, top-5 where there are more classes than that, and top-1 of
    every class. `unseen` says that no class was in training."""
    N, C = len(pictures), len(classes)
    if not N or len(labels) != N or len(names) != C or int(labels.min()) < 0 or int(labels.max()) >= C:
        raise DataError(f"{N} pictures, {len(labels)} labels and {len(names)} names do not go with {C} classes")
    how = "zero-shot" if unseen else "by prompt"
    right = (F.normalize(pictures, dim=-1) @ classes.T).topk(min(5, C)).indices == labels[:, None]  # (N, ≤ 5)
    majority = int(labels.bincount().max()) / N
    scores = [Score.counted(f"{how}, top-1", _share(right[:, 0]), chance=1 / C, majority=majority)]
    if C > 5:
        often = labels.bincount(minlength=C).topk(5).values.sum().item() / N
        scores.append(Score.counted(f"{how}, top-5", _share(right.any(1)), chance=5 / C, majority=often))
    of_class = [Score.counted(f"  {name}", _share(right[labels == c, 0]), chance=1 / C) for c, name in enumerate(names)]
    return scores + [score for score in of_class if score.of]


def _share(hits: Tensor) -> Share:
    return Share(int(hits.sum(dtype=torch.int64)), len(hits))
