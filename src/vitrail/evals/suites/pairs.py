"""Pairs that differ in who does what: Winoground's scores, ARO's, and such pairs made of scenes.

B pairs, O object slots, H, W pixels, E width of the embedding
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import Tensor

from vitrail.data.scenes.scene import GRID, Scenes
from vitrail.data.scenes.source import SceneSource
from vitrail.data.words import Pair, Words, swap
from vitrail.data.words.facts import Facts
from vitrail.errors import ConfigError, DataError, nearest
from vitrail.evals.shares import Score, Share

BATCH = 256  # scenes looked through at once
PATIENCE = 400  # batches without enough pairs before a preset is given up


def winoground(scores: Tensor) -> list[Score]:
    """scores[b, c, p] of caption c with picture p (B, 2, 2), where caption 0 belongs to picture 0 and 1 to 1.

    text: for both pictures the right caption is the nearer; image: for both captions the right picture; group: both.
    A tie is a miss.
    """
    (a, b), (c, d) = (column.unbind(1) for column in scores.unbind(1))  # a, d belong together
    text, image = (a > c) & (d > b), (a > b) & (d > c)
    rows = {"text": (text, 1 / 4), "image": (image, 1 / 4), "group": (text & image, 1 / 6)}
    return [Score.counted(name, Share(int(hit.sum()), len(hit)), chance=chance) for name, (hit, chance) in rows.items()]


def aro(pictures: Tensor, true: Tensor, false: Tensor) -> Score:
    """How often a picture lies nearer to its true caption than to the false one; all (B, E). A tie is a miss. Beside
    it what is had without looking: all captions held against the mean picture."""

    def share(pictures: Tensor) -> Share:
        hit = (pictures * true).sum(1) > (pictures * false).sum(1)
        return Share(int(hit.sum()), len(hit))

    blind = share(pictures.mean(0, keepdim=True).expand_as(pictures)).value
    return Score.counted("true caption before the false", share(pictures), chance=1 / 2, blind=blind)


# ---- pairs made of scenes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Twins:
    """Pictures with a true and a false caption; `other` shows what the false one says, and nothing else is changed."""

    scenes: Scenes
    pixels: Tensor  # (B, 3, H, W) uint8
    true: list[str]
    false: list[str]
    others: Scenes | None = None
    other: Tensor | None = None  # (B, 3, H, W)


SORTS = {"colours": "colour", "relations": "relation", "counting": "number", "plain": "size"}
"""preset → the swap that it is made for"""


def captioned(source: SceneSource, words: Words, sort: str, n: int, *, held_out: bool = True) -> Twins:
    """n scenes, each with a true and a false caption of the same words, in paraphrases that training never uses unless
    `held_out` is off."""
    return _gather(source, words, sort, n, held_out, None)


def twins(source: SceneSource, words: Words, sort: str, n: int, *, held_out: bool = True) -> Twins:
    """n scenes with their counterparts: the colours of two things exchanged, or their places."""
    if sort not in COUNTERPARTS:
        raise ConfigError(f"no counterpart can be made for the swap {sort!r}", nearest(sort, COUNTERPARTS))
    return _gather(source, words, sort, n, held_out, COUNTERPARTS[sort])


def exchanged_colours(words: Words, scenes: Scenes, i: int, j: int) -> tuple[Scenes, Tensor]:
    """The scenes with what slots i and j wear exchanged, and which of them are fit to be shown."""
    return replace(scenes, colour=_exchanged(scenes.colour, i, j)), scenes.filled[:, i] & scenes.filled[:, j]


def exchanged_places(words: Words, scenes: Scenes, i: int, j: int) -> tuple[Scenes, Tensor]:
    """The scenes with the things of slots i and j each on the other's centre, in its own size: fit to be shown where
    they stay within the picture and touch nothing."""
    extent = _exchanged(scenes.box[..., 2:] - scenes.box[..., :2], i, j)
    low = (scenes.centre - extent) // 2
    moved = torch.zeros_like(scenes.filled)
    moved[:, [i, j]] = True
    box = torch.where(moved[..., None], torch.cat([low, low + extent], -1), scenes.box)
    swapped = replace(scenes, sprite=_exchanged(scenes.sprite, i, j), colour=_exchanged(scenes.colour, i, j), box=box)
    apart = Facts(words, swapped).disjoint | ~scenes.filled[:, :, None] | ~scenes.filled[:, None, :]
    apart |= torch.eye(apart.shape[1], dtype=torch.bool, device=apart.device)
    fit = scenes.filled[:, i] & scenes.filled[:, j] & apart[:, [i, j]].all(2).all(1)
    within = ((box[:, [i, j]] >= 0) & (box[:, [i, j]] <= GRID)).flatten(1).all(1)
    loose = (scenes.inside[:, [i, j]] < 0).all(1) & ~Facts(words, scenes).frame[:, [i, j]].any(1)
    return swapped, fit & within & loose


Counterpart = Callable[[Words, Scenes, int, int], tuple[Scenes, Tensor]]
COUNTERPARTS: dict[str, Counterpart] = {"colour": exchanged_colours, "relation": exchanged_places}


def _exchanged(x: Tensor, i: int, j: int) -> Tensor:
    order = list(range(x.shape[1]))
    order[i], order[j] = j, i
    return x[:, order]


def _gather(
    source: SceneSource, words: Words, sort: str, n: int, held_out: bool, counterpart: Counterpart | None
) -> Twins:
    if f"swap_{sort}" not in words.loose:
        raise ConfigError(f"there is no swap {sort!r}", nearest(sort, SORTS.values()))
    if n < 1:
        raise DataError(f"{n} pairs", "ask for at least one")

    def say(scenes: Scenes) -> Pair:
        return swap(words, scenes, source.config.seed, sort, held_out=held_out)

    scenes, others = [], []
    true: list[str] = []
    false: list[str] = []
    for start in range(0, PATIENCE * BATCH, BATCH):
        some = source.scenes(torch.arange(start, start + BATCH, device=words.concept.device))
        pair = say(some)
        other, good = (some, pair.valid) if counterpart is None else _true_of(words, some, pair, say, counterpart)
        rows = good.nonzero()[: n - len(true), 0]
        scenes.append(some[rows])
        others.append(other[rows])
        true += words.pieces.read(pair.true[rows])
        false += words.pieces.read(pair.false[rows])
        if len(true) == n:
            break
    else:
        raise DataError(
            f"scenes {source.config.preset!r} gave {len(true)} pairs for the swap {sort!r}, not {n}",
            "ask for fewer, or choose another preset",
        )
    told = _joined(scenes)
    if counterpart is None:
        return Twins(told, source.render(told), true, false)
    untold = _joined(others)
    return Twins(told, source.render(told), true, false, untold, source.render(untold))


def _true_of(
    words: Words, scenes: Scenes, pair: Pair, say: Callable[[Scenes], Pair], counterpart: Counterpart
) -> tuple[Scenes, Tensor]:
    """Counterparts of which the false captions are true, and for which scenes there is one.

    The truth decides: two slots are exchanged, the words are asked anew about the scene that comes of it, and it counts
    only where they say what was false before, and call false what was true.
    """
    found, good = scenes, torch.zeros_like(pair.valid)
    for i, j in combinations(range(scenes.sprite.shape[1]), 2):
        others, fit = counterpart(words, scenes, i, j)
        back = say(others)
        turned = (back.true == pair.false).all(1) & (back.false == pair.true).all(1)
        new = pair.valid & back.valid & fit & turned & ~good
        found, good = _where(new, others, found), good | new
    return found, good


def _where(mask: Tensor, a: Scenes, b: Scenes) -> Scenes:
    parts = ((getattr(a, name), getattr(b, name)) for name in Scenes.__dataclass_fields__)
    return Scenes(*(torch.where(mask.view(-1, *[1] * (x.ndim - 1)), x, y) for x, y in parts))


def _joined(parts: list[Scenes]) -> Scenes:
    return Scenes(*(torch.cat([getattr(part, name) for part in parts]) for name in Scenes.__dataclass_fields__))
