"""The shipped examples: complete, small, correct and reproducible."""

import json

import numpy as np
import pytest
from PIL import Image

from experiments.render_examples import SCENES, SEED, render_examples
from vitrail.data.examples import FOLDER, GROUND_TRUTH_FILE, load_examples
from vitrail.data.language import QA_DRAFTERS
from vitrail.data.scenes.atlas_library import open_atlas
from vitrail.data.scenes.plurals import pluralize
from vitrail.errors import DataError


def test_examples_are_complete_and_small():
    found = load_examples()
    assert [one.name for one in found] == [wanted.name for wanted in SCENES]
    for one, wanted in zip(found, SCENES, strict=True):
        with Image.open(one.file) as picture:
            assert picture.size == (96, 96) and picture.mode == "RGB"
        assert tuple(q["kind"] for q in one.questions) == wanted.kinds and set(wanted.kinds) <= QA_DRAFTERS.keys()
        assert one.caption and all(q["question"] and q["answer"] for q in one.questions)
    shipped = [file for file in FOLDER.iterdir() if file.suffix in (".png", ".json", ".txt")]
    assert sum(file.stat().st_size for file in shipped) < 100_000
    licences = (FOLDER / "LICENCES.txt").read_text()
    assert "Noto Emoji" in licences and "Apache License 2.0" in licences
    assert all(f"{one.name}.png" in licences for one in found)


def test_answers_match_the_objects():
    """Check numbers, colours and presence against the list of objects; all object sprites are Noto's."""
    checked = 0
    for row in json.loads((FOLDER / GROUND_TRUTH_FILE).read_text())["scenes"]:
        names = [obj["name"] for obj in row["objects"]]
        assert all(obj["sprite"].startswith("noto/") for obj in row["objects"] if obj["kind"] == "thing")
        for question in row["questions"]:
            text, answer = question["question"].lower(), question["answer"]
            if question["kind"] == "counting":
                (name,) = {name for name in names if name in text or pluralize(name) in text}
                assert answer == str(names.count(name))
            elif question["kind"] == "colour":
                (colour,) = {obj["colour"] for obj in row["objects"] if obj["name"] in text}
                assert answer == colour
            elif question["kind"].startswith("existence"):
                assert (answer == "Yes") == any(name in text.rstrip("?.").split() for name in names)
            elif question["kind"] == "reading":
                assert [answer] == [obj["name"] for obj in row["objects"] if obj["kind"] == "word"]
            else:
                continue
            checked += 1
    assert checked >= 6


@pytest.mark.parametrize("text", ["", "[]", '{"scenes": [{"name": "x"}]}', '{"scenes": 3}'])
def test_broken_ground_truth_is_named(tmp_path, text):
    (tmp_path / GROUND_TRUTH_FILE).write_text(text)
    with pytest.raises(DataError, match=GROUND_TRUTH_FILE):
        load_examples(tmp_path)


@pytest.mark.slow
def test_examples_are_reproducible(tmp_path):
    try:
        atlas = open_atlas("emoji")
    except DataError as error:
        pytest.skip(f"no sprites: {error}")
    rows = render_examples(tmp_path, atlas)
    assert rows[0]["seed"] == SEED
    assert (tmp_path / GROUND_TRUTH_FILE).read_text() == (FOLDER / GROUND_TRUTH_FILE).read_text()
    for one in load_examples():
        with Image.open(one.file) as shipped, Image.open(tmp_path / one.file.name) as rendered:
            assert np.array_equal(np.asarray(shipped), np.asarray(rendered))
