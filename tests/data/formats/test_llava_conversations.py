"""LLaVA's conversation format: placeholders, roles, repeated ids."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.formats import ContentPart, Turn, open_dataset
from vitrail.data.formats.llava_conversations import _Message, _parse_turns, _Row
from vitrail.errors import DataError


def test_placeholders_are_numbered_in_reading_order(make):
    made = make("llava")
    samples = open_dataset("llava", made.path, **made.options)
    assert samples[0].turns == (
        Turn("user", (ContentPart("image"), ContentPart("text", "What is this?"))),
        Turn("assistant", (ContentPart("text", "A teal card."),)),
    )
    assert samples[1].turns[0].parts == (
        ContentPart("text", "Compare "),
        ContentPart("image", index=0),
        ContentPart("text", " with "),
        ContentPart("image", index=1),
        ContentPart("text", "."),
    )
    assert [path.name for path in samples[1].images] == ["a.png", "b.png"]
    assert samples[2].images == () and samples[2].turns[0].text == "Hi"


@given(st.lists(st.lists(st.sampled_from(["<image>", "words", " ", "<video>"]), min_size=1), min_size=1))
def test_text_and_placeholders_are_kept(turns):
    values = ["".join(pieces) for pieces in turns]
    whole = "".join(values)
    row = _Row(
        [_Message("human", value) for value in values],
        image=["x"] * whole.count("<image>"),
        video=["y"] * whole.count("<video>"),
    )
    if row.video and not row.image:
        return  # see the test below
    parts = [part for turn in _parse_turns(row) for part in turn.parts]
    assert "".join(part.text if part.kind == "text" else f"<{part.kind}>" for part in parts) == whole
    for kind, count in (("image", len(row.image)), ("video", len(row.video))):
        assert [part.index for part in parts if part.kind == kind] == list(range(count))


@pytest.mark.parametrize(
    ("files", "value"),
    [
        ({"image": "a.png"}, "What?"),
        ({"image": "a.png"}, "<image> and <image>"),
        ({"image": ["a.png", "b.png"]}, "<image>"),
        ({}, "<image>\nWhat?"),
        ({"image": []}, "<image>"),
        ({"video": "a.mp4"}, "What?"),
        ({"image": "a.png", "video": "b.mp4"}, "<image>"),
    ],
)
def test_placeholders_must_match_the_files(tmp_path, files, value):
    good = {"id": "good", "conversations": [{"from": "human", "value": "Hi"}]}
    row = {"id": "odd/7", "conversations": [{"from": "human", "value": value}], **files}
    path = tmp_path / "x.json"
    path.write_text(json.dumps([good, row]))
    with pytest.raises(
        DataError, match=r"sample 1 \(odd/7\): the text has \d × <(image|video)>, but the sample names \d"
    ):
        open_dataset("llava", path)


def test_video_placeholder_may_be_image_or_video():
    for placeholder in ("<image>", "<video>"):
        (turn,) = _parse_turns(_Row([_Message("human", f"{placeholder}\nWhat?")], video="a.mp4"))
        assert turn.parts == (ContentPart("video"), ContentPart("text", "What?"))


def test_json_lines_roles_and_repeated_ids(tmp_path):
    conversation = [{"from": "system", "value": "Be brief."}, {"from": "user", "value": "Hi"}]
    rows = [
        {"id": 5, "conversations": conversation},
        {"id": "5", "conversations": conversation},
        {"id": "5#2", "conversations": conversation},
    ]
    rows += [{"conversations": conversation}, {"id": 5, "conversations": conversation}]
    path = tmp_path / "x.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in rows))
    samples = open_dataset("llava", path)
    assert [sample.id for sample in samples] == ["5", "5#2", "5#2#2", "3", "5#3"]
    assert [turn.role for turn in samples[0].turns] == ["system", "user"]
    path.write_text(json.dumps([{"conversations": [{"from": "robot", "value": "beep"}]}]))
    with pytest.raises(DataError, match="unknown speaker 'robot'"):
        open_dataset("llava", path)


def test_a_system_message_beside_the_turns(tmp_path):
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    for name, row in (("llava", {"conversations": turns}), ("messages", {"messages": messages})):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps([row | {"system": "Be brief."}, row | {"system": ""}]))
        first, second = open_dataset(name, path)
        assert [(turn.role, turn.text) for turn in first.turns[:2]] == [("system", "Be brief."), ("user", "Hi")]
        assert [turn.role for turn in second.turns] == ["user", "assistant"]
