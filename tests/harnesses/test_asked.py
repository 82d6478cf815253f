"""Options of frameworks in the words of `Talker`, and what is said where a framework is missing."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.errors import ConfigError
from vitrail.generate.sampling import GREEDY, Sampling
from vitrail.harnesses.asked import answered, framework, read_options, shifted, talker_of


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({}, {"sampling": GREEDY}),
        (  # most tasks of lmms-eval
            {"max_new_tokens": 16, "temperature": 0, "top_p": 1.0, "num_beams": 1, "do_sample": False},
            {"sampling": GREEDY, "max_new": 16},
        ),
        ({"temperature": 0.7}, {"sampling": Sampling(temperature=0.7)}),
        ({"temperature": 0.7, "do_sample": False}, {"sampling": GREEDY}),
        ({"do_sample": True}, {"sampling": Sampling(temperature=1.0)}),
        ({"do_sample": True, "temperature": 0.0}, {"sampling": GREEDY}),
        ({"temperature": 0.2, "top_p": 0}, {"sampling": GREEDY}),  # transformers keeps the likeliest then
        ({"temperature": None, "top_p": None}, {"sampling": GREEDY}),
        (
            {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "seed": 3, "repetition_penalty": 1.1},
            {"sampling": Sampling(temperature=0.5, top_p=0.9, top_k=40, seed=3, repetition=1.1)},
        ),
        ({"do_sample": True, "top_k": 0}, {"sampling": Sampling()}),
        ({"repetition_penalty": 1.2}, {"sampling": Sampling(temperature=0.0, repetition=1.2)}),
        ({"until": "\n\n"}, {"sampling": GREEDY, "stop_strings": ("\n\n",)}),
        ({"until": ["a", "b"], "stop": "b"}, {"sampling": GREEDY, "stop_strings": ("a", "b")}),
        ({"until": []}, {"sampling": GREEDY}),
        ({"image_aspect_ratio": "original"}, {"sampling": GREEDY}),
    ],
)
def test_options(options, how):
    assert read_options(options) == how


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_new_token": 3}, "did you mean 'max_new_tokens'"),
        ({"num_beams": 4}, "4 beams"),
        ({"until": [""]}, "until is"),
        ({"stop": 3}, "stop is 3"),
        ({"do_sample": True, "top_p": 1.5}, "top_p is 1.5"),
    ],
)
def test_what_cannot_be_done_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        read_options(options)


@given(st.integers(0, 2**31), st.integers(0, 10_000))
def test_every_answer_has_a_seed_of_its_own(seed, number):
    how = {"sampling": Sampling(seed=seed), "max_new": 3}
    assert shifted(how, number) == {"sampling": Sampling(seed=seed + number), "max_new": 3}
    assert shifted({"sampling": GREEDY}, number) == {"sampling": GREEDY}


def test_an_answer_ends_where_the_context_does(talker, caplog):
    turn = talker.turn([], "how many balls are there?")
    held = len(talker.prompt([turn]).stream)
    room = talker.model.config.decoder.context - held
    assert answered(talker, [turn], {"max_new": 100_000}) == talker.chat([turn], max_new=room)
    assert f"room for {room} tokens of the 100000" in caplog.text
    long = talker.turn([], "what is this? " * 200)
    with pytest.raises(ConfigError, match="fewer words"):
        answered(talker, [long], {"max_new": 8})


def test_a_framework_that_is_missing_is_named(monkeypatch):
    for name, package, remedy in (
        ("lmms", "lmms_eval", "pip install lmms-eval"),
        ("vlmevalkit", "vlmeval", "pip install git"),
    ):
        for known in [one for one in sys.modules if one.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, known)
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
        monkeypatch.delitem(sys.modules, f"vitrail.harnesses.{name}", raising=False)
        with pytest.raises(ConfigError, match=remedy):
            framework(f"vitrail.harnesses.{name}", "nothing")


def test_only_what_talks_is_taken(talker, monkeypatch):
    assert talker_of(talker, None, None) is talker
    monkeypatch.setattr("vitrail.studio.talks", lambda _: False)
    with pytest.raises(ConfigError, match="no vision-language model"):
        talker_of("folder", None, None)
