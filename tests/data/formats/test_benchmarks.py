"""ChartQA, DocVQA, OCRBench, OCR-VQA, HallusionBench, RefCOCO, Winoground, ARO: what each says and refuses."""

import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.formats.conftest import png
from vitrail.data.formats import open_format
from vitrail.errors import ConfigError, DataError


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


def test_ocrvqa_reads_one_part(make):
    made = make("ocrvqa")
    samples = open_format("ocrvqa", made.path, **made.options)
    who, games = samples
    assert (who.id, who.turns[0].text, who.answers) == ("0761183272/0", "Who wrote this book?", ("Sandra Boynton",))
    assert (games.id, games.answers, games.pictures) == ("0761183272/1", ("No",), who.pictures)
    assert who.notes["genre"] == "Calendars" and samples.skipped == {"questions of other parts": 1}
    (genre,) = open_format("ocrvqa", made.path, part="train", **made.options)
    assert genre.pictures[0].name == "1445228777.png"
    assert len(open_format("ocrvqa", made.path, part="all", **made.options)) == 3
    genre.pictures[0].rename(genre.pictures[0].with_suffix(".jpg"))  # as LLaVA's keepers have them all
    (genre,) = open_format("ocrvqa", made.path, part="train", **made.options)
    assert genre.pictures[0].name == "1445228777.jpg"
    genre.pictures[0].unlink()
    with pytest.raises(DataError, match=r"1445228777\.jpg' is not in"):
        list(open_format("ocrvqa", made.path, part="train", **made.options))
    with pytest.raises(ConfigError, match="did you mean 'test'"):
        open_format("ocrvqa", made.path, part="tests", **made.options)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_ocrvqa_loses_no_question(tmp_path_factory, covers):
    """Every question is in one part, once, with its own answer."""
    root = tmp_path_factory.mktemp("covers")
    rows = {
        str(n): {
            "imageURL": "http://x/y.jpg",
            "questions": [f"q{n}.{k}" for k in range(count)],
            "answers": [f"a{n}.{k}" for k in range(count)],
            "split": split,
        }
        for n, (count, split) in enumerate(covers)
    }
    for name in rows:
        (root / f"{name}.jpg").write_bytes(png())
    (root / "dataset.json").write_text(json.dumps(rows))
    found = []
    for part in ("train", "val", "test"):
        with suppress(DataError):  # a part without questions is refused
            found += open_format("ocrvqa", root / "dataset.json", part=part)
    told = {sample.turns[0].text: sample.answers[0] for sample in found}
    assert told == {f"q{n}.{k}": f"a{n}.{k}" for n, (count, _) in enumerate(covers) for k in range(count)}
    assert len({sample.id for sample in found}) == len(found) == len(told)


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
        ("ocrvqa", lambda d: d["0761183272"]["answers"].pop(), "cover 0761183272 has 2 questions and 1 answers"),
        ("ocrvqa", lambda d: d["1445228777"].update(split=4), r"Invalid enum value 4"),
        ("ocrvqa", lambda d: d["1445228777"].pop("imageURL"), "missing required field `imageURL`"),
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
