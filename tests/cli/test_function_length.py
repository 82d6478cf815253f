"""Functions of the command line parse, call and print: none is long."""

import ast
from pathlib import Path

import vitrail

MAX_BODY_LINES = 40  # without signature and docstring


def list_functions():
    for path in sorted(Path(vitrail.__file__).parent.joinpath("cli").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path.name}:{node.lineno} {node.name}", node


def count_body_lines(function) -> int:
    has_docstring = ast.get_docstring(function) is not None
    body = function.body[1:] if has_docstring else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def test_functions_are_short():
    functions = list(list_functions())
    long = {name: lines for name, node in functions if (lines := count_body_lines(node)) > MAX_BODY_LINES}
    assert not long, f"move logic to the package it belongs to: {long}"
    assert len(functions) > 50
