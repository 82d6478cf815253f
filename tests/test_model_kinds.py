"""Outside pipelines, no function tests an object against one kind of model after the other."""

import ast
from pathlib import Path

import vitrail
from vitrail.registry import MODELS

ROOT = Path(vitrail.__file__).parent
PARTS = {
    "ConvTower",
    "DaViT",
    "HybridTower",
    "MultiTower",
    "PackedViT",
    "SAM",
    "TextTower",
    "TiledViT",
    "ViT",
}  # of models
MAX_KINDS = 2  # separate tests of kinds in one function


def list_kinds() -> set[str]:
    models = [MODELS[name] for name in MODELS.own_names]
    return {name for model in models for name in (model.__name__, model.Config.__name__) if model.__name__ not in PARTS}


def count_tested_kinds(function: ast.AST, kinds: set[str]) -> set[frozenset[str]]:
    """Return the sets of model kinds that `isinstance` and `case` test in a function."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            names = {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
        elif isinstance(node, ast.match_case):
            classes = (each.cls for each in ast.walk(node.pattern) if isinstance(each, ast.MatchClass))
            names = {each.id for each in classes if isinstance(each, ast.Name)}
        else:
            continue
        if names & kinds:
            found.add(frozenset(names & kinds))
    return found


def test_no_chains_over_model_kinds():
    kinds, chains, seen = list_kinds(), {}, 0
    for path in sorted(ROOT.rglob("*.py")):
        if path.parent.name == "pipelines":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                tested = count_tested_kinds(node, kinds)
                seen += bool(tested)
                if len(tested) > MAX_KINDS:
                    chains[f"{path.relative_to(ROOT)}: {node.name}"] = sorted(map(sorted, tested))
    assert not chains, f"use functools.singledispatch, or a method of the models: {chains}"
    assert seen > 10
