"""Image naming: asks a model for the name of the object in an image.

N images, S image size
"""

from collections import Counter
from collections.abc import Iterable

import torch

from vitrail.data.augmentation import NO_AUGMENTATION, augment_images
from vitrail.data.named_images import NamedImageSource
from vitrail.data.qa import NAMING_QUESTIONS
from vitrail.data.sources.progress_bar import progress_bar
from vitrail.errors import DataError
from vitrail.evals.scores import Proportion, Score
from vitrail.evals.suites.image_collections import sample_rows
from vitrail.evals.suites.scene_benchmarks import AnswerFn, normalize_answer

UNSEEN_QUESTION = "tell me what you can make out here."  # a question that no training uses


def evaluate_naming(
    answer_fn: AnswerFn,
    source: NamedImageSource,
    image_size: int,
    *,
    allowed_names: Iterable[str] = (),
    limit: int | None = None,
    unseen_question: bool = False,
    batch_size: int = 64,
) -> list[Score]:
    """Accuracy of names, word for word, and the fraction of names that are correct at least once.

    The baseline is the most common name. `allowed_names` restricts the images to these names.
    """
    allowed = {name.lower() for name in allowed_names}
    rows = [row for row, record in enumerate(source.records) if not allowed or record.name.lower() in allowed]
    rows = [rows[i] for i in sample_rows(len(rows), limit)]
    if not rows:
        raise DataError(f"no image of {', '.join(source.config.datasets)} has one of the names", "use other names")
    question = UNSEEN_QUESTION if unseen_question else NAMING_QUESTIONS[0]
    names = [normalize_answer(source.records[row].name) for row in rows]
    correct = []
    with progress_bar("naming images", len(rows), unit="") as progress:
        for first in range(0, len(rows), batch_size):
            index = torch.tensor(rows[first : first + batch_size])
            # (B, 3, S, S) in −1 … 1
            images = augment_images(source.pixels(index), NO_AUGMENTATION.replace(image_size=image_size))
            responses = answer_fn(((images + 1) * 127.5).round().clamp(0, 255).byte(), [question] * len(index))
            correct += [
                normalize_answer(a) == b for a, b in zip(responses, names[first : first + batch_size], strict=True)
            ]
            progress.update(len(index))
    name_counts, named_names = Counter(names), {name for name, hit in zip(names, correct, strict=True) if hit}
    majority = max(name_counts.values()) / len(names)
    return [
        Score.from_proportion("named", Proportion(sum(correct), len(names)), majority=majority),
        Score.from_proportion("distinct names correct at least once", Proportion(len(named_names), len(name_counts))),
    ]
