"""ARC, HellaSwag, PIQA, Social IQa and WinoGrande: as released, as the hubs have them, and what is refused."""

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.formats.conftest import lines, write
from evals.text_rows import HUB
from vitrail.data.formats import guess, open_format
from vitrail.data.formats.texts import letter
from vitrail.errors import ConfigError, DataError


@pytest.mark.parametrize("kind", HUB)
def test_columns_of_the_hubs(tmp_path, kind):
    path = tmp_path / "validation-00000-of-00001.parquet"
    datasets.Dataset.from_list(HUB[kind]).to_parquet(path)
    assert guess(path) == kind
    samples = open_format(kind, path)
    samples.check()
    assert len(samples) == len(HUB[kind]) and all(len(sample.answers) == 1 for sample in samples)
    with pytest.raises(ConfigError, match="as parquet has no option 'labels'"):
        open_format(kind, path, labels=tmp_path / "labels.lst")


def test_the_same_of_both(tmp_path):
    """Files of the authors, made of the hubs' rows."""
    for kind, label in (("piqa", "label"), ("siqa", "label"), ("winogrande", "answer")):
        told = [{key: value for key, value in row.items() if key != label} for row in HUB[kind]]
        path = write(tmp_path / kind / "dev.jsonl", lines(told))
        write(tmp_path / kind / "dev-labels.lst", "".join(f"{row[label]}\n" for row in HUB[kind]))
        parquet = tmp_path / f"{kind}.parquet"
        datasets.Dataset.from_list(HUB[kind]).to_parquet(parquet)
        assert list(open_format(kind, path)) == list(open_format(kind, parquet))
        assert list(open_format(kind, tmp_path / kind)) == list(open_format(kind, path))  # or their folder
    rows = [
        {"id": row["id"], "answerKey": row["answerKey"], "question": {"stem": row["question"], "choices": [
            {"text": text, "label": label} for text, label in zip(*row["choices"].values(), strict=True)]}}
        for row in HUB["arc"]
    ]  # fmt: skip
    datasets.Dataset.from_list(HUB["arc"]).to_parquet(tmp_path / "arc.parquet")
    path = write(tmp_path / "test.jsonl", lines(rows))
    assert list(open_format("arc", path)) == list(open_format("arc", tmp_path / "arc.parquet"))


def test_what_is_read(make, tmp_path):
    made = make("arc")
    easy, hard = sorted(open_format("arc", made.path), key=lambda sample: sample.id)
    assert (easy.notes, hard.notes) == ({"set": "Easy"}, {"set": "Challenge"}) and easy.answers == ("B",)
    assert open_format("hellaswag", make("hellaswag").path)[0].answers == ("C",)
    assert [sample.answers for sample in open_format("piqa", make("piqa").path)] == [("B",), ("A",)]
    one, two = open_format("siqa", make("siqa").path)
    assert (one.hint, one.answers, two.answers) == ("Alex was late.", ("A",), ("C",))
    assert one.notes["about"] == two.notes["about"]
    one, two = open_format("winogrande", make("winogrande").path)
    assert one.notes["about"] == two.notes["about"] == "3QH" and one.id == "3QH-1"


def test_answers_that_nobody_tells(tmp_path):
    row = {"goal": "Open it", "sol1": "a", "sol2": "b"}
    for label in ({}, {"label": -1}, {"label": ""}):
        path = write(tmp_path / "tests.jsonl", lines([row | label]))
        assert open_format("piqa", path)[0].answers == ()


SIQA = {"context": "c", "question": "q", "answerA": "a", "answerB": "b", "answerC": "c"}
WINO = {"sentence": "so _ won", "option1": "Ann", "option2": "Eve"}
ARC = {"id": "1", "question": {"stem": "q", "choices": [{"text": "a", "label": "A"}, {"text": "b", "label": "A"}]}}


@pytest.mark.parametrize(
    ("kind", "row", "labels", "said"),
    [
        ("piqa", {"goal": "g", "sol1": "a", "sol2": "b", "label": 2}, None, "row 0: the label '2'\n.*only 0 to 1"),
        ("piqa", {"goal": "g", "sol1": "a", "sol2": " "}, None, "without words"),
        ("piqa", {"goal": "g", "sol1": "a"}, None, "line 1.*sol2"),
        ("siqa", SIQA, "0\n", "the label '0'\n.*only 1 to 3"),
        ("siqa", SIQA | {"label": "²"}, None, "the label '²'"),
        ("siqa", SIQA | {"correct": "D"}, None, "the label '0'"),
        ("siqa", SIQA, "1\n2\n", "2 lines for the 1 of"),
        ("winogrande", WINO | {"answer": "1"}, "2\n", "the file says A, and its labels B"),
        ("winogrande", WINO | {"sentence": "so she won"}, None, "no blank"),
        ("winogrande", WINO | {"sentence": "it was _ "}, None, "no blank"),
        ("arc", ARC | {"answerKey": "A"}, None, "options A, A and the answer 'A'"),
    ],
)
def test_refused(tmp_path, kind, row, labels, said):
    path = write(tmp_path / "dev.jsonl", lines([row]))
    if labels is not None:
        write(tmp_path / "dev-labels.lst", labels)
    with pytest.raises(DataError, match=said):
        list(open_format(kind, path))


def test_folders_and_twins(tmp_path):
    with pytest.raises(DataError, match=r"holds no valid\.jsonl or dev\.jsonl"):
        open_format("piqa", tmp_path)
    for name in ("dev", "valid"):
        write(tmp_path / f"{name}.jsonl", lines([{"goal": "g", "sol1": "a", "sol2": "b"}]))
    with pytest.raises(DataError, match=r"holds dev\.jsonl, valid\.jsonl"):
        open_format("piqa", tmp_path)
    with pytest.raises(DataError, match=r"away\.lst does not exist"):
        open_format("piqa", tmp_path / "dev.jsonl", labels=tmp_path / "away.lst")
    twins = write(tmp_path / "twins.jsonl", lines([WINO | {"qID": "a-1"}] * 2))
    with pytest.raises(DataError, match="same id 'a-1'"):
        open_format("winogrande", twins)


@given(st.integers(0, 1), st.integers(2, 26), st.data())
def test_letters_of_numbers(first, options, data):
    at = data.draw(st.integers(0, options - 1))
    assert letter(at + first, first, options) == letter(f" {at + first}\n", first, options) == chr(ord("A") + at)
    with pytest.raises(DataError):
        letter(options + first, first, options)
