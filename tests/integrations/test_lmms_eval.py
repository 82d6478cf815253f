"""lmms-eval adapter: answers and losses match the pipeline, in request order."""

import importlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from vitrail.errors import ConfigError, TextError
from vitrail.generate import vlm_generation
from vitrail.generate.sampling import GREEDY, SamplingConfig

GREEDILY = {"max_new_tokens": 6, "temperature": 0, "do_sample": False, "until": ["\n\n"]}


@pytest.fixture
def make(adapter, chat_pipeline, pictures):
    """Build an adapter and requests from rows of (context, second argument, image indices)."""

    def made(rows, kind="generate_until", **options):
        module = adapter("lmms_eval", "lmms_eval")
        instance = importlib.import_module("lmms_eval.api.instance").Instance
        model = module.VitrailModel(chat_pipeline, **options)
        model.task_dict = {"task": {"test": [[Image.open(pictures[n]) for n in shown] for *_, shown in rows]}}
        about = {"task": "task", "doc_id": 0, "repeats": 1}
        return model, [
            instance(kind, (context, second, lambda doc: doc, n, "task", "test"), 0, about)
            for n, (context, second, _) in enumerate(rows)
        ]

    return made


def test_requests_become_messages(make, chat_pipeline, pictures, heard):
    rows = [
        ("what is this?", {**GREEDILY, "max_new_tokens": 9}, [0]),
        ("is <image> larger than <image>?", GREEDILY, [1, 2]),
        ("how many?", {"do_sample": True, "temperature": 0.5, "seed": 10}, []),
        ("what are these?", {}, [0, 1]),
    ]
    model, requests = make(rows, top_k=5, max_new_tokens=40)
    assert model.generate_until(requests) == [f"answer {n}" for n in (1, 2, 3, 4)]
    (first, how), (second, _), (third, drawn), (fourth, usual) = heard
    assert how == {"max_new_tokens": 9, "sampling": GREEDY, "stop_strings": ("\n\n",)}
    assert [part["type"] for part in first[0]["content"]] == ["image", "text"]
    assert [part.get("text", "image") for part in second[0]["content"]] == [
        "is ",
        "image",
        " larger than ",
        "image",
        "?",
    ]
    assert third == [{"role": "user", "content": [{"type": "text", "text": "how many?"}]}]
    assert drawn == {
        "max_new_tokens": 40,
        "sampling": SamplingConfig(temperature=0.5, top_k=5, seed=12),
    }  # the third's own seed
    assert [part["type"] for part in fourth[0]["content"]] == ["image", "image", "text"] and usual[
        "max_new_tokens"
    ] == 40


def test_answers_match_model(make, chat_pipeline, pictures):
    """Opened images and image files give the same answers."""
    model, requests = make([("what is this?", GREEDILY, [0, 1]), ("how many balls?", GREEDILY, [])])
    stop = {"max_new_tokens": 6, "stop_strings": ["\n\n"]}
    wanted = [
        chat_pipeline.ask(pictures[:2], "what is this?", **stop),
        chat_pipeline.ask([], "how many balls?", **stop),
    ]
    assert model.generate_until(requests) == wanted


ROW = st.tuples(
    st.sampled_from(["what is this?", "how many balls are there?", "and behind it?"]),
    st.sampled_from(
        [GREEDILY, {**GREEDILY, "max_new_tokens": 3}, {"max_new_tokens": 4, "temperature": 2.0, "seed": 5}]
    ),
    st.lists(st.integers(0, 2), max_size=2),
)


@given(st.lists(ROW, min_size=1, max_size=7), st.integers(2, 4))
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_batched_answers_match_single_answers(make, rows, batch):
    """Any batch composition gives each request its own answer."""
    (alone, requests), (together, again) = make(rows), make(rows, batch_size=batch)
    assert together.generate_until(again) == alone.generate_until(requests)


def test_losses_match_transformers(make, theirs, chat_pipeline, pictures):
    """Mean of −log p over the answer and its end token."""
    model, options = theirs[0], ["a red cube", "a ball", "how many balls are there?"]
    ours, requests = make([("what is this?", f" {option}", [0, 1]) for option in options], "loglikelihood")
    stream, shown, _ = chat_pipeline.build_prompt([chat_pipeline.build_message(pictures[:2], "what is this?")])
    wanted = []
    for option in options:
        more = [*chat_pipeline.tokenizer.encode(f" {option}"), chat_pipeline.tokenizer.eos_token_id]
        labels = torch.tensor([[-100] * len(stream) + more])
        ids = torch.cat([stream.ids, torch.tensor(more)])[None]
        with torch.no_grad():
            wanted.append(float(model(input_ids=ids, pixel_values=shown.pixels, labels=labels).loss))
    found = ours.loglikelihood(requests)
    assert [loss for loss, _ in found] == pytest.approx(wanted, rel=1e-4)
    assert not any(greedy for _, greedy in found)


def test_greedy_answer_is_recognized(make, chat_pipeline, pictures, monkeypatch):
    stream, shown, _ = chat_pipeline.build_prompt([chat_pipeline.build_message(pictures[0], "what is this?")])
    (written,) = vlm_generation.generate_from_streams(
        chat_pipeline.model, [stream], shown, max_new_tokens=3, sampling=GREEDY, tokenizer=chat_pipeline.tokenizer
    )
    other = [*written.ids[:-1], written.ids[-1] ^ 1]
    for ids, output in ((list(written.ids), True), (other, False)):
        monkeypatch.setattr(chat_pipeline, "_encode_answer", lambda turn, text, ids=ids: ids)
        ours, requests = make([("what is this?", "these tokens", [0])], "loglikelihood")
        ((loss, greedy),) = ours.loglikelihood(requests)
        assert greedy == output and loss > 0


def test_invalid_inputs_raise(make, monkeypatch):
    model, requests = make([("is <image> larger than <image>?", GREEDILY, [1])])
    with pytest.raises(TextError, match="2 placeholders"):
        model.generate_until(requests)
    with pytest.raises(ConfigError, match="multi-round"):
        model.generate_until_multi_round(requests)
    model, requests = make([("what?", "a", [])], "loglikelihood")
    requests[0].arguments = ("", "a")
    with pytest.raises(ConfigError, match="acc_mutual_info"):
        model.loglikelihood(requests)
    with pytest.raises(ConfigError, match="batch_size is 'auto'"):
        make([], batch_size="auto")
    with pytest.raises(ConfigError, match="did you mean 'temperature'"):
        make([], temprature=1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        make([])


def test_model_is_registered(adapter):
    module = adapter("lmms_eval", "lmms_eval")
    assert importlib.import_module("lmms_eval.api.registry").MODEL_REGISTRY["vitrail"] is module.VitrailModel
    found = module.build_manifest()
    assert (found.model_id, found.simple_class_path) == ("vitrail", "vitrail.integrations.lmms_eval.VitrailModel")
    path, _, name = found.simple_class_path.rpartition(".")
    assert getattr(importlib.import_module(path), name) is module.VitrailModel and module.VitrailModel.is_simple
