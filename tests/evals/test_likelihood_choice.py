"""Choice by likelihood: multiple choice, ARO and Winoground."""

import pytest

from data.formats.conftest import MAKERS
from vitrail.data.formats import Sample, SampleDataset
from vitrail.errors import ConfigError
from vitrail.evals.suites.benchmarks import CAPTION_PROMPT, _expand_aro, get_benchmark
from vitrail.evals.suites.likelihood_choice import choose_by_likelihood


def opened(name, root, **options):
    row = get_benchmark(name)
    made = MAKERS[row.format][1](root)
    return row, row.load_samples(made.path, **made.options, **options)


def values(scores):
    return {score.title: score.value for score in scores}


def test_multiple_choice_by_likelihood(tmp_path):
    row, samples = opened("mmbench", tmp_path, circular=True)
    asked = []

    def weigh(some):
        asked.extend(some)
        return [[-float(option not in ("teal", "both")) for option in options] for *_, options in some]

    keep = tmp_path / "kept.jsonl"
    output = choose_by_likelihood(weigh, row, samples, batch_size=4, answers_file=keep, model_name="toy")
    assert output == [sample.answers[0] for sample in samples] and values(row.score(samples, output))["accuracy"] == 1
    assert asked[0][1:] == (
        "A hint\nWhich colour?",
        ["teal", "red"],
    )  # the question without options; option texts, not letters
    before = len(asked)
    assert (
        choose_by_likelihood(weigh, row, samples, answers_file=keep, model_name="toy") == output
        and len(asked) == before
    )
    assert (
        choose_by_likelihood(weigh, row, samples, answers_file=keep, model_name="toy", prompt="{question}!") == output
        and len(asked) > before
    )
    equal = choose_by_likelihood(lambda some: [[0.0] * len(options) for *_, options in some], row, samples)
    assert set(equal) == {""} and values(row.score(samples, equal))["no option"] == 1
    with pytest.raises(ConfigError, match="not a multiple-choice"):
        choose_by_likelihood(weigh, get_benchmark("pope"), samples)


def test_aro_by_likelihood():
    """Correct if the true caption is more likely given the image, in any order; a tie is wrong. The mean over kinds
    covers both."""
    chances = {"ab": -3.0, "ba": -4.0, "cd": -2.0, "dc": -1.0, "ee": -5.0, "e e": -5.0}
    pairs = [("ab", "ba"), ("ab", "ba"), ("cd", "dc"), ("dc", "cd"), ("ee", "e e")]
    made = [
        Sample(
            id=str(n),
            images=(b"%d" % n,),
            captions=pair,
            metadata={"part": "relation", "kind": "on" if n < 3 else "under"},
        )
        for n, pair in enumerate(pairs)
    ]
    samples = _expand_aro(SampleDataset("aro", None, made, lambda sample: sample))
    row = get_benchmark("aro")

    def weigh(some):
        assert all(text == CAPTION_PROMPT for _, text, _ in some)
        return [[chances[option] for option in options] for *_, options in some]

    output = choose_by_likelihood(weigh, row, samples, batch_size=2)
    own = [chances[true] > chances[false] for true, false in pairs]
    assert own == [True, True, False, True, False]
    found = values(row.score(samples, output))
    assert found == {"accuracy": 3 / 5, "mean over kinds": pytest.approx((2 / 3 + 1 / 2) / 2)}


def test_winoground_by_likelihood(tmp_path):
    """s(caption, image) of all pairs; text compares captions of an image, image compares images of a caption."""
    row, samples = opened("winoground", tmp_path)
    captions = list(samples[0].choices.values())
    pictures = list(samples[2].images)

    def scored(table):
        def weigh(some):
            return [[table[captions.index(o)][pictures.index(shown)] for o in options] for shown, _, options in some]

        return values(row.score(samples, choose_by_likelihood(weigh, row, samples, batch_size=3)))

    assert scored([[2.0, 0.0], [0.0, 2.0]]) == {"text": 1, "image": 1, "group": 1}
    assert scored([[2.0, 1.0], [3.0, 4.0]]) == {"text": 0, "image": 1, "group": 0}
    assert scored([[2.0, 3.0], [1.0, 4.0]]) == {"text": 1, "image": 0, "group": 0}
    blind = choose_by_likelihood(
        lambda some: [[-1.0 * len(o) for o in options] for *_, options in some], row, samples, blind=True
    )
    assert values(row.score(samples, blind))["image"] == 0  # without images a caption is equally likely for both
