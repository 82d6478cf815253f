"""What tasks that answer questions share: talks about pictures in tokens, batches of pictures and plain text, and the
loss of what is said.

B samples, L tokens
"""

import copy
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.backbones.decoder import Decoder
from vitrail.data.scenes.source import by_source
from vitrail.data.talks import Talk, Talks
from vitrail.data.words.pieces import Pieces, TokenTable
from vitrail.errors import ConfigError
from vitrail.objectives.cross_entropy import linear_cross_entropy
from vitrail.processing.templates import spoken
from vitrail.processing.text import Tokenizer
from vitrail.train import distributed
from vitrail.train.task import Batch

TEXT = "text/ids"  # of a batch: windows of plain text, whichever source they are of
IGNORED = -100
TRIED = 64  # samples of a source that are looked at before training


class Told(NamedTuple):
    """Talks about pictures."""

    pixels: Tensor  # uint8 (B, 3 or 4, H, W)
    ids: Tensor  # (B, L)
    targets: Tensor  # (B, L) what each token should be followed by, where it is learnt
    inside: Tensor  # (B, L) which tokens are no padding
    since: Tensor  # (B, L) the place where each token's turn begins


@lru_cache(maxsize=16)
def _tabled(texts: tuple[str, ...], words: Tokenizer, end: int) -> TokenTable:
    """A table of pieces in ids, and the end behind them. The stages of a run share those of their sources."""
    pieces = Pieces()
    pieces.rows(texts)
    return pieces.tokenized(words, [end])


class Teller:
    """The talks of some sources in a tokenizer's ids, `length` of them; the tables are kept by device."""

    def __init__(self, talks: Mapping[str, Talks], words: Tokenizer, end: int, length: int):
        self.talks, self.end, self.length = talks, end, length
        self._ready: dict[tuple[torch.device, str], TokenTable] = {
            (torch.device("cpu"), name): _tabled(tuple(told.pieces.texts), words, end) for name, told in talks.items()
        }

    @torch.no_grad()
    def tell(self, name: str, index: Tensor) -> Told:
        return self._written(name, self.talks[name].talk(index))

    def _written(self, name: str, told: Talk) -> Told:
        L, table = self.length, self.table(told.rows.device, name)
        ids, _ = table.write(told.rows, L + 1, self.end, check=False)
        piece, sizes = table.piece(told.rows, L + 1), table.length[told.rows]
        learnt = told.learnt.gather(1, piece)
        inside = torch.arange(L + 1, device=ids.device) < sizes.sum(1, keepdim=True)
        targets = torch.where(learnt & inside, ids, IGNORED)[:, 1:]
        since = (sizes.cumsum(1) - sizes).gather(1, told.since.gather(1, piece))
        return Told(told.pixels, ids[:, :-1], targets, inside[:, :-1], since[:, :-1])

    def table(self, device: torch.device, name: str) -> TokenTable:
        if (device, name) not in self._ready:
            self._ready[device, name] = self._ready[torch.device("cpu"), name].to(device)
        return self._ready[device, name]

    def look_over(self, name: str, count: int) -> None:
        """Say what is cut, and refuse where nothing is left to learn, which would look perfect."""
        index = torch.arange(min(count, TRIED))
        told = self.talks[name].talk(index)
        size = self.table(index.device, name).length[told.rows].sum(1)
        if (cut := int((size > self.length + 1).sum())) and distributed.rank() == 0:
            sys.stderr.write(
                f"{name}: of {len(index)} talks {cut} are longer than {self.length} tokens, and cut; the longest has "
                f"{int(size.max())}\n"
            )
        if not bool((self._written(name, told).targets != IGNORED).any()):
            raise ConfigError(
                f"of {len(index)} talks about {name!r} not one has an answer within {self.length} tokens",
                "allow a greater length, or kinds of questions that its scenes admit",
            )


def collate(samples: Sequence[Any]) -> Batch:
    """Numbers of pictures by their source, and windows of plain text."""
    windows = [torch.from_numpy(sample) for sample in samples if isinstance(sample, np.ndarray)]
    batch = by_source([sample for sample in samples if not isinstance(sample, np.ndarray)])
    return batch | ({TEXT: torch.stack(windows)} if windows else {})


def step_flops(legs: Iterable[tuple[Sequence[nn.Module], int]]) -> float:
    """Operations of a step through parts in the order of a pass, each with those of its forward pass: forward, back to
    whatever learns before a part, and back to its own weights as far as they learn. A frozen tower runs forward alone.
    """
    total, before = 0.0, False
    for modules, found in legs:
        share = _learning(modules)
        total += found * (1 + (before or share > 0) + share)
        before = before or share > 0
    return total


def _learning(modules: Sequence[nn.Module]) -> float:
    """The share of the weights that learns."""
    weights = [p for module in modules for p in module.parameters()]
    return sum(p.numel() for p in weights if p.requires_grad) / max(1, sum(p.numel() for p in weights))


def speaking(words: Tokenizer, mark: int) -> Tokenizer:
    """The tokenizer with a template of talks in which every turn ends with the end token, and nothing else says whose
    it was. Its mark of a picture must be no other word's."""
    lead = begins(words)
    if mark >= words.size or mark in (words.eos, *lead) or words.token(mark) not in words.specials:
        raise ConfigError(
            f"the id {mark}, which stands for a picture, is no special token of its own to the tokenizer",
            f"set rules.fill (or mark) to one of {words.specials}, the end and the start aside, or add one: "
            "tokenizer.specials",
        )
    named = copy.copy(words)
    start = "".join(words.token(id) for id in lead)
    named.chat_template = spoken(words.token(mark), start, words.named["eos"])
    return named


def begins(words: Tokenizer) -> list[int]:
    """The bos, where the tokenizer begins every text with one."""
    lead = words.encode("", specials=True)[:1]
    return lead if lead == [words.bos] else []


def said_loss(decoder: Decoder, hidden: Tensor, targets: Tensor, reduction: Literal["mean", "sum"], z: float) -> Tensor:
    """hidden (B, L, W), targets (B, L) → −log p of what is learnt, and z · logsumexp². What is not, most of a talk, has
    no logits made; under a compiler, to which every batch must have one shape, all have."""
    head = decoder.embed.weight if decoder.head is None else decoder.head.weight
    if not torch.compiler.is_compiling():
        learnt = targets != IGNORED
        hidden, targets = hidden[learnt][None], targets[learnt][None]  # (1, n, W), (1, n)
    return linear_cross_entropy(hidden.flatten(0, 1), head, targets.flatten(), z=z, reduction=reduction, ignore=IGNORED)
