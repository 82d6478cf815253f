"""Stop conditions and streamed text of one generated row."""

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Literal

from vitrail.errors import ConfigError

if TYPE_CHECKING:  # the tokenizers library is optional here
    from vitrail.processing.tokenizer import Tokenizer

FinishReason = Literal["stop", "string", "length"]
"""Why a row ended: a stop id, a stop string, or the token limit."""


class RowState:
    """State of one generated row: remaining tokens, stop conditions and text."""

    def __init__(
        self,
        prompt: list[int],
        max_new_tokens: int,
        stop_ids: Sequence[int],
        stop_strings: Sequence[str],
        tokenizer: "Tokenizer | None",
    ):
        if stop_strings and tokenizer is None:
            raise ConfigError("stop_strings need a tokenizer", "pass the tokenizer")
        if isinstance(stop_strings, str) or not all(stop_strings):
            raise ConfigError(f"stop_strings is {stop_strings!r}", "give a list of non-empty strings")
        self.tokens_left, self.stop_ids = max_new_tokens, frozenset(stop_ids)
        self.text_filter = None if tokenizer is None else StopStringFilter(tokenizer, prompt, stop_strings)
        self.finish_reason: FinishReason | None = None

    def push(self, id: int) -> str:
        self.tokens_left -= 1
        released = ""
        if id in self.stop_ids:
            self.finish_reason = "stop"
        elif self.text_filter is not None:
            released, stopped = self.text_filter.push(id)
            if stopped:
                self.finish_reason = "string"
                return released
        if self.finish_reason is None and not self.tokens_left:
            self.finish_reason = "length"
        return released + self.text_filter.finish() if self.finish_reason and self.text_filter is not None else released


class StopStringFilter:
    """Stream the text of generated ids without the prompt, incomplete characters or stop strings.

    A row stops as soon as the text of its ids contains a stop string. The stop string that is complete first counts,
    so the result does not depend on the tokenization.
    """

    def __init__(self, tokenizer: "Tokenizer", prompt: list[int], stop_strings: Sequence[str]):
        self.stop_strings = stop_strings
        # The text of a token depends on the tokens before it, so the decoder processes the prompt first. The text that
        # it then holds back is the end of the prompt, which precedes the first generated text.
        self.decoder = tokenizer.create_decoder(skip_special_tokens=True)
        for id in prompt:
            self.decoder.push(id)
        self.prompt_tail = self._peek_held_text()
        self.held_text = ""  # generated text that may be the beginning of a stop string

    def push(self, id: int) -> tuple[str, bool]:
        """Return the text that is complete now, and whether a stop string ended the row."""
        self._append(self.decoder.push(id))
        if not self.stop_strings:
            return self._release(len(self.held_text)), False
        # Include held-back bytes: in some vocabularies a newline is a byte token.
        text = self.held_text + self._strip_prompt_tail(self._peek_held_text())
        found = [(at + len(stop), at) for stop in self.stop_strings if (at := text.find(stop)) >= 0]
        if found:
            return text[: min(found)[1]], True
        # Hold back the longest suffix that can become a stop string.
        for at in range(max(0, len(self.held_text) - max(map(len, self.stop_strings)) + 1), len(self.held_text)):
            if any(stop.startswith(self.held_text[at:]) for stop in self.stop_strings):
                return self._release(at), False
        return self._release(len(self.held_text)), False

    def finish(self) -> str:
        """Return the text held back, at the end of the row."""
        self._append(self.decoder.finish())
        return self._release(len(self.held_text))

    def _peek_held_text(self) -> str:
        return copy(self.decoder).finish()

    def _strip_prompt_tail(self, text: str) -> str:
        """Return the text after the prefix shared with the end of the prompt."""
        prefix = 0
        while prefix < min(len(text), len(self.prompt_tail)) and text[prefix] == self.prompt_tail[prefix]:
            prefix += 1
        return text[prefix:]

    def _append(self, text: str) -> None:
        if text:
            self.held_text += self._strip_prompt_tail(text)
            self.prompt_tail = ""

    def _release(self, end: int) -> str:
        released, self.held_text = self.held_text[:end], self.held_text[end:]
        return released
