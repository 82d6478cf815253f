"""Questions about scenes whose truth is known, and drawings that a judge looks at.

B pictures, H, W pixels
"""

import string
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from vitrail.data.formats.sample import progress
from vitrail.data.scenes.source import SceneSource
from vitrail.data.words import Words, ask, baselines, matches, prompts
from vitrail.data.words.templates import DRAWINGS
from vitrail.errors import ConfigError
from vitrail.evals.judge import Judge, fulfilled
from vitrail.evals.shares import Score, Share

Answerer = Callable[[Tensor, list[str]], list[str]]
"""pictures uint8 (B, 3, H, W) and a question of each → what is answered"""

Drawer = Callable[[list[str], int], Tensor]
"""prompts and the number of the first → pictures uint8 (B, 3, H, W)"""


class Watch(Protocol):
    """Who looks on: at each picture uint8 (3, H, W), what was asked, and what came of it."""

    def __call__(self, kind: str, pixels: Tensor, asked: str, right: bool, said: str = "", truth: str = "") -> None: ...


def unwatched(kind: str, pixels: Tensor, asked: str, right: bool, said: str = "", truth: str = "") -> None:
    """Nobody does."""


BATCH = 64
PATIENCE = 200  # batches without enough questions of a kind before it is given up
GUESSED = 4096  # scenes that what can be had without looking is fitted to, and as many that it is tested on
TRUE = "true pictures through the codec"
NONE = "there is no"  # how an answer begins that refuses the question


def plain(text: str) -> str:
    """What counts of an answer: its words, in small letters."""
    return " ".join(text.lower().translate(str.maketrans("", "", string.punctuation)).split())


def answered(
    answerer: Answerer,
    source: SceneSource,
    words: Words,
    kinds: Sequence[str],
    count: int,
    *,
    held_out: bool = False,
    start: int = 0,
    batch: int = BATCH,
    watch: Watch = unwatched,
) -> list[Score]:
    """The share of right answers of each kind, beside the best guess without looking; and, of all kinds together, how
    often a question is refused that has no answer, and how often one that has. An answer is right if it is the true one
    word for word. `held_out` asks in paraphrases that training never uses."""
    if count < 1:
        raise ConfigError(f"{count} questions", "ask at least one")
    scores = []
    refused, asked = {True: 0, False: 0}, {True: 0, False: 0}  # by whether a question is to be refused
    for kind in kinds:
        hits = 0
        for pixels, questions, answers in _questions(source, words, kind, count, held_out, start):
            said = []
            for first in range(0, len(questions), batch):
                rows = slice(first, first + batch)
                said += answerer(pixels[rows], questions[rows])
            for n, (text, true) in enumerate(zip(map(plain, said), map(plain, answers), strict=True)):
                watch(kind, pixels[n], questions[n], text == true, said[n], answers[n])
                hits += text == true
                asked[true.startswith(NONE)] += 1
                refused[true.startswith(NONE)] += text.startswith(NONE)
        scores.append(Score.counted(kind, Share(hits, count), **_blind(source, words, kind, held_out, start + 2**20)))
    names = {True: "refused where nothing can be answered", False: "refused though it can be answered"}
    scores += [Score.counted(name, Share(refused[none], asked[none])) for none, name in names.items() if asked[none]]
    return scores


def _questions(
    source: SceneSource, words: Words, kind: str, count: int, held_out: bool, start: int
) -> Iterator[tuple[Tensor, list[str], list[str]]]:
    """`count` questions of a kind, a batch of scenes at a time: pictures, questions, true answers"""
    found = 0
    for batch in range(PATIENCE + count):
        index = torch.arange(start + batch * BATCH, start + (batch + 1) * BATCH, device=words.concept.device)
        drawn = source.draw(index)
        said = ask(words, drawn.scenes, source.config.seed, kind, held_out=held_out)
        rows = said.valid.nonzero()[: count - found, 0]
        if len(rows):
            read = words.pieces.read
            yield drawn.pixels[rows], read(said.question[rows]), read(said.answer[rows])
        found += len(rows)
        if found == count:
            return
    raise ConfigError(f"scenes {source.name!r} hardly ever admit a question of kind {kind!r}", "leave the kind out")


def _blind(source: SceneSource, words: Words, kind: str, held_out: bool, start: int) -> dict[str, float]:
    """What the commonest answer and the best reading of the question alone would have."""
    index = torch.arange(start, start + 2 * GUESSED, device=words.concept.device)
    said = ask(words, source.scenes(index), source.config.seed, kind, held_out=held_out)
    return {name: getattr(row, name) for row in baselines(said) for name in ("majority", "blind")}


def drawn(
    drawer: Drawer,
    judge: Judge,
    count: int,
    *,
    seed: int = 0,
    held_out: bool = False,
    batch: int = BATCH,
    watch: Watch = unwatched,
) -> list[Score]:
    """The share of drawings that the judge takes for what was asked, by GenEval's kinds of prompt, and their mean;
    beside it the share that it takes for what the next prompt of the kind asks."""
    if count < 1:
        raise ConfigError(f"{count} drawings of each kind", "ask for at least one")
    scores, hits, chance = [], 0, 0
    for number, kind in enumerate(DRAWINGS):
        asked = prompts(judge.words, kind, count, seed, held_out=held_out, among=judge.knows)
        texts, others = judge.words.pieces.read(asked.text), asked.spec[torch.arange(count).roll(1)]
        right, taken = 0, 0
        for first in progress(range(0, count, batch), f"drawings, {kind}"):
            rows = slice(first, first + batch)
            pixels = drawer(texts[rows], number * count + first)
            seen = judge.look(pixels.to(asked.spec.number.device))
            found = matches(judge.words, asked.spec[rows], seen)
            right += int(found.sum())
            for picture, text, hit in zip(pixels, texts[rows], found.tolist(), strict=True):
                watch(kind, picture, text, bool(hit))
            taken += int(matches(judge.words, others[rows], seen).sum())
        scores.append(Score.counted(kind, Share(right, count), others=taken / count))
        hits, chance = hits + right, chance + taken
    every = count * len(DRAWINGS)
    return [*scores, Score.counted("all", Share(hits, every), others=chance / every)]


def redrawn(
    through: Callable[[Tensor], Tensor], judge: Judge, source: SceneSource, count: int, *, batch: int = BATCH
) -> Score:
    """True pictures in place of drawings, as a codec shows them (uint8 (B, 3, H, W) → (B, 3, H, W)): what the judge
    refuses of these no drawing in its codes could have."""
    hits = 0
    for kind in DRAWINGS:
        spec, made = fulfilled(judge.words, source, kind, count)
        for first in range(0, count, batch):
            rows = slice(first, first + batch)
            hits += int(judge.right(spec[rows], through(made.pixels[rows]).to(spec.number.device)).sum())
    return Score.counted(TRUE, Share(hits, count * len(DRAWINGS)))
