"""The scenes that ship: whole, small, true, and made again the same."""

import json

import numpy as np
import pytest
from PIL import Image

from vitrail.data.examples import FOLDER, TRUTH, examples
from vitrail.data.examples.make import SCENES, SEED, make
from vitrail.data.scenes.library import open_atlas
from vitrail.data.scenes.plurals import plural
from vitrail.data.words import DRAFTS
from vitrail.errors import DataError


def test_they_are_whole_and_small():
    found = examples()
    assert [one.name for one in found] == [wanted.name for wanted in SCENES]
    for one, wanted in zip(found, SCENES, strict=True):
        with Image.open(one.file) as picture:
            assert picture.size == (96, 96) and picture.mode == "RGB"
        assert tuple(q["kind"] for q in one.questions) == wanted.kinds and set(wanted.kinds) <= DRAFTS.keys()
        assert one.caption and all(q["question"] and q["answer"] for q in one.questions)
    shipped = [file for file in FOLDER.iterdir() if file.suffix in (".png", ".json", ".txt")]
    assert sum(file.stat().st_size for file in shipped) < 100_000
    licences = (FOLDER / "LICENCES.txt").read_text()
    assert "Noto Emoji" in licences and "Apache License 2.0" in licences
    assert all(f"{one.name}.png" in licences for one in found)


def test_what_is_said_is_so():
    """Numbers, colours and presence by the list of objects; every sprite of things is Noto's."""
    checked = 0
    for row in json.loads((FOLDER / TRUTH).read_text())["scenes"]:
        names = [thing["name"] for thing in row["objects"]]
        assert all(thing["sprite"].startswith("noto/") for thing in row["objects"] if thing["kind"] == "thing")
        for asked in row["questions"]:
            words, answer = asked["question"].lower(), asked["answer"]
            if asked["kind"] == "counting":
                (name,) = {name for name in names if name in words or plural(name) in words}
                assert answer == str(names.count(name))
            elif asked["kind"] == "colour":
                (worn,) = {thing["colour"] for thing in row["objects"] if thing["name"] in words}
                assert answer == worn
            elif asked["kind"].startswith("existence"):
                assert (answer == "Yes") == any(name in words.rstrip("?.").split() for name in names)
            elif asked["kind"] == "reading":
                assert [answer] == [thing["name"] for thing in row["objects"] if thing["kind"] == "word"]
            else:
                continue
            checked += 1
    assert checked >= 6


@pytest.mark.parametrize("text", ["", "[]", '{"scenes": [{"name": "x"}]}', '{"scenes": 3}'])
def test_a_broken_truth_is_named(tmp_path, text):
    (tmp_path / TRUTH).write_text(text)
    with pytest.raises(DataError, match=TRUTH):
        examples(tmp_path)


@pytest.mark.slow
def test_they_are_made_again_the_same(tmp_path):
    try:
        atlas = open_atlas("emoji")
    except DataError as error:
        pytest.skip(f"no sprites: {error}")
    rows = make(tmp_path, atlas)
    assert rows[0]["seed"] == SEED
    assert (tmp_path / TRUTH).read_text() == (FOLDER / TRUTH).read_text()
    for one in examples():
        with Image.open(one.file) as kept, Image.open(tmp_path / one.file.name) as made:
            assert np.array_equal(np.asarray(kept), np.asarray(made))
