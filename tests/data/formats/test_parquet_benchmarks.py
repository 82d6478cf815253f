"""Benchmarks as parquet files with the hubs' columns give the same samples as their own files."""

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

from vitrail.data.formats import detect_format, open_dataset
from vitrail.data.formats.parquet_table import ParquetTable
from vitrail.errors import ConfigError, DataError
from vitrail.evals.suites.benchmarks import get_benchmark


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
    "ocrvqa": [  # howard-hou's version
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
    "mmmu": [  # as in MMMU/MMMU: options are a list written as text, and missing images are null
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
    dataset = datasets.Dataset.from_list(rows)
    for name in rows[0]:
        if name.startswith("image") and (name == "image" or name[-1].isdigit()):
            dataset = dataset.cast_column(name, datasets.Image())
    dataset.to_parquet(path, **how)
    return path


@pytest.mark.parametrize("kind", ROWS)
def test_every_benchmark_is_detected_and_read(tmp_path, kind):
    path = write(tmp_path / "test-00000-of-00001.parquet", ROWS[kind])
    assert detect_format(path) == detect_format(tmp_path) == kind
    samples = open_dataset(kind, path)
    samples.check()
    assert len({sample.id for sample in samples}) == len(samples) == len(ROWS[kind])
    assert samples[0].load_image().size == (8, 6)
    assert samples[0].images[0] == CARD["bytes"]


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
    row = get_benchmark(name)
    samples = row.load_samples(write(tmp_path / "val.parquet", ROWS[row.format]))
    how = {"boxes": "pixels"} if name == "refcoco" else {}
    assert row.score(samples, right, **how)[0].value == marks
    assert row.score(samples, wrong, **how)[0].value == 0


@pytest.mark.parametrize("kind", ["docvqa", "hallusion"])
def test_parquet_equals_original_files(tmp_path, make, kind):
    made = make(kind)
    file = json.loads(made.path.read_text())
    rows = file if isinstance(file, list) else file["data"]
    rows = [{**row, "image": CARD if row.get("visual_input") != "0" else None} for row in rows]
    other = open_dataset(kind, write(tmp_path / "test.parquet", rows))
    for a, b in zip(open_dataset(kind, made.path, **made.options), other, strict=True):
        assert replace(a, images=b.images) == b and len(a.images) == len(b.images)


def test_rows_with_several_questions(tmp_path, make):
    """OCR-VQA's rows are covers: the same samples as from its own file, with one image each."""
    made = make("ocrvqa")
    covers = json.loads(made.path.read_text()).items()
    rows = [
        {"image": CARD, "image_id": name, **{key: row[key] for key in row if key not in ("imageURL", "split")}}
        for name, row in covers
    ]
    other = open_dataset("ocrvqa", write(tmp_path / "test.parquet", rows))
    for a, b in zip(open_dataset("ocrvqa", made.path, split="all", **made.options), other, strict=True):
        assert replace(a, images=b.images) == b and b.images == (CARD["bytes"],)
    rows[1]["answers"] = []
    with pytest.raises(DataError, match=r"row 1: cover 1445228777 has 1 questions and 0 answers"):
        open_dataset("ocrvqa", write(tmp_path / "other.parquet", rows))


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
def test_options_in_columns_or_lists(tmp_path, columns, choices, answer):
    path = write(tmp_path / "test.parquet", [{"question": "Which?", "image": CARD, **columns}])
    assert detect_format(path) == "mmbench"
    (sample,) = open_dataset("mmbench", path)
    assert sample.answers == (answer,) and list(sample.choices) == list("ABC"[: len(sample.choices)])
    assert choices is None or sample.choices == choices
    assert sample.hint == columns.get("hint", "")


def test_options_in_the_question(tmp_path):
    """MMStar in its authors' format."""
    question = "Which is it?\nOptions: A: a ball, B: a card, C: one of these, D: said he, D: a cat, or a dog"
    row = {"index": 5, "question": question, "image": CARD, "answer": "D", "category": "x", "l2_category": "y",
           "meta_info": {"source": "MMBench"}}  # fmt: skip
    path = write(tmp_path / "val.parquet", [row])
    assert detect_format(path) == "mmbench"
    (sample,) = open_dataset("mmbench", path)
    wanted = {"A": "a ball", "B": "a card", "C": "one of these", "D": "said he, D: a cat, or a dog"}
    assert sample.choices == wanted and sample.turns[0].text == "Which is it?" and sample.answers == ("D",)
    with pytest.raises(DataError, match="has no options"):
        open_dataset("mmbench", write(tmp_path / "other.parquet", [row | {"question": "Which is it?"}]))


@pytest.mark.parametrize("options", ["['a', 'b'", "a, b", "{'a': 1}", "[['a'], ['b']]", "__import__('os')", "[]" * 99])
def test_invalid_option_lists_are_refused(tmp_path, options):
    row = {"question": "Which?", "image": CARD, "options": options, "answer": "B"}
    with pytest.raises(DataError, match="not a list of texts"):
        open_dataset("mmbench", write(tmp_path / "test.parquet", [row]))
    with pytest.raises(DataError, match="more than there are letters"):
        open_dataset("mmbench", write(tmp_path / "many.parquet", [row | {"options": str(["x"] * 27)}]))


def test_mmmu_uses_the_images_in_its_text(tmp_path):
    """Questions without options expect a word."""
    row, (first, second) = get_benchmark("mmmu"), ROWS["mmmu"]
    samples = row.load_samples(write(tmp_path / "validation.parquet", [first, second]), circular=True)
    assert [len(sample.images) for sample in samples] == [1, 1, 2]
    assert [sample.answers for sample in samples] == [("B",), ("A",), ("5.75", "5 3/4")]
    assert [sample.metadata["category"] for sample in samples] == ["Art_Theory", "Art_Theory", "Math"]
    assert "option's letter" in row.build_question(samples[0]) and "word or phrase" in row.build_question(samples[2])
    assert samples[2].images == (CARD["bytes"], COAT["bytes"])
    found = {score.title: score.value for score in row.score(samples, ["B", "A", "none"])}
    assert found["accuracy"] == pytest.approx(2 / 3) and found["circular accuracy"] == 0.5 and found["no option"] == 0
    unknown = write(tmp_path / "test.parquet", [first | {"answer": "?"}])
    assert open_dataset("mmmu", unknown)[0].answers == ()
    with pytest.raises(DataError, match="refers to an image that it does not have"):
        rows = [first | {"question": "Is <image 1> like <image 2>?"}, second]
        open_dataset("mmmu", write(tmp_path / "dev.parquet", rows))[0].load_image()
    with pytest.raises(DataError, match="'E' is none of A, B"):
        open_dataset("mmmu", write(tmp_path / "odd.parquet", [first | {"answer": "E"}]))


def test_several_images_in_a_row(tmp_path):
    """SEED-Bench's videos are lists of frames."""
    kind = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    table = pa.table({
        "question": ["Which?"], "choice_a": ["x"], "choice_b": ["y"], "answer": ["A"],
        "image": pa.array([[CARD, COAT]], kind),
    })  # fmt: skip
    pq.write_table(table, tmp_path / "test.parquet")
    (sample,) = open_dataset("mmbench", tmp_path)
    assert sample.images == (CARD["bytes"], COAT["bytes"])
    assert [part.kind for part in sample.turns[0].parts] == ["image", "image", "text"]


def test_gqa_images_are_separate(tmp_path):
    row = {
        "id": "201307251", "imageId": "n161313", "question": "Is it?", "isBalanced": True, "answer": "no",
        "fullAnswer": "No, it is not.", "types": {"semantic": "rel", "structural": "verify"},
    }  # fmt: skip
    path = write(tmp_path / "testdev.parquet", [row])
    with pytest.raises(ConfigError, match="does not contain its images"):
        open_dataset("gqa", path)
    image_files = write(tmp_path / "images.parquet", [{"id": "n1", "image": COAT}, {"id": "n161313", "image": CARD}])
    (sample,) = open_dataset("gqa", path, image_folder=image_files)
    assert (sample.id, sample.answers, sample.images) == ("201307251", ("no",), (CARD["bytes"],))
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "n161313.jpg").write_bytes(CARD["bytes"])
    assert open_dataset("gqa", path, image_folder=tmp_path / "pictures")[0].load_image().size == (8, 6)
    missing = write(tmp_path / "none.parquet", [{"id": "n1", "image": COAT}])
    with pytest.raises(DataError, match=r"image n161313 of .*row 0, is not in"):
        open_dataset("gqa", path, image_folder=missing)[0]


@settings(max_examples=20)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 4), st.randoms())
def test_every_row_has_its_own_image(tmp_path_factory, sizes, group, chance):
    folder = tmp_path_factory.mktemp("pieces")
    rows = [{"n": n, "image": {"bytes": bytes([n + 1, 7]), "path": None}} for n in range(sum(sizes))]
    first = 0
    for number, size in enumerate(sizes):
        piece = pa.Table.from_pylist(rows[first : first + size])
        pq.write_table(piece, folder / f"val-{number:05}-of-{len(sizes):05}.parquet", row_group_size=group)
        first += size
    table = ParquetTable(folder / f"val-00000-of-{len(sizes):05}.parquet")
    assert [row["n"] for row in table] == list(range(len(rows)))
    order = list(range(len(rows)))
    chance.shuffle(order)
    assert all(table.read_images(n) == (bytes([n + 1, 7]),) for n in order)


def write_damaged(tmp_path, how):
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
    ("how", "message"),
    [
        ("cut", r"test-00000-of-00001.parquet cannot be read"),
        ("row", r"row 1: question 1 has the answer 'perhaps'"),
        ("path", r"row 0: image names an image that is not in the file"),
        ("piece", r"1 of 2 parts"),
        ("splits", r"several splits: test, val"),
    ],
)
def test_damaged_files_are_named(tmp_path, how, message):
    with pytest.raises(DataError, match=message):
        open_dataset("pope", write_damaged(tmp_path, how)).check()


def test_wrong_columns_are_refused(tmp_path):
    path = write(tmp_path / "test.parquet", ROWS["chartqa"])
    with pytest.raises(DataError, match=r"expected for 'pope': question_id"):
        open_dataset("pope", path)
    with pytest.raises(ConfigError, match="'aro' has no parquet version"):
        open_dataset("aro", path)
    with pytest.raises(ConfigError, match="contains its images"):
        open_dataset("chartqa", path, image_folder=tmp_path)
    pq.write_table(pa.table({"n": [1]}), tmp_path / "other.parquet")
    with pytest.raises(DataError, match=r"no known benchmark has the columns n"):
        detect_format(tmp_path / "other.parquet")


def test_small_files_with_huge_tables_are_refused(tmp_path, monkeypatch):
    """Files like these once used several gigabytes."""
    monkeypatch.setenv("VITRAIL_FILE_BYTES", "1e8")
    for name, column in {
        "nulls": pa.nulls(1_000_000, pa.string()),
        "repeated": pa.array(["x" * 1_000_000] * 100, pa.string()),
    }.items():
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"question": column, "answer": column}), path, compression="zstd")
        assert path.stat().st_size < 100_000
        with pytest.raises(DataError, match="MB of memory") as error:
            ParquetTable(path)
        assert "VITRAIL_FILE_BYTES" in error.value.remedy


def test_images_that_repeat_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_FILE_BYTES", "1e8")
    rows = [{"image": {"bytes": b"x" * 5_000_000, "path": None}, "question": "?"} for _ in range(30)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", compression="zstd")
    table = ParquetTable(tmp_path / "a.parquet")
    assert len(table) == 30
    with pytest.raises(DataError, match="MB of memory"):
        table.read_images(0)


def test_text_that_is_not_utf_8(tmp_path):
    pq.write_table(
        pa.table({"question": ["abcd" * 9]}), tmp_path / "a.parquet", compression="none", write_statistics=False
    )
    data = (tmp_path / "a.parquet").read_bytes()
    assert b"abcd" * 9 in data
    (tmp_path / "a.parquet").write_bytes(data.replace(b"abcd" * 9, b"\xff" * 36))
    with pytest.raises(DataError, match="cannot be read"):
        ParquetTable(tmp_path / "a.parquet")
