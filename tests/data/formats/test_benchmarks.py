"""ChartQA, DocVQA, OCRBench, HallusionBench, RefCOCO, Winoground, ARO: what each says, and what they refuse."""

import json

import pytest

from vitrail.data.formats import open_format
from vitrail.errors import DataError


def opened(make, name):
    made = make(name)
    return open_format(name, made.path, **made.options)


def test_documents(make):
    (chart,) = opened(make, "chartqa")
    assert (chart.id, chart.turns[0].text, chart.answers) == ("0", "How many bars?", ("14",))
    (document,) = opened(make, "docvqa")
    assert (document.id, document.answers) == ("49153", ("$975.00", "975.00"))
    assert document.notes["types"] == ["table/list"] and document.pictures[0].name == "pybv0228_81.png"
    word, formula = opened(make, "ocrbench")
    assert word.answers == ("CENTRE",) and formula.answers == ("x ^ 2",) and formula.notes["dataset"] == "HME100k"


def test_hallusion(make):
    blind, seen, changed = opened(make, "hallusion")
    assert (blind.id, blind.pictures, blind.answers) == ("VS_chart_0_0_0", (), ("yes",))
    assert blind.turns[0].parts[0].kind == "text" and seen.turns[0].parts[0].kind == "image"
    assert blind.notes["figure"] is None  # which is no figure
    assert seen.notes["figure"] == "VS_chart_0_1" and changed.notes["figure"] == "VD_figure_0_0"
    assert blind.notes["question"] == seen.notes["question"] == "VS_chart_0_0"


def test_refcoco(make):
    first, second = opened(make, "refcoco")
    assert (first.turns[0].text, first.instances[0].box, first.size) == ("left card", (0, 1, 3, 3), (6, 8))
    assert second.instances[0].box == (1, 1, 4, 3) and first.pictures == second.pictures


def test_pairs(make):
    (two,) = opened(make, "winoground")
    assert [path.name for path in two.pictures] == ["ex_0_img_0.png", "ex_0_img_1.png"]
    assert two.captions[0].startswith("an old") and two.notes == {"tag": "Object"}
    on, behind = opened(make, "aro")
    assert on.captions == ("the cat is on the mat", "the mat is on the cat")
    assert on.image().size == (8, 6) and behind.notes == {"part": "relation", "kind": "behind"}


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("chartqa", lambda d: d[0].pop("label"), r"test_human.json: .*required field `label` - at `\$\[0\]`"),
        ("docvqa", lambda d: d["data"][0].pop("image"), r"val_v1.0.json: .*`image` - at `\$.data\[0\]`"),
        ("hallusion", lambda d: d[1].update(gt_answer="2"), r"Invalid enum value '2' - at `\$\[1\].gt_answer`"),
        ("hallusion", lambda d: d.append(d[0]), "samples 0 and 3 have the same id 'VS_chart_0_0_0'"),
        ("refcoco", lambda d: d["annotations"].pop(), "expression 1 has 0 boxes"),
        (
            "refcoco",
            lambda d: d["annotations"][0].update(bbox=[0, 0, -1, 2]),
            "expression 0 has a picture or a box of no",
        ),
        ("aro", lambda d: d[0].update(bbox_w=0), "sample 0: no box of 0 × 6 pixels is at 1, 2 of"),
    ],
)
def test_what_is_wrong_is_named(make, name, change, said):
    made = make(name)
    data = json.loads(made.path.read_text())
    change(data)
    made.path.write_text(json.dumps(data))
    with pytest.raises(DataError, match=said):
        list(open_format(name, made.path, **made.options))


def test_lines_are_numbered(make):
    made = make("winoground")
    row = json.loads(made.path.read_text())
    made.path.write_text(json.dumps(row) + "\n" + json.dumps({"id": 1}) + "\n")
    with pytest.raises(DataError, match=r"examples.jsonl, line 2: .*`image_0`"):
        open_format("winoground", made.path, **made.options)
