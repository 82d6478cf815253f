"""A judge of drawings: a detector looks, and what it saw is held against what was asked.

B pictures, O objects
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from vitrail.data.scenes.scene import COLOURS, GRID, Scenes, SpriteTable
from vitrail.data.scenes.source import Drawn, SceneSource
from vitrail.data.words import Prompt, Spec, Words, matches, prompt
from vitrail.data.words.templates import DRAWINGS
from vitrail.errors import ConfigError
from vitrail.evals.shares import Share
from vitrail.models.detector import Detector, seen

SURE = 0.4  # how sure a detector must be of an object; the published error is measured so


class Judge:
    """Writes what a detector finds as scenes of a table's sprites, so that one rule says what is right, for drawings
    whose truth is known and for those that are only looked at."""

    def __init__(self, detector: Detector, words: Words, table: SpriteTable, *, threshold: float = SURE):
        self.detector, self.words, self.threshold = detector.eval(), words, threshold
        shown: dict[str, int] = {}
        for row, (kind, concept) in enumerate(zip(table.kind, table.concept.tolist(), strict=True)):
            if kind == "thing":
                shown.setdefault(table.names[concept], row)
        unknown = [name for name in shown if name not in detector.config.concepts]
        if unknown:
            raise ConfigError(
                f"the judge does not know {unknown[0]!r} and {len(unknown) - 1} more of the things to be judged",
                "train it on their names, or draw fewer",
            )
        if detector.config.colours != tuple(colour.name for colour in COLOURS):
            raise ConfigError("the judge tells other colours apart", "train it on this version's COLOURS")
        # What no prompt can name is nothing that was asked for, and left out.
        self.row = torch.tensor([shown.get(name, -1) for name in detector.config.concepts])
        self.knows = tuple(table.concept[list(shown.values())].tolist())  # frames have names too, which it never heard

    @torch.no_grad()
    def look(self, pixels: Tensor) -> Scenes:
        """uint8 (B, 3, H, W) → what is on them"""
        found = self.detector.find(seen(pixels), threshold=self.threshold)
        B, M = found.score.shape
        sprite = self.row.to(pixels.device)[found.concept.clamp(min=0)].where(found.concept >= 0, -1)
        none = torch.full((B, M), -1, device=pixels.device)
        return Scenes(
            index=torch.arange(B, device=pixels.device),
            sprite=sprite,
            colour=found.colour,
            box=(found.box * GRID).round().long(),
            inside=none,
            background=torch.zeros(B, dtype=torch.int64, device=pixels.device),
        )

    def right(self, spec: Spec, pixels: Tensor) -> Tensor:
        """(B,) whether each picture shows what its prompt asked for"""
        return matches(self.words, spec, self.look(pixels))


@dataclass(frozen=True)
class Error:
    """How often a judge is wrong where the truth is known: it takes a wrong picture, or turns down a right one."""

    taken: Share  # of the wrong pictures
    refused: Share  # of the right pictures

    @property
    def all(self) -> Share:
        return Share(self.taken.hits + self.refused.hits, self.taken.of + self.refused.of)


def judge_error(verdict: Tensor, truth: Tensor) -> Error:
    """verdict, truth (B,) bool"""
    return Error(
        taken=Share(int((verdict & ~truth).sum()), int((~truth).sum())),
        refused=Share(int((~verdict & truth).sum()), int(truth.sum())),
    )


# ---- renders whose truth is known -------------------------------------------------------------------------------


def fulfilled(words: Words, source: SceneSource, kind: str, n: int, *, start: int = 0) -> tuple[Spec, Drawn]:
    """n pictures, each with a wish of this kind that it fulfils."""
    asked, drawn = wished(words, source, kind, n, start=start)
    return asked.spec, drawn


def wished(
    words: Words, source: SceneSource, kind: str, n: int, *, start: int = 0, whole: bool = False, held_out: bool = False
) -> tuple[Prompt, Drawn]:
    """n prompts of this kind, `whole` where they name all that there is, each with a picture of what it asks for."""
    index, batch = start, max(64, 4 * n)
    told, drawn = [], []
    while sum(len(one.valid) for one in told) < n:
        if index - start > 1000 * batch:
            raise ConfigError(f"scenes {source.name!r} hardly ever show what a prompt of kind {kind!r} asks for")
        made = source.draw(torch.arange(index, index + batch, device=words.concept.device))
        asked = prompt(words, made.scenes, source.config.seed, kind, whole=whole, held_out=held_out)
        rows = asked.valid.nonzero()[:, 0]
        told.append(Prompt(asked.text[rows], asked.spec[rows], asked.valid[rows]))
        drawn.append(Drawn(made.scenes[rows], made.pixels[rows]))
        index += batch
    spec = Spec(*(torch.cat([getattr(one.spec, f.name) for one in told])[:n] for f in fields(Spec)))
    text, valid = (torch.cat([getattr(one, name) for one in told])[:n] for name in ("text", "valid"))
    scenes = Scenes(*(torch.cat([getattr(d.scenes, f.name) for d in drawn])[:n] for f in fields(Scenes)))
    return Prompt(text, spec, valid), Drawn(scenes, torch.cat([d.pixels for d in drawn])[:n])


def labelled(words: Words, source: SceneSource, kind: str, n: int, *, start: int = 0) -> tuple[Spec, Drawn]:
    """n pictures, each with a wish of this kind: every second one as it was drawn, the others wrong in one thing."""
    right, drawn = fulfilled(words, source, kind, n, start=start)
    wrong = altered(right, kind)
    odd = torch.arange(n, device=right.number.device) % 2 == 1

    def mixed(name: str) -> Tensor:
        a, b = getattr(right, name), getattr(wrong, name)
        return torch.where(odd.view(-1, *[1] * (a.ndim - 1)), b, a)

    return Spec(*(mixed(f.name) for f in fields(Spec))), drawn


def altered(spec: Spec, kind: str) -> Spec:
    """The same wishes with one thing changed: the concept, the number, the colour, the side, or who wears what."""
    if kind in ("single", "two"):  # somebody else's
        concept = spec.concept.clone()
        concept[:, -1 if kind == "two" else 0] = spec.concept[:, 0].roll(1)
        return replace(spec, concept=concept)
    if kind == "counting":
        number = spec.number.clone()
        number[:, 0] += torch.where(torch.arange(len(number), device=number.device) % 4 < 2, 1, -1)
        return replace(spec, number=number)
    if kind == "colours":
        colour = spec.colour % (len(COLOURS) - 1) + 1
        return replace(spec, colour=torch.where(spec.colour > 0, colour, 0))
    if kind == "position":
        return replace(spec, relation=spec.relation ^ 1)  # left and right, above and below, are neighbours
    return replace(spec, colour=spec.colour.flip(1))


def check(judge: Judge, source: SceneSource, n: int = 200, *, start: int = 0) -> dict[str, Error]:
    """The judge's error on n labelled renders, by kind and in all."""
    if n < len(DRAWINGS):
        raise ConfigError(f"{n} renders for {len(DRAWINGS)} kinds of prompt", f"give at least {len(DRAWINGS)}")
    errors, verdicts, truths = {}, [], []
    for i, kind in enumerate(DRAWINGS):
        many = n // len(DRAWINGS) + (i < n % len(DRAWINGS))
        spec, drawn = labelled(judge.words, source, kind, many, start=start)
        verdicts.append(judge.right(spec, drawn.pixels))
        truths.append(matches(judge.words, spec, drawn.scenes))
        errors[kind] = judge_error(verdicts[-1], truths[-1])
    return errors | {"all": judge_error(torch.cat(verdicts), torch.cat(truths))}
