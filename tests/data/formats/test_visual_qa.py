"""VQA, GQA, TextVQA, POPE, MMBench, MME: samples and errors."""

import json

import pytest

from vitrail.data.formats import open_dataset
from vitrail.errors import ConfigError, DataError


def test_vqa(make):
    made = make("vqa")
    samples = open_dataset("vqa", made.path, **made.options)
    assert [sample.id for sample in samples] == ["0", "10", "20"]
    assert samples[1].answers == ("card",) * 10 and samples[1].turns[0].text == "What is in 1?"
    assert samples[1].metadata == {"question_type": "what is", "answer_type": "other"}
    assert samples[1].images[0].name == "COCO_val2014_000000000001.jpg"
    unanswered = open_dataset("vqa", made.path, image_folder=made.options["image_folder"])
    assert unanswered[1].answers == ()
    with pytest.raises(ConfigError, match=r"it may use \{subset\}, \{id\}"):
        open_dataset("vqa", made.path, **made.options, image_pattern="{nope}.jpg")


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (1, lambda d: d["annotations"].pop(1), "question 10 of .* has no answer"),
        (0, lambda d: d["questions"].pop(1), "answers question 10, which is not in"),
        (1, lambda d: d["annotations"][1].update(image_id=9), "question 10 has image 1, its answer has image 9"),
        (1, lambda d: d["annotations"][1].update(question_id=0), "samples 0 and 1 have the same id '0'"),
        (0, lambda d: d["questions"].append(d["questions"][0]), "samples 0 and 3 have the same id '0'"),
        (0, lambda d: d.update(data_subtype="/../../x"), "leads out of"),
    ],
)
def test_vqa_files_must_match(make, file, change, message):
    made = make("vqa")
    data = json.loads(made.files[file].read_text())
    change(data)
    made.files[file].write_text(json.dumps(data))
    with pytest.raises(DataError, match=message):
        open_dataset("vqa", made.path, **made.options)[0]


def test_gqa(make):
    made = make("gqa")
    first, second = open_dataset("gqa", made.path, **made.options)
    assert (first.id, first.answers, first.metadata["full_answer"]) == ("02930152", ("no",), "No, it is not dark.")
    assert first.metadata["balanced"] and first.metadata["types"]["structural"] == "verify"
    assert second.answers == () and second.turns[0].text == "What colour?"


def test_gqa_duplicate_keys_are_refused(make):
    made = make("gqa")
    made.path.write_text(made.path.read_text().replace("07333408", "02930152"))
    with pytest.raises(DataError, match="the same id '02930152'"):
        open_dataset("gqa", made.path, **made.options)


def test_textvqa(make):
    made = make("textvqa")
    (sample,) = open_dataset("textvqa", made.path, **made.options)
    assert sample.answers[9] == "acme inc" and len(sample.answers) == 10 and sample.size == (6, 8)
    assert sample.metadata == {"ocr_tokens": ["ACME", "INC"], "classes": ["Card"]}
    made.options["ocr_file"].write_text('{"data": []}')
    with pytest.raises(DataError, match=r"image 0ee of .* is not in"):
        open_dataset("textvqa", made.path, **made.options)


def test_pope_reads_one_file_or_a_folder(make):
    made = make("pope")
    samples = open_dataset("pope", made.path, **made.options)
    assert [sample.id for sample in samples][:3] == ["adversarial/1", "adversarial/2", "popular/1"]
    assert [sample.answers for sample in samples] == [("yes",), ("no",)] * 3
    assert samples[4].metadata == {"split": "random"}
    one = open_dataset("pope", made.files[0], **made.options)
    assert len(one) == 2 and one[0].turns == samples[4].turns


@pytest.mark.parametrize("label", ["maybe", "", "yes no"])
def test_pope_answers_are_yes_or_no(make, label):
    made = make("pope")
    made.files[0].write_text(made.files[0].read_text().replace('"yes"', json.dumps(label)))
    with pytest.raises(DataError, match="question 1 has the answer"):
        open_dataset("pope", made.path, **made.options)


def test_folder_without_pope_files(tmp_path):
    with pytest.raises(DataError, match="holds no POPE file"):
        open_dataset("pope", tmp_path)


def test_mmbench(make):
    made = make("mmbench")
    first, second = open_dataset("mmbench", made.path)
    assert first.choices == {"A": "teal", "B": "red"} and first.answers == ("A",) and first.hint == "A hint"
    assert first.metadata == {"category": "attribute"}
    assert second.turns[0].text == 'Two\nlines, "quoted"' and list(second.choices) == ["A", "B", "C", "D"]
    assert second.images == first.images


def test_cell_with_several_images(make):
    """MMMU in VLMEvalKit's format."""
    made = make("mmbench")
    text = made.path.read_text()
    picture = text.splitlines()[1].split("\t")[-1]
    made.path.write_text(text.replace(picture, f"['{picture}', '{picture}']", 1))
    sample = open_dataset("mmbench", made.path)[0]
    assert len(sample.images) == 2 and sample.images[0] == sample.images[1] and sample.load_image(1).size == (8, 6)
    assert [part.kind for part in sample.turns[0].parts] == ["image", "image", "text"]


def test_mmbench_row_offsets_with_bom_and_line_ends(make):
    made = make("mmbench")
    want = list(open_dataset("mmbench", made.path))
    text = made.path.read_text().replace("A hint", "“hint”\u2028\x0b")  # line separators only for str.splitlines
    made.path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    first, second = open_dataset("mmbench", made.path)
    assert first.hint == "“hint”\u2028\x0b" and (first.id, first.images) == ("241", want[0].images)
    assert second.turns[0].text == 'Two\r\nlines, "quoted"' and second.images == want[1].images


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("index\t", "number\t", "has the columns 'number, question"),
        ("\tB\t", "\tA\t", "give each column once"),
        ("\n252", "\n241", "the same id '241'"),
        ("\tA\tattribute", "\tC\tattribute", "line 2: the answer 'C' is none of A, B"),
        ("A hint\t", "", "line 2: 9 cells for 10 columns"),
        ("iVBOR", "iVB*R", "line 2: the image is not valid base64"),
        ("\t241\n", "\t\n", "line 3 has no image"),
        ("\t241\n", "\t242\n", "line 3: the image is not valid base64"),
        ('"Two', 'x"Two', "line 3"),
        ('""quoted"""', "quoted", "unexpected end of data"),
    ],
)
def test_invalid_tables_are_refused(make, old, new, message):
    made = make("mmbench")
    text = made.path.read_text()
    assert old in text
    made.path.write_text(text.replace(old, new, 1))
    with pytest.raises(DataError, match=message):
        list(open_dataset("mmbench", made.path))


def test_changed_table_is_detected(make):
    made = make("mmbench")
    samples = open_dataset("mmbench", made.path)
    made.path.write_text("index\n")
    with pytest.raises(DataError, match="has changed since it was opened"):
        samples[0]


def test_large_images_in_cells(tmp_path):
    import base64

    content = bytes(range(256)) * 1000
    path = tmp_path / "x.tsv"
    path.write_text(f"index\timage\tquestion\tanswer\n1\t{base64.b64encode(content).decode()}\tq\tNO\n")
    (sample,) = open_dataset("mme", path)
    assert sample.images == (content,) and sample.answers == ("no",)


def test_mme_folders(make):
    made = make("mme")
    samples = open_dataset("mme", made.path)
    assert [(s.id, s.answers, s.metadata["category"]) for s in samples] == [
        ("OCR/02/0", ("yes",), "OCR"),
        ("OCR/02/1", ("no",), "OCR"),
        ("count/01/0", ("yes",), "count"),
        ("count/01/1", ("no",), "count"),
    ]
    assert samples[2].turns[0].text == "Is there one card? Please answer yes or no."
    made.files[0].write_text("No tab here")
    with pytest.raises(DataError, match="line 1 has no tab"):
        open_dataset("mme", made.path)
    made.files[0].rename(made.files[0].with_name("99.txt"))
    with pytest.raises(DataError, match=r"no image belongs to .*99\.txt"):
        open_dataset("mme", made.path)
