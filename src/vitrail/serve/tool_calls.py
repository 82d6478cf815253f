"""Tools of a chat: how a chat template writes tool calls, their grammar, and the calls in an answer.

The answer's grammar is the format of the template, so a call is always complete and its arguments fit the schema of
the function. Two formats are known: that of Hermes and Qwen (`<tool_call>`), and that of Llama 3 (an answer that is one
JSON object with `name` and `parameters`).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vitrail.errors import VitrailError
from vitrail.processing.chat_template import ChatTemplate
from vitrail.processing.tokenizer import Tokenizer
from vitrail.serve.openai_schema import (
    APIError,
    ChatCompletionRequest,
    ChatMessage,
    NamedToolChoice,
    ResponseFormat,
    Tool,
    to_api_error,
)
from vitrail.serve.token_constraints import ConstraintError, build_json_grammar, embed_schema


class ToolCallFormat(NamedTuple):
    """Texts around a call and between calls, and the key of the arguments. Without `opening`, an answer is one call."""

    opening: str
    closing: str
    separator: str
    arguments_key: str

    @property
    def marker(self) -> str:
        """Beginning of an answer's first call. After it, the answer has only calls."""
        return self.opening.rstrip() or "{"


class ParsedToolCall(NamedTuple):
    """A call in an answer. The arguments are JSON text."""

    name: str
    arguments: str


HERMES = ToolCallFormat("<tool_call>\n", "\n</tool_call>", "\n", "arguments")
LLAMA = ToolCallFormat("", "", "", "parameters")


def find_tool_call_format(template: ChatTemplate, tokenizer: Tokenizer) -> ToolCallFormat:
    """Return the format in which a template writes tool calls."""
    source = template.source
    if "tools" not in source:
        raise APIError(f"{template.name} takes no tools: leave tools out", param="tools")
    markers_are_text = not {"<tool_call>", "</tool_call>"} & tokenizer.special_tokens.keys()
    if "<tool_call>" in source and "<function=" not in source and "arguments" in source and markers_are_text:
        return HERMES
    if "<tool_call>" not in source and '"parameters": ' in source:
        return LLAMA
    raise APIError(
        f"{template.name} writes tool calls in a format that is not supported: leave tools out", param="tools"
    )


def build_template_tools(tools: Sequence[Tool], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return tools as chat templates take them. Their texts cannot contain special tokens."""
    found = []
    for index, tool in enumerate(tools):
        function = tool.function
        entry: dict[str, Any] = {"name": function.name, "description": function.description or ""}
        entry["parameters"] = complete_parameters(function.parameters)
        text = json.dumps(entry, ensure_ascii=False)
        if token := next((token for token in tokenizer.special_tokens if token in text), None):
            raise APIError(f"the tool contains the special token {token!r}: remove it", param=f"tools[{index}]")
        found.append({"type": "function", "function": entry})
    return found


def complete_parameters(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the schema of a function's arguments: an object, without properties by default."""
    return dict(parameters) if parameters else {"type": "object", "properties": {}, "additionalProperties": False}


def select_tools(request: ChatCompletionRequest) -> list[tuple[int, Tool]]:
    """Return the tools that the answer may call, with their places in the request."""
    tools = list(enumerate(request.tools or ()))
    names = [tool.function.name for _, tool in tools]
    if len(set(names)) != len(names):
        raise APIError("two tools have the same name", param="tools")
    choice = request.tool_choice
    if isinstance(choice, NamedToolChoice):
        tools = [one for one in tools if one[1].function.name == choice.function.name]
        if not tools:
            raise APIError(
                f"tools have no function {choice.function.name!r}; functions: {', '.join(names) or 'none'}",
                param="tool_choice.function.name",
            )
    elif choice == "required" and not tools:
        raise APIError("tool_choice is required, and there are no tools", param="tool_choice")
    return [] if choice == "none" else tools


def build_tool_grammar(request: ChatCompletionRequest, style: ToolCallFormat) -> str:
    """Build the grammar of an answer that may call tools, or must."""
    calls, rules = [], []
    for index, tool in select_tools(request):
        param = f"tools[{index}].function.parameters"
        parameters = complete_parameters(tool.function.parameters)
        if parameters.get("type") != "object":
            raise APIError(f"{param}: the type must be object", param=param)
        head = f'{{"name": {json.dumps(tool.function.name)}, "{style.arguments_key}": '
        try:
            rules.append(f"arguments_{index}: {embed_schema(parameters)}")
        except ConstraintError as error:
            raise APIError(f"{param}: {error.problem}; {error.remedy}", param=param) from None
        calls.append(f'{json.dumps(head)} arguments_{index} "}}"')
    must_call = request.tool_choice not in (None, "auto")
    several = bool(style.opening) and request.parallel_tool_calls is not False
    closing = f" {json.dumps(style.closing)}" if style.closing else ""
    rest = f" ({json.dumps(style.separator + style.opening)} call{closing})*" if several else ""
    answer = f"call{closing}{rest}"
    if must_call:
        start = f"{json.dumps(style.opening)} {answer}" if style.opening else answer
        lines = [f"start: {start}"]
    elif style.opening:  # a text ends where the first call begins
        lines = [f"start: TEXT | opening {answer}", f"opening[lazy]: TEXT {json.dumps(style.opening)}"]
        lines.append("TEXT: /(?s:.*)/")
    else:
        lines = [f"start: TEXT | {answer}", r"TEXT: /([^{\s](?s:.*))?/"]
    return "\n".join([*lines, f"call: {' | '.join(calls)}", *rules, ""])


def build_answer_grammar(answer: ResponseFormat) -> str:
    """Build the grammar of an answer in JSON."""
    if answer.type == "json_object":
        return build_json_grammar({"type": "object"})
    if answer.json_schema is None:
        raise APIError("json_schema is missing", param="response_format.json_schema")
    try:
        return build_json_grammar(answer.json_schema.schema or {})
    except VitrailError as error:
        raise to_api_error(error, "response_format.json_schema.schema") from None


class ToolCallParser:
    """Split the text of an answer into text and calls as it is generated."""

    def __init__(self, style: ToolCallFormat):
        self.style, self._held, self._in_calls = style, "", False

    def push(self, text: str) -> str:
        """Add text and return what is not part of a call. Calls are held back until the end."""
        self._held += text
        if self._in_calls:
            return ""
        marker = self.style.marker
        if not self.style.opening:  # the first character decides
            self._in_calls = self._held.lstrip().startswith(marker)
            at = 0 if self._in_calls or not self._held.strip() else len(self._held)
        elif (at := self._held.find(marker)) >= 0:
            self._in_calls = True
        else:  # hold back the beginning of a marker
            ends = range(max(0, len(self._held) - len(marker) + 1), len(self._held))
            at = next((end for end in ends if marker.startswith(self._held[end:])), len(self._held))
        released, self._held = self._held[:at], self._held[at:]
        return released

    def finish(self) -> tuple[str, list[ParsedToolCall]]:
        """Return the text held back and the calls, at the end of an answer. A call that was cut is text."""
        held, self._held = self._held, ""
        calls: list[ParsedToolCall] = []
        rest = held
        while self._in_calls and rest.strip():
            body = rest.lstrip().removeprefix(self.style.marker if self.style.opening else "").lstrip()
            try:
                value, end = json.JSONDecoder().raw_decode(body)
                key = self.style.arguments_key
                start = len(f'{{"name": {json.dumps(value["name"])}, "{key}": ')
                found = ParsedToolCall(value["name"], body[start : end - 1])
                json.loads(found.arguments)
            except (ValueError, KeyError, TypeError, RecursionError):
                break
            rest = body[end:]
            if self.style.closing:
                closed = rest.lstrip().startswith(self.style.closing.strip())
                if not closed:
                    break
                rest = rest.lstrip()[len(self.style.closing.strip()) :]
            calls.append(found)
        return ("" if calls else held), calls


def build_template_message(message: ChatMessage, where: str) -> dict[str, Any]:
    """Return the fields of a message that belong to tools, as chat templates take them: arguments are objects."""
    found: dict[str, Any] = {}
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.role == "tool" and message.name is not None:
        found["name"] = message.name
    calls = []
    for index, call in enumerate(message.tool_calls or ()):
        param = f"{where}.tool_calls[{index}].function.arguments"
        try:
            arguments = json.loads(call.function.arguments or "{}")
        except (ValueError, RecursionError):
            raise APIError("the arguments are not valid JSON", param=param) from None
        if not isinstance(arguments, dict):
            raise APIError("the arguments are no JSON object", param=param)
        function = {"name": call.function.name, "arguments": arguments}
        calls.append({"id": call.id, "type": "function", "function": function})
    return found | ({"tool_calls": calls} if calls else {})


def check_message_roles(message: ChatMessage, where: str) -> None:
    """Raise an error if a message has fields of another role, or no content."""
    if message.tool_calls and message.role != "assistant":
        raise APIError(f"a message of {message.role} has no tool_calls", param=f"{where}.tool_calls")
    if message.role == "tool" and message.tool_call_id is None:
        raise APIError("a tool message needs tool_call_id", param=f"{where}.tool_call_id")
    if message.content is None and not message.tool_calls:
        raise APIError("the message has no content", param=f"{where}.content")
