"""DPG-Bench's way of looking at drawings: dense prompts, each with a graph of questions that are asked of its drawing.

B pictures, H, W pixels
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vitrail.data.formats.sample import progress
from vitrail.data.graphs import Graph
from vitrail.data.scenes.source import SceneSource
from vitrail.data.words import Words
from vitrail.data.words.dense import Dense, dense
from vitrail.errors import ConfigError
from vitrail.evals.judge import Judge
from vitrail.evals.metrics.dpg import pictures, told
from vitrail.evals.metrics.yesno import among_words
from vitrail.evals.shares import Score, Share
from vitrail.evals.suites.sheets import mean
from vitrail.evals.suites.talking import BATCH, PATIENCE, TRUE, Answerer, Drawer, Watch, unwatched

Looker = Callable[[Tensor, Sequence[int]], list[list[bool]]]
"""pictures uint8 (B, 3, H, W) and the number of the graph that each is asked → whether each answer is yes"""

Answers = list[list[list[bool]]]
"""by prompt, drawing and question"""


def dense_prompts(words: Words, source: SceneSource, count: int, *, held_out: bool = False) -> Dense:
    """`count` dense prompts about a source's scenes, the first that admit one."""
    if count < 1:
        raise ConfigError(f"{count} prompts", "ask for at least one")
    graphs, specs, index = [], [], []
    for batch in range(PATIENCE + count):
        numbers = torch.arange(batch * BATCH, (batch + 1) * BATCH, device=words.concept.device)
        found = dense(words, source.scenes(numbers), source.config.seed, held_out=held_out)
        graphs, specs, index = graphs + found.graphs, specs + found.specs, [*index, found.scenes.index]
        if len(graphs) >= count:
            return Dense(graphs[:count], specs[:count], source.scenes(torch.cat(index)[:count]))
    raise ConfigError(f"scenes {source.name!r} hardly ever admit a dense prompt", "give them more things that differ")


def judged(judge: Judge, asked: Dense) -> Looker:
    """The judge of GenEval's kinds answers: each question holds or not of what it saw."""

    def look(pixels: Tensor, numbers: Sequence[int]) -> list[list[bool]]:
        return asked.answers(judge.words, numbers, judge.look(pixels.to(judge.words.concept.device)))

    return look


class Asker:
    """A model that answers questions about pictures: what is not yes, or not only yes, is no. It counts what could be
    read as neither."""

    def __init__(self, answerer: Answerer, graphs: Sequence[Graph], *, batch: int = BATCH):
        self.answerer, self.graphs, self.batch = answerer, graphs, batch
        self.asked, self.unread = 0, 0

    def __call__(self, pixels: Tensor, numbers: Sequence[int]) -> list[list[bool]]:
        texts = [[question.text for question in self.graphs[number].questions] for number in numbers]
        asked = [(row, text) for row, own in enumerate(texts) for text in own]
        said: list[str] = []
        for first in range(0, len(asked), self.batch):
            some = asked[first : first + self.batch]
            said += self.answerer(pixels[[row for row, _ in some]], [text for _, text in some])
        read = [among_words(one) for one in said]
        self.asked, self.unread = self.asked + len(read), self.unread + read.count("")
        answers = iter(one == "yes" for one in read)
        return [[next(answers) for _ in own] for own in texts]

    @property
    def score(self) -> Score:
        return Score.counted("neither yes nor no", Share(self.unread, self.asked))


def densely(
    drawer: Drawer,
    looker: Looker,
    graphs: Sequence[Graph],
    *,
    drawings: int = 1,
    batch: int = BATCH,
    watch: Watch = unwatched,
) -> list[Score]:
    """DPG-Bench's score of drawings, several of each prompt, and its shares of yes by category; beside each what the
    same drawings have by the questions of the prompt before. Intervals draw prompts anew."""
    if drawings < 1:
        raise ConfigError(f"{drawings} drawings of each prompt", "draw at least one")
    own: Answers = [[] for _ in graphs]
    others: Answers = [[] for _ in graphs]
    parts = [(turn, first) for turn in range(drawings) for first in range(0, len(graphs), batch)]
    for turn, first in progress(parts, "drawings"):
        rows = range(first, min(first + batch, len(graphs)))
        pixels = drawer([graphs[row].prompt for row in rows], turn * len(graphs) + first)
        for row, picture, yes in zip(rows, pixels, looker(pixels, rows), strict=True):
            own[row].append(yes)
            missed = [question.text for question, one in zip(graphs[row].questions, yes, strict=True) if not one]
            watch("dense", picture, " ".join([graphs[row].prompt, *missed]), not missed)
        if len(graphs) > 1:
            before = [row - 1 if row else len(graphs) - 1 for row in rows]
            for row, yes in zip(before, looker(pixels, before), strict=True):
                others[row].append(yes)
    scores = scored(graphs, own)
    if len(graphs) < 2:
        return scores
    beside = [score.value for score in scored(graphs, others)]
    return [replace(score, beside={"others": value}) for score, value in zip(scores, beside, strict=True)]


def redrawn_densely(
    through: Callable[[Tensor], Tensor], looker: Looker, asked: Dense, source: SceneSource, *, batch: int = BATCH
) -> Score:
    """The true pictures of the prompts' scenes in place of drawings, as a codec shows them (uint8 (B, 3, H, W) →
    (B, 3, H, W)): what they lose no drawing in its codes could have."""
    answers: Answers = []
    for first in progress(range(0, len(asked.graphs), batch), "true pictures"):
        rows = range(first, min(first + batch, len(asked.graphs)))
        pixels = source.render(asked.scenes[rows.start : rows.stop])
        answers += [[yes] for yes in looker(through(pixels), rows)]
    return replace(scored(asked.graphs, answers)[0], name=TRUE)


def scored(graphs: Sequence[Graph], answers: Answers) -> list[Score]:
    """The benchmark's score, then its shares by category: of level 1 in the order they come in, of level 2 by name."""
    scores = [mean("DPG score", pictures(graphs, answers), range(len(graphs)))]
    every = list(told(graphs, answers))
    for level, names in ((1, dict.fromkeys(one.level1 for one in every)), (2, sorted({one.level2 for one in every}))):
        for name in names:
            here = [one for one in every if (one.level1 if level == 1 else one.level2) == name]
            values, rows = [float(one.yes) for one in here], [one.prompt for one in here]
            scores.append(mean(name, values, rows, {"level": level}, binary=True))
    return scores
