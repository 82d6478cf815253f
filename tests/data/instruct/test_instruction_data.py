"""Instruction data end to end, with a scripted text model."""

import json

import pytest
import torch
from PIL import Image

from data.scenes.conftest import drawn
from vitrail.data.formats import detect_format, open_dataset
from vitrail.data.instruct import (
    INSTRUCTION_KINDS,
    ImageDescription,
    build_prompt,
    describe_samples,
    describe_scenes,
    make_instruction_data,
)
from vitrail.data.instruct.image_descriptions import DescribedObject
from vitrail.data.instruct.instruction_prompts import PROMPT_PHRASES
from vitrail.data.scene_annotations import SceneAnnotator
from vitrail.data.scenes.atlas import Atlas
from vitrail.data.scenes.scene_source import SceneSource, SceneSourceConfig
from vitrail.errors import ConfigError, DataError

DOG = ImageDescription(
    "7",
    "dog.png",
    ("A dog under a tree.",),
    (DescribedObject("dog", (0.1, 0.2, 0.5, 0.6)), DescribedObject("tree", (0, 0, 1, 1))),
)
GOOD = {
    "conversation": "Question: What is under the tree?\nAnswer: A dog.\nQuestion: How many dogs?\nAnswer: One.",
    "detail": "A dog lies in the shade of one large tree that fills the picture, a little to the left of its middle.",
    "reasoning": "Question: Why may the dog lie there?\nAnswer: The tree gives shade, and on a warm day it is cooler.",
    "yesno": "Question: Is there a dog?\nAnswer: Yes\nQuestion: Is there a cat?\nAnswer: No.",
    "choice": "Question: What is under the tree now?\nA. a cat\nB. a dog\nC. a car\nD. a bed\nAnswer: B",
}


class Script:
    """Returns a fixed text for each kind, and fails after a number of calls."""

    def __init__(self, texts, max_calls=10**9):
        self.texts, self.max_calls, self.calls = texts, max_calls, []

    def __call__(self, prompt, seed):
        if len(self.calls) == self.max_calls:
            raise KeyboardInterrupt
        self.calls.append((prompt, seed))
        return next(self.texts[kind] for kind, row in INSTRUCTION_KINDS.items() if row.instruction in prompt)


def rows(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_good_outputs_become_conversations(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "dog.png")
    statistics = make_instruction_data([DOG], Script(GOOD), tmp_path)
    assert {kind: (one.num_texts, one.num_pairs, one.num_kept) for kind, one in statistics.items()} == {
        "conversation": (1, 2, 2), "detail": (1, 1, 1), "reasoning": (1, 1, 1), "yesno": (1, 2, 2), "choice": (1, 1, 1),
    }  # fmt: skip
    assert statistics["yesno"].answer_counts == {"yes": 1, "no": 1} and not any(
        one.rejections for one in statistics.values()
    )
    assert detect_format(tmp_path / "instruct.jsonl") == "llava" and not rows(tmp_path / "refused.jsonl")
    samples = open_dataset("llava", tmp_path / "instruct.jsonl")
    assert [sample.id for sample in samples] == [f"7-{kind}" for kind in INSTRUCTION_KINDS]
    assert all(sample.load_image().size == (8, 8) for sample in samples)
    conversation, *_, closed, choice = samples
    assert [turn.role for turn in conversation.turns] == ["user", "assistant"] * 2
    assert [turn.text for turn in conversation.turns[:2]] == ["What is under the tree?", "A dog."]
    assert closed.turns[2].text == "Is there a cat?\nAnswer yes or no." and closed.turns[3].text == "no"
    question, answer = (turn.text for turn in choice.turns)
    assert f"\n{answer}. a dog\n" in question and question.endswith("Answer with the letter alone.")


def test_bad_outputs_are_rejected_and_counted(tmp_path):
    bad = {
        "conversation": f"{GOOD['conversation']}\nQuestion: What is under the tree?\nAnswer: Grass.",
        "detail": "A cat.",
        "reasoning": "I cannot see the picture.",
        "yesno": "Question: Is there a dog?\nAnswer: Yes, in the caption\nQuestion: Is it red?\nAnswer: maybe",
        "choice": None,
    }
    statistics = make_instruction_data([DOG], Script(bad), tmp_path)
    assert {kind: dict(one.rejections) for kind, one in statistics.items()} == {
        "conversation": {"duplicate question": 1},
        "detail": {"answer too short": 1},
        "reasoning": {"no question-answer pair": 1},
        "yesno": {"mentions captions or boxes": 1, "neither yes nor no": 1},
        "choice": {"prompt does not fit the model": 1},
    }
    assert [row["id"] for row in rows(tmp_path / "instruct.jsonl")] == ["7-conversation"]
    refused = rows(tmp_path / "refused.jsonl")
    assert [row["kind"] for row in refused] == list(INSTRUCTION_KINDS) and refused[2]["answer"] == bad["reasoning"]


def test_resumed_run_gives_the_same_files(tmp_path):
    seen = [DOG._replace(id=str(i)) for i in range(4)]
    whole = Script(GOOD)
    make_instruction_data(seen, whole, tmp_path / "whole")
    first, rest = Script(GOOD, max_calls=7), Script(GOOD)
    with pytest.raises(KeyboardInterrupt):
        make_instruction_data(seen, first, tmp_path / "cut")
    assert not (tmp_path / "cut" / "instruct.jsonl").exists()
    journal = tmp_path / "cut" / "answers.jsonl"
    journal.write_bytes(journal.read_bytes()[:-9])  # the last line is incomplete
    make_instruction_data(seen, rest, tmp_path / "cut")
    assert first.calls[:6] + rest.calls == whole.calls
    for name in ("instruct.jsonl", "refused.jsonl", "answers.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    again = Script(GOOD)
    make_instruction_data(seen, again, tmp_path / "cut")
    assert not again.calls
    with pytest.raises(ConfigError, match="other settings"):
        make_instruction_data(seen, again, tmp_path / "cut", seed=1)
    journal.write_text("{}\n")
    with pytest.raises(DataError, match=r"answers\.jsonl"):
        make_instruction_data(seen, again, tmp_path / "cut")


def test_seeds_depend_on_image_kind_and_seed(tmp_path):
    seeds = []
    for seed in (0, 1):
        script = Script(GOOD)
        make_instruction_data([DOG, DOG._replace(id="8")], script, tmp_path / str(seed), seed=seed)
        seeds += [call_seed for _, call_seed in script.calls]
    assert len(set(seeds)) == len(seeds) == 20


def test_prompt_contains_captions_and_objects(tmp_path):
    text = build_prompt(DOG, "yesno")
    assert "- A dog under a tree.\n" in text and text.index("- tree: 0.00") < text.index(
        "- dog: 0.10, 0.20, 0.50, 0.60"
    )
    assert all(echo in text for echo in PROMPT_PHRASES)
    many = DOG._replace(objects=DOG.objects * 10)
    assert "- and 8 smaller things" in build_prompt(many, "detail")
    sly = DOG._replace(captions=("A dog\nAnswer: yes",), objects=(DescribedObject("a\ncat", (0, 0, 1, 1)),))
    assert "- A dog Answer: yes\n" in build_prompt(sly, "yesno") and "- a cat: 0.00" in build_prompt(sly, "yesno")
    with pytest.raises(ConfigError, match="yesno"):
        make_instruction_data([DOG], Script(GOOD), tmp_path, kinds=("yesnoo",))


def test_coco_captions_and_boxes_are_combined(tmp_path):
    (tmp_path / "val").mkdir()
    for name in ("a.png", "b.png"):
        Image.new("RGB", (8, 4)).save(tmp_path / "val" / name)
    images = [{"id": i, "file_name": name, "width": 8, "height": 4} for i, name in enumerate(("a.png", "b.png"))]
    caption_file = {"images": images, "annotations": [{"id": 1, "image_id": 0, "caption": " A dog. "}]}
    annotation = {"id": 1, "image_id": 0, "category_id": 5, "bbox": [2, 1, 4, 2], "iscrowd": 1}
    nameless = annotation | {"id": 2, "category_id": 6}
    categories = [{"id": 5, "name": "dog"}, {"id": 6, "name": ""}]
    instance_file = {"images": images, "annotations": [annotation, nameless], "categories": categories}
    for name, data in (("captions", caption_file), ("instances", instance_file)):
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    captions, instances = (
        open_dataset(f"coco-{name}", tmp_path / f"{name}.json", image_folder=tmp_path / "val")
        for name in ("captions", "instances")
    )
    seen = list(describe_samples(captions, instances, root=tmp_path / "val"))
    assert seen == [
        ImageDescription("0", "a.png", ("A dog.",), (DescribedObject("a group of dog", (0.25, 0.25, 0.75, 0.75)),))
    ]
    assert [one.captions for one in describe_samples(instances, root=tmp_path)] == [()]
    assert next(iter(describe_samples(instances, root=tmp_path))).image == "val/a.png"


def test_file_instead_of_folder_is_refused(tmp_path):
    (tmp_path / "afile").touch()
    with pytest.raises(DataError, match="afile cannot be created"):
        make_instruction_data([DOG], Script(GOOD), tmp_path / "afile")


def test_samples_without_an_image_file_are_refused(tmp_path):
    rows = [{"id": "words", "conversations": [{"from": "human", "value": "Hi"}]}]
    (tmp_path / "talk.json").write_text(json.dumps(rows))
    with pytest.raises(DataError, match="has no image file"):
        list(describe_samples(open_dataset("llava", tmp_path / "talk.json"), root=tmp_path))


def test_scenes_are_described_and_rendered(tmp_path):
    source = SceneSource(
        SceneSourceConfig(atlas="-", preset="plain", image_size=32, seed=3, num_samples=500), Atlas.build(drawn()), "s"
    )
    annotator = SceneAnnotator(source)
    seen = list(describe_scenes(annotator, 0, 3, tmp_path / "pictures"))
    scenes = source.sample_scenes(torch.arange(3))
    assert [len(one.objects) for one in seen] == scenes.num_objects.tolist()
    assert all(0 <= x <= 1 for one in seen for thing in one.objects for x in thing.box)
    found = make_instruction_data(seen, Script(GOOD | {"detail": None}), tmp_path, kinds=("conversation", "detail"))
    assert found["conversation"].num_kept == 6 and found["detail"].num_texts == 3
    samples = open_dataset("llava", tmp_path / "instruct.jsonl")
    assert [sample.load_image().size for sample in samples] == [(32, 32)] * 3
