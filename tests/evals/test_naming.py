"""Who knows what pictures show is right; who says the commonest name is as good as that."""

import numpy as np
import pytest
from PIL import Image

from vitrail.data.named import NamedConfig, NamedSource
from vitrail.errors import DataError
from vitrail.evals.suites.naming import UNSEEN, named

COLOURS = {"red": (255, 0, 0), "sea blue": (0, 0, 255), "grass": (0, 128, 0)}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("colours")
    for name, count in zip(COLOURS, (5, 2, 1), strict=True):
        (folder / name).mkdir()
        for k in range(count):
            Image.new("RGB", (20, 12 + k), COLOURS[name]).save(folder / name / f"{k}.png")
    return NamedSource(NamedConfig(data=(str(folder),), side=16, names="category"))


def test_who_knows_is_right(source):
    def knows(pixels, questions):
        assert pixels.shape[1:] == (3, 24, 24) and set(questions) == {UNSEEN}
        mean = pixels.float().mean((2, 3)).numpy()
        near = [min(COLOURS, key=lambda c, m=m: np.abs(m - COLOURS[c]).sum()) for m in mean]
        return [name.upper() + "." for name in near]

    share, names = named(knows, source, 24, unseen=True, batch=3)
    assert (share.value, share.of, share.beside["commonest"]) == (1, 8, 5 / 8)
    assert (names.value, names.of) == (1, 3)


def test_one_answer_for_all(source):
    share, names = named(lambda _, asked: ["red"] * len(asked), source, 24)
    assert share.value == 5 / 8 == share.beside["commonest"] and names.value == 1 / 3
    some, _ = named(lambda _, asked: ["red"] * len(asked), source, 24, among=["RED", "Grass"])
    assert (some.value, some.of) == (5 / 6, 6)
    assert named(lambda _, asked: ["a red"] * len(asked), source, 24, limit=4)[0].value == 0
    with pytest.raises(DataError, match="one of the names"):
        named(lambda _, asked: [""] * len(asked), source, 24, among=["pink"])
