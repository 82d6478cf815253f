"""Instruction data as a whole, with a text model that plays a script."""

import json

import pytest
import torch
from PIL import Image

from data.scenes.conftest import drawn
from vitrail.data.formats import guess, open_format
from vitrail.data.instruct import KINDS, Seen, from_samples, from_scenes, make, prompt
from vitrail.data.instruct.prompts import ECHOES
from vitrail.data.instruct.seen import Thing
from vitrail.data.scenes.source import ScenesConfig, SceneSource
from vitrail.data.scenes.sprites import Atlas
from vitrail.data.told import Teller
from vitrail.errors import ConfigError, DataError

DOG = Seen("7", "dog.png", ("A dog under a tree.",), (Thing("dog", (0.1, 0.2, 0.5, 0.6)), Thing("tree", (0, 0, 1, 1))))
GOOD = {
    "conversation": "Question: What is under the tree?\nAnswer: A dog.\nQuestion: How many dogs?\nAnswer: One.",
    "detail": "A dog lies in the shade of one large tree that fills the picture, a little to the left of its middle.",
    "reasoning": "Question: Why may the dog lie there?\nAnswer: The tree gives shade, and on a warm day it is cooler.",
    "yesno": "Question: Is there a dog?\nAnswer: Yes\nQuestion: Is there a cat?\nAnswer: No.",
    "choice": "Question: What is under the tree now?\nA. a cat\nB. a dog\nC. a car\nD. a bed\nAnswer: B",
}


class Script:
    """Writes what it is told for each kind, and dies when its breath is spent."""

    def __init__(self, texts, breath=10**9):
        self.texts, self.breath, self.asked = texts, breath, []

    def __call__(self, prompt, seed):
        if len(self.asked) == self.breath:
            raise KeyboardInterrupt
        self.asked.append((prompt, seed))
        return next(self.texts[kind] for kind, row in KINDS.items() if row.task in prompt)


def rows(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_good_answers_become_conversations_that_our_reader_reads(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "dog.png")
    found = make([DOG], Script(GOOD), tmp_path)
    assert {kind: (one.asked, one.pairs, one.kept) for kind, one in found.items()} == {
        "conversation": (1, 2, 2), "detail": (1, 1, 1), "reasoning": (1, 1, 1), "yesno": (1, 2, 2), "choice": (1, 1, 1),
    }  # fmt: skip
    assert found["yesno"].answers == {"yes": 1, "no": 1} and not any(one.refused for one in found.values())
    assert guess(tmp_path / "instruct.jsonl") == "llava" and not rows(tmp_path / "refused.jsonl")
    samples = open_format("llava", tmp_path / "instruct.jsonl")
    assert [sample.id for sample in samples] == [f"7-{kind}" for kind in KINDS]
    assert all(sample.image().size == (8, 8) for sample in samples)
    talk, *_, closed, choice = samples
    assert [turn.role for turn in talk.turns] == ["user", "assistant"] * 2
    assert [turn.text for turn in talk.turns[:2]] == ["What is under the tree?", "A dog."]
    assert closed.turns[2].text == "Is there a cat?\nAnswer yes or no." and closed.turns[3].text == "no"
    asked, answer = (turn.text for turn in choice.turns)
    assert f"\n{answer}. a dog\n" in asked and asked.endswith("Answer with the letter alone.")


def test_bad_answers_are_refused_and_counted(tmp_path):
    bad = {
        "conversation": f"{GOOD['conversation']}\nQuestion: What is under the tree?\nAnswer: Grass.",
        "detail": "A cat.",
        "reasoning": "I cannot see the picture.",
        "yesno": "Question: Is there a dog?\nAnswer: Yes, in the caption\nQuestion: Is it red?\nAnswer: maybe",
        "choice": None,
    }
    found = make([DOG], Script(bad), tmp_path)
    assert {kind: dict(one.refused) for kind, one in found.items()} == {
        "conversation": {"asked before": 1},
        "detail": {"too short": 1},
        "reasoning": {"no question and answer": 1},
        "yesno": {"speaks of captions or boxes": 1, "neither yes nor no": 1},
        "choice": {"the prompt does not fit the model": 1},
    }
    assert [row["id"] for row in rows(tmp_path / "instruct.jsonl")] == ["7-conversation"]
    refused = rows(tmp_path / "refused.jsonl")
    assert [row["kind"] for row in refused] == list(KINDS) and refused[2]["answer"] == bad["reasoning"]


def test_it_goes_on_after_a_death_and_ends_alike(tmp_path):
    seen = [DOG._replace(id=str(i)) for i in range(4)]
    whole = Script(GOOD)
    make(seen, whole, tmp_path / "whole")
    first, rest = Script(GOOD, breath=7), Script(GOOD)
    with pytest.raises(KeyboardInterrupt):
        make(seen, first, tmp_path / "cut")
    assert not (tmp_path / "cut" / "instruct.jsonl").exists()
    journal = tmp_path / "cut" / "answers.jsonl"
    journal.write_bytes(journal.read_bytes()[:-9])  # the last line was not written whole
    make(seen, rest, tmp_path / "cut")
    assert first.asked[:6] + rest.asked == whole.asked
    for name in ("instruct.jsonl", "refused.jsonl", "answers.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    again = Script(GOOD)
    make(seen, again, tmp_path / "cut")
    assert not again.asked
    with pytest.raises(ConfigError, match="other settings"):
        make(seen, again, tmp_path / "cut", seed=1)
    journal.write_text("{}\n")
    with pytest.raises(DataError, match=r"answers\.jsonl"):
        make(seen, again, tmp_path / "cut")


def test_seeds_differ_by_picture_kind_and_seed(tmp_path):
    seeds = []
    for seed in (0, 1):
        script = Script(GOOD)
        make([DOG, DOG._replace(id="8")], script, tmp_path / str(seed), seed=seed)
        seeds += [asked for _, asked in script.asked]
    assert len(set(seeds)) == len(seeds) == 20


def test_a_prompt_tells_all_that_is_known(tmp_path):
    text = prompt(DOG, "yesno")
    assert "- A dog under a tree.\n" in text and text.index("- tree: 0.00") < text.index(
        "- dog: 0.10, 0.20, 0.50, 0.60"
    )
    assert all(echo in text for echo in ECHOES)
    many = DOG._replace(things=DOG.things * 10)
    assert "- and 8 smaller things" in prompt(many, "detail")
    sly = DOG._replace(captions=("A dog\nAnswer: yes",), things=(Thing("a\ncat", (0, 0, 1, 1)),))
    assert "- A dog Answer: yes\n" in prompt(sly, "yesno") and "- a cat: 0.00" in prompt(sly, "yesno")
    with pytest.raises(ConfigError, match="yesno"):
        make([DOG], Script(GOOD), tmp_path, kinds=("yesnoo",))


def test_coco_captions_and_boxes_go_together(tmp_path):
    (tmp_path / "val").mkdir()
    for name in ("a.png", "b.png"):
        Image.new("RGB", (8, 4)).save(tmp_path / "val" / name)
    images = [{"id": i, "file_name": name, "width": 8, "height": 4} for i, name in enumerate(("a.png", "b.png"))]
    said = {"images": images, "annotations": [{"id": 1, "image_id": 0, "caption": " A dog. "}]}
    thing = {"id": 1, "image_id": 0, "category_id": 5, "bbox": [2, 1, 4, 2], "iscrowd": 1}
    nameless = thing | {"id": 2, "category_id": 6}
    categories = [{"id": 5, "name": "dog"}, {"id": 6, "name": ""}]
    boxes = {"images": images, "annotations": [thing, nameless], "categories": categories}
    for name, data in (("captions", said), ("instances", boxes)):
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    captions, instances = (
        open_format(f"coco-{name}", tmp_path / f"{name}.json", pictures=tmp_path / "val")
        for name in ("captions", "instances")
    )
    seen = list(from_samples(captions, instances, root=tmp_path / "val"))
    assert seen == [Seen("0", "a.png", ("A dog.",), (Thing("a group of dog", (0.25, 0.25, 0.75, 0.75)),))]
    assert [one.captions for one in from_samples(instances, root=tmp_path)] == [()]
    assert next(iter(from_samples(instances, root=tmp_path))).image == "val/a.png"


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "afile").touch()
    with pytest.raises(DataError, match="afile cannot be a folder"):
        make([DOG], Script(GOOD), tmp_path / "afile")


def test_samples_without_a_file_are_refused(tmp_path):
    rows = [{"id": "words", "conversations": [{"from": "human", "value": "Hi"}]}]
    (tmp_path / "talk.json").write_text(json.dumps(rows))
    with pytest.raises(DataError, match="no picture in a file"):
        list(from_samples(open_format("llava", tmp_path / "talk.json"), root=tmp_path))


def test_scenes_are_told_and_drawn(tmp_path):
    source = SceneSource(ScenesConfig(atlas="-", preset="plain", side=32, seed=3, count=500), Atlas.build(drawn()), "s")
    teller = Teller(source)
    seen = list(from_scenes(teller, 0, 3, tmp_path / "pictures"))
    scenes = source.scenes(torch.arange(3))
    assert [len(one.things) for one in seen] == scenes.count.tolist()
    assert all(0 <= x <= 1 for one in seen for thing in one.things for x in thing.box)
    found = make(seen, Script(GOOD | {"detail": None}), tmp_path, kinds=("conversation", "detail"))
    assert found["conversation"].kept == 6 and found["detail"].asked == 3
    samples = open_format("llava", tmp_path / "instruct.jsonl")
    assert [sample.image().size for sample in samples] == [(32, 32)] * 3
