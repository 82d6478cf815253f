"""Constrained decoding: a grammar allows some tokens at each step, so that an answer is JSON or a tool call.

llguidance computes the masks. Schemas are untrusted, so a grammar is compiled first in a process with limits.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vitrail.errors import ConfigError, VitrailError
from vitrail.limited_process import LimitedProcess, LimitExceededError
from vitrail.processing.tokenizer import Tokenizer

MAX_SCHEMA_CHARACTERS = 1 << 16
MAX_CACHED_GRAMMARS = 32
SHARE_OF_SECONDS = 0.2  # of the time limit of a file, to compile a grammar
WHITE_SPACE = r"[ \n]{0,16}"  # between the parts of a JSON value: bounded, so that an answer ends
JSON_OPTIONS = {"whitespace_pattern": WHITE_SPACE, "lenient": False, "coerce_one_of": False}
LIMITS = {"max_grammar_size": 100_000, "max_lexer_states": 50_000, "verbose_errors": False}
OPTIONS_KEY = "x-guidance"  # with which a schema could change the options

_compiler = LimitedProcess("vitrail.serve.token_constraints:check_grammar")


class ConstraintError(VitrailError):
    """A schema that is not supported or too complex."""


def import_llguidance() -> Any:
    """Import llguidance, or raise an error that names the extra."""
    try:
        import llguidance  # pyrefly: ignore[missing-import]
    except ImportError:
        raise ConfigError(
            "JSON output and tools need llguidance, which the server does not have", "pip install 'vitrail[serve]'"
        ) from None
    return llguidance


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise an error if a schema is too large or sets options of the compiler."""
    if (length := len(json.dumps(schema))) > MAX_SCHEMA_CHARACTERS:
        raise ConstraintError(
            f"the schema has {length:,} characters", f"give one of at most {MAX_SCHEMA_CHARACTERS:,} characters"
        )
    if OPTIONS_KEY in schema:
        raise ConstraintError(f"the schema has the key {OPTIONS_KEY!r}", "remove it")


def build_json_grammar(schema: Mapping[str, Any]) -> str:
    """Build the grammar of the JSON values of a schema."""
    check_schema(schema)
    return import_llguidance().LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON_OPTIONS)


def embed_schema(schema: Mapping[str, Any]) -> str:
    """Return the JSON values of a schema as a part of a Lark grammar."""
    check_schema(schema)
    return f"%json {json.dumps({**schema, OPTIONS_KEY: JSON_OPTIONS})}"


def check_grammar(grammar: str) -> str:
    """Compile a grammar and return its error, or an empty text. Runs in the process with limits."""
    llguidance = import_llguidance()
    limits = llguidance.LLParserLimits(**LIMITS)
    found, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, None, limits=limits)
    return messages[0] if found else ""


class TokenConstraint:
    """State of a grammar in one answer."""

    def __init__(self, matcher: Any):
        self._matcher = matcher

    def copy(self) -> "TokenConstraint":
        """Return the same state for another answer."""
        return TokenConstraint(self._matcher.deep_copy())

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow the tokens so far."""
        return bool(self._matcher.is_stopped())

    def compute_mask(self) -> np.ndarray:
        """Return the allowed tokens, one bit each, in words of 32 bits. After an error all are allowed."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
        return np.full_like(mask, -1) if self._matcher.is_error() else mask

    def push(self, id: int) -> ConstraintError | None:
        """Add a token. Returns an error if the grammar exceeded its limits."""
        if self._matcher.consume_token(id):
            return None
        return ConstraintError("the schema is too complex to follow", "simplify its patterns and unions")


class ConstraintCompiler:
    """Compile grammars for a tokenizer. `stop_ids` end an answer where the grammar allows it."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: Sequence[int]):
        self.tokenizer, self.stop_ids = tokenizer, stop_ids
        self._lock = threading.Lock()
        self._vocabulary: Any = None
        self._cache: OrderedDict[str, Any] = OrderedDict()

    def compile(self, grammar: str) -> TokenConstraint:
        """Compile a grammar, or return a copy of one that was compiled before."""
        with self._lock:
            if grammar in self._cache:
                self._cache.move_to_end(grammar)
                return TokenConstraint(self._cache[grammar].deep_copy())
        llguidance = import_llguidance()
        try:
            problem = _compiler.call(grammar, SHARE_OF_SECONDS)
        except LimitExceededError as error:
            raise ConstraintError(f"compiling the schema {error}", "simplify it") from None
        if problem:
            raise ConstraintError(f"the schema is not supported: {problem[:500]}", "see docs/serving.md")
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._build_vocabulary(llguidance)
            matcher = llguidance.LLMatcher(
                self._vocabulary, grammar, log_level=0, limits=llguidance.LLParserLimits(**LIMITS)
            )
            matcher.compute_bitmask()
            if matcher.is_error():
                raise ConstraintError(f"the schema is not supported: {matcher.get_error()[:500]}", "simplify it")
            self._cache[grammar] = matcher
            while len(self._cache) > MAX_CACHED_GRAMMARS:
                self._cache.popitem(last=False)
            return TokenConstraint(matcher.deep_copy())

    def _build_vocabulary(self, llguidance: Any) -> Any:
        """Build the tokens for the library.

        The library takes every added token in angle brackets for a special one. Those that are not, such as
        `<tool_call>` of Qwen, are text here.
        """
        tokenizer, size = self.tokenizer, self.tokenizer.vocab_size
        # Without a stop id, an id beyond the vocabulary stands for the end, which the sampler never selects.
        ends = list(self.stop_ids) or [size]
        count, source = max(size, *ends) + 1, tokenizer.to_json()
        special = set(tokenizer.special_tokens.values()) | set(ends)
        added = {one["content"]: one["id"] for one in json.loads(source)["added_tokens"] if one["id"] not in special}
        try:
            found = llguidance.LLTokenizer(source, n_vocab=count, eos_token=ends)
            if not added:
                return found
            tokens = [found.decode_bytes([id]) for id in range(count)]
            for text, id in added.items():
                tokens[id] = text.encode()
            plain = llguidance.TokenizerWrapper(_PlainTokens(found, tokens, added, ends[0], sorted(special)))
            return llguidance.LLTokenizer(plain, n_vocab=count, eos_token=ends)
        except Exception as error:  # a kind of tokenizer that the library does not read
            raise ConstraintError(
                f"the tokenizer of this model supports no schemas ({str(error)[:200]})", "ask for plain text"
            ) from None


class _PlainTokens:
    """Tokens of which the added ones are text, with the names that llguidance reads."""

    bos_token_id = None

    def __init__(
        self, base: Any, tokens: list[bytes], added: dict[str, int], eos_token_id: int, special_token_ids: list[int]
    ):
        self.base, self.tokens, self.added = base, tokens, added
        self.eos_token_id, self.special_token_ids = eos_token_id, special_token_ids
        longest_first = sorted(added, key=len, reverse=True)
        self.pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self.pattern.split(text):
            ids += [self.added[piece]] if piece in self.added else self.base.tokenize_str(piece)
        return ids
