"""What a tour shows of reading: pictures whose truth is known, the user's own, and a drawing of the model's."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from vitrail.data.examples import examples
from vitrail.data.words import ask
from vitrail.evals.judge import Judge
from vitrail.evals.suites.talking import plain
from vitrail.processing.images import load_image
from vitrail.show.measured import Measured
from vitrail.show.page import Section, code_colours, figure, heading, marked, mosaic, row, table
from vitrail.show.strip import AMPLIFIED, decibel, difference
from vitrail.studio import Studio
from vitrail.tour.judge import Drawn, named
from vitrail.tour.step import Step

UNKNOWN = ("What is this?", "Is there a person in the picture?", "How many things are there?")
"""Asked of pictures whose truth is not known."""
OWN = ("existence_random", "counting", "colour", "position")
"""Kinds of questions about its own drawing."""
SHOWS = "What does it show?"


class Shown(NamedTuple):
    """A picture to be read, and questions: their kind, their words, their answer. What is not known is None."""

    name: str
    picture: Image.Image
    caption: str | None
    questions: list[tuple[str | None, str, str | None]]


def shown(images: Sequence[str | Path]) -> list[Shown]:
    """The user's pictures and the example scenes, all of them opened."""
    own = [Shown(Path(name).name, load_image(name), None, [(None, q, None) for q in UNKNOWN]) for name in images]
    return own + [
        Shown(e.name, load_image(e.file), e.caption, [(q["kind"], q["question"], q["answer"]) for q in e.questions])
        for e in examples()
    ]


def scenes(pictures: Sequence[Shown]) -> Section:
    """Pictures and their truth, where there is no model to read them."""
    body: list[str] = []
    for one in pictures:
        body += [heading(one.name), row(figure(one.picture, one.caption or "", one.caption or one.name))]
        if one.caption is not None:
            body.append(table(("question", "truth"), [(q, a or "") for _, q, a in one.questions]))
    return Section("Scenes", body)


def read(studio: Studio, pictures: Sequence[Shown], step: Step, measured: Measured | None) -> Section:
    body: list[str] = []
    hits = known = 0
    for one in pictures:
        progress = step(f"reading {one.name}")
        ids, seen = studio.tokenize(one.picture), studio.seen(one.picture)
        again = studio.detokenize(ids)[0]
        questions = [question for _, question, _ in one.questions]
        answers, caption = studio.ask(one.picture, questions, max_new=24), studio.caption(one.picture, max_new=48)
        said, where = studio.looked(one.picture, questions[0], progress=progress)
        rows = [(SHOWS, caption, one.caption or "not known", "")]
        for (kind, question, truth), given in zip(one.questions, answers, strict=True):
            right = truth is not None and plain(given) == plain(truth)
            hits, known = hits + right, known + (truth is not None)
            share = "" if measured is None or kind is None else measured.share("questions", kind)
            rows.append((question, given if truth is None else marked(right, given), truth or "not known", share))
        head, wide = ("question", "the model", "truth", "right, of many"), 3 if measured is None else 4
        colours, alt = code_colours(studio.model.codec.quantizer, ids[0]), one.caption or one.name
        body += [
            heading(one.name),
            row(
                figure(seen, "the picture, as the model is shown it", alt),
                mosaic(ids[0].cpu(), colours, f"its {ids.numel()} codes"),
                figure(again, f"made again from its codes, {decibel(seen, again):.1f} dB", f"Made again: {alt}"),
                figure(difference(seen, again), "what was lost", "The difference of the two"),
                figure(where, f"where it looked: “{questions[0]}” {said}", "The picture, bright where it looked"),
            ),
            table(head[:wide], [cells[:wide] for cells in rows]),
        ]
    found = None if measured is None else measured.first("questions")
    beside = (
        []
        if found is None
        else [f"The last column is the share of many such questions that it answers right: “{found.title}”, below."]
    )
    return Section(
        "It reads",
        [
            f"{hits} of {known} answers are right, word for word. Captions are not counted: others can be right too.",
            *beside,
            "A cell is a code: near colours are near codes, and pointing at one shows its number. What was lost is "
            f"shown {AMPLIFIED} times as large; grey is nothing. It looked where the picture is bright: covering that "
            "costs the answer most.",
            *body,
        ],
    )


def own(studio: Studio, judge: Judge, one: Drawn, seed: int, step: Step) -> Section:
    step("reading its own drawing")
    words = judge.words.pieces.read
    few = {name: getattr(one.seen, name)[:, : judge.words.objects] for name in ("sprite", "colour", "box", "inside")}
    said = [ask(judge.words, replace(one.seen, **few), seed, kind) for kind in OWN]  # the surest, if it saw very many
    asked = [(words(each.question)[0], words(each.answer)[0]) for each in said if bool(each.valid[0])]
    answers = studio.ask(one.picture, [question for question, _ in asked], max_new=24) if asked else []
    rows = [
        (question, marked(plain(given) == plain(truth), given), truth)
        for (question, truth), given in zip(asked, answers, strict=True)
    ]
    caption = studio.caption(one.picture, max_new=48)
    return Section(
        "It looks at its own drawing",
        [
            "The same drawing. The judge is asked, too: a tick is where the two agree, word for word, and no more.",
            row(figure(one.picture, one.prompt, f"The drawing that is asked about: {one.prompt}")),
            table(("question", "the model", "the judge"), [(SHOWS, caption, named(judge, one.seen)), *rows]),
        ],
    )
