"""Chat templates: render messages to text, locate the assistant's spans, and encode ids with a loss mask.

Templates are Jinja, as in model folders. They are untrusted, so they run in a sandbox, and those that are not presets
run in a process with limits. Messages are untrusted too: special tokens spelled inside a message stay plain text.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple, Self

from vitrail.errors import TextError
from vitrail.limited_process import BYTES_VARIABLE, SECONDS_VARIABLE, LimitedProcess, LimitExceededError
from vitrail.processing import template_sandbox
from vitrail.processing.chat_template_presets import PRESETS
from vitrail.processing.template_sandbox import RenderedTemplate
from vitrail.processing.tokenizer import CharSpan, Tokenizer, build_span_mask
from vitrail.processing.tokenizer_files import read_tokenizer_files

Message = Mapping[str, Any]  # {"role": …, "content": a string, or a list of parts {"type": "text", "text": …}}

ROLES = ("system", "developer", "user", "assistant", "tool", "ipython")
CONTENT_TYPES = ("text", "image", "video")
_FIRST_PRIVATE = 0x10F000  # first code point of the search for unused characters
_TRUSTED_SOURCES = frozenset(preset.source for preset in PRESETS.values())
_SHARE_OF_SECONDS = 0.25  # of the time limit of a file, because a conversation is rendered several times
_renderer = LimitedProcess("vitrail.processing.template_sandbox:answer_request")


class EncodedChat(NamedTuple):
    """An encoded conversation. `loss_mask[n]` is True if the model is trained on token n (the assistant's tokens)."""

    text: str
    ids: list[int]
    loss_mask: list[bool]


class ChatTemplate:
    """Chat template that renders a conversation as the text a model was trained on.

    `variables` are passed to the template at every rendering. `special_tokens` must exist in the tokenizer.
    `expansions` replace tokens that the template writes, as processors of transformers do: token → text.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str = "the chat template",
        special_tokens: Sequence[str] = (),
        variables: Mapping[str, Any] | None = None,
        expansions: Mapping[str, str] | None = None,
    ):
        self.source = source
        self.name = name
        self.special_tokens = tuple(special_tokens)
        self.variables = dict(variables or {})
        self.expansions = dict(expansions or {})
        self._is_untrusted = source not in _TRUSTED_SOURCES
        self._marks_generation = self._run(None).marks_generation

    @classmethod
    def from_preset(cls, name: str) -> Self:
        """Return a template of `PRESETS` by name."""
        if name not in PRESETS:
            raise TextError(f"unknown chat template preset {name!r}", f"presets: {', '.join(PRESETS)}")
        row = PRESETS[name]
        return cls(row.source, name=f"the {name} template", special_tokens=row.special_tokens, variables=row.variables)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Load the template of a model folder (see `tokenizer_files.read_chat_templates`)."""
        folder = Path(folder)
        if not folder.is_dir():
            raise TextError(f"{folder} is not a folder", "give the folder with the model's tokenizer files")
        found = read_tokenizer_files(folder)
        templates = found.chat_templates
        where = f"the chat template of {folder}" if templates.file is None else str(templates.file)
        return cls._from_source(templates.default, where, found.named_special_tokens)

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, name: str | None = None) -> Self:
        """Return the template that a tokenizer was loaded with, or one of its `named_chat_templates`."""
        if name is not None:
            source, where = tokenizer.named_chat_templates.get(name), f"the tokenizer's chat template {name!r}"
        else:
            source, where = (
                tokenizer.chat_template,
                str(tokenizer.chat_template_file or "the tokenizer's chat template"),
            )
        return cls._from_source(source, where, tokenizer.named_special_tokens)

    @classmethod
    def _from_source(cls, source: str | None, name: str, special_tokens: Mapping[str, str]) -> Self:
        if source is None:
            raise TextError(f"{name} is missing", f"use ChatTemplate.from_preset(…): {', '.join(PRESETS)}")
        return cls(source, name=name, variables=_token_variables(special_tokens))

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False, **variables: Any) -> str:
        """Render the conversation as text. With `add_generation_prompt`, the text ends with the assistant's prompt."""
        _check_messages(messages)
        return self._render(messages, add_generation_prompt, variables)

    def render_spans(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False, **variables: Any
    ) -> tuple[str, list[CharSpan]]:
        """Render the text and return it with the character spans [start, end) that the assistant writes.

        The spans are the `{% generation %}` blocks of the template. Without these blocks, a span is the text that
        follows the prompt of its turn. A template that later changes a turn raises `TextError`.
        """
        text = self.render(messages, add_generation_prompt=add_generation_prompt, **variables)
        if not self._marks_generation:
            return text, list(self._find_turns(messages, text, variables))
        opening, closing = _find_unused_characters(text, 2)
        marked = self._render(messages, add_generation_prompt, variables, marks=(opening, closing))
        spans, plain, at = [], [], 0
        for segment in marked.split(opening):
            inside, mark, after = segment.partition(closing)
            if mark:
                spans.append((at, at + len(inside)))
            plain += [inside, after]
            at += len(inside) + len(after)
        if "".join(plain) != text or len(spans) != marked.count(opening):
            raise TextError(
                f"{self.name} changes the content of its generation blocks after rendering them",
                "put the generation tags directly around the output, not around filtered or nested text",
            )
        return text, [span for span in spans if span[0] < span[1]]

    def encode(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        *,
        add_generation_prompt: bool = False,
        trusted_roles: Collection[str] = (),
        **variables: Any,
    ) -> EncodedChat:
        """Encode the conversation to ids and a loss mask. With `add_generation_prompt`, the loss mask is all False.

        Special tokens spelled inside a message are plain text, except in messages of `trusted_roles`.
        """
        variables = _token_variables(tokenizer.named_special_tokens) | variables
        if add_generation_prompt:
            text, spans = self.render(messages, add_generation_prompt=True, **variables), []
        else:
            text, spans = self.render_spans(messages, **variables)
        if missing := self.find_missing_tokens(messages, tokenizer, **variables):
            raise TextError(
                f"{self.name} uses special tokens that the tokenizer does not have: {', '.join(missing)}",
                f"call tokenizer.add_special_tokens({missing!r}), and resize the model's embedding",
            )
        literal = self._find_literal_spans(messages, text, tokenizer, add_generation_prompt, trusted_roles, variables)
        ids, offsets = tokenizer.encode_spans(text, literal=literal)
        inside = build_span_mask(text, spans)
        # A token without characters (a word boundary marker) takes the mask of the next character.
        return EncodedChat(text, ids, [any(inside[start : max(end, start + 1)]) for start, end in offsets])

    def find_missing_tokens(self, messages: Sequence[Message], tokenizer: Tokenizer, **variables: Any) -> list[str]:
        """Return the special tokens that these messages need and the tokenizer does not have."""
        _check_messages(messages)
        variables = self.variables | _token_variables(tokenizer.named_special_tokens) | variables
        kinds = {part["type"] for message in messages for part in _parts(message)}
        used = [name for name in ("bos_token", "eos_token") if name in self.source] + sorted(kinds - {"text"})
        needed = [*self.special_tokens, *(variables[name] for name in used if variables.get(name))]
        return [token for token in dict.fromkeys(needed) if token not in tokenizer.special_tokens]

    # ── internals ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _render(
        self,
        messages: Sequence[Message],
        generate: bool,
        variables: Mapping[str, Any],
        *,
        marks: tuple[str, str] | None = None,
        change: Callable[[str, str], str] = lambda _role, text: text,
    ) -> str:
        """Render copies of the messages, with each string passed through `change(role, text)`."""
        copies = [_to_plain_data(message, partial(change, message["role"])) for message in messages]
        hide, expand = self._plan_expansions(copies, marks or ())
        context = {
            "tools": None,
            "documents": None,
            **self.variables,
            **variables,
            "add_generation_prompt": generate,
            "messages": [_to_plain_data(message, hide) for message in copies],
        }
        return expand(self._run(context, marks).text)

    def _plan_expansions(
        self, messages: Sequence[Message], marks: Sequence[str]
    ) -> tuple[Callable[[str], str], Callable[[str], str]]:
        """Return a function that hides the tokens in `expansions` inside of messages, and one that expands the others.

        The second function shows the hidden tokens again.
        """
        if not self.expansions:
            return str, str
        strings = [self.source, *marks]
        for message in messages:
            _to_plain_data(message, lambda string: strings.append(string) or string)
        unused = _find_unused_characters("".join(strings), len(self.expansions))
        hidden = {token: mark + token[1:] for token, mark in zip(self.expansions, unused, strict=True)}
        return partial(_replace_all, replacements=hidden), lambda text: _replace_all(
            _replace_all(text, self.expansions), {stand_in: token for token, stand_in in hidden.items()}
        )

    def _run(self, context: Mapping[str, Any] | None, marks: tuple[str, str] | None = None) -> RenderedTemplate:
        """Render the template, or only compile it. A template that is not a preset runs in a limited process."""
        request = (self.source, context, marks, template_sandbox.MAX_STEPS)
        if self._is_untrusted:
            plain = None if context is None else _to_plain_data(context, str)
            try:
                found = RenderedTemplate(*_renderer.call((self.source, plain, *request[2:]), _SHARE_OF_SECONDS))
            except LimitExceededError as error:
                raise TextError(
                    f"{self.name} {error}",
                    f"do not use this template, or raise the limit ({SECONDS_VARIABLE}, {BYTES_VARIABLE})",
                ) from None
        else:
            found = template_sandbox.render_template(*request)
        place = self.name if found.line is None else f"{self.name}, line {found.line}"
        match found.error:
            case "":
                return found
            case "syntax":
                raise TextError(f"{place}: {found.message}", "fix the template at that line")
            case "refusal":
                raise TextError(f"{place} rejects the messages: {found.message}", "change the messages or the template")
            case "undefined":
                remedy = "pass it to render(…, name=value), or add the key to the message"
                raise TextError(f"{place}: {found.message}", remedy)
            case "unsafe":
                raise TextError(f"{place} does something unsafe: {found.message}", "do not use this template")
            case _:
                raise TextError(f"{place}: {found.message}", "fix the template or the messages")

    def _find_turns(self, messages: Sequence[Message], text: str, variables: Mapping[str, Any]) -> Iterator[CharSpan]:
        """Yield the assistant's spans in a template without generation blocks."""
        for n, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            try:
                turn = self._find_turn(messages[: n + 1], text, variables)
                reason = f"messages[{n}] renders differently in the prompt, in its turn and in the whole text"
            except TextError as error:
                turn, reason = None, f"it cannot end at messages[{n}]: {error.problem}"
            if turn is None:
                raise TextError(
                    f"{self.name} does not separate the assistant's text: {reason}",
                    "put {% generation %} … {% endgeneration %} around it in the template",
                )
            yield turn

    def _find_turn(self, messages: Sequence[Message], text: str, variables: Mapping[str, Any]) -> CharSpan | None:
        """Return the span that the last message adds to its prompt, or None if the whole text differs."""
        prompt = self._render(messages[:-1], True, variables)
        turn = self._render(messages, False, variables)
        if not (text.startswith(turn) and turn.startswith(prompt)):
            return None
        if prompt == self._render(messages[:-1], False, variables):
            # The template ignores `add_generation_prompt`. It may end every text with a prompt, which the assistant
            # does not write. In that case, the user's next turn does not continue the text.
            next_turn = self._render([*messages, {"role": "user", "content": "?"}], False, variables)
            if not next_turn.startswith(turn):
                return None
        return len(prompt), len(turn)

    def _find_literal_spans(
        self,
        messages: Sequence[Message],
        text: str,
        tokenizer: Tokenizer,
        generate: bool,
        trust: Collection[str],
        variables: Mapping[str, Any],
    ) -> list[CharSpan]:
        """Return the spans of the text where a message, not the template, spells the start of a special token.

        The method replaces their first characters by unused characters and locates those in the rendering. A string
        that ends in part of a special token counts too, because the next part of the message could complete it.
        """
        strings: list[tuple[str, str]] = []
        for message in messages:
            _to_plain_data(message, lambda string, role=message["role"]: strings.append((role, string)) or string)
        firsts = {s[at] for role, s in strings if role not in trust for at in tokenizer.find_special_tokens(s)}
        if not firsts:
            return []
        unused = _find_unused_characters("".join([text, *(string for _, string in strings)]), len(firsts))
        swap = dict(zip(sorted(firsts), unused, strict=True))
        back = {ord(stand_in): char for char, stand_in in swap.items()}

        def hide(role: str, string: str) -> str:
            chars = list(string)
            for at in () if role in trust else tokenizer.find_special_tokens(string):
                chars[at] = swap[chars[at]]
            return "".join(chars)

        masked = self._render(messages, generate, variables, change=hide)
        if masked.translate(back) != text:
            raise TextError(
                f"{self.name} handles a special token inside a message specially",
                "remove the token from the message, or add the message's role to trusted_roles",
            )
        return [(at, at + 1) for at, char in enumerate(masked) if ord(char) in back]


# ── messages ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _check_messages(messages: Sequence[Message]) -> None:
    for n, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TextError(
                f"messages[{n}] is a {type(message).__name__}, not a dict", 'give {"role": …, "content": …}'
            )
        role = message.get("role")
        if role not in ROLES:
            raise TextError(f"messages[{n}] has the unknown role {role!r}", f"roles: {', '.join(ROLES)}")
        content = message.get("content")
        # A message with tool calls may have no content.
        if isinstance(content, str) or (content is None and "tool_calls" in message):
            continue
        if not isinstance(content, (list, tuple)):
            raise TextError(f"messages[{n}] has no content", "give a string, or a list of parts")
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else part
            if kind not in CONTENT_TYPES or (kind == "text" and not isinstance(part.get("text"), str)):
                raise TextError(
                    f"messages[{n}] has an invalid part: {kind!r}",
                    'parts are {"type": "text", "text": …}, {"type": "image"} and {"type": "video"}',
                )


def _parts(message: Message) -> Sequence[Mapping[str, Any]]:
    content = message.get("content")
    return () if content is None or isinstance(content, str) else content


def _to_plain_data(value: Any, change: Callable[[str], str]) -> Any:
    """Return a copy in plain data with each string changed, so that a template cannot access images or objects."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        names = ("role", "type")  # in a message; in the schema of a tool, `type` can be a list
        return {
            str(k): str(v) if k in names and isinstance(v, str) else _to_plain_data(v, change) for k, v in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_to_plain_data(item, change) for item in value]
    return value if value is None or isinstance(value, (bool, int, float)) else type(value).__name__


def _replace_all(text: str, replacements: Mapping[str, str]) -> str:
    for old, new in replacements.items():
        text = text.replace(old, new)
    return text


def _token_variables(tokens: Mapping[str, str]) -> dict[str, Any]:
    return {f"{role}_token": token for role, token in tokens.items()}


def _find_unused_characters(text: str, n: int) -> list[str]:
    """Return `n` characters that do not occur in the text."""
    used = set(text)
    return list(islice((char for char in map(chr, count(_FIRST_PRIVATE)) if char not in used), n))
