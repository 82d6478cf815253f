"""VQA, GQA, TextVQA, POPE, MMBench, MME: what each says, and what they refuse."""

import json

import pytest

from vitrail.data.formats import open_format
from vitrail.errors import ConfigError, DataError


def test_vqa(make):
    made = make("vqa")
    samples = open_format("vqa", made.path, **made.options)
    assert [sample.id for sample in samples] == ["0", "10", "20"]
    assert samples[1].answers == ("card",) * 10 and samples[1].turns[0].text == "What is in 1?"
    assert samples[1].notes == {"question_type": "what is", "answer_type": "other"}
    assert samples[1].pictures[0].name == "COCO_val2014_000000000001.jpg"
    unanswered = open_format("vqa", made.path, pictures=made.options["pictures"])
    assert unanswered[1].answers == ()
    with pytest.raises(ConfigError, match=r"it may use \{subset\}, \{id\}"):
        open_format("vqa", made.path, **made.options, picture="{nope}.jpg")


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        (1, lambda d: d["annotations"].pop(1), "question 10 of .* has no answer"),
        (0, lambda d: d["questions"].pop(1), "answers question 10, which is not in"),
        (1, lambda d: d["annotations"][1].update(image_id=9), "question 10 is of picture 1, its answer of 9"),
        (1, lambda d: d["annotations"][1].update(question_id=0), "samples 0 and 1 have the same id '0'"),
        (0, lambda d: d["questions"].append(d["questions"][0]), "samples 0 and 3 have the same id '0'"),
        (0, lambda d: d.update(data_subtype="/../../x"), "leads out of"),
    ],
)
def test_vqa_files_must_belong_together(make, file, change, said):
    made = make("vqa")
    data = json.loads(made.files[file].read_text())
    change(data)
    made.files[file].write_text(json.dumps(data))
    with pytest.raises(DataError, match=said):
        open_format("vqa", made.path, **made.options)[0]


def test_gqa(make):
    made = make("gqa")
    first, second = open_format("gqa", made.path, **made.options)
    assert (first.id, first.answers, first.notes["full_answer"]) == ("02930152", ("no",), "No, it is not dark.")
    assert first.notes["balanced"] and first.notes["types"]["structural"] == "verify"
    assert second.answers == () and second.turns[0].text == "What colour?"


def test_gqa_keys_may_not_come_twice(make):
    made = make("gqa")
    made.path.write_text(made.path.read_text().replace("07333408", "02930152"))
    with pytest.raises(DataError, match="the same id '02930152'"):
        open_format("gqa", made.path, **made.options)


def test_textvqa(make):
    made = make("textvqa")
    (sample,) = open_format("textvqa", made.path, **made.options)
    assert sample.answers[9] == "acme inc" and len(sample.answers) == 10 and sample.size == (6, 8)
    assert sample.notes == {"ocr_tokens": ["ACME", "INC"], "classes": ["Card"]}
    made.options["ocr"].write_text('{"data": []}')
    with pytest.raises(DataError, match=r"picture 0ee of .* is not in"):
        open_format("textvqa", made.path, **made.options)


def test_pope_reads_one_file_or_the_three(make):
    made = make("pope")
    samples = open_format("pope", made.path, **made.options)
    assert [sample.id for sample in samples][:3] == ["adversarial/1", "adversarial/2", "popular/1"]
    assert [sample.answers for sample in samples] == [("yes",), ("no",)] * 3
    assert samples[4].notes == {"split": "random"}
    one = open_format("pope", made.files[0], **made.options)
    assert len(one) == 2 and one[0].turns == samples[4].turns


@pytest.mark.parametrize("label", ["maybe", "", "yes no"])
def test_pope_knows_two_answers(make, label):
    made = make("pope")
    made.files[0].write_text(made.files[0].read_text().replace('"yes"', json.dumps(label)))
    with pytest.raises(DataError, match="question 1 has the answer"):
        open_format("pope", made.path, **made.options)


def test_a_folder_without_pope_files(tmp_path):
    with pytest.raises(DataError, match="holds no POPE file"):
        open_format("pope", tmp_path)


def test_mmbench(make):
    made = make("mmbench")
    first, second = open_format("mmbench", made.path)
    assert first.choices == {"A": "teal", "B": "red"} and first.answers == ("A",) and first.hint == "A hint"
    assert first.notes == {"category": "attribute"}
    assert second.turns[0].text == 'Two\nlines, "quoted"' and list(second.choices) == ["A", "B", "C", "D"]
    assert second.pictures == first.pictures


def test_a_cell_may_hold_several_pictures(make):
    """MMMU as VLMEvalKit keeps it."""
    made = make("mmbench")
    text = made.path.read_text()
    picture = text.splitlines()[1].split("\t")[-1]
    made.path.write_text(text.replace(picture, f"['{picture}', '{picture}']", 1))
    sample = open_format("mmbench", made.path)[0]
    assert len(sample.pictures) == 2 and sample.pictures[0] == sample.pictures[1] and sample.image(1).size == (8, 6)
    assert [part.kind for part in sample.turns[0].parts] == ["image", "image", "text"]


def test_mmbench_finds_rows_again_after_marks_letters_and_line_ends(make):
    made = make("mmbench")
    want = list(open_format("mmbench", made.path))
    text = made.path.read_text().replace("A hint", "“hint”\u2028\x0b")  # ends of line for str.splitlines alone
    made.path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    first, second = open_format("mmbench", made.path)
    assert first.hint == "“hint”\u2028\x0b" and (first.id, first.pictures) == ("241", want[0].pictures)
    assert second.turns[0].text == 'Two\r\nlines, "quoted"' and second.pictures == want[1].pictures


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("index\t", "number\t", "has the columns 'number, question"),
        ("\tB\t", "\tA\t", "each once"),
        ("\n252", "\n241", "the same id '241'"),
        ("\tA\tattribute", "\tC\tattribute", "line 2: the answer 'C' is none of A, B"),
        ("A hint\t", "", "line 2: 9 cells for 10 columns"),
        ("iVBOR", "iVB*R", "line 2: the picture is no base64"),
        ("\t241\n", "\t\n", "line 3 has no picture"),
        ("\t241\n", "\t242\n", "line 3: the picture is no base64"),
        ('"Two', 'x"Two', "line 3"),
        ('""quoted"""', "quoted", "unexpected end of data"),
    ],
)
def test_tables_that_are_none(make, old, new, said):
    made = make("mmbench")
    text = made.path.read_text()
    assert old in text
    made.path.write_text(text.replace(old, new, 1))
    with pytest.raises(DataError, match=said):
        list(open_format("mmbench", made.path))


def test_a_table_that_changes_under_the_reader(make):
    made = make("mmbench")
    samples = open_format("mmbench", made.path)
    made.path.write_text("index\n")
    with pytest.raises(DataError, match="not the file it was"):
        samples[0]


def test_pictures_in_cells_may_be_large(tmp_path):
    import base64

    content = bytes(range(256)) * 1000
    path = tmp_path / "x.tsv"
    path.write_text(f"index\timage\tquestion\tanswer\n1\t{base64.b64encode(content).decode()}\tq\tNO\n")
    (sample,) = open_format("mme", path)
    assert sample.pictures == (content,) and sample.answers == ("no",)


def test_mme_folders(make):
    made = make("mme")
    samples = open_format("mme", made.path)
    assert [(s.id, s.answers, s.notes["category"]) for s in samples] == [
        ("OCR/02/0", ("yes",), "OCR"),
        ("OCR/02/1", ("no",), "OCR"),
        ("count/01/0", ("yes",), "count"),
        ("count/01/1", ("no",), "count"),
    ]
    assert samples[2].turns[0].text == "Is there one card? Please answer yes or no."
    made.files[0].write_text("No tab here")
    with pytest.raises(DataError, match="line 1 has no tab"):
        open_format("mme", made.path)
    made.files[0].rename(made.files[0].with_name("99.txt"))
    with pytest.raises(DataError, match=r"no picture goes with .*99\.txt"):
        open_format("mme", made.path)
