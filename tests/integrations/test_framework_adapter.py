"""Conversion of generation options, and errors for missing frameworks."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.errors import ConfigError
from vitrail.generate.sampling import GREEDY, SamplingConfig
from vitrail.integrations.framework_adapter import (
    generate_answer,
    import_framework,
    load_chat_pipeline,
    offset_seed,
    parse_generation_options,
)


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({}, {"sampling": GREEDY}),
        (  # most tasks of lmms-eval
            {"max_new_tokens": 16, "temperature": 0, "top_p": 1.0, "num_beams": 1, "do_sample": False},
            {"sampling": GREEDY, "max_new_tokens": 16},
        ),
        ({"temperature": 0.7}, {"sampling": SamplingConfig(temperature=0.7)}),
        ({"temperature": 0.7, "do_sample": False}, {"sampling": GREEDY}),
        ({"do_sample": True}, {"sampling": SamplingConfig(temperature=1.0)}),
        ({"do_sample": True, "temperature": 0.0}, {"sampling": GREEDY}),
        ({"temperature": 0.2, "top_p": 0}, {"sampling": GREEDY}),  # transformers keeps the likeliest then
        ({"temperature": None, "top_p": None}, {"sampling": GREEDY}),
        (
            {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "seed": 3, "repetition_penalty": 1.1},
            {"sampling": SamplingConfig(temperature=0.5, top_p=0.9, top_k=40, seed=3, repetition_penalty=1.1)},
        ),
        ({"do_sample": True, "top_k": 0}, {"sampling": SamplingConfig()}),
        ({"repetition_penalty": 1.2}, {"sampling": SamplingConfig(temperature=0.0, repetition_penalty=1.2)}),
        ({"until": "\n\n"}, {"sampling": GREEDY, "stop_strings": ("\n\n",)}),
        ({"until": ["a", "b"], "stop": "b"}, {"sampling": GREEDY, "stop_strings": ("a", "b")}),
        ({"until": []}, {"sampling": GREEDY}),
        ({"image_aspect_ratio": "original"}, {"sampling": GREEDY}),
    ],
)
def test_parse_generation_options(options, how):
    assert parse_generation_options(options) == how


@pytest.mark.parametrize(
    ("options", "output"),
    [
        ({"max_new_token": 3}, "did you mean 'max_new_tokens'"),
        ({"num_beams": 4}, "num_beams is 4"),
        ({"until": [""]}, "until is"),
        ({"stop": 3}, "stop is 3"),
        ({"do_sample": True, "top_p": 1.5}, "top_p is 1.5"),
    ],
)
def test_unsupported_options_raise(options, output):
    with pytest.raises(ConfigError, match=output):
        parse_generation_options(options)


@given(st.integers(0, 2**31), st.integers(0, 10_000))
def test_each_answer_has_its_own_seed(seed, number):
    how = {"sampling": SamplingConfig(seed=seed), "max_new_tokens": 3}
    assert offset_seed(how, number) == {"sampling": SamplingConfig(seed=seed + number), "max_new_tokens": 3}
    assert offset_seed({"sampling": GREEDY}, number) == {"sampling": GREEDY}


def test_answer_is_limited_by_context(chat_pipeline, caplog):
    turn = chat_pipeline.build_message([], "how many balls are there?")
    held = len(chat_pipeline.build_prompt([turn]).stream)
    room = chat_pipeline.model.config.decoder.context_length - held
    assert generate_answer(chat_pipeline, [turn], {"max_new_tokens": 100_000}) == chat_pipeline.chat(
        [turn], max_new_tokens=room
    )
    assert f"reduced from 100000 to {room}" in caplog.text
    long = chat_pipeline.build_message([], "what is this? " * 200)
    with pytest.raises(ConfigError, match="a shorter text"):
        generate_answer(chat_pipeline, [long], {"max_new_tokens": 8})


def test_missing_framework_is_named(monkeypatch):
    for name, package, remedy in (
        ("lmms_eval", "lmms_eval", "pip install lmms-eval"),
        ("vlmevalkit", "vlmeval", "pip install git"),
    ):
        for known in [one for one in sys.modules if one.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, known)
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
        monkeypatch.delitem(sys.modules, f"vitrail.integrations.{name}", raising=False)
        with pytest.raises(ConfigError, match=remedy):
            import_framework(f"vitrail.integrations.{name}", "nothing")


def test_only_vlms_are_accepted(chat_pipeline, monkeypatch):
    assert load_chat_pipeline(chat_pipeline, None, None) is chat_pipeline
    monkeypatch.setattr("vitrail.pipelines.loading.is_vlm", lambda _: False)
    with pytest.raises(ConfigError, match="not a vision-language model"):
        load_chat_pipeline("folder", None, None)
