"""Chat templates: messages to one text, to the spans the assistant wrote, and to ids with a loss mask.

Templates are Jinja, as model folders carry them, and run in a sandbox: they come from strangers. So do messages, so
special tokens spelled inside a message stay plain text.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple, Self

import jinja2
from jinja2.sandbox import SecurityError

from vitrail.errors import TextError
from vitrail.processing.sandbox import MARKS, STEPS, Refusal, Sandbox
from vitrail.processing.sidecar import read_sidecar
from vitrail.processing.templates import PRESETS
from vitrail.processing.text import Span, Tokenizer, mark_spans

Message = Mapping[str, Any]  # {"role": …, "content": a string, or a list of parts {"type": "text", "text": …}}

ROLES = ("system", "developer", "user", "assistant", "tool", "ipython")
PARTS = ("text", "image", "video")
_PRIVATE = 0x10F000  # where the search for a character that nobody uses begins


class Chat(NamedTuple):
    """A conversation ready for a model: `loss[n]` says whether token n is the assistant's to learn."""

    text: str
    ids: list[int]
    loss: list[bool]


class ChatTemplate:
    """Writes a conversation as the text a model was trained on.

    `variables` are given to the template at every rendering; `specials` are tokens that a tokenizer must know.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str = "the chat template",
        specials: Sequence[str] = (),
        variables: Mapping[str, Any] | None = None,
    ):
        self.source = source
        self.name = name
        self.specials = tuple(specials)
        self.variables = dict(variables or {})
        self._sandbox = Sandbox()
        try:
            self._template = self._sandbox.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TextError(f"{name}, line {error.lineno}: {error.message}", "mend the template there") from None
        except RecursionError:
            raise TextError(f"{name} is nested too deeply", "use a simpler template") from None

    @classmethod
    def preset(cls, name: str) -> Self:
        """One of `PRESETS`."""
        if name not in PRESETS:
            raise TextError(f"there is no chat preset {name!r}", f"presets: {', '.join(PRESETS)}")
        row = PRESETS[name]
        return cls(row.source, name=f"the {name} template", specials=row.specials, variables=row.variables)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """The template of a model folder: chat_template.jinja, chat_template.json or tokenizer_config.json."""
        folder = Path(folder)
        if not folder.is_dir():
            raise TextError(f"{folder} is no folder", "give the folder that holds the model's tokenizer files")
        return cls._from(read_sidecar(folder), f"the chat template of {folder}")

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """The template that came with a tokenizer."""
        return cls._from(tokenizer, "the tokenizer's chat template")

    @classmethod
    def _from(cls, holder: Any, name: str) -> Self:
        if holder.chat_template is None:
            raise TextError(f"{name} is missing", f"use ChatTemplate.preset(…): {', '.join(PRESETS)}")
        return cls(holder.chat_template, name=name, variables=_token_variables(holder.named))

    def render(self, messages: Sequence[Message], *, generate: bool = False, **variables: Any) -> str:
        """The conversation as text; with `generate` it ends where the assistant is to go on."""
        _check(messages)
        return self._run(messages, generate, variables)

    def render_spans(
        self, messages: Sequence[Message], *, generate: bool = False, **variables: Any
    ) -> tuple[str, list[Span]]:
        """The text, and the characters [start, end) of it that the assistant is to write.

        They are what the template puts inside `{% generation %}`. In a template without that tag, a turn is what
        follows the exact prompt a model would be given there; a template that later rewrites a turn is refused.
        """
        text = self.render(messages, generate=generate, **variables)
        if not self._sandbox.marks_generation:
            return text, list(self._turns(messages, text, variables))
        opening, closing = _unused(text, 2)
        marked = self._run(messages, generate, variables, marks=(opening, closing))
        spans, plain, at = [], [], 0
        for segment in marked.split(opening):
            inside, mark, after = segment.partition(closing)
            if mark:
                spans.append((at, at + len(inside)))
            plain += [inside, after]
            at += len(inside) + len(after)
        if "".join(plain) != text or len(spans) != marked.count(opening):
            raise TextError(
                f"{self.name} changes what stands inside its generation tags after the fact",
                "put the tags where the text is written out, not around text that is filtered or nested",
            )
        return text, [span for span in spans if span[0] < span[1]]

    def encode(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        *,
        generate: bool = False,
        trust: Collection[str] = (),
        **variables: Any,
    ) -> Chat:
        """Ids and loss mask; with `generate` it is a prompt, and nothing in it is to be learnt.

        Special tokens spelled inside a message are plain text, save in the roles of `trust`.
        """
        variables = _token_variables(tokenizer.named) | variables
        if generate:
            text, spans = self.render(messages, generate=True, **variables), []
        else:
            text, spans = self.render_spans(messages, **variables)
        if missing := self.missing(messages, tokenizer, **variables):
            raise TextError(
                f"{self.name} writes special tokens that the tokenizer does not have: {', '.join(missing)}",
                f"tokenizer.add_specials({missing!r}), and give the model's embedding rows for them",
            )
        literal = self._literal(messages, text, tokenizer, generate, trust, variables)
        ids, offsets = tokenizer.encode_spans(text, literal=literal)
        inside = mark_spans(text, spans)
        # A token without characters of its own (a word mark) goes with the character it stands before.
        return Chat(text, ids, [any(inside[start : max(end, start + 1)]) for start, end in offsets])

    def missing(self, messages: Sequence[Message], tokenizer: Tokenizer, **variables: Any) -> list[str]:
        """The special tokens that a preset writes for these messages and the tokenizer does not have."""
        _check(messages)
        variables = self.variables | _token_variables(tokenizer.named) | variables
        kinds = {part["type"] for message in messages for part in _parts(message)}
        used = [name for name in ("bos_token", "eos_token") if name in self.source] + sorted(kinds - {"text"})
        needed = [*self.specials, *(variables[name] for name in used if variables.get(name))]
        return [token for token in dict.fromkeys(needed) if token not in tokenizer.specials]

    # ── within ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(
        self,
        messages: Sequence[Message],
        generate: bool,
        variables: Mapping[str, Any],
        *,
        marks: tuple[str, str] | None = None,
        change: Callable[[str, str], str] = lambda role, text: text,
    ) -> str:
        """Render copies of the messages, each string of a role changed first."""
        context = {
            "tools": None,
            "documents": None,
            **self.variables,
            **variables,
            STEPS: count(1),
            MARKS: marks,
            "add_generation_prompt": generate,
            "messages": [_plain(message, partial(change, message["role"])) for message in messages],
        }
        try:
            return self._template.render(context)
        except Refusal as error:
            raise TextError(
                f"{self.name} refuses the messages: {error}", "change the messages or the template"
            ) from None
        except jinja2.UndefinedError as error:
            remedy = "give it: render(…, name=value), or a key of the message"
            raise TextError(f"{self._where(error)}: {error}", remedy) from None
        except SecurityError as error:
            raise TextError(f"{self._where(error)} does what none may: {error}", "do not use this template") from None
        except Exception as error:  # a template is foreign code: it may fail in any way
            reason = f"{type(error).__name__}: {error}"
            raise TextError(f"{self._where(error)}: {reason}", "mend the template or the messages") from None

    def _where(self, error: BaseException) -> str:
        """The template and the line in it that an error came from."""
        line, frame = None, error.__traceback__
        while frame is not None:
            if frame.tb_frame.f_code.co_filename == "<template>":
                line = frame.tb_lineno
            frame = frame.tb_next
        return self.name if line is None else f"{self.name}, line {line}"

    def _turns(self, messages: Sequence[Message], text: str, variables: Mapping[str, Any]) -> Iterator[Span]:
        """The assistant's turns of a template without generation tags."""
        for n, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            try:
                turn = self._turn(messages[: n + 1], text, variables)
                reason = f"it writes messages[{n}] otherwise than when it prompts for it or goes on from it"
            except TextError as error:
                turn, reason = None, f"it cannot end at messages[{n}]: {error.problem}"
            if turn is None:
                raise TextError(
                    f"{self.name} does not tell the assistant's words apart: {reason}",
                    "put {% generation %} … {% endgeneration %} around them in the template",
                )
            yield turn

    def _turn(self, messages: Sequence[Message], text: str, variables: Mapping[str, Any]) -> Span | None:
        """What the last message adds to the prompt for it, if the whole text has it so."""
        prompt = self._run(messages[:-1], True, variables)
        turn = self._run(messages, False, variables)
        if not (text.startswith(turn) and turn.startswith(prompt)):
            return None
        if prompt == self._run(messages[:-1], False, variables):
            # The template does not heed `generate`: it may end every text with a prompt, which is not the assistant's.
            # Then the user's next turn would not go on from there.
            next_turn = self._run([*messages, {"role": "user", "content": "?"}], False, variables)
            if not next_turn.startswith(turn):
                return None
        return len(prompt), len(turn)

    def _literal(
        self,
        messages: Sequence[Message],
        text: str,
        tokenizer: Tokenizer,
        generate: bool,
        trust: Collection[str],
        variables: Mapping[str, Any],
    ) -> list[Span]:
        """Where in the text a message, not the template, spells the start of a special token.

        Their first characters are swapped for ones that nobody uses, and found again in the rendering. A string that
        ends in half a special token counts too: the next part of the message could complete it.
        """
        said: list[tuple[str, str]] = []
        for message in messages:
            _plain(message, lambda string, role=message["role"]: said.append((role, string)) or string)
        firsts = {s[at] for role, s in said if role not in trust for at in tokenizer.spelled(s)}
        if not firsts:
            return []
        unused = _unused("".join([text, *(string for _, string in said)]), len(firsts))
        swap = dict(zip(sorted(firsts), unused, strict=True))
        back = {ord(stand_in): char for char, stand_in in swap.items()}

        def hide(role: str, string: str) -> str:
            chars = list(string)
            for at in () if role in trust else tokenizer.spelled(string):
                chars[at] = swap[chars[at]]
            return "".join(chars)

        masked = self._run(messages, generate, variables, change=hide)
        if masked.translate(back) != text:
            raise TextError(
                f"{self.name} treats a special token inside a message in a way of its own",
                "remove it from the message, or name the message's role in trust",
            )
        return [(at, at + 1) for at, char in enumerate(masked) if ord(char) in back]


# ── messages ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _check(messages: Sequence[Message]) -> None:
    for n, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TextError(f"messages[{n}] is no dict but {type(message).__name__}", 'give {"role": …, "content": …}')
        role = message.get("role")
        if role not in ROLES:
            raise TextError(f"messages[{n}] has an unknown role {role!r}", f"roles: {', '.join(ROLES)}")
        content = message.get("content")
        # A call of a tool may stand alone.
        if isinstance(content, str) or (content is None and "tool_calls" in message):
            continue
        if not isinstance(content, (list, tuple)):
            raise TextError(f"messages[{n}] has no content", "give a string, or a list of parts")
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else part
            if kind not in PARTS or (kind == "text" and not isinstance(part.get("text"), str)):
                raise TextError(
                    f"messages[{n}] has a part that is none: {kind!r}",
                    'parts are {"type": "text", "text": …}, {"type": "image"} and {"type": "video"}',
                )


def _parts(message: Message) -> Sequence[Mapping[str, Any]]:
    content = message.get("content")
    return () if content is None or isinstance(content, str) else content


def _plain(value: Any, change: Callable[[str], str]) -> Any:
    """A copy in plain data, each string changed: a template must not get at pictures or other objects."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {str(k): str(v) if k in ("role", "type") else _plain(v, change) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, change) for item in value]
    return value if value is None or isinstance(value, (bool, int, float)) else type(value).__name__


def _token_variables(named: Mapping[str, str]) -> dict[str, Any]:
    return {f"{role}_token": token for role, token in named.items()}


def _unused(text: str, n: int) -> list[str]:
    """`n` characters that the text does not hold."""
    taken = set(text)
    return list(islice((char for char in map(chr, count(_PRIVATE)) if char not in taken), n))
