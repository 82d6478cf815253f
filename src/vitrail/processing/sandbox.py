"""The sandbox that chat templates run in: they come with a model's files, so a stranger wrote them."""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

MAX_STEPS = 200_000  # loop turns and calls of one rendering
MAX_REPEAT = 1_000_000  # longest string or list that multiplying may make
MAX_POWER = 64  # largest base or exponent

# Names of our own in a template's context, which no template can spell: a counter, and the two characters to put
# around what stands in generation tags (or None).
STEPS, MARKS = "the steps", "the marks"


class Refusal(jinja2.TemplateError):
    """A template's own `raise_exception`."""


class _Missing(jinja2.Undefined):
    """May be asked whether it is there, as templates do, but not written out as nothing."""

    __str__ = jinja2.Undefined._fail_with_undefined_error


class _Namespace(jinja2.utils.Namespace):
    """Jinja's, without names that Python itself looks for."""

    def __init__(self, *args: Any, **attrs: Any):
        super().__init__()
        for name, value in dict(*args, **attrs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}")
        super().__setitem__(name, value)


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}`: what the assistant writes; and a step for each turn of a loop."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("mark", [nodes.ContextReference()])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def mark(self, context: Any, caller: Callable[[], str]) -> str:
        marks = context.get(MARKS)
        return caller() if marks is None else marks[0] + caller() + marks[1]

    def step(self) -> bool:
        """Only called: the sandbox counts calls."""
        return True


class Sandbox(ImmutableSandboxedEnvironment):
    """No attributes beyond plain data, nothing changed, and an end to every loop.

    Steps are bounded, memory is not: doubling a string needs few steps.
    """

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=_Missing,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        self.marks_generation = False
        self.filters["tojson"] = _to_json
        for endless in ("batch", "slice"):
            del self.filters[endless]
        for idle in ("lipsum", "cycler", "joiner"):
            del self.globals[idle]
        shared: dict[str, Any] = self.globals
        shared.update(namespace=_Namespace, raise_exception=_refuse, strftime_now=_now)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            step = nodes.Call(nodes.ExtensionAttribute(_Generation.identifier, "step"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(step, lineno=loop.lineno))
            if loop.test is not None:
                loop.test = nodes.And(step, loop.test)
        tree.set_environment(self)
        blocks = tree.find_all(nodes.CallBlock)
        self.marks_generation = any(isinstance(block.call.node, nodes.ExtensionAttribute) for block in blocks)
        return tree

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if next(__context.get(STEPS)) > MAX_STEPS:
            raise SecurityError(f"more than {MAX_STEPS:,} steps")
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for value, times in ((left, right), (right, left)):
            if operator == "*" and isinstance(value, (str, list, tuple)) and len(value) * times > MAX_REPEAT:
                raise SecurityError(f"more than {MAX_REPEAT:,} elements by {operator}")
        if operator == "**" and max(abs(left), abs(right)) > MAX_POWER:
            raise SecurityError(f"a power with more than {MAX_POWER}")
        return super().call_binop(context, operator, left, right)


def _refuse(message: str) -> None:
    raise Refusal(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
