"""Choosing by likelihood: multiple choice, ARO and Winoground by their own rules."""

import pytest

from data.formats.conftest import MAKERS
from vitrail.data.formats import Sample, Samples
from vitrail.errors import ConfigError
from vitrail.evals.suites.benchmarks import CAPTION, _true_or_false, benchmark
from vitrail.evals.suites.likely import likely


def opened(name, root, **options):
    row = benchmark(name)
    made = MAKERS[row.format][1](root)
    return row, row.read(made.path, **made.options, **options)


def values(scores):
    return {score.title: score.value for score in scores}


def test_multiple_choice(tmp_path):
    row, samples = opened("mmbench", tmp_path, circular=True)
    asked = []

    def weigh(some):
        asked.extend(some)
        return [[-float(option not in ("teal", "both")) for option in options] for *_, options in some]

    keep = tmp_path / "kept.jsonl"
    said = likely(weigh, row, samples, batch=4, keep=keep, model="toy")
    assert said == [sample.answers[0] for sample in samples] and values(row.score(samples, said))["accuracy"] == 1
    assert asked[0][1:] == ("A hint\nWhich colour?", ["teal", "red"])  # the question alone, and texts, not letters
    before = len(asked)
    assert likely(weigh, row, samples, keep=keep, model="toy") == said and len(asked) == before
    assert likely(weigh, row, samples, keep=keep, model="toy", prompt="{question}!") == said and len(asked) > before
    equal = likely(lambda some: [[0.0] * len(options) for *_, options in some], row, samples)
    assert set(equal) == {""} and values(row.score(samples, equal))["no option"] == 1
    with pytest.raises(ConfigError, match="no choice"):
        likely(weigh, benchmark("pope"), samples)


def test_aro_by_its_own_rule():
    """Right where the true caption is likelier than the false one given the picture, whichever is asked first; a tie
    goes to the false one. Twice alike, the mean over kinds is of both."""
    chances = {"ab": -3.0, "ba": -4.0, "cd": -2.0, "dc": -1.0, "ee": -5.0, "e e": -5.0}
    pairs = [("ab", "ba"), ("ab", "ba"), ("cd", "dc"), ("dc", "cd"), ("ee", "e e")]
    made = [
        Sample(
            id=str(n),
            pictures=(b"%d" % n,),
            captions=pair,
            notes={"part": "relation", "kind": "on" if n < 3 else "under"},
        )
        for n, pair in enumerate(pairs)
    ]
    samples = _true_or_false(Samples("aro", None, made, lambda sample: sample))
    row = benchmark("aro")

    def weigh(some):
        assert all(text == CAPTION for _, text, _ in some)
        return [[chances[option] for option in options] for *_, options in some]

    said = likely(weigh, row, samples, batch=2)
    own = [chances[true] > chances[false] for true, false in pairs]
    assert own == [True, True, False, True, False]
    found = values(row.score(samples, said))
    assert found == {"accuracy": 3 / 5, "mean over kinds": pytest.approx((2 / 3 + 1 / 2) / 2)}


def test_winoground_by_its_own_rule(tmp_path):
    """s(caption, picture) of both with both; text compares captions of a picture, image pictures of a caption."""
    row, samples = opened("winoground", tmp_path)
    captions = list(samples[0].choices.values())
    pictures = list(samples[2].pictures)

    def scored(table):
        def weigh(some):
            return [[table[captions.index(o)][pictures.index(shown)] for o in options] for shown, _, options in some]

        return values(row.score(samples, likely(weigh, row, samples, batch=3)))

    assert scored([[2.0, 0.0], [0.0, 2.0]]) == {"text": 1, "image": 1, "group": 1}
    assert scored([[2.0, 1.0], [3.0, 4.0]]) == {"text": 0, "image": 1, "group": 0}
    assert scored([[2.0, 3.0], [1.0, 4.0]]) == {"text": 1, "image": 0, "group": 0}
    blind = likely(lambda some: [[-1.0 * len(o) for o in options] for *_, options in some], row, samples, blind=True)
    assert values(row.score(samples, blind))["image"] == 0  # without pictures a caption is as likely under both
