"""Batched answer generation: order of answers, batching, and saved answers files."""

import numpy as np
import pytest
import torch
from PIL import Image

from generate.test_unified_generation import TEXTS, unified
from vitrail.data.formats import Sample
from vitrail.errors import ConfigError, ImageError
from vitrail.evals.suites.generation import generate_answers
from vitrail.pipelines.unified import UnifiedPipeline
from vitrail.processing.tokenizer import Tokenizer


class Toy:
    """Answers with the question in capitals; `sizes` records the batch sizes."""

    def __init__(self, fails: str = ""):
        self.sizes, self.fails = [], fails

    def ask(self, shown, question, **how):
        self.sizes.append(1)
        if self.fails and self.fails in question:
            raise KeyboardInterrupt
        return question.upper()

    def together(self, shown, questions, **how):
        self.sizes.append(len(questions))
        if any(self.fails and self.fails in question for question in questions):
            raise KeyboardInterrupt
        if any("alone" in question for question in questions):
            raise ImageError("not side by side", "ask it by itself")
        return [question.upper() for question in questions]


def samples(count: int, alone: int = -1) -> list[Sample]:
    """Samples of which every third has no image."""
    shown = [(b"a picture",) if n % 3 else () for n in range(count)]
    return [Sample(id=f"{n}{' alone' if n == alone else ''}", images=own) for n, own in enumerate(shown)]


def ask(toy, some, **how):
    return generate_answers(toy, some, lambda sample: f"what is {sample.id}?", answer_batch=toy.together, **how)


def test_answers_follow_the_order_of_samples():
    toy = Toy()
    assert ask(toy, samples(10), batch_size=4) == [f"WHAT IS {n}?" for n in range(10)]
    assert toy.sizes == [4, 4, 2]  # separate batches with and without images
    with pytest.raises(ConfigError, match="batch size 0"):
        ask(toy, samples(2), batch_size=0)


def test_failed_batches_are_asked_one_by_one():
    toy = Toy()
    assert ask(toy, samples(8, alone=4), batch_size=3)[4] == "WHAT IS 4 ALONE?"
    assert toy.sizes == [3, 1, 1, 1, 3, 2]


def test_interrupted_runs_resume(tmp_path):
    keep = tmp_path / "answers.jsonl"
    with pytest.raises(KeyboardInterrupt):
        ask(Toy(fails="8"), samples(10), batch_size=3, answers_file=keep)
    assert len(keep.read_text().splitlines()) == 6  # two full batches
    toy = Toy()
    assert ask(toy, samples(10), batch_size=3, answers_file=keep) == [f"WHAT IS {n}?" for n in range(10)]
    assert sum(toy.sizes) == 4 and len(keep.read_text().splitlines()) == 10
    assert ask(toy, samples(10), batch_size=10, answers_file=keep) and sum(toy.sizes) == 4


def test_out_of_memory_suggests_a_smaller_batch():
    def together(*_, **__):
        raise torch.OutOfMemoryError

    with pytest.raises(ConfigError, match="a batch of 2 questions"):
        generate_answers(Toy(), samples(3), lambda sample: sample.id, answer_batch=together, batch_size=2)


def test_batched_answers_match_single_answers(tmp_path):
    """Padding of questions of different lengths does not change answers."""
    unified_pipeline = UnifiedPipeline(unified(), Tokenizer.train(TEXTS * 3, 300))
    some = []
    for n, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (4, 30, 40, 3), dtype=np.uint8)):
        Image.fromarray(pixels).save(tmp_path / f"{n}.png")
        some.append(Sample(id=str(n), images=(tmp_path / f"{n}.png",)))

    def question(sample: Sample) -> str:
        return TEXTS[int(sample.id)]

    single = generate_answers(unified_pipeline, some, question, max_new_tokens=8)
    assert len(set(single)) > 1
    assert (
        generate_answers(
            unified_pipeline, some, question, answer_batch=unified_pipeline.ask, batch_size=3, max_new_tokens=8
        )
        == single
    )
    both = [Sample(id="both", images=(*some[0].images, *some[1].images)), some[2]]
    with pytest.raises(ConfigError, match="both has 2 images"):
        generate_answers(
            unified_pipeline,
            both,
            lambda _: TEXTS[0],
            answer_batch=unified_pipeline.ask,
            batch_size=2,
            max_new_tokens=8,
        )
