"""Questions about clips as token ids: one turn of fixed length for each question.

Shapes: B clips, Q questions of a clip, S tokens of a turn, P text pieces
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from vitrail.data.clips.clip_questions import ClipQuestions, get_piece_table
from vitrail.data.language.text_pieces import TokenTable
from vitrail.errors import ConfigError
from vitrail.processing.tokenizer import Tokenizer

IGNORE_INDEX = -100


class ClipTurns(NamedTuple):
    """Turns: question, end, answer, end, and end tokens as padding."""

    ids: Tensor  # (B, Q, S)
    targets: Tensor  # (B, Q, S) the next token where it belongs to an answer or is its end, else IGNORE_INDEX
    question_lengths: Tensor  # (B, Q) with the end


class ClipTokenizer:
    """Turns questions about clips into token ids. Token tables are cached per device."""

    def __init__(self, tokenizer: Tokenizer):
        if tokenizer.eos_token_id is None:
            raise ConfigError("answers need an end token, but the tokenizer has none", "use a tokenizer with one")
        self.tokenizer, self.eos_token_id = tokenizer, tokenizer.eos_token_id
        pieces = get_piece_table()
        self._end_row = len(pieces)
        self._tables = {torch.device("cpu"): pieces.tokenize(tokenizer, [self.eos_token_id])}

    def _get_table(self, device: torch.device) -> TokenTable:
        if device not in self._tables:
            self._tables[device] = self._tables[torch.device("cpu")].to(device)
        return self._tables[device]

    def encode(self, questions: ClipQuestions, turn_length: int) -> ClipTurns:
        """Encode questions and their answers as turns; longer turns are truncated, see `measure`."""
        table, shape = self._get_table(questions.kind.device), questions.kind.shape
        rows = torch.cat([pad(questions.question, (0, 1), value=self._end_row), questions.answer], -1)
        rows = pad(rows, (0, 1), value=self._end_row).flatten(0, 1)  # (B·Q, 2P + 2)
        ids, total = table.to_ids(rows, turn_length + 1, self.eos_token_id, check=False)
        question = table.length[rows[:, : questions.question.shape[-1] + 1]].sum(1)
        place = torch.arange(1, turn_length + 1, device=ids.device)
        is_target = (place >= question[:, None]) & (place < total[:, None])
        targets = torch.where(is_target, ids[:, 1:], IGNORE_INDEX)
        return ClipTurns(ids[:, :-1].unflatten(0, shape), targets.unflatten(0, shape), question.view(shape))

    def measure(self, questions: ClipQuestions) -> int:
        """Return the tokens of the longest turn."""
        table = self._get_table(questions.kind.device)
        rows = torch.cat([questions.question, questions.answer], -1)
        return int(table.length[rows].sum(-1).max()) + 2
