"""Talks about pictures: questions and answers to read, and prompts to draw, from scenes and named pictures alike, made
on the device where their numbers lie.

B samples, T turns, P pieces of a text
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from vitrail.data.named import NamedSource
from vitrail.data.scenes.source import SceneSource
from vitrail.data.told import words_about
from vitrail.data.views import ViewsConfig
from vitrail.data.words import DRAFTS, Words, ask, ask_several, prompt
from vitrail.data.words.ask import longest
from vitrail.data.words.pieces import Pieces, TokenTable
from vitrail.data.words.templates import DRAWINGS
from vitrail.errors import ConfigError, nearest
from vitrail.nn.replay import Replayed

QUESTIONS = tuple(kind for kind in DRAFTS if kind not in ("caption_long", "grounding"))
NAMING = ("what is this?", "what does the picture show?", "name what you see.", "which thing is drawn here?")


class Talk(NamedTuple):
    """A turn is a question, an end, an answer, an end; the row behind the last piece is the end."""

    pixels: Tensor  # uint8 (B, 3 or 4, H, W)
    rows: Tensor  # (B, P) pieces
    learnt: Tensor  # (B, P) which are to be learnt: answers, and their ends
    since: Tensor  # (B, P) the piece that each one's turn begins with


class Wish(NamedTuple):
    """A text, and a picture that is a right drawing of it."""

    pixels: Tensor  # uint8 (B, 3 or 4, H, W)
    rows: Tensor  # (B, P) pieces, and an end


class Talks(Protocol):
    @property
    def pieces(self) -> Pieces: ...

    @property
    def views(self) -> ViewsConfig: ...

    def talk(self, index: Tensor) -> Talk: ...

    def wish(self, index: Tensor) -> Wish: ...

    def longest(self, tokens: TokenTable) -> tuple[int, int]:
        """Tokens that no talk and no wish exceeds, without what may be cut."""
        ...


class SceneTalks:
    """Several questions a scene, of different kinds, their answers evened out, and one kind `last` of all: behind them,
    so that no answer could be read off a caption. And prompts of GenEval's kinds that name all there is, or else the
    caption. `many` has more wordings than are usual."""

    def __init__(
        self,
        source: SceneSource,
        questions: int,
        kinds: Sequence[str] = QUESTIONS,
        last: str | None = None,
        *,
        held_out: bool = False,
        many: bool = False,
    ):
        if not 1 <= questions <= len(kinds):
            raise ConfigError(f"{questions} questions of {len(kinds)} kinds", "ask at least one, and each kind once")
        if last is not None and last not in DRAFTS:
            raise ConfigError(f"no kind of question is called {last!r}", nearest(last, DRAFTS))
        self.source, self.questions, self.kinds, self.last = source, questions, tuple(kinds), last
        self.views = source.config.views
        self.held_out = held_out
        self.words = words_about(source, many=many)
        self.pieces = self.words.pieces
        self._words = {torch.device("cpu"): self.words}
        self.talk: Any = Replayed(self._talk)
        self._wishes: Any = Replayed(self._able)

    def _talk(self, index: Tensor) -> Talk:
        drawn, words = self.source.draw(index), self._on(index.device)
        told = ask_several(
            words, drawn.scenes, self.source.config.seed, self.kinds, self.questions, held_out=self.held_out
        )
        parts = [turns(told.question, told.answer, told.valid, len(self.pieces))]
        if self.last is not None:
            told = ask(words, drawn.scenes, self.source.config.seed, self.last, held_out=self.held_out)
            parts.append(turns(told.question, told.answer, told.valid, len(self.pieces)))
        rows, learnt = (torch.cat([x.view(len(index), -1) for x in column], 1) for column in zip(*parts, strict=True))
        wide, place = parts[0][0].shape[1], torch.arange(rows.shape[1], device=index.device)
        since = (place // wide).clamp(max=self.questions - (self.last is None)) * wide
        return Talk(drawn.pixels, rows, learnt, since.expand_as(rows))

    def wish(self, index: Tensor) -> Wish:
        pixels, texts, able = self._wishes(index)
        which = (torch.rand(able.shape, device=index.device) * able).argmax(1)  # one of those that can be had
        rows = texts[torch.arange(len(index), device=index.device), which]
        return Wish(pixels, pad(rows, (0, 1), value=len(self.pieces)))

    def _able(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """pixels, prompts of every kind (B, kinds, P), and which can be had (B, kinds)"""
        drawn, words, seed = self.source.draw(index), self._on(index.device), self.source.config.seed
        told = ask(words, drawn.scenes, seed, "caption_short", held_out=self.held_out)
        asked = [prompt(words, drawn.scenes, seed, kind, held_out=self.held_out) for kind in DRAWINGS]
        able = torch.stack([one.valid for one in asked] + [told.valid], 1)  # (B, kinds)
        texts = [one.text for one in asked] + [told.answer]
        wide = max(text.shape[1] for text in texts)
        table = torch.stack([pad(text, (0, wide - text.shape[1])) for text in texts], 1)
        return drawn.pixels, table, able

    def longest(self, tokens: TokenTable) -> tuple[int, int]:
        question, answer = longest(self.words, tokens, self.kinds)
        behind = 0 if self.last is None else sum(longest(self.words, tokens, [self.last])) + 2
        wishes = (self.words.loose[f"draw_{kind}"].longest(tokens) for kind in DRAWINGS)
        wish = max(longest(self.words, tokens, ["caption_short"])[1], *wishes)
        return self.questions * (question + answer + 2) + behind, wish + 1

    def _on(self, device: torch.device) -> Words:
        if device not in self._words:
            self._words[device] = self.words.to(device)
        return self._words[device]


class NamedTalks:
    """One question a picture: what it shows."""

    def __init__(self, source: NamedSource):
        self.source, self.views = source, source.config.views
        self.pieces = source.pieces
        self._asked = {torch.device("cpu"): self.pieces.rows(NAMING)}

    def talk(self, index: Tensor) -> Talk:
        which = torch.randint(len(NAMING), (len(index), 1), device=index.device)
        question = self._on(index.device)[which]
        valid = torch.ones(len(index), dtype=torch.bool, device=index.device)
        rows, learnt = turns(question, self.source.texts(index, vary=False), valid, len(self.pieces))
        return Talk(self.source.pixels(index), rows, learnt, torch.zeros_like(rows))

    def wish(self, index: Tensor) -> Wish:
        rows = self.source.texts(index)
        return Wish(self.source.pixels(index), pad(rows, (0, 1), value=len(self.pieces)))

    def longest(self, tokens: TokenTable) -> tuple[int, int]:
        name = self.source.longest(tokens)
        asked = tokens.length[self._on(tokens.length.device)]
        return int(asked.max()) + name + 2, name + 1

    def _on(self, device: torch.device) -> Tensor:
        if device not in self._asked:
            self._asked[device] = self._asked[torch.device("cpu")].to(device)
        return self._asked[device]


def turns(question: Tensor, answer: Tensor, valid: Tensor, end: int) -> tuple[Tensor, Tensor]:
    """question (N, P), answer (N, Q), valid (N,) → pieces (N, P + Q + 2), and which are to be learnt; none of either
    where a turn is not valid"""
    ends = torch.where(valid, end, 0)[:, None]
    rows = torch.cat([question, ends, answer, ends], 1) * valid[:, None]
    behind = torch.arange(rows.shape[1], device=rows.device) > question.shape[1]
    return rows, behind & valid[:, None]


def talks(
    source: NamedSource | SceneSource,
    questions: int,
    kinds: Sequence[str] = QUESTIONS,
    last: str | None = None,
    *,
    many: bool = False,
) -> Talks:
    if isinstance(source, NamedSource):
        return NamedTalks(source)
    return SceneTalks(source, questions, kinds, last, many=many)
