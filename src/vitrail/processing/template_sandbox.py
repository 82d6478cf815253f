"""Sandbox for chat templates, which come with model files and are untrusted code.

The sandbox gives a template access to plain data only and limits its steps. It cannot limit the time and the memory of
a single filter or operator, so templates from files run in a process that is limited (`vitrail.limited_process`).
"""

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

MAX_STEPS = 200_000  # maximum loop iterations and calls per rendering
MAX_REPEAT = 1_000_000  # maximum length of a string or list made by multiplication
MAX_POWER = 64  # maximum base or exponent

# Internal variables of the template context. The names are not identifiers, so that no template can access them: a
# step counter, and the two characters that mark generation blocks (or None).
STEPS_VARIABLE, MARKS_VARIABLE = "the steps", "the marks"


class TemplateRefusal(jinja2.TemplateError):
    """Error raised by a template through `raise_exception`."""


class RenderedTemplate(NamedTuple):
    """Text of a template, or its error: a kind, a message, and the line if it is known."""

    text: str = ""
    marks_generation: bool = False  # whether the template marks the text that the assistant writes
    error: str = ""  # "syntax", "refusal", "undefined", "unsafe" or "other"
    message: str = ""
    line: int | None = None


def render_template(
    source: str, variables: Mapping[str, Any] | None, marks: tuple[str, str] | None = None, max_steps: int = MAX_STEPS
) -> RenderedTemplate:
    """Render a template, or only compile it if there are no variables."""
    try:
        sandbox, template = _compile(source)
        if variables is None:
            return RenderedTemplate(marks_generation=sandbox.marks_generation)
        steps = iter(range(max_steps))
        text = template.render({**variables, STEPS_VARIABLE: steps, MARKS_VARIABLE: marks})
        return RenderedTemplate(text, sandbox.marks_generation)
    except jinja2.TemplateSyntaxError as error:
        return RenderedTemplate(error="syntax", message=str(error.message), line=error.lineno)
    except TemplateRefusal as error:
        return RenderedTemplate(error="refusal", message=str(error))
    except jinja2.UndefinedError as error:
        return RenderedTemplate(error="undefined", message=str(error), line=_find_line(error))
    except SecurityError as error:
        return RenderedTemplate(error="unsafe", message=str(error), line=_find_line(error))
    except MemoryError:
        raise  # a limit of the process
    except Exception as error:  # a template is foreign code and can raise anything
        return RenderedTemplate(error="other", message=f"{type(error).__name__}: {error}", line=_find_line(error))


def answer_request(request: tuple) -> RenderedTemplate:
    """Call `render_template` with the arguments that the parent process sent."""
    return render_template(*request)


@lru_cache(maxsize=32)
def _compile(source: str) -> tuple["TemplateSandbox", jinja2.Template]:
    sandbox = TemplateSandbox()
    return sandbox, sandbox.from_string(source)


def _find_line(error: BaseException) -> int | None:
    """Return the line of the template where an error occurred."""
    line, frame = None, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == "<template>":
            line = frame.tb_lineno
        frame = frame.tb_next
    return line


class _StrictUndefined(jinja2.Undefined):
    """Undefined value that templates may test for existence but not print."""

    __str__ = jinja2.Undefined._fail_with_undefined_error


class _RestrictedNamespace(jinja2.utils.Namespace):
    """Jinja's namespace, restricted to names without a leading underscore."""

    def __init__(self, *args: Any, **attrs: Any):
        super().__init__()
        for name, value in dict(*args, **attrs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace cannot contain {name!r}")
        super().__setitem__(name, value)


class _GenerationExtension(Extension):
    """Jinja extension for `{% generation %} … {% endgeneration %}` blocks and for counting loop iterations."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("mark", [nodes.ContextReference()])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def mark(self, context: Any, caller: Callable[[], str]) -> str:
        marks = context.get(MARKS_VARIABLE)
        return caller() if marks is None else marks[0] + caller() + marks[1]

    def step(self) -> bool:
        """Do nothing. The sandbox counts the call as a step."""
        return True


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja environment with access to plain data only, immutable inputs and a limit on steps."""

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=_StrictUndefined,
            extensions=[_GenerationExtension, "jinja2.ext.loopcontrols"],
        )
        self.marks_generation = False
        self.filters["tojson"] = _to_json
        for filter_name in ("batch", "slice"):
            del self.filters[filter_name]
        for global_name in ("lipsum", "cycler", "joiner"):
            del self.globals[global_name]
        shared: dict[str, Any] = self.globals
        shared.update(namespace=_RestrictedNamespace, raise_exception=_raise_exception, strftime_now=_strftime_now)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            step = nodes.Call(nodes.ExtensionAttribute(_GenerationExtension.identifier, "step"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(step, lineno=loop.lineno))
            if loop.test is not None:
                loop.test = nodes.And(step, loop.test)
        tree.set_environment(self)
        blocks = tree.find_all(nodes.CallBlock)
        self.marks_generation = any(isinstance(block.call.node, nodes.ExtensionAttribute) for block in blocks)
        return tree

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if next(__context.get(STEPS_VARIABLE), None) is None:
            raise SecurityError("too many steps")
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for value, times in ((left, right), (right, left)):
            if operator == "*" and isinstance(value, (str, list, tuple)) and len(value) * times > MAX_REPEAT:
                raise SecurityError(f"more than {MAX_REPEAT:,} elements by {operator}")
        if operator == "**" and max(abs(left), abs(right)) > MAX_POWER:
            raise SecurityError(f"a power with a base or exponent above {MAX_POWER}")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)


def _strftime_now(format: str) -> str:
    if re.search(r"%\D{0,3}\d{3}", format):  # the GNU C library pads a field to any width: gigabytes in one call
        raise SecurityError("a date field wider than 99 characters")
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialize to JSON. Jinja's built-in filter would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
