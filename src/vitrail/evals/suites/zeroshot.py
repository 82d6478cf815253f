"""Classes by prompt: the class whose prompts lie nearest to a picture.

Whether that is zero-shot depends on training: a model that was trained on the classes it is tested on is only asked by
prompt. Nothing here can know, so the caller says it.

N pictures, C classes, T templates, E width of the embedding
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import ConfigError, DataError
from vitrail.evals.shares import EVERYTHING, Score, Share

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


def prompts(names: Sequence[str], templates: Sequence[str] = TEMPLATES) -> list[str]:
    """C · T texts, the names' one after another."""
    if not names or not templates:
        raise ConfigError(f"{len(names)} classes and {len(templates)} templates", "give at least one of each")
    for template in templates:
        if "{}" not in template:
            raise ConfigError(f"the template {template!r} has no place for the name", 'write "{}" where it goes')
    return [template.replace("{}", name) for name in names for template in templates]


def averaged(embedded: Tensor, classes: int) -> Tensor:
    """(C · T, E) → (C, E): the mean of a class's prompts, each of length 1, brought to length 1 again."""
    each = F.normalize(embedded, dim=-1).view(classes, -1, embedded.shape[-1])  # (C, T, E)
    return F.normalize(each.mean(1), dim=-1)


def classifier(
    embed: Callable[[Sequence[str]], Tensor], names: Sequence[str], templates: Sequence[str] = TEMPLATES
) -> Tensor:
    """(C, E): each class as the mean direction of its prompts. `embed` is texts → (N, E)."""
    return averaged(embed(prompts(names, templates)), len(names))


def zeroshot(
    pictures: Tensor,
    labels: Tensor,
    classes: Tensor,
    names: Sequence[str],
    *,
    unseen: bool = False,
    part: Mapping[str, str | int] = EVERYTHING,
) -> list[Score]:
    """pictures (N, E), labels (N,), classes (C, E) → top-1, top-5 where there are more classes than that, and top-1 of
    every class. `unseen` says that no class was in training; `part` is what the scores are for."""
    N, C = len(pictures), len(classes)
    if not N or len(labels) != N or len(names) != C or int(labels.min()) < 0 or int(labels.max()) >= C:
        raise DataError(f"{N} pictures, {len(labels)} labels and {len(names)} names do not go with {C} classes")
    how = "zero-shot" if unseen else "by prompt"
    near = F.normalize(pictures, dim=-1) @ classes.T  # (N, C)
    own = near.gather(1, labels[:, None])
    # Of those exactly as near half come before: what cannot tell classes apart (few numbers, a broken model) has none.
    rank = 1 + (near > own).sum(1) + ((near == own).sum(1) - 1) / 2  # (N,)
    majority = int(labels.bincount().max()) / N
    scores = [Score.counted(f"{how}, top-1", _share(rank <= 1), chance=1 / C, majority=majority)]
    if C > 5:
        often = labels.bincount(minlength=C).topk(5).values.sum().item() / N
        scores.append(Score.counted(f"{how}, top-5", _share(rank <= 5), chance=5 / C, majority=often))
    of_class = [
        Score.counted(f"  {name}", _share(rank[labels == c] <= 1), chance=1 / C) for c, name in enumerate(names)
    ]
    scores += [score for score in of_class if score.of]
    return [replace(score, part=part) for score in scores]


def _share(hits: Tensor) -> Share:
    return Share(int(hits.sum(dtype=torch.int64)), len(hits))
