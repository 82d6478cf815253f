"""The benchmark of one's own conversations: questions, splits, metrics and baselines."""

import json

import pytest
from PIL import Image

from vitrail.data.conversations import ConversationsConfig, ConversationSource
from vitrail.errors import ConfigError, DataError
from vitrail.evals.suites.benchmarks import get_benchmark

CONVERSATION = [
    ("human", "<image>\nWhich colour?"),
    ("gpt", "Red."),
    ("human", "And of <image>?"),
    ("gpt", "blue, deep"),
    ("human", "Why?"),
    ("gpt", " "),
]


def write(folder, rows):
    file = folder / "own.json"
    for row in rows:
        for name in row["image"]:
            Image.new("RGB", (4, 4)).save(folder / name)
    file.write_text(json.dumps(rows))
    return file


def make_row(name, turns=CONVERSATION, images=2):
    turns = [{"from": role, "value": text} for role, text in turns]
    return {"id": name, "image": [f"{name}-{n}.png" for n in range(images)], "conversations": turns}


def test_each_turn_is_a_question_with_the_images_shown_so_far(tmp_path):
    benchmark = get_benchmark("conversations")
    first, second = benchmark.load_samples(write(tmp_path, [make_row("a")]))  # a turn without an answer is not asked
    assert [path.name for path in first.images] == ["a-0.png"] and first.answers == ("Red.",)
    assert [path.name for path in second.images] == ["a-0.png", "a-1.png"] and second.answers == ("blue, deep",)
    assert benchmark.build_question(second) == "And of ?" and (first.id, second.id) == ("a/0", "a/1")


def test_metrics_and_baselines(tmp_path):
    benchmark = get_benchmark("conversations")
    turns = [("human", "<image>Which?"), ("gpt", "a"), ("human", "Sure?"), ("gpt", "yes")]
    other = [("human", "<image>Which?"), ("gpt", "b"), ("human", "Sure?"), ("gpt", "yes")]
    file = write(tmp_path, [make_row("1", turns, 1), make_row("2", turns, 1), make_row("3", other, 1)])
    samples = benchmark.load_samples(file)
    scores = {score.title: score for score in benchmark.score(samples, ["A.", "yes", "a", "no", "It is b", "yes"])}
    assert scores["accuracy"].value == pytest.approx(4 / 6)
    assert scores["accuracy, question Which?"].value == pytest.approx(2 / 3)
    assert scores["accuracy, question Which?"].baselines["majority"] == pytest.approx(2 / 3)
    assert scores["accuracy, question Sure?"].baselines["majority"] == 1  # the majority of each question
    contained = benchmark.score(samples, ["A.", "yes", "a", "no", "It is b", "yes"], match="contains")
    assert contained[0].value == pytest.approx(5 / 6)
    with pytest.raises(ConfigError, match="match is 'fuzzy'"):
        benchmark.score(samples, [""] * 6, match="fuzzy")


def test_test_split_has_no_image_of_training(tmp_path):
    file = write(tmp_path, [make_row(str(n), CONVERSATION[:2], 1) for n in range(60)])
    asked = {sample.images[0] for sample in get_benchmark("conversations").load_samples(file, split="test")}
    trained = ConversationSource(ConversationsConfig(path=str(file), split="train"))
    assert asked and not asked & {trained[n].images[0] for n in range(len(trained))}
    assert len(asked) + len(trained) == 60


def test_system_messages_are_refused(tmp_path):
    file = write(tmp_path, [make_row("a", [("system", "Be brief."), *CONVERSATION[:2]], 1)])
    with pytest.raises(DataError, match="sample a has a system message"):
        get_benchmark("conversations").load_samples(file)
