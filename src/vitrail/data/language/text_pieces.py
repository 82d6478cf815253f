"""Text pieces: a sentence is a row of piece indices, which converts to text or to token ids.

Conversion to token ids uses only tensors, so a GPU can write millions of sentences without strings.

Shapes: B sentences, P pieces per sentence, L tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vitrail.errors import TextError
from vitrail.processing.tokenizer import Tokenizer


class PieceTable:
    """Table of unique strings. Row 0 is the empty piece, which can occur anywhere in a sentence.

    Every piece either starts a sentence or begins with a space. Tokenizers start a word at a space, so concatenated
    ids of the pieces are the ids of the sentence.
    """

    def __init__(self) -> None:
        self.texts: list[str] = [""]
        self._row: dict[str, int] = {"": 0}

    def __len__(self) -> int:
        return len(self.texts)

    def add(self, text: str) -> int:
        """Return the row of a string, and append it if it is new."""
        if text not in self._row:
            self._row[text] = len(self.texts)
            self.texts.append(text)
        return self._row[text]

    def add_all(self, texts: Sequence[str]) -> Tensor:
        """Return the rows (n,) of strings, and append new ones."""
        return torch.tensor([self.add(text) for text in texts], dtype=torch.int64)

    def to_texts(self, rows: Tensor) -> list[str]:
        """Convert rows of pieces (B, P) to B sentences."""
        return ["".join(self.texts[i] for i in row) for row in rows.tolist()]

    def tokenize(self, tokenizer: Tokenizer, *extra_rows: Sequence[int]) -> "TokenTable":
        """Convert the table to token ids. `extra_rows` are additional rows of ids, such as prefixes of sentences.

        Raises an error if a piece has different ids inside a sentence.
        """
        ids = [[], *_encode_in_context(tokenizer, self.texts[1:])]
        seams = self._representative_pairs()
        for (left, right), whole in zip(seams, _encode_in_context(tokenizer, [a + b for a, b in seams]), strict=True):
            if whole != ids[self._row[left]] + ids[self._row[right]]:
                raise TextError(
                    f"the tokenizer encodes {left + right!r} differently from {left!r} followed by {right!r}",
                    "use a tokenizer that starts a word at every space, and pieces that begin with a space",
                )
        return TokenTable([*ids, *extra_rows])

    def _representative_pairs(self) -> list[tuple[str, str]]:
        """Return representative pairs: each piece on both sides once, each sort of end with each sort of start."""
        texts = [text for text in self.texts if text.strip()]  # without pieces of only spaces
        follow = [text for text in texts if text[:1] == " "]
        ends = {_char_class(text[-1]): text for text in texts}
        starts = {tuple(map(_char_class, text[:2])): text for text in follow}
        every = [(end, start) for end in ends.values() for start in starts.values()]
        if not follow:
            return every
        return every + [(text, follow[0]) for text in texts] + [(follow[0], text) for text in follow]


def _encode_in_context(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Encode texts as they appear in a sentence: a text that begins with a space follows another text.

    SentencePiece adds a space before every text, so the ids of such a text differ if it is encoded alone.
    """
    first = "a"
    lead = tokenizer.encode(first)
    found = tokenizer.encode_batch([first + text if text[:1] == " " else text for text in texts])
    return [
        ids[len(lead) :] if text[:1] == " " and ids[: len(lead)] == lead else ids
        for text, ids in zip(texts, found, strict=True)
    ]


def _char_class(char: str) -> str:
    return "a" if char.isalpha() else "0" if char.isdigit() else char


class TokenTable:
    """Token ids of all pieces in one flat tensor, with the start and length of each piece."""

    def __init__(self, ids: Sequence[Sequence[int]]):
        self.length = torch.tensor([len(i) for i in ids])  # (pieces,)
        self.start = self.length.cumsum(0) - self.length  # (pieces,)
        self.ids = torch.tensor([i for row in ids for i in row] or [0], dtype=torch.int64)

    def to(self, device: torch.device | str) -> "TokenTable":
        moved = TokenTable.__new__(TokenTable)
        moved.length, moved.start, moved.ids = (t.to(device) for t in (self.length, self.start, self.ids))
        return moved

    def to_ids(self, rows: Tensor, length: int, pad: int = 0, *, check: bool = True) -> tuple[Tensor, Tensor]:
        """Convert pieces (B, P) to ids (B, L), padded with `pad`, and return the number of tokens per sentence (B,).

        The length check synchronizes with the device. Disable it if `CompiledTemplates.max_tokens` guarantees the
        length, or check the returned numbers later: a number above L means that the sentence was truncated.
        """
        ends = self.length[rows].cumsum(1)
        total = ends[:, -1]
        if check and int(total.max()) > length:
            raise TextError(f"a sentence has {int(total.max())} tokens, more than {length}", "raise the length")
        at = torch.arange(length, device=rows.device).expand(len(rows), length)
        piece = self.piece_of_token(rows, length)
        within = at - (ends - self.length[rows]).gather(1, piece)
        places = (self.start[rows].gather(1, piece) + within).clamp_(0, len(self.ids) - 1)
        return torch.where(at < total[:, None], self.ids[places], pad), total

    def piece_of_token(self, rows: Tensor, length: int) -> Tensor:
        """Return the index of the piece of each token (B, L), for pieces (B, P)."""
        ends = self.length[rows].cumsum(1)
        at = torch.arange(length, device=rows.device).expand(len(rows), length)
        return torch.searchsorted(ends, at.contiguous(), right=True).clamp_(max=rows.shape[1] - 1)
