"""A sentence is a row of pieces. Its text and its token ids are two readings of the same row, so that a million
sentences can be written on a GPU without one string.

B sentences, P pieces a sentence, L tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vitrail.errors import TextError
from vitrail.processing.text import Tokenizer


class Pieces:
    """A table of strings, each added once. Row 0 is the empty piece; it may stand anywhere in a sentence.

    A piece stands first in a sentence or begins with a space: there a tokenizer begins a word, so that ids of pieces,
    one behind the other, are the ids of the sentence."""

    def __init__(self) -> None:
        self.texts: list[str] = [""]
        self._row: dict[str, int] = {"": 0}

    def __len__(self) -> int:
        return len(self.texts)

    def add(self, text: str) -> int:
        """The row of a string; a new one is appended."""
        if text not in self._row:
            self._row[text] = len(self.texts)
            self.texts.append(text)
        return self._row[text]

    def rows(self, texts: Sequence[str]) -> Tensor:
        """(n,) rows of strings"""
        return torch.tensor([self.add(text) for text in texts], dtype=torch.int64)

    def read(self, rows: Tensor) -> list[str]:
        """(B, P) → B sentences"""
        return ["".join(self.texts[i] for i in row) for row in rows.tolist()]

    def tokenized(self, tokenizer: Tokenizer, *more: Sequence[int]) -> "TokenTable":
        """The same table in token ids; refused where a piece would have other ids inside a sentence. Behind it rows of
        ids that are no text: what stands before and behind a sentence."""
        ids = [[], *_inside(tokenizer, self.texts[1:])]
        seams = self._seams()
        for (left, right), whole in zip(seams, _inside(tokenizer, [a + b for a, b in seams]), strict=True):
            if whole != ids[self._row[left]] + ids[self._row[right]]:
                raise TextError(
                    f"the tokenizer reads {left + right!r} otherwise than {left!r} and {right!r} one behind the other",
                    "use a tokenizer that begins a word at every space, and pieces that begin with one",
                )
        return TokenTable([*ids, *more])

    def _seams(self) -> list[tuple[str, str]]:
        """Pairs that stand for all: every piece on either side once, every sort of end before every sort of start."""
        texts = [text for text in self.texts if text.strip()]  # a lone space is what an empty slot would say
        follow = [text for text in texts if text[:1] == " "]
        ends = {_sort(text[-1]): text for text in texts}
        starts = {tuple(map(_sort, text[:2])): text for text in follow}
        every = [(end, start) for end in ends.values() for start in starts.values()]
        if not follow:
            return every
        return every + [(text, follow[0]) for text in texts] + [(follow[0], text) for text in follow]


def _inside(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Ids of texts where they stand: one that begins with a space stands behind another, which to SentencePiece, who
    puts a space before every text, is not the same as alone."""
    first = "a"
    lead = tokenizer.encode(first)
    found = tokenizer.encode_batch([first + text if text[:1] == " " else text for text in texts])
    return [
        ids[len(lead) :] if text[:1] == " " and ids[: len(lead)] == lead else ids
        for text, ids in zip(texts, found, strict=True)
    ]


def _sort(char: str) -> str:
    return "a" if char.isalpha() else "0" if char.isdigit() else char


class TokenTable:
    """Token ids of pieces, flat, with their places."""

    def __init__(self, ids: Sequence[Sequence[int]]):
        self.length = torch.tensor([len(i) for i in ids])  # (pieces,)
        self.start = self.length.cumsum(0) - self.length  # (pieces,)
        self.flat = torch.tensor([i for row in ids for i in row] or [0], dtype=torch.int64)

    def to(self, device: torch.device | str) -> "TokenTable":
        moved = TokenTable.__new__(TokenTable)
        moved.length, moved.start, moved.flat = (t.to(device) for t in (self.length, self.start, self.flat))
        return moved

    def write(self, rows: Tensor, length: int, pad: int = 0, *, check: bool = True) -> tuple[Tensor, Tensor]:
        """(B, P) pieces → ids (B, L), filled up with `pad`, and how many tokens each sentence has (B,).

        The check waits for the device. Leave it out where `Frames.longest` says that all fit, or look at the numbers
        of tokens later: one above L tells of a sentence that was cut.
        """
        ends = self.length[rows].cumsum(1)
        total = ends[:, -1]
        if check and int(total.max()) > length:
            raise TextError(f"a sentence has {int(total.max())} tokens and there is room for {length}", "allow more")
        at = torch.arange(length, device=rows.device).expand(len(rows), length)
        piece = self.piece(rows, length)
        within = at - (ends - self.length[rows]).gather(1, piece)
        places = (self.start[rows].gather(1, piece) + within).clamp_(0, len(self.flat) - 1)
        return torch.where(at < total[:, None], self.flat[places], pad), total

    def piece(self, rows: Tensor, length: int) -> Tensor:
        """(B, P) pieces → (B, L): which of them each token of the sentence is of"""
        ends = self.length[rows].cumsum(1)
        at = torch.arange(length, device=rows.device).expand(len(rows), length)
        return torch.searchsorted(ends, at.contiguous(), right=True).clamp_(max=rows.shape[1] - 1)
