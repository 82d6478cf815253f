"""ARC, HellaSwag, PIQA, Social IQa and WinoGrande: original files, the hubs' parquet, and errors."""

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.formats.conftest import lines, write
from evals.text_rows import HUB
from vitrail.data.formats import detect_format, open_dataset
from vitrail.data.formats.text_choices import label_to_letter
from vitrail.errors import ConfigError, DataError


@pytest.mark.parametrize("kind", HUB)
def test_parquet_of_the_hubs(tmp_path, kind):
    path = tmp_path / "validation-00000-of-00001.parquet"
    datasets.Dataset.from_list(HUB[kind]).to_parquet(path)
    assert detect_format(path) == kind
    samples = open_dataset(kind, path)
    samples.check()
    assert len(samples) == len(HUB[kind]) and all(len(sample.answers) == 1 for sample in samples)
    with pytest.raises(ConfigError, match="as parquet has no option 'label_file'"):
        open_dataset(kind, path, label_file=tmp_path / "labels.lst")


def test_original_files_equal_parquet(tmp_path):
    """Authors' files are generated from the hubs' rows."""
    for kind, label in (("piqa", "label"), ("siqa", "label"), ("winogrande", "answer")):
        unlabelled = [{key: value for key, value in row.items() if key != label} for row in HUB[kind]]
        path = write(tmp_path / kind / "dev.jsonl", lines(unlabelled))
        write(tmp_path / kind / "dev-labels.lst", "".join(f"{row[label]}\n" for row in HUB[kind]))
        parquet = tmp_path / f"{kind}.parquet"
        datasets.Dataset.from_list(HUB[kind]).to_parquet(parquet)
        assert list(open_dataset(kind, path)) == list(open_dataset(kind, parquet))
        assert list(open_dataset(kind, tmp_path / kind)) == list(open_dataset(kind, path))  # a folder works too
    rows = [
        {"id": row["id"], "answerKey": row["answerKey"], "question": {"stem": row["question"], "choices": [
            {"text": text, "label": label} for text, label in zip(*row["choices"].values(), strict=True)]}}
        for row in HUB["arc"]
    ]  # fmt: skip
    datasets.Dataset.from_list(HUB["arc"]).to_parquet(tmp_path / "arc.parquet")
    path = write(tmp_path / "test.jsonl", lines(rows))
    assert list(open_dataset("arc", path)) == list(open_dataset("arc", tmp_path / "arc.parquet"))


def test_samples(make, tmp_path):
    made = make("arc")
    easy, hard = sorted(open_dataset("arc", made.path), key=lambda sample: sample.id)
    assert (easy.metadata, hard.metadata) == ({"set": "Easy"}, {"set": "Challenge"}) and easy.answers == ("B",)
    assert open_dataset("hellaswag", make("hellaswag").path)[0].answers == ("C",)
    assert [sample.answers for sample in open_dataset("piqa", make("piqa").path)] == [("B",), ("A",)]
    one, two = open_dataset("siqa", make("siqa").path)
    assert (one.hint, one.answers, two.answers) == ("Alex was late.", ("A",), ("C",))
    assert one.metadata["about"] == two.metadata["about"]
    one, two = open_dataset("winogrande", make("winogrande").path)
    assert one.metadata["about"] == two.metadata["about"] == "3QH" and one.id == "3QH-1"


def test_missing_answers(tmp_path):
    row = {"goal": "Open it", "sol1": "a", "sol2": "b"}
    for label in ({}, {"label": -1}, {"label": ""}):
        path = write(tmp_path / "tests.jsonl", lines([row | label]))
        assert open_dataset("piqa", path)[0].answers == ()


SIQA = {"context": "c", "question": "q", "answerA": "a", "answerB": "b", "answerC": "c"}
WINO = {"sentence": "so _ won", "option1": "Ann", "option2": "Eve"}
ARC = {"id": "1", "question": {"stem": "q", "choices": [{"text": "a", "label": "A"}, {"text": "b", "label": "A"}]}}


@pytest.mark.parametrize(
    ("kind", "row", "labels", "message"),
    [
        ("piqa", {"goal": "g", "sol1": "a", "sol2": "b", "label": 2}, None, "row 0: the label is '2'\n.*give 0 to 1"),
        ("piqa", {"goal": "g", "sol1": "a", "sol2": " "}, None, "a text is empty"),
        ("piqa", {"goal": "g", "sol1": "a"}, None, "line 1.*sol2"),
        ("siqa", SIQA, "0\n", "the label is '0'\n.*give 1 to 3"),
        ("siqa", SIQA | {"label": "²"}, None, "the label is '²'"),
        ("siqa", SIQA | {"correct": "D"}, None, "the label is '0'"),
        ("siqa", SIQA, "1\n2\n", "2 labels for the 1 rows of"),
        ("winogrande", WINO | {"answer": "1"}, "2\n", "the file has the answer A, its label file B"),
        ("winogrande", WINO | {"sentence": "so she won"}, None, "no blank"),
        ("winogrande", WINO | {"sentence": "it was _ "}, None, "no blank"),
        ("arc", ARC | {"answerKey": "A"}, None, "options A, A and the answer 'A'"),
    ],
)
def test_invalid_rows_are_refused(tmp_path, kind, row, labels, message):
    path = write(tmp_path / "dev.jsonl", lines([row]))
    if labels is not None:
        write(tmp_path / "dev-labels.lst", labels)
    with pytest.raises(DataError, match=message):
        list(open_dataset(kind, path))


def test_folders_and_duplicate_ids(tmp_path):
    with pytest.raises(DataError, match=r"holds no valid\.jsonl or dev\.jsonl"):
        open_dataset("piqa", tmp_path)
    for name in ("dev", "valid"):
        write(tmp_path / f"{name}.jsonl", lines([{"goal": "g", "sol1": "a", "sol2": "b"}]))
    with pytest.raises(DataError, match=r"holds dev\.jsonl, valid\.jsonl"):
        open_dataset("piqa", tmp_path)
    with pytest.raises(DataError, match=r"away\.lst does not exist"):
        open_dataset("piqa", tmp_path / "dev.jsonl", label_file=tmp_path / "away.lst")
    twins = write(tmp_path / "twins.jsonl", lines([WINO | {"qID": "a-1"}] * 2))
    with pytest.raises(DataError, match="same id 'a-1'"):
        open_dataset("winogrande", twins)


@given(st.integers(0, 1), st.integers(2, 26), st.data())
def test_label_to_letter(first, options, data):
    position = data.draw(st.integers(0, options - 1))
    assert (
        label_to_letter(position + first, first, options)
        == label_to_letter(f" {position + first}\n", first, options)
        == chr(ord("A") + position)
    )
    with pytest.raises(DataError):
        label_to_letter(options + first, first, options)
