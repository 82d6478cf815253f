"""Names and structure: names that were replaced stay away, module names are unique, listed files exist."""

import ast
import io
import re
import tokenize
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src/vitrail"
CLASSES, MODULES = (part.split() for part in (ROOT / "tests/removed_names.txt").read_text().split("\n\n"))
PARTICIPLES, NO_PARTICIPLES, OLD_WORDS, NO_PARAMETERS = (
    set(part.split()) for part in (ROOT / "tests/word_lists.txt").read_text().split("\n\n")
)
SHARED_MODULE_NAMES = {"__init__", "__main__", "config", "presets", "registry"}


def test_replaced_class_names_are_gone():
    found = []
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
        others = {name.name for node in imports if not (node.module or "").startswith("vitrail") for name in node.names}
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        replaced = (t for t in tokens if t.type == tokenize.NAME and t.string in CLASSES and t.string not in others)
        found += [(path.name, t.start[0], t.string) for t in replaced]
    assert not found


@pytest.mark.parametrize("folder", ["src", "docs", "perf", "examples", "recipes"])
def test_replaced_module_paths_are_gone(folder):
    pattern = re.compile(r"(?<![\w.])(" + "|".join(re.escape(name) for name in MODULES) + r")(?![\w])")
    found = []
    for path in (ROOT / folder).rglob("*"):
        if path.suffix in (".py", ".md", ".toml"):
            found += [(path.name, match.group(1)) for match in pattern.finditer(path.read_text())]
    assert not found


def test_kinds_of_components_are_written_with_dashes():
    """Except families, which are the model types of transformers, and parts of OpenAI's requests."""
    pattern = re.compile(r'(?:\b(?!FAMILIES)[A-Z_]+\.register\(\s*|\btag=)"(\w*_\w*)"')
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py") if path.stem != "openai_schema"}
    assert not [(path.name, kind) for path, text in texts.items() for kind in pattern.findall(text)]


def test_module_names_are_unique():
    folders = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        if path.stem not in SHARED_MODULE_NAMES:
            folders[path.stem].append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in folders.items() if len(paths) > 1} == {}


NAMES_OF_THE_FIELD = {"TrainingInterrupted", "penalized_loss", "relaxed_accuracy", "smoothed_cross_entropy"}


def is_participle(word: str) -> bool:
    regular = len(word) > 4 and word.endswith(("ed", "ing")) and word not in NO_PARTICIPLES
    return regular or word in PARTICIPLES


def list_public_definitions():
    """Yield (file, node) of every public class, function and method of the package."""

    def walk(node, path):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and child.name[0] != "_":
                yield path.relative_to(PACKAGE), child
                if isinstance(child, ast.ClassDef):
                    yield from walk(child, path)

    for path in sorted(PACKAGE.rglob("*.py")):
        yield from walk(ast.parse(path.read_text(encoding="utf-8")), path)


def is_property(node) -> bool:
    names = {getattr(each, "id", getattr(each, "attr", "")) for each in node.decorator_list}
    return bool(names & {"property", "cached_property", "setter"})


def test_public_classes_are_named_by_nouns():
    """The last word of a class says what it is: no participle or adjective, such as Shown, Laid or Beside."""
    found = set()
    for path, node in list_public_definitions():
        if isinstance(node, ast.ClassDef) and node.name not in NAMES_OF_THE_FIELD:
            last = re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+", node.name)[-1].lower()
            if is_participle(last):
                found.add((str(path), node.name))
    assert not found


def test_public_functions_begin_with_a_verb():
    """No function is called by a participle or an adjective, such as told, shown or packed_size. Properties may be."""
    found = set()
    for path, node in list_public_definitions():
        if isinstance(node, ast.ClassDef) or is_property(node) or node.name in NAMES_OF_THE_FIELD:
            continue
        if is_participle(node.name.split("_")[0]) and not node.name.startswith("left_right"):
            found.add((str(path), node.name))
    assert not found


@pytest.mark.parametrize("folder", ["src", "experiments", "perf", "examples", "tests"])
def test_old_words_are_no_names(folder):
    """No variable, parameter, attribute or function has a word of the old vocabulary as its name."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
        found += [
            (path.name, t.start[0], t.string) for t in tokens if t.type == tokenize.NAME and t.string in OLD_WORDS
        ]
    assert not found


@pytest.mark.parametrize("folder", ["src", "experiments"])
def test_parameters_are_named_by_nouns(folder):
    """A parameter is what it holds: `images`, not `shown`; `options`, not `how`; fields are named, not `**more`."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                arguments = [each for each in ast.walk(node.args) if isinstance(each, ast.arg)]
                found += [(path.name, each.lineno, each.arg) for each in arguments if each.arg in NO_PARAMETERS]
    assert not found


def test_files_listed_in_the_architecture_page_exist():
    listed = set(re.findall(r"`([a-z_]+/[\w./-]+\.(?:py|toml))`", (ROOT / "docs/architecture.md").read_text()))
    assert len(listed) > 30
    assert {name for name in listed if not (PACKAGE / name).exists() and not (ROOT / name).exists()} == set()


def test_architecture_page_lists_the_layers_that_ci_enforces():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [name.removeprefix("vitrail.") for name in contracts[0]["layers"]]
    page = (ROOT / "docs/architecture.md").read_text()
    table = page[page.index("| package | contents |") : page.index("## Operations")]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", table, re.MULTILINE)
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row)] == layers
    modules = {path.stem for path in PACKAGE.glob("*.py")} | {
        path.parent.name for path in PACKAGE.glob("*/__init__.py")
    }
    assert set(layers) == modules - {"__init__", "__main__"}


@pytest.mark.parametrize("folder", ["src", "experiments"])
def test_there_are_no_chained_assignments(folder):
    found = [
        (path.name, node.lineno)
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assign) and len(node.targets) > 1
    ]
    assert not found
