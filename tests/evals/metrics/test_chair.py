"""CHAIR: things named, in one word or several, and those that are not there."""

import pytest

from vitrail.errors import DataError
from vitrail.evals.metrics.chair import COCO_PHRASES, MEASURES, Things, chair

COCO = [["person", "man", "baby", "people"], ["bird"], ["cat", "kitten"], ["hot dog"], ["dog", "puppy"], ["bus"],
        ["wine glass"], ["knife"], ["dining table", "table"], ["toilet"], ["chair", "seat"]]  # fmt: skip


def test_named():
    things = Things(COCO, COCO_PHRASES)
    assert things.named("Two men feed a kitten.") == ["person", "cat"]
    assert things.named("Hot dogs, dogs and puppies") == ["hot dog", "dog", "dog"]
    assert things.named("a baby bird on a bus beside buses") == ["bird", "bus", "bus"]
    assert things.named("a baby animal; a baby") == ["person"]  # an animal of no kind is nothing here, and no person
    assert things.named("wine glasses, knives, a dining-table") == ["wine glass", "knife"]
    assert things.named("the toilet seat near the seat") == ["toilet", "chair"]
    trains = Things([["train"]], COCO_PHRASES)
    assert trains.named("a train track, two train tracks, a passenger train") == ["train"]
    assert things.named("dining tables") == ["dining table"] and things.named("") == []


def test_chair():
    table = chair(["a cat and a dog and a dog", "a bus", "nothing"], [{"cat"}, {"bus", "dog"}, set()], Things(COCO))
    assert table.tolist() == [[2, 3, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1]]
    found = {name: measure(table.sum(0)).item() for name, measure in MEASURES.items()}
    assert found == pytest.approx({"CHAIR_i": 2 / 4, "CHAIR_s": 1 / 3})


def test_file(tmp_path):
    (tmp_path / "synonyms.txt").write_text("person, girl, boy\ncell phone, mobile phone, phone\n\n")
    assert Things.read(tmp_path / "synonyms.txt").named("girls with mobile phones") == ["person", "cell phone"]
    (tmp_path / "synonyms.txt").write_text("person, girl\ncat,, kitten\n")
    with pytest.raises(DataError, match=r"synonyms.txt, line 2: a comma beside nothing"):
        Things.read(tmp_path / "synonyms.txt")
    with pytest.raises(DataError, match="2 captions of 1 pictures"):
        chair(["a", "b"], [set()], Things(COCO))
