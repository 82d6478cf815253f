"""Benchmarks as parquet, written by `datasets` in the hubs' columns: the same samples as of their own files."""

import io
import json
from dataclasses import replace

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitrail.data.formats import guess, open_format
from vitrail.data.formats.parquet import Table
from vitrail.errors import ConfigError, DataError
from vitrail.evals.suites.benchmarks import benchmark


def png(colour):
    file = io.BytesIO()
    Image.new("RGB", (8, 6), colour).save(file, "PNG")
    return file.getvalue()


TEN = [{"answer": "two", "answer_confidence": "yes", "answer_id": i} for i in range(10)]
CARD, COAT = {"bytes": png("teal"), "path": "card.png"}, {"bytes": png("red"), "path": None}

# The columns are those of lmms-lab's data sets, of echo840's OCRBench, MMStar, AI2D, ScienceQA and SEED-Bench.
ROWS = {
    "vqa": [
        {"question_type": "how many", "answers": TEN, "image_id": 42, "answer_type": "number", "question_id": 420,
         "question": "How many?", "image": CARD, "multiple_choice_answer": "two"},
    ],
    "textvqa": [
        {"image_id": "a1", "question_id": 34602, "question": "what brand?", "image": CARD, "image_width": 8,
         "image_classes": ["Card"], "answers": ["nous"] * 10, "ocr_tokens": ["NOUS"], "set_name": "val"},
    ],
    "docvqa": [
        {"questionId": "49153", "question": "Cost?", "question_types": ["table/list"], "image": CARD, "docId": 1,
         "answers": ["$975.00", "975.00"]},
    ],
    "chartqa": [{"type": "human_test", "question": "How many bars?", "answer": "14", "image": CARD}],
    "ocrbench": [
        {"dataset": "IIIT5K", "question": "what is written?", "question_type": "Regular Text", "answer": ["CENTRE"],
         "image": CARD},
    ],
    "ocrvqa": [  # howard-hou's
        {"image": CARD, "image_id": "0761183272", "questions": ["Who wrote this book?"], "answers": ["Sandra Boynton"],
         "ocr_tokens": ["MOM'S"], "title": "Calendar", "authorName": "Sandra Boynton", "genre": "Calendars",
         "image_width": 8, "image_height": 6, "image_url": "http://x/y.jpg", "set_name": "test"},
    ],
    "pope": [
        {"id": str(n), "question_id": "1", "question": "Is there a card in the image?", "answer": "yes",
         "image_source": "COCO_1", "image": CARD, "category": split}
        for n, split in enumerate(("random", "popular"))
    ],
    "mme": [
        {"question_id": "OCR/0001.jpg", "image": CARD, "question": f"Is it {word}? Please answer yes or no.",
         "answer": answer, "category": "OCR"}
        for word, answer in (("A", "Yes"), ("B", "No"))
    ],
    "hallusion": [
        {"category": "VS", "subcategory": "chart", "visual_input": seen, "set_id": "0", "figure_id": figure,
         "sample_note": "x", "question_id": "0", "question": "Is it?", "gt_answer_details": "It is.",
         "gt_answer": "1", "filename": None if seen == "0" else "./VS/chart/0_1.png",
         "image": None if seen == "0" else CARD}
        for seen, figure in (("1", "1"), ("0", "0"))
    ],
    "winoground": [
        {"id": 0, "image_0": CARD, "image_1": COAT, "caption_0": "an old card", "caption_1": "a card of old",
         "tag": "Scope", "secondary_tag": "", "num_main_preds": 1, "collapsed_tag": "Object"},
    ],
    "refcoco": [
        {"question_id": "1", "image": CARD, "question": "What is there?", "answer": ["left card", "card"],
         "segmentation": [1.0, 2.0], "bbox": [0.0, 1.0, 3.0, 2.0], "iscrowd": 0, "file_name": "COCO_1.jpg"},
    ],
    "mmbench": [
        {"index": 241, "question": "Which?", "hint": "nan", "answer": "B", "A": "a ball", "B": "a card", "C": "nan",
         "D": "nan", "category": "identity", "image": CARD, "source": "x", "L2-category": "y", "split": "dev"},
    ],
    "mmmu": [  # as MMMU/MMMU: options are a list written as text, and pictures that are not there are empty
        {"id": "validation_Art_Theory_7", "question": "Which, <image 1>?", "options": "['a ball', \"a card's\"]",
         "explanation": "", "image_1": CARD, "image_2": None, "img_type": "['Paintings']", "answer": "B",
         "topic_difficulty": "Easy", "question_type": "multiple-choice", "subfield": "Drawing"},
        {"id": "validation_Math_12", "question": "How much is <image 2> less <image 1>?", "options": "[]",
         "explanation": "", "image_1": CARD, "image_2": COAT, "img_type": "[]", "answer": "['5.75', '5 3/4']",
         "topic_difficulty": "Hard", "question_type": "open", "subfield": "Numbers"},
    ],
    "realworldqa": [
        {"image": CARD, "image_path": "0.webp", "answer": "B", "question":
         "Which way?\n\nA. Left\nB. Right, or up\nPlease answer directly with only the letter of the correct option."},
        {"image": CARD, "image_path": "1.webp", "answer": "Two",
         "question": "How many?\nPlease answer directly with a single word or number."},
    ],
    "coco-captions": [
        {"question_id": "a.jpg", "image": CARD, "question": "Caption?", "answer": ["a card", "a teal card"], "id": 7},
    ],
}  # fmt: skip


def write(path, rows, **how):
    told = datasets.Dataset.from_list(rows)
    for name in rows[0]:
        if name.startswith("image") and (name == "image" or name[-1].isdigit()):
            told = told.cast_column(name, datasets.Image())
    told.to_parquet(path, **how)
    return path


@pytest.mark.parametrize("kind", ROWS)
def test_each_is_known_by_its_columns_and_read(tmp_path, kind):
    path = write(tmp_path / "test-00000-of-00001.parquet", ROWS[kind])
    assert guess(path) == guess(tmp_path) == kind
    samples = open_format(kind, path)
    samples.check()
    assert len({sample.id for sample in samples}) == len(samples) == len(ROWS[kind])
    assert samples[0].image().size == (8, 6)
    assert samples[0].pictures[0] == CARD["bytes"]


@pytest.mark.parametrize(
    ("name", "right", "marks", "wrong"),
    [
        ("vqav2", ["two"], 1, ["ten"]), ("textvqa", ["nous"], 1, ["us"]), ("docvqa", ["975.00"], 1, ["a lot"]),
        ("chartqa", ["14"], 1, ["12"]), ("ocrbench", ["a CENTRE"], 1, ["left"]),
        ("ocrvqa", ["sandra boynton "], 1, ["Sandra Boynton."]),
        ("pope", ["yes", "yes"], 1, ["no", "no"]), ("mme", ["yes", "no"], 200, ["no", "yes"]),
        ("hallusionbench", ["yes", "yes"], 1, ["no", "no"]), ("mmbench", ["B"], 1, ["A"]),
        ("mmmu", ["B", "It is 5.754"], 1, ["A", "5.7"]), ("realworldqa", ["(B)", "two."], 1, ["left", "three"]),
        ("refcoco", ['{"bbox_2d": [0, 1, 3, 3]}'], 1, ['{"bbox_2d": [4, 1, 6, 3]}']),
        ("winoground", ["A", "B", "A", "B"], 1, ["B", "B", "A", "A"]),
    ],
)  # fmt: skip
def test_answers_are_scored(tmp_path, name, right, marks, wrong):
    row = benchmark(name)
    samples = row.read(write(tmp_path / "val.parquet", ROWS[row.format]))
    how = {"boxes": "pixels"} if name == "refcoco" else {}
    assert row.score(samples, right, **how)[0].value == marks
    assert row.score(samples, wrong, **how)[0].value == 0


@pytest.mark.parametrize("kind", ["docvqa", "hallusion"])
def test_they_say_what_their_own_files_say(tmp_path, make, kind):
    made = make(kind)
    file = json.loads(made.path.read_text())
    rows = file if isinstance(file, list) else file["data"]
    rows = [{**row, "image": CARD if row.get("visual_input") != "0" else None} for row in rows]
    other = open_format(kind, write(tmp_path / "test.parquet", rows))
    for a, b in zip(open_format(kind, made.path, **made.options), other, strict=True):
        assert replace(a, pictures=b.pictures) == b and len(a.pictures) == len(b.pictures)


def test_a_row_may_ask_several_questions(tmp_path, make):
    """OCR-VQA's rows are covers: the same samples as of its own file, and a picture each."""
    made = make("ocrvqa")
    covers = json.loads(made.path.read_text()).items()
    rows = [
        {"image": CARD, "image_id": name, **{key: row[key] for key in row if key not in ("imageURL", "split")}}
        for name, row in covers
    ]
    other = open_format("ocrvqa", write(tmp_path / "test.parquet", rows))
    for a, b in zip(open_format("ocrvqa", made.path, part="all", **made.options), other, strict=True):
        assert replace(a, pictures=b.pictures) == b and b.pictures == (CARD["bytes"],)
    rows[1]["answers"] = []
    with pytest.raises(DataError, match=r"row 1: cover 1445228777 has 1 questions and 0 answers"):
        open_format("ocrvqa", write(tmp_path / "other.parquet", rows))


@pytest.mark.parametrize(
    ("columns", "choices", "answer"),
    [
        ({"options": ["a ball", "a card"], "answer": "1"}, {"A": "a ball", "B": "a card"}, "B"),  # AI2D
        ({"choices": ["a ball", "a card", "a cat"], "answer": 2, "hint": "Look."}, None, "C"),  # ScienceQA
        ({"choice_a": "a ball", "choice_b": "a card", "answer": "A", "question_id": "7"}, None, "A"),  # SEED-Bench
        ({"A": "a ball", "B": "a card", "answer": "B", "index": 5}, None, "B"),  # MMStar in MMBench's form
        ({"options": "['a ball', 'a card']", "answer": "B"}, {"A": "a ball", "B": "a card"}, "B"),  # written as text
    ],
)
def test_options_come_in_columns_or_lists(tmp_path, columns, choices, answer):
    path = write(tmp_path / "test.parquet", [{"question": "Which?", "image": CARD, **columns}])
    assert guess(path) == "mmbench"
    (sample,) = open_format("mmbench", path)
    assert sample.answers == (answer,) and list(sample.choices) == list("ABC"[: len(sample.choices)])
    assert choices is None or sample.choices == choices
    assert sample.hint == columns.get("hint", "")


def test_options_may_stand_in_the_question(tmp_path):
    """MMStar, as its authors keep it."""
    question = "Which is it?\nOptions: A: a ball, B: a card, C: one of these, D: said he, D: a cat, or a dog"
    row = {"index": 5, "question": question, "image": CARD, "answer": "D", "category": "x", "l2_category": "y",
           "meta_info": {"source": "MMBench"}}  # fmt: skip
    path = write(tmp_path / "val.parquet", [row])
    assert guess(path) == "mmbench"
    (sample,) = open_format("mmbench", path)
    wanted = {"A": "a ball", "B": "a card", "C": "one of these", "D": "said he, D: a cat, or a dog"}
    assert sample.choices == wanted and sample.turns[0].text == "Which is it?" and sample.answers == ("D",)
    with pytest.raises(DataError, match="has no options"):
        open_format("mmbench", write(tmp_path / "other.parquet", [row | {"question": "Which is it?"}]))


@pytest.mark.parametrize("options", ["['a', 'b'", "a, b", "{'a': 1}", "[['a'], ['b']]", "__import__('os')", "[]" * 99])
def test_what_is_no_list_of_options_is_refused(tmp_path, options):
    row = {"question": "Which?", "image": CARD, "options": options, "answer": "B"}
    with pytest.raises(DataError, match="no list of texts"):
        open_format("mmbench", write(tmp_path / "test.parquet", [row]))
    with pytest.raises(DataError, match="more than there are letters"):
        open_format("mmbench", write(tmp_path / "many.parquet", [row | {"options": str(["x"] * 27)}]))


def test_mmmu_shows_what_its_words_speak_of(tmp_path):
    """And asks what has no options for a word."""
    row, (first, second) = benchmark("mmmu"), ROWS["mmmu"]
    samples = row.read(write(tmp_path / "validation.parquet", [first, second]), circular=True)
    assert [len(sample.pictures) for sample in samples] == [1, 1, 2]
    assert [sample.answers for sample in samples] == [("B",), ("A",), ("5.75", "5 3/4")]
    assert [sample.notes["category"] for sample in samples] == ["Art_Theory", "Art_Theory", "Math"]
    assert "option's letter" in row.question(samples[0]) and "word or phrase" in row.question(samples[2])
    assert samples[2].pictures == (CARD["bytes"], COAT["bytes"])
    found = {score.title: score.value for score in row.score(samples, ["B", "A", "none"])}
    assert found["accuracy"] == pytest.approx(2 / 3) and found["circular accuracy"] == 0.5 and found["no option"] == 0
    unknown = write(tmp_path / "test.parquet", [first | {"answer": "?"}])
    assert open_format("mmmu", unknown)[0].answers == ()
    with pytest.raises(DataError, match="speaks of a picture that it has not"):
        rows = [first | {"question": "Is <image 1> like <image 2>?"}, second]
        open_format("mmmu", write(tmp_path / "dev.parquet", rows))[0].image()
    with pytest.raises(DataError, match="'E' is none of A, B"):
        open_format("mmmu", write(tmp_path / "odd.parquet", [first | {"answer": "E"}]))


def test_several_pictures_a_row(tmp_path):
    """SEED-Bench's videos are lists of frames."""
    kind = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    table = pa.table({
        "question": ["Which?"], "choice_a": ["x"], "choice_b": ["y"], "answer": ["A"],
        "image": pa.array([[CARD, COAT]], kind),
    })  # fmt: skip
    pq.write_table(table, tmp_path / "test.parquet")
    (sample,) = open_format("mmbench", tmp_path)
    assert sample.pictures == (CARD["bytes"], COAT["bytes"])
    assert [part.kind for part in sample.turns[0].parts] == ["image", "image", "text"]


def test_gqa_has_its_pictures_apart(tmp_path):
    row = {
        "id": "201307251", "imageId": "n161313", "question": "Is it?", "isBalanced": True, "answer": "no",
        "fullAnswer": "No, it is not.", "types": {"semantic": "rel", "structural": "verify"},
    }  # fmt: skip
    path = write(tmp_path / "testdev.parquet", [row])
    with pytest.raises(ConfigError, match="lie in files of their own"):
        open_format("gqa", path)
    shown = write(tmp_path / "images.parquet", [{"id": "n1", "image": COAT}, {"id": "n161313", "image": CARD}])
    (sample,) = open_format("gqa", path, pictures=shown)
    assert (sample.id, sample.answers, sample.pictures) == ("201307251", ("no",), (CARD["bytes"],))
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "n161313.jpg").write_bytes(CARD["bytes"])
    assert open_format("gqa", path, pictures=tmp_path / "pictures")[0].image().size == (8, 6)
    none = write(tmp_path / "none.parquet", [{"id": "n1", "image": COAT}])
    with pytest.raises(DataError, match=r"picture n161313 of .*row 0, is not in"):
        open_format("gqa", path, pictures=none)[0]


@settings(max_examples=20)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 4), st.randoms())
def test_any_row_of_any_piece_has_its_own_picture(tmp_path_factory, sizes, group, chance):
    folder = tmp_path_factory.mktemp("pieces")
    rows = [{"n": n, "image": {"bytes": bytes([n + 1, 7]), "path": None}} for n in range(sum(sizes))]
    first = 0
    for number, size in enumerate(sizes):
        piece = pa.Table.from_pylist(rows[first : first + size])
        pq.write_table(piece, folder / f"val-{number:05}-of-{len(sizes):05}.parquet", row_group_size=group)
        first += size
    table = Table(folder / f"val-00000-of-{len(sizes):05}.parquet")
    assert [row["n"] for row in table] == list(range(len(rows)))
    order = list(range(len(rows)))
    chance.shuffle(order)
    assert all(table.pictures(n) == (bytes([n + 1, 7]),) for n in order)


def spoil(tmp_path, how):
    rows = ROWS["pope"]
    if how == "row":
        rows = [rows[0], {**rows[1], "answer": "perhaps"}]
    if how == "path":
        rows = [{**row, "image": {"bytes": None, "path": "card.png"}} for row in rows]
    path = tmp_path / f"test-00000-of-0000{2 if how == 'piece' else 1}.parquet"
    if how == "path":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        write(path, rows)
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    if how == "splits":
        write(tmp_path / "val-00000-of-00001.parquet", ROWS["pope"])
    return tmp_path


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("cut", r"test-00000-of-00001.parquet cannot be read"),
        ("row", r"row 1: question 1 has the answer 'perhaps'"),
        ("path", r"row 0: image names a picture that is not in the file"),
        ("piece", r"1 of 2 pieces are there"),
        ("splits", r"holds test, val"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, how, said):
    with pytest.raises(DataError, match=said):
        open_format("pope", spoil(tmp_path, how)).check()


def test_other_columns_are_refused(tmp_path):
    path = write(tmp_path / "test.parquet", ROWS["chartqa"])
    with pytest.raises(DataError, match=r"question_id.*were expected of 'pope'"):
        open_format("pope", path)
    with pytest.raises(ConfigError, match="'aro' is not read from"):
        open_format("aro", path)
    with pytest.raises(ConfigError, match="lie in it"):
        open_format("chartqa", path, pictures=tmp_path)
    pq.write_table(pa.table({"n": [1]}), tmp_path / "other.parquet")
    with pytest.raises(DataError, match=r"no benchmark known here has the columns n of"):
        guess(tmp_path / "other.parquet")
