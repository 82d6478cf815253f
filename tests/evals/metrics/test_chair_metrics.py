"""CHAIR: object mentions of one or more words, and hallucinations."""

import pytest

from vitrail.errors import DataError
from vitrail.evals.metrics.chair_metrics import CHAIR_MEASURES, COCO_PHRASES, ObjectVocabulary, count_hallucinations

COCO = [["person", "man", "baby", "people"], ["bird"], ["cat", "kitten"], ["hot dog"], ["dog", "puppy"], ["bus"],
        ["wine glass"], ["knife"], ["dining table", "table"], ["toilet"], ["chair", "seat"]]  # fmt: skip


def test_find_objects():
    things = ObjectVocabulary(COCO, COCO_PHRASES)
    assert things.find_objects("Two men feed a kitten.") == ["person", "cat"]
    assert things.find_objects("Hot dogs, dogs and puppies") == ["hot dog", "dog", "dog"]
    assert things.find_objects("a baby bird on a bus beside buses") == ["bird", "bus", "bus"]
    assert things.find_objects("a baby animal; a baby") == [
        "person"
    ]  # "animal" alone is neither an object nor a person
    assert things.find_objects("wine glasses, knives, a dining-table") == ["wine glass", "knife"]
    assert things.find_objects("the toilet seat near the seat") == ["toilet", "chair"]
    trains = ObjectVocabulary([["train"]], COCO_PHRASES)
    assert trains.find_objects("a train track, two train tracks, a passenger train") == ["train"]
    assert things.find_objects("dining tables") == ["dining table"] and things.find_objects("") == []


def test_chair():
    table = count_hallucinations(
        ["a cat and a dog and a dog", "a bus", "nothing"], [{"cat"}, {"bus", "dog"}, set()], ObjectVocabulary(COCO)
    )
    assert table.tolist() == [[2, 3, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1]]
    found = {name: measure(table.sum(0)).item() for name, measure in CHAIR_MEASURES.items()}
    assert found == pytest.approx({"CHAIR_i": 2 / 4, "CHAIR_s": 1 / 3})


def test_synonym_file(tmp_path):
    (tmp_path / "synonyms.txt").write_text("person, girl, boy\ncell phone, mobile phone, phone\n\n")
    assert ObjectVocabulary.from_file(tmp_path / "synonyms.txt").find_objects("girls with mobile phones") == [
        "person",
        "cell phone",
    ]
    (tmp_path / "synonyms.txt").write_text("person, girl\ncat,, kitten\n")
    with pytest.raises(DataError, match=r"synonyms.txt, line 2: empty synonym"):
        ObjectVocabulary.from_file(tmp_path / "synonyms.txt")
    with pytest.raises(DataError, match="2 captions for 1 images"):
        count_hallucinations(["a", "b"], [set()], ObjectVocabulary(COCO))
