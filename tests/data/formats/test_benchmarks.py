"""ChartQA, DocVQA, OCRBench, OCR-VQA, HallusionBench, RefCOCO, Winoground, ARO: samples and errors."""

import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.formats.conftest import png
from vitrail.data.formats import open_dataset
from vitrail.errors import ConfigError, DataError


def open_made(make, name):
    made = make(name)
    return open_dataset(name, made.path, **made.options)


def test_documents(make):
    (chart,) = open_made(make, "chartqa")
    assert (chart.id, chart.turns[0].text, chart.answers) == ("0", "How many bars?", ("14",))
    (document,) = open_made(make, "docvqa")
    assert (document.id, document.answers) == ("49153", ("$975.00", "975.00"))
    assert document.metadata["types"] == ["table/list"] and document.images[0].name == "pybv0228_81.png"
    word, formula = open_made(make, "ocrbench")
    assert word.answers == ("CENTRE",) and formula.answers == ("x ^ 2",) and formula.metadata["dataset"] == "HME100k"


def test_ocrvqa_reads_one_split(make):
    made = make("ocrvqa")
    samples = open_dataset("ocrvqa", made.path, **made.options)
    who, games = samples
    assert (who.id, who.turns[0].text, who.answers) == ("0761183272/0", "Who wrote this book?", ("Sandra Boynton",))
    assert (games.id, games.answers, games.images) == ("0761183272/1", ("No",), who.images)
    assert who.metadata["genre"] == "Calendars" and samples.skipped == {"questions of other splits": 1}
    (genre,) = open_dataset("ocrvqa", made.path, split="train", **made.options)
    assert genre.images[0].name == "1445228777.png"
    assert len(open_dataset("ocrvqa", made.path, split="all", **made.options)) == 3
    genre.images[0].rename(genre.images[0].with_suffix(".jpg"))  # LLaVA's copy names all of them .jpg
    (genre,) = open_dataset("ocrvqa", made.path, split="train", **made.options)
    assert genre.images[0].name == "1445228777.jpg"
    genre.images[0].unlink()
    with pytest.raises(DataError, match=r"1445228777\.jpg' is not in"):
        list(open_dataset("ocrvqa", made.path, split="train", **made.options))
    with pytest.raises(ConfigError, match="did you mean 'test'"):
        open_dataset("ocrvqa", made.path, split="tests", **made.options)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_ocrvqa_splits_cover_all_questions(tmp_path_factory, covers):
    """Every question is in one split, once, with its own answer."""
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
    for split in ("train", "val", "test"):
        with suppress(DataError):  # a split without questions is refused
            found += open_dataset("ocrvqa", root / "dataset.json", split=split)
    answers = {sample.turns[0].text: sample.answers[0] for sample in found}
    assert answers == {f"q{n}.{k}": f"a{n}.{k}" for n, (count, _) in enumerate(covers) for k in range(count)}
    assert len({sample.id for sample in found}) == len(found) == len(answers)


def test_hallusion(make):
    blind, original, modified = open_made(make, "hallusion")
    assert (blind.id, blind.images, blind.answers) == ("VS_chart_0_0_0", (), ("yes",))
    assert blind.turns[0].parts[0].kind == "text" and original.turns[0].parts[0].kind == "image"
    assert blind.metadata["figure"] is None  # there is no figure
    assert original.metadata["figure"] == "VS_chart_0_1" and modified.metadata["figure"] == "VD_figure_0_0"
    assert blind.metadata["question"] == original.metadata["question"] == "VS_chart_0_0"


def test_refcoco(make):
    first, second = open_made(make, "refcoco")
    assert (first.turns[0].text, first.instances[0].box, first.size) == ("left card", (0, 1, 3, 3), (6, 8))
    assert second.instances[0].box == (1, 1, 4, 3) and first.images == second.images


def test_winoground_and_aro(make):
    (pair,) = open_made(make, "winoground")
    assert [path.name for path in pair.images] == ["ex_0_img_0.png", "ex_0_img_1.png"]
    assert pair.captions[0].startswith("an old") and pair.metadata == {"tag": "Object"}
    on, behind = open_made(make, "aro")
    assert on.captions == ("the cat is on the mat", "the mat is on the cat")
    assert on.load_image().size == (8, 6) and behind.metadata == {"part": "relation", "kind": "behind"}


@pytest.mark.parametrize(
    ("name", "change", "message"),
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
            "expression 0 has an image or a box without area",
        ),
        ("aro", lambda d: d[0].update(bbox_w=0), "sample 0: the box of 0 × 6 pixels at 1, 2 is outside of"),
    ],
)
def test_invalid_files_are_named(make, name, change, message):
    made = make(name)
    data = json.loads(made.path.read_text())
    change(data)
    made.path.write_text(json.dumps(data))
    with pytest.raises(DataError, match=message):
        list(open_dataset(name, made.path, **made.options))


def test_errors_name_the_line(make):
    made = make("winoground")
    row = json.loads(made.path.read_text())
    made.path.write_text(json.dumps(row) + "\n" + json.dumps({"id": 1}) + "\n")
    with pytest.raises(DataError, match=r"examples.jsonl, line 2: .*`caption_0`"):
        open_dataset("winoground", made.path, **made.options)
