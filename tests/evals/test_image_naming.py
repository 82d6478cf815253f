"""Image naming of a perfect model and of a constant answer."""

import numpy as np
import pytest
from PIL import Image

from vitrail.data.named_images import NamedImagesConfig, NamedImageSource
from vitrail.errors import DataError
from vitrail.evals.suites.image_naming import UNSEEN_QUESTION, evaluate_naming

COLOURS = {"red": (255, 0, 0), "sea blue": (0, 0, 255), "grass": (0, 128, 0)}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("colours")
    for name, count in zip(COLOURS, (5, 2, 1), strict=True):
        (folder / name).mkdir()
        for k in range(count):
            Image.new("RGB", (20, 12 + k), COLOURS[name]).save(folder / name / f"{k}.png")
    return NamedImageSource(NamedImagesConfig(datasets=(str(folder),), image_size=16, name_from="category"))


def test_perfect_answers_score_one(source):
    def knows(pixels, questions):
        assert pixels.shape[1:] == (3, 24, 24) and set(questions) == {UNSEEN_QUESTION}
        mean = pixels.float().mean((2, 3)).numpy()
        near = [min(COLOURS, key=lambda c, m=m: np.abs(m - COLOURS[c]).sum()) for m in mean]
        return [name.upper() + "." for name in near]

    share, names = evaluate_naming(knows, source, 24, unseen_question=True, batch_size=3)
    assert (share.value, share.count, share.baselines["majority"]) == (1, 8, 5 / 8)
    assert (names.value, names.count) == (1, 3)


def test_constant_answer(source):
    share, names = evaluate_naming(lambda _, asked: ["red"] * len(asked), source, 24)
    assert share.value == 5 / 8 == share.baselines["majority"] and names.value == 1 / 3
    some, _ = evaluate_naming(lambda _, asked: ["red"] * len(asked), source, 24, allowed_names=["RED", "Grass"])
    assert (some.value, some.count) == (5 / 6, 6)
    assert evaluate_naming(lambda _, asked: ["a red"] * len(asked), source, 24, limit=4)[0].value == 0
    with pytest.raises(DataError, match="one of the names"):
        evaluate_naming(lambda _, asked: [""] * len(asked), source, 24, allowed_names=["pink"])
