"""One row of a generation: the text that can be shown of it, and where it ends."""

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Literal

from vitrail.errors import ConfigError

if TYPE_CHECKING:  # a machine that only computes has no tokenizers
    from vitrail.processing.text import Tokenizer

Ended = Literal["stop", "string", "length"]
"""Why a row ended: a stop id, a stop string, or as many tokens as it may have."""


class Row:
    """Follows one row: what it may show, and whether it goes on."""

    def __init__(
        self,
        prompt: list[int],
        limit: int,
        stop_ids: Sequence[int],
        stop_strings: Sequence[str],
        tokenizer: "Tokenizer | None",
    ):
        if stop_strings and tokenizer is None:
            raise ConfigError("stop strings are found in text", "give the tokenizer too")
        if isinstance(stop_strings, str) or not all(stop_strings):
            raise ConfigError(f"stop_strings is {stop_strings!r}", "give a list of strings that are not empty")
        self.left, self.stop_ids = limit, frozenset(stop_ids)
        self.text = None if tokenizer is None else Text(tokenizer, prompt, stop_strings)
        self.ended: Ended | None = None

    def push(self, id: int) -> str:
        self.left -= 1
        shown = ""
        if id in self.stop_ids:
            self.ended = "stop"
        elif self.text is not None:
            shown, stopped = self.text.push(id)
            if stopped:
                self.ended = "string"
                return shown
        if self.ended is None and not self.left:
            self.ended = "length"
        return shown + self.text.finish() if self.ended and self.text is not None else shown


class Text:
    """Ids to text that can be shown: whole characters, nothing of the prompt, nothing of a stop string.

    A row stops as soon as the text of all its ids spells a stop string. Of several, the one complete first counts, so
    that it does not matter how the text is cut into tokens.
    """

    def __init__(self, tokenizer: "Tokenizer", prompt: list[int], stops: Sequence[str]):
        self.stops = stops
        # A token's text depends on what stands before it, so the decoder reads the prompt first. What it then holds
        # back is the prompt's own end, and comes out again in front of the first text of ours.
        self.decoder = tokenizer.decoder(skip_specials=True)
        for id in prompt:
            self.decoder.push(id)
        self.tail = self._held()
        self.waiting = ""  # ours, and perhaps the beginning of a stop string

    def push(self, id: int) -> tuple[str, bool]:
        """The text that can be shown now, and whether a stop string ended it."""
        self._add(self.decoder.push(id))
        if not self.stops:
            return self._show(len(self.waiting)), False
        # Bytes held back in the hope of a character count as they stand: a line end is one in some vocabularies.
        text = self.waiting + self._own(self._held())
        found = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            return text[: min(found)[1]], True
        # Hold back the longest end that may yet become a stop string.
        for at in range(max(0, len(self.waiting) - max(map(len, self.stops)) + 1), len(self.waiting)):
            if any(stop.startswith(self.waiting[at:]) for stop in self.stops):
                return self._show(at), False
        return self._show(len(self.waiting)), False

    def finish(self) -> str:
        """All that was held back, once nothing more can come."""
        self._add(self.decoder.finish())
        return self._show(len(self.waiting))

    def _held(self) -> str:
        return copy(self.decoder).finish()

    def _own(self, text: str) -> str:
        """What comes after the part shared with the prompt's end."""
        shared = 0
        while shared < min(len(text), len(self.tail)) and text[shared] == self.tail[shared]:
            shared += 1
        return text[shared:]

    def _add(self, text: str) -> None:
        if text:
            self.waiting += self._own(text)
            self.tail = ""

    def _show(self, end: int) -> str:
        shown, self.waiting = self.waiting[:end], self.waiting[end:]
        return shown
