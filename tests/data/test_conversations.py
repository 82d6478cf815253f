"""Conversations as a source: whatever cannot be learnt is said when it is opened, with how many and which."""

import json
import pickle

import pytest
from PIL import Image

from vitrail.data.conversations import ConversationsConfig, ConversationSource
from vitrail.errors import ConfigError, DataError, VitrailError


def row(name, asked="<image>\nWhat is this?", answer="A cat.", image="a.png"):
    said = [{"from": "human", "value": asked}] + ([{"from": "gpt", "value": answer}] if answer is not None else [])
    return {"id": name, "conversations": said} | ({} if image is None else {"image": image})


@pytest.fixture
def folder(tmp_path):
    for name in "abc":
        Image.new("RGB", (8, 6), "red").save(tmp_path / f"{name}.png")
    return tmp_path


def written(folder, rows, name="talks.json"):
    file = folder / name
    lines = "\n".join(json.dumps(one) for one in rows)
    file.write_text(lines if name.endswith("l") else json.dumps(rows))
    return str(file)


def opened(folder, rows, name="talks.json", **more):
    return ConversationSource(ConversationsConfig(data=written(folder, rows, name), **more))


@pytest.mark.parametrize("name", ["talks.json", "talks.jsonl"])
def test_samples_by_number(folder, name):
    source = opened(folder, [row(1), row(2, "Hello?", "Hi.", None), row(3, image="b.png")], name)
    assert [len(source), *(one.id for one in map(source.__getitem__, range(3)))] == [3, "1", "2", "3"]
    assert source[0] == source[0] and source[0].pictures[0].name == "a.png"
    again = pickle.loads(pickle.dumps(source))
    assert again[2] == source[2] and again.fingerprint == source.fingerprint
    assert source.pieces.texts[1:] == ["What is this?", "A cat.", "Hello?", "Hi."]
    assert source.extremes == [0]
    for item in (-1, 3):
        with pytest.raises(IndexError):
            source[item]


def test_the_fingerprint_is_of_words_and_pictures(folder):
    first = opened(folder, [row(1)]).fingerprint
    assert opened(folder, [row(1)], "elsewhere.jsonl").fingerprint == first
    assert opened(folder, [row(1, answer="A dog.")]).fingerprint != first
    Image.new("RGB", (80, 60), "blue").save(folder / "a.png")
    assert opened(folder, [row(1)]).fingerprint != first


def test_what_is_said_of_one_picture_stays_together(folder):
    for n in range(60):
        Image.new("RGB", (4, 4)).save(folder / f"{n}.png")
    rows = [row(f"{n}-{k}", image=f"{n}.png") for n in range(60) for k in range(2)]
    parts = {part: opened(folder, rows, part=part) for part in ("train", "test")}
    names = {part: {s[i].pictures[0].name for i in range(len(s))} for part, s in parts.items()}
    assert sum(map(len, parts.values())) == 120 and not names["train"] & names["test"]
    assert 0 < len(names["test"]) < 20
    few = opened(folder, rows, part="train", count=5)
    assert [few[i].id for i in range(5)] == [parts["train"][i].id for i in range(5)] and len(few) == 5


def test_answers_that_stand_apart_are_turns(folder):
    questions = [{"question_id": n, "image": "a.png", "text": "Is there a cat?", "label": "yes"} for n in range(2)]
    source = ConversationSource(ConversationsConfig(data=written(folder, questions, "pope.jsonl")))
    assert [(turn.role, turn.text) for turn in source[1].turns] == [("user", "Is there a cat?"), ("assistant", "yes")]


def test_a_folder_of_instructions(folder):
    written(folder, [row(1)], "instruct.jsonl")
    written(folder, [{"id": "no"}], "refused.jsonl")
    assert len(ConversationSource(ConversationsConfig(data=str(folder)))) == 1


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([row(1), row(2, image="gone.png"), row(3, image="lost.png")], r"2 of 3 .*'gone.png' is not in .*'lost.png'"),
        ([row(1, answer=None)], "sample 1: the assistant says nothing"),
        ([row(1, answer=" ")], "the assistant says nothing"),
        ([row(1) | {"conversations": []}], "nothing is said"),
        ([row(1) | {"conversations": row(1)["conversations"][::-1]}], "turn 1 is by the assistant"),
        ([row(1, asked="Which?")], "0 × <image>"),
        ([row(1) | {"conversations": [{"from": "cat", "value": "<image>miaow"}]}], "'cat'"),
        ([], "no format|no samples|nothing"),
    ],
)
def test_what_cannot_be_learnt_is_refused(folder, rows, says):
    with pytest.raises(DataError, match=says) as error:
        opened(folder, rows)
    assert error.value.remedy


def test_files_that_are_wrong(folder):
    with pytest.raises(DataError, match="does not exist"):
        ConversationSource(ConversationsConfig(data=str(folder / "none.json")))
    file = written(folder, [row(1), row(2)], "talks.jsonl")
    (folder / "talks.jsonl").write_text((folder / "talks.jsonl").read_text() + '\n{"id": 3, "conversations": [')
    with pytest.raises(DataError, match="line 3"):
        ConversationSource(ConversationsConfig(data=file))
    with pytest.raises(DataError, match="no folder"):
        opened(folder, [row(1)], pictures=str(folder / "none"))
    with pytest.raises(VitrailError, match="format"):
        opened(folder, [row(1)], format="llama")
    with pytest.raises(ConfigError, match="at least one"):
        ConversationsConfig(data="x", count=0)
    captions = {"images": [{"id": 1, "file_name": "a.png"}], "annotations": [{"image_id": 1, "id": 1, "caption": "x"}]}
    (folder / "captions.json").write_text(json.dumps(captions))
    with pytest.raises(DataError, match="no turns"):
        ConversationSource(ConversationsConfig(data=str(folder / "captions.json")))
