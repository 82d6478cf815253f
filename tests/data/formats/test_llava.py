import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.formats import Part, Turn, open_format
from vitrail.data.formats.llava import _Row, _Said, _turns
from vitrail.errors import DataError


def test_places_are_numbered_in_reading_order(make):
    made = make("llava")
    samples = open_format("llava", made.path, **made.options)
    assert samples[0].turns == (
        Turn("user", (Part("image"), Part("text", "What is this?"))),
        Turn("assistant", (Part("text", "A teal card."),)),
    )
    assert samples[1].turns[0].parts == (
        Part("text", "Compare "),
        Part("image", index=0),
        Part("text", " with "),
        Part("image", index=1),
        Part("text", "."),
    )
    assert [path.name for path in samples[1].pictures] == ["a.png", "b.png"]
    assert samples[2].pictures == () and samples[2].turns[0].text == "Hi"


@given(st.lists(st.lists(st.sampled_from(["<image>", "words", " ", "<video>"]), min_size=1), min_size=1))
def test_no_word_and_no_place_is_lost(turns):
    said = ["".join(pieces) for pieces in turns]
    whole = "".join(said)
    row = _Row(
        [_Said("human", value) for value in said],
        image=["x"] * whole.count("<image>"),
        video=["y"] * whole.count("<video>"),
    )
    if row.video and not row.image:
        return  # read as in the test below
    parts = [part for turn in _turns(row) for part in turn.parts]
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
def test_places_that_do_not_match_the_files_are_an_error(tmp_path, files, value):
    good = {"id": "good", "conversations": [{"from": "human", "value": "Hi"}]}
    row = {"id": "odd/7", "conversations": [{"from": "human", "value": value}], **files}
    path = tmp_path / "x.json"
    path.write_text(json.dumps([good, row]))
    with pytest.raises(DataError, match=r"sample 1 \(odd/7\): the words show \d × <(image|video)>, but \d"):
        open_format("llava", path)


def test_a_place_of_a_video_may_be_written_either_way():
    for mark in ("<image>", "<video>"):
        (turn,) = _turns(_Row([_Said("human", f"{mark}\nWhat?")], video="a.mp4"))
        assert turn.parts == (Part("video"), Part("text", "What?"))


def test_json_lines_speakers_and_repeated_ids(tmp_path):
    said = [{"from": "system", "value": "Be brief."}, {"from": "user", "value": "Hi"}]
    rows = [{"id": 5, "conversations": said}, {"id": "5", "conversations": said}, {"id": "5#2", "conversations": said}]
    rows += [{"conversations": said}, {"id": 5, "conversations": said}]
    path = tmp_path / "x.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in rows))
    samples = open_format("llava", path)
    assert [sample.id for sample in samples] == ["5", "5#2", "5#2#2", "3", "5#3"]
    assert [turn.role for turn in samples[0].turns] == ["system", "user"]
    path.write_text(json.dumps([{"conversations": [{"from": "robot", "value": "beep"}]}]))
    with pytest.raises(DataError, match="nobody knows the speaker 'robot'"):
        open_format("llava", path)
