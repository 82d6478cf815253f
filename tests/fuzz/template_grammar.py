"""Mutations of chat templates: random expressions of filters, operators, loops and methods with extreme values."""

import random

from fuzz.mutations import mutate_text

LEAVES = (
    "0",
    "1",
    "-1",
    "2",
    "7",
    "63",
    "10**6",
    "10**9",
    "99999",
    "1e308",
    "'a'",
    "'%s'",
    "'%.999999999f'",
    "'{:>99999999}'",
    "' '",
    "''",
    "[]",
    "()",
    "{}",
    "[1, 2]",
    "('a', 'b')",
    "{'a': 1}",
    "none",
    "true",
    "messages",
    "messages[0]",
    "messages[0]['content']",
    "tools",
    "ns.x",
    "loop",
    "x",
    "y",
    "range(9)",
    "range(99999)",
    "undefined_name",
)
FILTERS = (
    "abs",
    "attr('x')",
    "batch(2)",
    "capitalize",
    "center(10**8)",
    "center(9)",
    "count",
    "d(1)",
    "default('a', true)",
    "dictsort",
    "e",
    "escape",
    "filesizeformat",
    "first",
    "float",
    "forceescape",
    "format(1)",
    "format(10**9)",
    "groupby('role')",
    "groupby(0)",
    "indent(10**8)",
    "indent(2)",
    "int",
    "int(0, 16)",
    "items",
    "join",
    "join(x)",
    "join('a'*999)",
    "last",
    "length",
    "list",
    "lower",
    "map('upper')",
    "map('string')",
    "map('list')",
    "map('pprint')",
    "map(attribute='role')",
    "max",
    "min",
    "pprint",
    "random",
    "reject",
    "rejectattr('role')",
    "replace('', 'a'*999)",
    "replace('a', 'aa'*99)",
    "reverse",
    "round",
    "round(10**9, 'floor')",
    "round(-10**9, 'ceil')",
    "safe",
    "select",
    "selectattr('role', 'equalto', 'user')",
    "slice(2)",
    "sort",
    "string",
    "striptags",
    "sum",
    "sum(start=[])",
    "sum(start='')",
    "sum(start=())",
    "title",
    "tojson",
    "tojson(indent=10**8)",
    "tojson(indent=2)",
    "trim",
    "truncate(9)",
    "unique",
    "upper",
    "urlencode",
    "urlize",
    "wordcount",
    "wordwrap(1)",
    "wordwrap(10**9)",
    "xmlattr",
)
TESTS = (
    "defined",
    "string",
    "mapping",
    "sequence",
    "iterable",
    "number",
    "none",
    "in(x)",
    "eq(y)",
    "equalto(x)",
    "odd",
    "divisibleby(3)",
    "sameas(x)",
)
BINARY = ("+", "-", "*", "**", "//", "%", "/", "~", "==", "<", "in", "and", "or", "not in")
METHODS = (
    ".upper()",
    ".split()",
    ".split('a')",
    ".join(x)",
    ".join(['a', 'b'])",
    ".replace('', 'a'*99)",
    ".center(10**8)",
    ".ljust(10**8)",
    ".zfill(10**8)",
    ".format(x)",
    ".format(1)",
    ".format_map({})",
    ".encode()",
    ".items()",
    ".keys()",
    ".values()",
    ".get('a')",
    ".copy()",
    ".append(x)",
    ".update(x)",
    ".pop()",
    ".expandtabs(10**8)",
    ".startswith('a')",
    ".count('')",
    ".title()",
    ".strip()",
    ".splitlines()",
    ".translate({97: 'a'*999})",
    ".partition('a')",
    ".rstrip('a')",
    ".isdigit()",
    ".__class__",
    ".__init__",
    "[0]",
    "[-1]",
    "[::2]",
    "[1:]",
    "['a']",
    "[x]",
    "[::10**30]",
)
STATEMENTS = (
    "{{% set x = {0} %}}",
    "{{% set x = [x, x] %}}",
    "{{% set x = (x, x) %}}",
    "{{% set x = x ~ x %}}",
    "{{% set x = x * x %}}",
    "{{% set x = x + x %}}",
    "{{% set ns = namespace(x={0}) %}}",
    "{{% set ns.x = [ns.x, ns.x] %}}",
    "{{% set ns.x = ns.x ~ ns.x %}}",
    "{{% set ns.x = {0} %}}",
    "{{% set ns.x = ns.x * ns.x %}}",
    "{{{{ {0} }}}}",
    "{{{{ x }}}}",
    "{{{{ ns.x }}}}",
    "{{{{ x|string|length }}}}",
    "{{{{ x == y }}}}",
    "{{% set y = [y, y] %}}",
    "{{% if {0} %}}{{{{ {1} }}}}{{% endif %}}",
    "{{% macro m(x) %}}{{{{ m(x + 1) }}}}{{% endmacro %}}",
    "{{% set x %}}{{{{ x }}}}{{{{ x }}}}{{% endset %}}",
    "{{% filter upper %}}{{{{ {0} }}}}{{% endfilter %}}",
    "{{% generation %}}{{{{ {0} }}}}{{% endgeneration %}}",
    "{{{{ strftime_now('%999999999d') }}}}",
    "{{{{ raise_exception({0}) }}}}",
    "{{{{ dict(a={0}) }}}}",
    "{{{{ range({0}) }}}}",
    "{{{{ {{ {0}: 1 }} }}}}",
)
LOOPS = (
    "{{% for x in {0} %}}",
    "{{% for m in messages %}}",
    "{{% for i in range(99999) %}}",
    "{{% for i in range(40) %}}",
    "{{% for i in {0} if {1} %}}",
    "{{% for x in {0} recursive %}}",
)


def draw_expression(rng: random.Random, depth: int = 0) -> str:
    kind = rng.randrange(7) if depth < 4 else 0
    inner = lambda: draw_expression(rng, depth + 1)  # noqa: E731
    if kind <= 1:
        return rng.choice(LEAVES)
    if kind == 2:
        return f"({inner()} {rng.choice(BINARY)} {inner()})"
    if kind == 3:
        return f"({inner()})|{rng.choice(FILTERS)}"
    if kind == 4:
        return f"({inner()}){rng.choice(METHODS)}"
    if kind == 5:
        return rng.choice(
            (
                f"[{inner()}, {inner()}]",
                f"({inner()}, {inner()})",
                f"{{'a': {inner()}}}",
                f"({inner()} if {inner()} else {inner()})",
            )
        )
    return f"({inner()} is {rng.choice(TESTS)})"


def draw_template(rng: random.Random) -> str:
    """Draw a template of statements in nested loops."""
    parts = ["{% set x = 'a' %}{% set y = [1] %}{% set ns = namespace(x='a') %}"]
    loops = rng.choice((0, 1, 1, 2, 3))
    for _ in range(loops):
        parts.append(rng.choice(LOOPS).format(draw_expression(rng), draw_expression(rng)))
    for _ in range(rng.randint(1, 5)):
        parts.append(rng.choice(STATEMENTS).format(draw_expression(rng), draw_expression(rng)))
    return "".join(parts) + "{% endfor %}" * loops + "{{ x }}{{ ns.x }}{{ x == y }}"


_mutate_words = mutate_text([f"{{{{ x|{name} }}}}" for name in FILTERS] + ["{% for x in messages %}", "{% endfor %}"])


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Replace the template by a drawn one, extend it with one, or mutate its text."""
    kind = rng.randrange(4)
    if kind <= 1:
        return draw_template(rng).encode()
    if kind == 2:
        return draw_template(rng).encode() + data
    return _mutate_words(data, rng)
