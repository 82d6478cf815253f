"""Conversations as a source: unusable samples are reported when the source is opened."""

import json
import pickle

import pytest
from PIL import Image

from vitrail.data.conversations import ConversationsConfig, ConversationSource
from vitrail.errors import ConfigError, DataError, VitrailError


def row(name, question="<image>\nWhat is this?", answer="A cat.", image="a.png"):
    turns = [{"from": "human", "value": question}] + ([{"from": "gpt", "value": answer}] if answer is not None else [])
    return {"id": name, "conversations": turns} | ({} if image is None else {"image": image})


@pytest.fixture
def folder(tmp_path):
    for name in "abc":
        Image.new("RGB", (8, 6), "red").save(tmp_path / f"{name}.png")
    return tmp_path


def write_rows(folder, rows, name="talks.json"):
    file = folder / name
    lines = "\n".join(json.dumps(one) for one in rows)
    file.write_text(lines if name.endswith("l") else json.dumps(rows))
    return str(file)


def open_rows(folder, rows, name="talks.json", **more):
    return ConversationSource(ConversationsConfig(path=write_rows(folder, rows, name), **more))


@pytest.mark.parametrize("name", ["talks.json", "talks.jsonl"])
def test_samples_by_index(folder, name):
    source = open_rows(folder, [row(1), row(2, "Hello?", "Hi.", None), row(3, image="b.png")], name)
    assert [len(source), *(one.id for one in map(source.__getitem__, range(3)))] == [3, "1", "2", "3"]
    assert source[0] == source[0] and source[0].images[0].name == "a.png"
    again = pickle.loads(pickle.dumps(source))
    assert again[2] == source[2] and again.fingerprint == source.fingerprint
    assert source.pieces.texts[1:] == ["What is this?", "A cat.", "Hello?", "Hi."]
    assert source.extreme_items == [0]
    for item in (-1, 3):
        with pytest.raises(IndexError):
            source[item]


def test_fingerprint_depends_on_texts_and_images(folder):
    first = open_rows(folder, [row(1)]).fingerprint
    assert open_rows(folder, [row(1)], "elsewhere.jsonl").fingerprint == first
    assert open_rows(folder, [row(1, answer="A dog.")]).fingerprint != first
    Image.new("RGB", (80, 60), "blue").save(folder / "a.png")
    assert open_rows(folder, [row(1)]).fingerprint != first


def test_conversations_about_one_image_share_a_split(folder):
    for n in range(60):
        Image.new("RGB", (4, 4)).save(folder / f"{n}.png")
    rows = [row(f"{n}-{k}", image=f"{n}.png") for n in range(60) for k in range(2)]
    sources = {split: open_rows(folder, rows, split=split) for split in ("train", "test")}
    names = {split: {s[i].images[0].name for i in range(len(s))} for split, s in sources.items()}
    assert sum(map(len, sources.values())) == 120 and not names["train"] & names["test"]
    assert 0 < len(names["test"]) < 20
    few = open_rows(folder, rows, split="train", max_samples=5)
    assert [few[i].id for i in range(5)] == [sources["train"][i].id for i in range(5)] and len(few) == 5


def test_separate_answers_become_turns(folder):
    questions = [{"question_id": n, "image": "a.png", "text": "Is there a cat?", "label": "yes"} for n in range(2)]
    source = ConversationSource(ConversationsConfig(path=write_rows(folder, questions, "pope.jsonl")))
    assert [(turn.role, turn.text) for turn in source[1].turns] == [("user", "Is there a cat?"), ("assistant", "yes")]


def test_instruction_folder(folder):
    write_rows(folder, [row(1)], "instruct.jsonl")
    write_rows(folder, [{"id": "no"}], "refused.jsonl")
    assert len(ConversationSource(ConversationsConfig(path=str(folder)))) == 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(1), row(2, image="gone.png"), row(3, image="lost.png")], r"2 of 3 .*'gone.png' is not in .*'lost.png'"),
        ([row(1, answer=None)], "sample 1: the assistant's turns are empty"),
        ([row(1, answer=" ")], "the assistant's turns are empty"),
        ([row(1) | {"conversations": []}], "it has no turns"),
        ([row(1) | {"conversations": row(1)["conversations"][::-1]}], "turn 1 is by the assistant"),
        ([row(1, question="Which?")], "0 × <image>"),
        ([row(1) | {"conversations": [{"from": "cat", "value": "<image>miaow"}]}], "'cat'"),
        ([], "unknown format|no samples|nothing"),
    ],
)
def test_unusable_samples_are_refused(folder, rows, message):
    with pytest.raises(DataError, match=message) as error:
        open_rows(folder, rows)
    assert error.value.remedy


def test_invalid_files_are_refused(folder):
    with pytest.raises(DataError, match="does not exist"):
        ConversationSource(ConversationsConfig(path=str(folder / "none.json")))
    file = write_rows(folder, [row(1), row(2)], "talks.jsonl")
    (folder / "talks.jsonl").write_text((folder / "talks.jsonl").read_text() + '\n{"id": 3, "conversations": [')
    with pytest.raises(DataError, match="line 3"):
        ConversationSource(ConversationsConfig(path=file))
    with pytest.raises(DataError, match="is not a folder"):
        open_rows(folder, [row(1)], image_folder=str(folder / "none"))
    with pytest.raises(VitrailError, match="format"):
        open_rows(folder, [row(1)], format="llama")
    with pytest.raises(ConfigError, match=r"max_samples is 0\n.*at least 1"):
        ConversationsConfig(path="x", max_samples=0)
    with pytest.raises(DataError, match="no turns and no caption"):
        ConversationSource(ConversationsConfig(path=str(folder), format="images"))  # images without captions
