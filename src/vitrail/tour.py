"""A tour of a unified model: pictures read and held against the truth, drawings made and judged, as sections of a page.

B pictures, H, W pixels, h × w codes
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from vitrail import hub
from vitrail.data.examples import examples
from vitrail.data.scenes.plurals import plural
from vitrail.data.scenes.scene import COLOURS, GRID, Scenes, SpriteTable
from vitrail.data.words import Words, ask, matches, prompts
from vitrail.data.words.templates import DRAWINGS
from vitrail.errors import ConfigError
from vitrail.evals.judge import Judge
from vitrail.evals.shares import Score
from vitrail.evals.suites.talking import plain
from vitrail.hub.configs import SHIPPED
from vitrail.hub.files import read_json
from vitrail.processing.images import load_image
from vitrail.show.page import Html, Section, code_colours, figure, heading, html, marked, mosaic, row, table
from vitrail.show.strip import AMPLIFIED, decibel, difference
from vitrail.studio import Studio

UNKNOWN = ("What is this?", "Is there a person in the picture?", "How many things are there?")
"""Asked of pictures whose truth is not known."""
OWN = ("existence_random", "counting", "colour", "position")
"""Kinds of questions about its own drawing."""
SEEDS, SHARE, RIGHT_HALF = 3, 0.5, (0.5, 0.0, 1.0, 1.0)
SHOWS = "What does it show?"

Step = Callable[[str], Callable[[int, int], Any]]
"""What begins now → a function that is told how far it is"""


class Shown(NamedTuple):
    """A picture to be read. What is not known of it is None."""

    name: str
    picture: Image.Image
    caption: str | None
    questions: list[tuple[str, str | None]]


class Drawn(NamedTuple):
    """A drawing, what the judge sees on it, and whether that is what was asked for."""

    prompt: str
    picture: Image.Image
    seen: Scenes
    right: bool


def shown(images: Sequence[str | Path]) -> list[Shown]:
    """The user's pictures and the example scenes, all of them opened."""
    own = [Shown(Path(name).name, load_image(name), None, [(q, None) for q in UNKNOWN]) for name in images]
    return own + [
        Shown(e.name, load_image(e.file), e.caption, [(q["question"], q["answer"]) for q in e.questions])
        for e in examples()
    ]


def steps(pictures: Sequence[Shown]) -> int:
    """How many a tour has."""
    return len(pictures) + len(DRAWINGS) + 3


def tour(studio: Studio, pictures: Sequence[Shown], seed: int, step: Step) -> list[Section]:
    judge = ready_judge(str(studio.model.codec.device))
    reading = _read(studio, pictures, step)
    drawing, drawn = _draw(studio, judge, seed, step)
    chosen = next((one for one in drawn if one.right), drawn[0])
    other = next(one.prompt for one in drawn if one.prompt != chosen.prompt)
    return [
        reading,
        drawing,
        _own(studio, judge, chosen, seed, step),
        _changed(studio, chosen, other, seed, step),
    ]


def lead(studio: Studio) -> list[str]:
    model, (h, w) = studio.model, studio.model.grid
    sees = "by these codes" if model.config.sees == "codes" else "by the features that codes are made of"
    order = "one after another" if model.config.order == "raster" else "the surest first"
    weights = sum(p.numel() for p in model.parameters()) / 1e6
    return [
        f"A picture becomes {h} × {w} codes, each one of {model.codec.sizes[0]:,}. The model reads pictures {sees}, "
        f"and draws by writing codes, {order}. It has {weights:.1f} million weights.",
        "Scenes and prompts were drawn by lot before the model saw them: nothing is here because it went well.",
    ]


def scenes(pictures: Sequence[Shown]) -> Section:
    """Pictures and their truth, where there is no model to read them."""
    body: list[str] = []
    for one in pictures:
        body += [heading(one.name), row(figure(one.picture, one.caption or ""))]
        if one.caption is not None:
            body.append(table(("question", "truth"), [(q, a or "") for q, a in one.questions]))
    return Section("Scenes", body)


def measured(file: Path) -> Section:
    """A file of results: {"evals": {title: {"command": …, "scores": {name: {"value", "interval", "of"}}}}}; scores may
    also be a list, as `vitrail eval --out` writes it."""
    body: list[str] = [f"Of many more pictures and prompts than these: {file}."]
    try:
        for title, found in read_json(file)["evals"].items():
            scores = found["scores"]
            named = scores.items() if isinstance(scores, dict) else [(one["name"], one) for one in scores]
            # Suites of `vitrail eval` give shares; what others measure has units of its own.
            shares = found["command"].startswith("vitrail eval")
            rows = []
            for name, one in named:
                beside, rank = one.get("beside", {}), one.get("rank", False)
                score = Score(name, one["value"], tuple(one["interval"]), one["of"], beside, rank)
                said = (str(score), score.baselines) if shares else (f"{score.value:.4g} of {score.of:,}", "")
                rows.append((name, *said))
            body += [heading(title), Html(f"<p><code>{html(found['command'])}</code></p>")]
            body.append(table(("", "measured", "without looking"), rows))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"{file} holds no results as they are shown here: {error!r}", "give another file") from None
    return Section("Measured", body)


# ---- sections ---------------------------------------------------------------------------------------------------


def _read(studio: Studio, pictures: Sequence[Shown], step: Step) -> Section:
    body: list[str] = []
    hits = known = 0
    for one in pictures:
        progress = step(f"reading {one.name}")
        ids, seen = studio.tokenize(one.picture), studio.seen(one.picture)
        again = studio.detokenize(ids)[0]
        questions = [question for question, _ in one.questions]
        answers, caption = studio.ask(one.picture, questions, max_new=24), studio.caption(one.picture, max_new=48)
        where = studio.looked(one.picture, questions[0], progress=progress)[1]
        rows = [(SHOWS, caption, one.caption or "not known")]
        for (question, truth), said in zip(one.questions, answers, strict=True):
            right = truth is not None and plain(said) == plain(truth)
            hits, known = hits + right, known + (truth is not None)
            rows.append((question, said if truth is None else marked(right, said), truth or "not known"))
        colours = code_colours(studio.model.codec.quantizer, ids[0])
        body += [
            heading(one.name),
            row(
                figure(seen, "the picture, as the model is shown it"),
                mosaic(ids[0].cpu(), colours, f"its {ids.numel()} codes"),
                figure(again, f"made again from its codes, {decibel(seen, again):.1f} dB"),
                figure(difference(seen, again), "what was lost"),
                figure(where, f"where it looked: “{questions[0]}”"),
            ),
            table(("question", "the model", "truth"), rows),
        ]
    return Section(
        "It reads",
        [
            f"{hits} of {known} answers are right, word for word. Captions are not counted: others can be right too.",
            "A cell is a code: near colours are near codes, and pointing at one shows its number. What was lost is "
            f"shown {AMPLIFIED} times as large; grey is nothing. It looked where the picture is bright: covering that "
            "costs the answer most.",
            *body,
        ],
    )


def _draw(studio: Studio, judge: Judge, seed: int, step: Step) -> tuple[Section, list[Drawn]]:
    body: list[str] = []
    drawn: list[Drawn] = []
    for kind in DRAWINGS:
        asked = prompts(judge.words, kind, 1, seed)
        text = judge.words.pieces.read(asked.text)[0]
        ids = studio.draw_ids([text] * SEEDS, seed=seed, progress=step(f"drawing {text}"))
        pictures, seen = studio.detokenize(ids), judge.look(_pixels(studio, judge, ids))
        same = torch.zeros(SEEDS, dtype=torch.long, device=ids.device)  # one wish for all of them
        right = matches(judge.words, asked.spec[same], seen).tolist()
        each = zip(pictures, (seen[i : i + 1] for i in range(SEEDS)), right, strict=True)
        made = [Drawn(text, *one) for one in each]
        says = [marked(one.right, f"the judge sees {named(judge, one.seen)}") for one in made]
        body += [heading(text), row(*(figure(one.picture, said) for one, said in zip(made, says, strict=True)))]
        drawn += made
    lines = [
        f"{len(DRAWINGS)} prompts, {SEEDS} drawings of each, seeds {seed} to {seed + SEEDS - 1}. The judge takes "
        f"{sum(one.right for one in drawn)} of {len(drawn)} for what was asked.",
        "The judge is another network, strict, and sometimes wrong; docs/judge.md says how often.",
    ]
    return Section("It draws", [*lines, *body]), drawn


def _own(studio: Studio, judge: Judge, one: Drawn, seed: int, step: Step) -> Section:
    step("reading its own drawing")
    read = judge.words.pieces.read
    few = {name: getattr(one.seen, name)[:, : judge.words.objects] for name in ("sprite", "colour", "box", "inside")}
    said = [ask(judge.words, replace(one.seen, **few), seed, kind) for kind in OWN]  # the surest, if it saw very many
    asked = [(read(each.question)[0], read(each.answer)[0]) for each in said if bool(each.valid[0])]
    answers = studio.ask(one.picture, [question for question, _ in asked], max_new=24) if asked else []
    rows = [
        (question, marked(plain(given) == plain(truth), given), truth)
        for (question, truth), given in zip(asked, answers, strict=True)
    ]
    caption = studio.caption(one.picture, max_new=48)
    return Section(
        "It looks at its own drawing",
        [
            "The first that the judge took, or else the first. The judge answers too; a tick is where the two agree.",
            row(figure(one.picture, one.prompt)),
            table(("question", "the model", "the judge"), [(SHOWS, caption, named(judge, one.seen)), *rows]),
        ],
    )


def _changed(studio: Studio, one: Drawn, other: str, seed: int, step: Step) -> Section:
    progress = step("variations")
    varied = studio.vary(one.picture, one.prompt, share=SHARE, count=SEEDS, seed=seed, progress=progress)
    painted = studio.inpaint(one.picture, other, RIGHT_HALF, seed=seed, progress=step("painting in"))
    return Section(
        "It changes a drawing",
        [
            f"For a variation {SHARE:.0%} of the codes are drawn anew. Then the right half is, for other words.",
            row(
                figure(one.picture, one.prompt),
                *(figure(each, f"variation {i}") for i, each in enumerate(varied, 1)),
                figure(painted, f"right half: {other}"),
            ),
        ],
    )


# ---- the judge --------------------------------------------------------------------------------------------------


def ready_judge(device: str) -> Judge:
    """The one that ships, with words for the things it knows; no sprite is needed to say their names."""
    detector = hub.load(SHIPPED / "judge", dtype=torch.float32, device=device)
    names = detector.config.concepts
    n = len(names)
    known = SpriteTable(
        id=names,
        vendor=("",) * n,
        key=names,
        kind=("thing",) * n,
        concept=torch.arange(n),
        names=names,
        plurals=tuple(map(plural, names)),
        category=("thing",) * n,
        aspect=torch.full((n, 2), GRID),
    )
    return Judge(detector, Words.of(known).to(device), known)


def _pixels(studio: Studio, judge: Judge, ids: Tensor) -> Tensor:
    """ids (B, h, w) → uint8 (B, 3, H, W), at the size that the judge was made for"""
    pixels, side = studio.model.pixels(ids).float(), judge.detector.config.image.image
    if pixels.shape[-2:] != (side, side):
        pixels = interpolate(pixels, (side, side), mode="bicubic", antialias=True)
    return studio.model.codec.bytes(pixels)


def named(judge: Judge, found: Scenes) -> str:
    """What the judge sees on one picture, in words"""
    names = judge.detector.config.concepts
    things = [
        f"{COLOURS[colour].name} {names[thing]}".strip()
        for thing, colour in zip(found.sprite[0].tolist(), found.colour[0].tolist(), strict=True)
        if thing >= 0
    ]
    return ", ".join(things) or "nothing it knows"
