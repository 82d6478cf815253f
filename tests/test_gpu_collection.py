"""`make gpu` collects the GPU tests on a machine without the dev extra."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BARE = ("torch", "numpy", "safetensors", "msgspec", "pillow", "tokenizers", "jinja2", "cyclopts", "tqdm")
BARE += ("transformers", "pytest", "setuptools", "pip")
COLLECT = """
import sys
from importlib.machinery import PathFinder
import pytest

refused, find = set(sys.argv[1].split(",")), PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, *given: None if name.partition(".")[0] in refused else find(name, *given)
)
sys.exit(pytest.main(["-m", "gpu", "-p", "no:cacheprovider", "--collect-only", "-q", "tests"]))
"""


def normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def list_needed(names: list[str]) -> set[str]:
    """Return the distributions that these need, without their extras."""
    needed: set[str] = set()
    while names:
        name = normalize(names.pop())
        if name in needed:
            continue
        needed.add(name)
        try:
            rows = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        names += [re.match(r"[\w.-]+", row)[0] for row in rows if "extra ==" not in row]
    return needed


@pytest.mark.slow
def test_core_dependencies_are_enough_to_collect():
    needed = list_needed(list(BARE))
    modules = importlib.metadata.packages_distributions()
    refused = {module for module, names in modules.items() if not needed & set(map(normalize, names))}
    refused -= {"vitrail", "vitrail_mini", *sys.stdlib_module_names}
    assert {"hypothesis", "sybil", "starlette", "diffusers"} <= refused
    paths = [str(ROOT / folder) for folder in ("src", ".", "packages/mini", "tests")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-c", COLLECT, ",".join(sorted(refused))]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    found = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    assert found == {name for name in files if "mark.gpu" in (ROOT / name).read_text()} - {
        "tests/test_gpu_collection.py"
    }
