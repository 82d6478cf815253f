"""The judge of a tour's drawings.

H, W pixels
"""

import re
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from vitrail import hub
from vitrail.data.scenes.plurals import plural
from vitrail.data.scenes.scene import COLOURS, GRID, Scenes, SpriteTable
from vitrail.data.words import Spec, Words, matches
from vitrail.evals.judge import Judge
from vitrail.hub.configs import SHIPPED
from vitrail.show.page import Html, figure, lines, marked


class Drawn(NamedTuple):
    """A drawing, what was asked for, what the judge sees on it, and whether that is the same."""

    prompt: str
    spec: Spec
    seed: int
    picture: Image.Image
    seen: Scenes
    right: bool


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


def judged(judge: Judge, prompt: str, spec: Spec, seed: int, picture: Image.Image) -> Drawn:
    """A picture at the size that the judge was made for, and whether it is what the only row of `spec` asks for"""
    side = judge.detector.config.image.image
    pixels = torch.from_numpy(np.array(picture.resize((side, side), Image.Resampling.BICUBIC)))  # (H, W, 3)
    seen = judge.look(pixels.permute(2, 0, 1)[None].to(spec.number.device))
    return Drawn(prompt, spec, seed, picture, seen, bool(matches(judge.words, spec, seen)[0]))


def named(judge: Judge, found: Scenes) -> str:
    """What the judge sees on one picture, in words"""
    names = judge.detector.config.concepts
    things = [
        f"{COLOURS[colour].name} {names[thing]}".strip()
        for thing, colour in zip(found.sprite[0].tolist(), found.colour[0].tolist(), strict=True)
        if thing >= 0
    ]
    return ", ".join(things) or "nothing it knows"


def clear(one: Drawn) -> tuple[bool, bool, int]:
    """Drawings that are right come before others, those with nothing besides first, and then those of which most things
    and colours were asked."""
    things = int(one.spec.number.sum())
    colours = int(((one.spec.colour > 0) & (one.spec.number > 0)).sum())
    return one.right, int(one.seen.filled.sum()) == things, things + colours


def tells(judge: Judge, spec: Spec, caption: str) -> bool:
    """Whether a caption names all things that were asked for"""
    asked = {name for name, n in zip(spec.concept[0].tolist(), spec.number[0].tolist(), strict=True) if n}
    names = [judge.detector.config.concepts[thing] for thing in asked]
    return all(re.search(rf"\b({re.escape(name)}|{re.escape(plural(name))})\b", caption) for name in names)


def judged_figure(judge: Judge, one: Drawn, said: str) -> Html:
    verdict = marked(one.right, f"the judge sees {named(judge, one.seen)}")
    return figure(one.picture, lines(verdict, said), f"Drawn for: {one.prompt}")
