"""Published benchmarks from tiny files in their own formats: what is asked, and what answers score."""

import json

import pytest

from data.formats.conftest import MAKERS, png, tsv, write
from vitrail.data.formats import Sample
from vitrail.errors import ConfigError, DataError
from vitrail.evals.metrics.chair import Things
from vitrail.evals.metrics.moments import write_span
from vitrail.evals.shares import Share
from vitrail.evals.suites.answered import answers
from vitrail.evals.suites.benchmarks import BENCHMARKS, benchmark
from vitrail.evals.suites.scored import aro
from vitrail.evals.suites.sheets import Sheet, mean


@pytest.fixture
def opened(tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.evals.suites.scored.moments._filmed", lambda video: 60.0)  # the files are no videos

    def read(name, **options):
        row = benchmark(name)
        if row.format not in MAKERS:
            pytest.skip("of parquet alone: see those of the hubs")
        made = MAKERS[row.format][1](tmp_path)
        if name == "chair":
            options["instances"] = MAKERS["coco-instances"][1](tmp_path).path
        return row, row.read(made.path, **made.options, **options)

    return read


def values(scores):
    return {score.title: score.value for score in scores}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_right_answers_are_right_and_wrong_ones_wrong(opened, name):
    row, samples = opened(name)
    # POPE's own reading takes whatever denies nothing for a yes.
    options = {"chair": {"synonyms": Things([["card"], ["dog"], ["person"]])}, "pope": {"mode": "vlmevalkit"}}
    how = options.get(name, {})
    if name == "gqa":
        samples = samples.only([0])  # the other's answer is not known
    if name == "refcoco":
        boxes = [[1000 * x / side for x, side in zip(s.instances[0].box, (8, 6, 8, 6), strict=True)] for s in samples]
        right = [json.dumps({"bbox_2d": box}) for box in boxes]
    else:
        spans = [[write_span(moment) for moment in sample.moments] for sample in samples]
        right = [(one.answers or one.captions or at)[0] for one, at in zip(samples, spans, strict=True)]
    best, worst = row.score(samples, right, **how), row.score(samples, ["zzz"] * len(samples), blind=right, **how)
    first = "CIDEr" if name == "captions" else best[0].title
    assert values(best)[first] > values(worst)[first] or name == "chair"
    if name == "chair":
        assert values(best) == values(worst) == {"CHAIR_i": 0, "CHAIR_s": 0}
        wrong = row.score(samples, ["a dog and a card", "a dog"], **how)
        assert values(wrong) == {"CHAIR_i": 1 / 3, "CHAIR_s": 1 / 2}  # no dog is in the second
    elif name not in ("captions", "mme"):
        assert values(best)[first] == 1 and values(worst)[first] == 0
    found = {score.title: score.beside.get("blind") for score in worst}
    assert found[first] == values(best)[first]  # blind answers stand beside, scored alike
    assert all(score.interval[0] <= score.value <= score.interval[1] for score in best + worst)
    assert all(row.question(sample) for sample in samples)


def test_what_is_asked(opened):
    row, samples = opened("mmbench")
    text = "A hint\nWhich colour?\nA. teal\nB. red\nAnswer with the option's letter from the given choices directly."
    assert row.question(samples[0]) == text
    assert row.question(samples[0], "{question} ({choices})") == "Which colour? (A. teal\nB. red)"
    with pytest.raises(ConfigError, match=r"it may use \{question\}"):
        row.question(samples[0], "{quest}")
    with pytest.raises(ConfigError, match="cannot be filled in"):
        row.question(samples[0], "{question[x]}")
    row, samples = opened("refcoco")
    assert row.question(samples[0]).startswith('Locate "left card"') and '{"bbox_2d"' in row.question(samples[0])


def test_circular(opened):
    row, samples = opened("mmbench", circular=True)
    assert [(s.id, s.answers[0]) for s in samples] == [
        ("241", "A"), ("241+1", "B"), ("252", "D"), ("252+1", "A"), ("252+2", "B"), ("252+3", "C"),
    ]  # fmt: skip
    assert [s.choices[s.answers[0]] for s in samples] == ["teal"] * 2 + ["both"] * 4
    right = [s.answers[0] for s in samples]
    found = row.score(samples, [*right[:5], "A"])  # one of six orders wrong: one of two questions
    assert values(found)["circular accuracy"] == 0.5 and values(found)["accuracy"] == pytest.approx(5 / 6)
    assert found[0].beside["chance"] == pytest.approx((1 / 2**2 + 1 / 4**4) / 2)
    constant = row.score(samples, ["A"] * 6)
    assert values(constant)["circular accuracy"] == 0 and values(constant)["accuracy"] == pytest.approx(2 / 6)
    assert values(row.score(samples, ["who knows"] * 6))["no option"] == 1


@pytest.mark.parametrize(("name", "left"), [("mmbench", (2, 4)), ("winoground", (4,)), ("mme", (2,)), ("vqav2", (1,))])
def test_a_limit_keeps_what_is_scored_together(opened, name, left):
    _, samples = opened(name, limit=1, **({"circular": True} if name == "mmbench" else {}))
    assert len(samples) in left
    assert len({sample.notes.get("circle") for sample in samples}) == 1
    with pytest.raises(ConfigError, match="a limit of 0"):
        opened(name, limit=0)


def test_orders_in_the_file(tmp_path):
    """MMBench's own files hold a question's orders 1,000,000 apart; another question of such a number is another."""
    import base64

    picture = base64.b64encode(png()).decode()
    rows = [
        ["index", "question", "A", "B", "answer", "image"],
        ["7", "Which?", "x", "y", "A", picture],
        ["1000007", "Which?", "y", "x", "B", picture],
        ["2000007", "What else?", "y", "x", "B", picture],
    ]
    row = benchmark("mmbench")
    samples = row.read(write(tmp_path / "m.tsv", tsv(rows)))
    found = row.score(samples, ["A", "A", "B"])
    assert found[0].name == "circular accuracy" and (found[0].value, found[0].of) == (0.5, 2)


def test_pope_modes(opened):
    row, samples = opened("pope")
    said = ["Yes, there is.", "no"] * 3
    found = {mode: values(row.score(samples, said, mode=mode)) for mode in ("pope", "lmms-eval", "vlmevalkit")}
    assert found["pope"]["accuracy, split popular"] == found["vlmevalkit"]["F1, split random"] == 1
    assert found["lmms-eval"]["accuracy"] == 0.5 and found["lmms-eval"]["F1"] == 0  # and the splits are one
    guessed = row.score(samples, said)[0].beside["always yes"]
    assert guessed == 0.5
    with pytest.raises(ConfigError, match="did you mean 'lmms-eval'"):
        row.score(samples, said, mode="lmmseval")
    with pytest.raises(ConfigError, match="pope has no option 'boxes'"):
        row.score(samples, said, boxes="llava")


def test_mme(opened):
    row, samples = opened("mme")
    assert [s.id for s in samples] == ["OCR/02/0", "OCR/02/1", "count/01/0", "count/01/1"]
    found = row.score(samples, ["Yes, it is", "No.", "yes", "yes"])
    told = values(found)
    assert told["acc, category count"] == 0.5 and told["acc+, category count"] == 0 and told["acc, category OCR"] == 1
    assert told["perception"] == 250 and found[0].points and "cognition" not in told
    assert str(found[0]).startswith("250.0 [") and found[0].plain["points"]


def test_hallusion(opened):
    row, samples = opened("hallusionbench")
    told = values(row.score(samples, ["yes", "yes", "yes"]))
    assert told == pytest.approx({"aAcc": 2 / 3, "fAcc": 1 / 2, "qAcc": 1 / 2})  # the figure that is none is left out


def test_winoground(opened):
    row, samples = opened("winoground")
    assert [len(s.pictures) for s in samples] == [1, 1, 2, 2]
    assert values(row.score(samples, ["A", "B", "A", "A"])) == {"text": 1, "image": 0, "group": 0}
    assert row.score(samples, ["A"] * 4)[2].beside == {"chance": 1 / 16, "majority": 0}


def test_one_picture_leaves_everything_open(opened):
    row, samples = opened("pope")
    assert row.score(samples, ["yes"] * 6)[0].interval == (0, 1)
    row, samples = opened("mme")
    assert row.score(samples.only([0, 1]), ["yes", "no"])[0].interval == (0, 200)


def test_compare(opened):
    row, samples = opened("vqav2")
    found = row.compare(samples, ["card"] * 3, ["card", "dog", "dog"])
    assert found.difference == pytest.approx(2 / 3) and found.only == (2, 0)
    with pytest.raises(ConfigError, match="no value for every sample"):
        opened("chair")[0].compare(samples, [], [])


def test_thoughts_are_no_answers_in_any_of_them(opened):
    row, samples = opened("mmbench")
    right = [sample.answers[0] for sample in samples]
    aloud = [f"<think>C, or A? <answer>B</answer></think>{answer}" for answer in right]
    wrong = ["<think>A</think>"] * len(right)
    scores = row.score(samples, aloud, blind=aloud)
    assert values(scores)["accuracy"] == scores[0].beside["blind"] == 1 and values(scores)["no option"] == 0
    assert values(row.score(samples, wrong))["no option"] == 1
    assert row.compare(samples, aloud, wrong).difference == 1
    assert {told for told, _ in row.verdicts(samples, aloud)} == {"right"}
    assert {told for told, _ in row.verdicts(samples, wrong)} == {"unread"}


def test_captions_are_compared_as_they_are_scored(opened):
    row, samples = opened("captions")
    first, second = [sample.captions[0] for sample in samples], ["nothing of the kind"] * len(samples)
    found = row.compare(samples, first, second, tokenizer="plain", meteor=True)  # METEOR has no value of each
    assert found.difference > 0
    with pytest.raises(ConfigError, match="are not cut by"):
        row.compare(samples, first, second, tokenizer="scissors")


def test_what_does_not_fit_is_said(opened):
    row, samples = opened("gqa")
    with pytest.raises(DataError, match="the answer to '07333408' is not known"):
        row.score(samples, ["no", "no"])
    with pytest.raises(DataError, match="1 answers to 2 samples"):
        opened("docvqa")[0].score([samples[0]] * 2, ["no"])
    with pytest.raises(ConfigError, match="did you mean 'vqav2'"):
        benchmark("vqa2")
    with pytest.raises(ConfigError, match="cannot be scored without synonyms"):
        opened("chair")[0].check({})
    with pytest.raises(ConfigError, match="no multiple choice"):
        opened("pope", circular=True)


class Toy:
    """Answers with how many pictures it saw."""

    def __init__(self):
        self.asked = []

    def ask(self, pictures, question, **how):
        self.asked.append(question)
        return f"{len(pictures) if isinstance(pictures, list | tuple) else 1} pictures"


def test_answers_are_kept(opened, tmp_path):
    row, samples = opened("winoground")
    keep, toy = tmp_path / "kept" / "answers.jsonl", Toy()
    how = {"keep": keep, "model": "toy"}
    said = answers(toy, samples.only([0, 2]), row.question, **how)
    assert said == ["1 pictures", "2 pictures"]
    again = answers(toy, samples, row.question, **how)
    assert again == ["1 pictures", "1 pictures", "2 pictures", "2 pictures"] and len(toy.asked) == 4
    assert answers(toy, samples, row.question, blind=True, nothing=[], **how) == ["0 pictures"] * 4
    assert answers(toy, samples, row.question, keep=keep, model="other")[0] == "1 pictures" and len(toy.asked) == 12
    assert answers(toy, samples, row.question, max_new=3, **how)[0] == "1 pictures" and len(toy.asked) == 16
    assert len(keep.read_text().splitlines()) == 16

    class Each(Toy):
        def ask(self, pictures, question, **how):
            return ["one", "each"]

    with pytest.raises(ConfigError, match="0/image/0 shows 2 pictures"):
        answers(Each(), samples.only([2]), row.question)


def test_answers_about_other_pictures_are_others(tmp_path):
    """Two data sets number their samples alike and ask the same."""
    keep, toy = tmp_path / "answers.jsonl", Toy()
    for folder in ("one", "other"):
        sample = Sample(id="1", pictures=(tmp_path / folder / "a.png",))
        answers(toy, [sample], lambda _: "What is it?", keep=keep, model="toy")
    assert len(toy.asked) == 2
    for picture in (b"one", b"other", b"one"):
        answers(toy, [Sample(id="1", pictures=(picture,))], lambda _: "What is it?", keep=keep, model="toy")
    assert len(toy.asked) == 4
    for _ in range(2):  # without a picture it is one question
        answers(toy, [sample], lambda _: "What is it?", blind=True, keep=keep, model="toy")
    assert len(toy.asked) == 5


@pytest.mark.parametrize("cut", [1, 5, 60])
def test_a_line_that_was_cut_is_asked_again(tmp_path, cut):
    keep, toy = tmp_path / "answers.jsonl", Toy()
    samples = [Sample(id=str(n)) for n in range(3)]
    how = {"question": lambda sample: f"What is {sample.id}?", "keep": keep, "model": "toy"}
    said, whole = answers(toy, samples, **how), keep.read_bytes()
    keep.write_bytes(whole[:-cut])
    assert answers(toy, samples, **how) == said and len(toy.asked) == 4
    assert keep.read_bytes() == whole


def test_a_file_of_something_else_is_left_alone(tmp_path):
    keep = tmp_path / "data.json"
    for text in ('{"question_id": 1}', '{"question_id": 1}\n', '[{"question_id": 1}]'):
        keep.write_text(text)
        with pytest.raises(DataError, match=r"data\.json"):
            answers(Toy(), [Sample(id="1")], lambda _: "?", keep=keep)
        assert keep.read_text() == text


def test_aro_leaves_out_what_the_original_does():
    """Relations that hold both ways round, and pairs of attributes of which there are fewer than 25."""

    def sheet(part, counts):
        of = [kind for kind, count in counts.items() for _ in range(count)]
        notes = ({"part": part, "kind": kind} for kind in of)
        made = [
            Sample(id=str(n), choices={"A": "x", "B": "y"}, answers=("A",), notes=note) for n, note in enumerate(notes)
        ]
        return Sheet.of(made), of

    relations, of = sheet("relation", {"on": 2, "near": 30, "holding": 4})
    said = ["A" if kind == "on" else "B" for kind in of]
    assert values(aro.kinds(relations, said)) == {"accuracy": pytest.approx(2 / 36), "mean over kinds": 0.5}
    attributes, of = sheet("attribution", {"white_open": 25, "near_far": 25, "tall_red": 24})
    said = ["A" if kind == "white_open" else "B" for kind in of]
    assert values(aro.kinds(attributes, said))["mean over kinds"] == 0.5
    few, of = sheet("attribution", {"tall_red": 24})
    assert values(aro.kinds(few, ["A"] * 24)) == {"accuracy": 1}  # no kind is left to take a mean of
    assert len(aro.SYMMETRIC) == 157 and {"next to", "adjusting", "around"} <= aro.SYMMETRIC


def test_an_interval_of_shares_only_where_items_are_right_or_wrong():
    """Captions whose CIDEr happens to be 1 are not right: it goes to 10."""
    right = mean("accuracy", [1.0, 0.0, 1.0], [1, 2, 3], binary=True)
    assert right.interval == Share(2, 3).interval
    found = mean("CIDEr", [1.0, 0.0, 1.0], [1, 2, 3], most=10.0)
    nearly = mean("CIDEr", [1.0, 0.0, 1.0 + 1e-9], [1, 2, 3], most=10.0)
    assert found.interval == pytest.approx(nearly.interval, abs=1e-6)


def test_right_or_wrong_has_wilsons_interval():
    samples = [Sample(id=str(n), answers=("no",)) for n in range(5)]
    score = benchmark("gqa").score(samples, ["no", "no", "no", "no", "yes"])[0]
    assert score.interval == Share(4, 5).interval
