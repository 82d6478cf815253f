"""Published benchmarks on tiny files in their original formats: questions and scores."""

import json

import pytest

from data.formats.conftest import MAKERS, png, tsv, write
from vitrail.data.formats import Sample
from vitrail.errors import ConfigError, DataError
from vitrail.evals.metrics import aro_metrics
from vitrail.evals.metrics.chair_metrics import ObjectVocabulary
from vitrail.evals.metrics.moment_metrics import format_span
from vitrail.evals.metrics.scoring_table import ScoringTable, score_mean
from vitrail.evals.scores import Proportion
from vitrail.evals.suites.benchmarks import BENCHMARKS, get_benchmark
from vitrail.evals.suites.generation import generate_answers


@pytest.fixture
def opened(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "vitrail.evals.metrics.moment_metrics._video_duration", lambda video: 60.0
    )  # the files are not videos

    def read(name, **options):
        row = get_benchmark(name)
        if row.format not in MAKERS:
            pytest.skip("of parquet alone: see those of the hubs")
        made = MAKERS[row.format][1](tmp_path)
        if name == "chair":
            options["instances"] = MAKERS["coco-instances"][1](tmp_path).path
        return row, row.load_samples(made.path, **made.options, **options)

    return read


def values(scores):
    return {score.title: score.value for score in scores}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_correct_and_wrong_answers(opened, name):
    row, samples = opened(name)
    # POPE's parser takes every answer without a negation for yes.
    options = {"chair": {"synonyms": ObjectVocabulary([["card"], ["dog"], ["person"]])}, "pope": {"mode": "vlmevalkit"}}
    how = options.get(name, {})
    if name == "gqa":
        samples = samples.select([0])  # the other sample has no reference
    if name == "refcoco":
        boxes = [[1000 * x / side for x, side in zip(s.instances[0].box, (8, 6, 8, 6), strict=True)] for s in samples]
        right = [json.dumps({"bbox_2d": box}) for box in boxes]
    else:
        spans = [[format_span(moment) for moment in sample.moments] for sample in samples]
        right = [(one.answers or one.captions or at)[0] for one, at in zip(samples, spans, strict=True)]
    best, worst = (
        row.score(samples, right, **how),
        row.score(samples, ["zzz"] * len(samples), blind_answers=right, **how),
    )
    first = "CIDEr" if name == "captions" else best[0].title
    assert values(best)[first] > values(worst)[first] or name == "chair"
    if name == "chair":
        assert values(best) == values(worst) == {"CHAIR_i": 0, "CHAIR_s": 0}
        wrong = row.score(samples, ["a dog and a card", "a dog"], **how)
        assert values(wrong) == {"CHAIR_i": 1 / 3, "CHAIR_s": 1 / 2}  # the second image has no dog
    elif name not in ("captions", "mme"):
        assert values(best)[first] == 1 and values(worst)[first] == 0
    found = {score.title: score.baselines.get("blind") for score in worst}
    assert found[first] == values(best)[first]  # blind answers are scored as a baseline
    assert all(score.interval[0] <= score.value <= score.interval[1] for score in best + worst)
    assert all(row.build_question(sample) for sample in samples)


def test_questions(opened):
    row, samples = opened("mmbench")
    text = "A hint\nWhich colour?\nA. teal\nB. red\nAnswer with the option's letter from the given choices directly."
    assert row.build_question(samples[0]) == text
    assert row.build_question(samples[0], "{question} ({choices})") == "Which colour? (A. teal\nB. red)"
    with pytest.raises(ConfigError, match=r"use only \{question\}"):
        row.build_question(samples[0], "{quest}")
    with pytest.raises(ConfigError, match="cannot be formatted"):
        row.build_question(samples[0], "{question[x]}")
    row, samples = opened("refcoco")
    assert row.build_question(samples[0]).startswith('Locate "left card"') and '{"bbox_2d"' in row.build_question(
        samples[0]
    )


def test_circular(opened):
    row, samples = opened("mmbench", circular=True)
    assert [(s.id, s.answers[0]) for s in samples] == [
        ("241", "A"), ("241+1", "B"), ("252", "D"), ("252+1", "A"), ("252+2", "B"), ("252+3", "C"),
    ]  # fmt: skip
    assert [s.choices[s.answers[0]] for s in samples] == ["teal"] * 2 + ["both"] * 4
    right = [s.answers[0] for s in samples]
    found = row.score(samples, [*right[:5], "A"])  # one of six rotations is wrong: one of two questions
    assert values(found)["circular accuracy"] == 0.5 and values(found)["accuracy"] == pytest.approx(5 / 6)
    assert found[0].baselines["chance"] == pytest.approx((1 / 2**2 + 1 / 4**4) / 2)
    constant = row.score(samples, ["A"] * 6)
    assert values(constant)["circular accuracy"] == 0 and values(constant)["accuracy"] == pytest.approx(2 / 6)
    assert values(row.score(samples, ["who knows"] * 6))["no option"] == 1


@pytest.mark.parametrize(("name", "left"), [("mmbench", (2, 4)), ("winoground", (4,)), ("mme", (2,)), ("vqav2", (1,))])
def test_limit_keeps_groups(opened, name, left):
    _, samples = opened(name, limit=1, **({"circular": True} if name == "mmbench" else {}))
    assert len(samples) in left
    assert len({sample.metadata.get("circle") for sample in samples}) == 1
    with pytest.raises(ConfigError, match="limit = 0"):
        opened(name, limit=0)


def test_rotations_in_the_file(tmp_path):
    """MMBench's files contain rotations with ids 1,000,000 apart; other questions with such ids are separate."""
    import base64

    picture = base64.b64encode(png()).decode()
    rows = [
        ["index", "question", "A", "B", "answer", "image"],
        ["7", "Which?", "x", "y", "A", picture],
        ["1000007", "Which?", "y", "x", "B", picture],
        ["2000007", "What else?", "y", "x", "B", picture],
    ]
    row = get_benchmark("mmbench")
    samples = row.load_samples(write(tmp_path / "m.tsv", tsv(rows)))
    found = row.score(samples, ["A", "A", "B"])
    assert found[0].name == "circular accuracy" and (found[0].value, found[0].count) == (0.5, 2)


def test_pope_modes(opened):
    row, samples = opened("pope")
    output = ["Yes, there is.", "no"] * 3
    found = {mode: values(row.score(samples, output, mode=mode)) for mode in ("pope", "lmms-eval", "vlmevalkit")}
    assert found["pope"]["accuracy, split popular"] == found["vlmevalkit"]["F1, split random"] == 1
    assert found["lmms-eval"]["accuracy"] == 0.5 and found["lmms-eval"]["F1"] == 0  # splits are pooled
    guessed = row.score(samples, output)[0].baselines["always yes"]
    assert guessed == 0.5
    with pytest.raises(ConfigError, match="did you mean 'lmms-eval'"):
        row.score(samples, output, mode="lmmseval")
    with pytest.raises(ConfigError, match="pope has no option 'boxes'"):
        row.score(samples, output, boxes="llava")


def test_mme(opened):
    row, samples = opened("mme")
    assert [s.id for s in samples] == ["OCR/02/0", "OCR/02/1", "count/01/0", "count/01/1"]
    found = row.score(samples, ["Yes, it is", "No.", "yes", "yes"])
    result = values(found)
    assert (
        result["acc, category count"] == 0.5
        and result["acc+, category count"] == 0
        and result["acc, category OCR"] == 1
    )
    assert result["perception"] == 250 and found[0].unit == "points" and "cognition" not in result
    assert str(found[0]).startswith("250.0 [") and found[0].as_dict["unit"] == "points"


def test_hallusion(opened):
    row, samples = opened("hallusionbench")
    result = values(row.score(samples, ["yes", "yes", "yes"]))
    assert result == pytest.approx({"aAcc": 2 / 3, "fAcc": 1 / 2, "qAcc": 1 / 2})  # items without a figure are excluded


def test_winoground(opened):
    row, samples = opened("winoground")
    assert [len(s.images) for s in samples] == [1, 1, 2, 2]
    assert values(row.score(samples, ["A", "B", "A", "A"])) == {"text": 1, "image": 0, "group": 0}
    assert row.score(samples, ["A"] * 4)[2].baselines == {"chance": 1 / 16, "majority": 0}


def test_one_image_has_the_full_interval(opened):
    row, samples = opened("pope")
    assert row.score(samples, ["yes"] * 6)[0].interval == (0, 1)
    row, samples = opened("mme")
    assert row.score(samples.select([0, 1]), ["yes", "no"])[0].interval == (0, 200)


def test_comparison(opened):
    row, samples = opened("vqav2")
    found = row.compare(samples, ["card"] * 3, ["card", "dog", "dog"])
    assert found.difference == pytest.approx(2 / 3) and found.only_one_correct == (2, 0)
    with pytest.raises(ConfigError, match="no score per sample"):
        opened("chair")[0].compare(samples, [], [])


def test_reasoning_is_ignored_in_all_benchmarks(opened):
    row, samples = opened("mmbench")
    right = [sample.answers[0] for sample in samples]
    aloud = [f"<think>C, or A? <answer>B</answer></think>{answer}" for answer in right]
    wrong = ["<think>A</think>"] * len(right)
    scores = row.score(samples, aloud, blind_answers=aloud)
    assert values(scores)["accuracy"] == scores[0].baselines["blind"] == 1 and values(scores)["no option"] == 0
    assert values(row.score(samples, wrong))["no option"] == 1
    assert row.compare(samples, aloud, wrong).difference == 1
    assert {result for result, _ in row.grade_answers(samples, aloud)} == {"right"}
    assert {result for result, _ in row.grade_answers(samples, wrong)} == {"unread"}


def test_caption_comparison_uses_cider(opened):
    row, samples = opened("captions")
    first, second = [sample.captions[0] for sample in samples], ["nothing of the kind"] * len(samples)
    found = row.compare(samples, first, second, tokenizer="plain", meteor=True)  # METEOR has no item scores
    assert found.difference > 0
    with pytest.raises(ConfigError, match="unknown caption tokenizer"):
        row.compare(samples, first, second, tokenizer="scissors")


def test_mismatched_inputs_raise(opened):
    row, samples = opened("gqa")
    with pytest.raises(DataError, match="sample '07333408' has no reference answer"):
        row.score(samples, ["no", "no"])
    with pytest.raises(DataError, match="1 answers to 2 samples"):
        opened("docvqa")[0].score([samples[0]] * 2, ["no"])
    with pytest.raises(ConfigError, match="did you mean 'vqav2'"):
        get_benchmark("vqa2")
    with pytest.raises(ConfigError, match="needs the option synonyms"):
        opened("chair")[0].check_options({})
    with pytest.raises(ConfigError, match="is not multiple choice"):
        opened("pope", circular=True)


class Toy:
    """Answers with the number of images."""

    def __init__(self):
        self.asked = []

    def ask(self, pictures, question, **how):
        self.asked.append(question)
        return f"{len(pictures) if isinstance(pictures, list | tuple) else 1} pictures"


def test_answers_are_saved(opened, tmp_path):
    row, samples = opened("winoground")
    keep, toy = tmp_path / "kept" / "answers.jsonl", Toy()
    how = {"answers_file": keep, "model_name": "toy"}
    output = generate_answers(toy, samples.select([0, 2]), row.build_question, **how)
    assert output == ["1 pictures", "2 pictures"]
    again = generate_answers(toy, samples, row.build_question, **how)
    assert again == ["1 pictures", "1 pictures", "2 pictures", "2 pictures"] and len(toy.asked) == 4
    assert generate_answers(toy, samples, row.build_question, blind=True, no_images=[], **how) == ["0 pictures"] * 4
    assert (
        generate_answers(toy, samples, row.build_question, answers_file=keep, model_name="other")[0] == "1 pictures"
        and len(toy.asked) == 12
    )
    assert (
        generate_answers(toy, samples, row.build_question, max_new_tokens=3, **how)[0] == "1 pictures"
        and len(toy.asked) == 16
    )
    assert len(keep.read_text().splitlines()) == 16

    class Each(Toy):
        def ask(self, pictures, question, **how):
            return ["one", "each"]

    with pytest.raises(ConfigError, match="0/image/0 has 2 images"):
        generate_answers(Each(), samples.select([2]), row.build_question)


def test_answers_about_other_images_do_not_match(tmp_path):
    """Two datasets have equal sample ids and questions."""
    keep, toy = tmp_path / "answers.jsonl", Toy()
    for folder in ("one", "other"):
        sample = Sample(id="1", images=(tmp_path / folder / "a.png",))
        generate_answers(toy, [sample], lambda _: "What is it?", answers_file=keep, model_name="toy")
    assert len(toy.asked) == 2
    for picture in (b"one", b"other", b"one"):
        generate_answers(
            toy, [Sample(id="1", images=(picture,))], lambda _: "What is it?", answers_file=keep, model_name="toy"
        )
    assert len(toy.asked) == 4
    for _ in range(2):  # without images it is one question
        generate_answers(toy, [sample], lambda _: "What is it?", blind=True, answers_file=keep, model_name="toy")
    assert len(toy.asked) == 5


@pytest.mark.parametrize("cut", [1, 5, 60])
def test_incomplete_lines_are_asked_again(tmp_path, cut):
    keep, toy = tmp_path / "answers.jsonl", Toy()
    samples = [Sample(id=str(n)) for n in range(3)]
    how = {"build_question": lambda sample: f"What is {sample.id}?", "answers_file": keep, "model_name": "toy"}
    output, whole = generate_answers(toy, samples, **how), keep.read_bytes()
    keep.write_bytes(whole[:-cut])
    assert generate_answers(toy, samples, **how) == output and len(toy.asked) == 4
    assert keep.read_bytes() == whole


def test_foreign_files_raise_and_are_unchanged(tmp_path):
    keep = tmp_path / "data.json"
    for text in ('{"question_id": 1}', '{"question_id": 1}\n', '[{"question_id": 1}]'):
        keep.write_text(text)
        with pytest.raises(DataError, match=r"data\.json"):
            generate_answers(Toy(), [Sample(id="1")], lambda _: "?", answers_file=keep)
        assert keep.read_text() == text


def test_aro_excludes_symmetric_relations():
    """Symmetric relations, and attribute pairs with fewer than 25 items."""

    def sheet(part, counts):
        of = [kind for kind, count in counts.items() for _ in range(count)]
        notes = ({"part": part, "kind": kind} for kind in of)
        made = [
            Sample(id=str(n), choices={"A": "x", "B": "y"}, answers=("A",), metadata=note)
            for n, note in enumerate(notes)
        ]
        return ScoringTable.from_samples(made), of

    relations, of = sheet("relation", {"on": 2, "near": 30, "holding": 4})
    output = ["A" if kind == "on" else "B" for kind in of]
    assert values(aro_metrics.score_kinds(relations, output)) == {
        "accuracy": pytest.approx(2 / 36),
        "mean over kinds": 0.5,
    }
    attributes, of = sheet("attribution", {"white_open": 25, "near_far": 25, "tall_red": 24})
    output = ["A" if kind == "white_open" else "B" for kind in of]
    assert values(aro_metrics.score_kinds(attributes, output))["mean over kinds"] == 0.5
    few, of = sheet("attribution", {"tall_red": 24})
    assert values(aro_metrics.score_kinds(few, ["A"] * 24)) == {"accuracy": 1}  # no kind is left for the mean
    assert (
        len(aro_metrics.SYMMETRIC_RELATIONS) == 157
        and {"next to", "adjusting", "around"} <= aro_metrics.SYMMETRIC_RELATIONS
    )


def test_wilson_interval_only_for_binary_items():
    """A CIDEr of 1 is not graded as correct: CIDEr goes to 10."""
    right = score_mean("accuracy", [1.0, 0.0, 1.0], [1, 2, 3], binary=True)
    assert right.interval == Proportion(2, 3).interval
    found = score_mean("CIDEr", [1.0, 0.0, 1.0], [1, 2, 3], max_value=10.0)
    nearly = score_mean("CIDEr", [1.0, 0.0, 1.0 + 1e-9], [1, 2, 3], max_value=10.0)
    assert found.interval == pytest.approx(nearly.interval, abs=1e-6)


def test_binary_scores_have_wilson_intervals():
    samples = [Sample(id=str(n), answers=("no",)) for n in range(5)]
    score = get_benchmark("gqa").score(samples, ["no", "no", "no", "no", "yes"])[0]
    assert score.interval == Proportion(4, 5).interval
