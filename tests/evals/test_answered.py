"""Samples asked side by side: the same answers in the same order, kept as they come."""

import numpy as np
import pytest
import torch
from PIL import Image

from generate.test_answers import TEXTS, unified
from vitrail.data.formats import Sample
from vitrail.errors import ConfigError, ImageError
from vitrail.evals.suites.answered import answers
from vitrail.processing.text import Tokenizer
from vitrail.studio import Studio


class Toy:
    """Says its question in capitals; `sizes` are those of the calls."""

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
    """Every third shows nothing."""
    shown = [(b"a picture",) if n % 3 else () for n in range(count)]
    return [Sample(id=f"{n}{' alone' if n == alone else ''}", pictures=own) for n, own in enumerate(shown)]


def ask(toy, some, **how):
    return answers(toy, some, lambda sample: f"what is {sample.id}?", together=toy.together, **how)


def test_the_order_is_that_of_the_samples():
    toy = Toy()
    assert ask(toy, samples(10), batch=4) == [f"WHAT IS {n}?" for n in range(10)]
    assert toy.sizes == [4, 4, 2]  # those that look and those that do not, apart
    with pytest.raises(ConfigError, match="0 questions at a time"):
        ask(toy, samples(2), batch=0)


def test_what_cannot_be_asked_side_by_side_is_asked_alone():
    toy = Toy()
    assert ask(toy, samples(8, alone=4), batch=3)[4] == "WHAT IS 4 ALONE?"
    assert toy.sizes == [3, 1, 1, 1, 3, 2]


def test_a_run_that_broke_off_goes_on(tmp_path):
    keep = tmp_path / "answers.jsonl"
    with pytest.raises(KeyboardInterrupt):
        ask(Toy(fails="8"), samples(10), batch=3, keep=keep)
    assert len(keep.read_text().splitlines()) == 6  # two whole batches
    toy = Toy()
    assert ask(toy, samples(10), batch=3, keep=keep) == [f"WHAT IS {n}?" for n in range(10)]
    assert sum(toy.sizes) == 4 and len(keep.read_text().splitlines()) == 10
    assert ask(toy, samples(10), batch=10, keep=keep) and sum(toy.sizes) == 4


def test_too_many_at_once():
    def together(*_, **__):
        raise torch.OutOfMemoryError

    with pytest.raises(ConfigError, match="2 questions at once"):
        answers(Toy(), samples(3), lambda sample: sample.id, together=together, batch=2)


def test_a_unified_model_says_what_it_says_alone(tmp_path):
    """Questions of unequal lengths: the padding changes nothing."""
    studio = Studio(unified(), Tokenizer.train(TEXTS * 3, 300))
    some = []
    for n, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (4, 30, 40, 3), dtype=np.uint8)):
        Image.fromarray(pixels).save(tmp_path / f"{n}.png")
        some.append(Sample(id=str(n), pictures=(tmp_path / f"{n}.png",)))

    def question(sample: Sample) -> str:
        return TEXTS[int(sample.id)]

    single = answers(studio, some, question, max_new=8)
    assert len(set(single)) > 1
    assert answers(studio, some, question, together=studio.ask, batch=3, max_new=8) == single
    both = [Sample(id="both", pictures=(*some[0].pictures, *some[1].pictures)), some[2]]
    with pytest.raises(ConfigError, match="both shows 2 pictures"):
        answers(studio, both, lambda _: TEXTS[0], together=studio.ask, batch=2, max_new=8)
