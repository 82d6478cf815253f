"""Run the blocks of tutorials and how-to pages in order in an empty folder, as a reader follows them.

A block whose first line is a comment with a file name (`# digits.toml`) is saved under that name. Other Python blocks
are executed. `vitrail` commands and scripts of `sh` blocks run in this process. Trainings take two steps, and
evaluations and recordings few samples. Other commands, and those that start a server or need a model of the hub, are
not run.
"""

import os
import re
import runpy
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from sybil import Example
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser

from vitrail import registry
from vitrail.data.sources.fetch import is_fetched
from vitrail.recipe import load_recipe
from vitrail.registry import PLUGIN_VARIABLE, Registry

FILE_COMMENT = re.compile(r"# ([\w-]+\.(?:py|toml))\n")
SERVERS = ("play", "serve")
HUB_ID = re.compile(r"--model [\w-]+/[\w.-]+")
SHORTER_EVALUATIONS = {
    "conversations": ["--limit", "4"],
    "pope": ["--limit", "8"],
    "world": ["--count", "4", "--rollout-frames", "8"],
}

run_python = PythonEvaluator()


def add_skip_conditions(namespace: dict[str, Any]) -> None:
    """Add what `<!-- skip: next if(…) -->` of a page may call."""
    namespace["is_fetched"] = is_fetched


def enter_folder(namespace: dict[str, Any]) -> None:
    """Work in an empty folder, and remember what a page may change."""
    registries = [value for value in vars(registry).values() if isinstance(value, Registry)]
    namespace["_page"] = {
        "folder": tempfile.TemporaryDirectory(),
        "cwd": Path.cwd(),
        "path": list(sys.path),
        "modules": set(sys.modules),
        "registries": [(each, set(each._values)) for each in registries],
    }
    os.chdir(namespace["_page"]["folder"].name)
    sys.path.insert(0, namespace["_page"]["folder"].name)  # as for `python script.py`


def leave_folder(namespace: dict[str, Any]) -> None:
    """Return to the folder before, and remove the plugins of the page."""
    page = namespace["_page"]
    os.chdir(page["cwd"])
    sys.path[:] = page["path"]
    os.environ.pop(PLUGIN_VARIABLE, None)
    files = {path.stem for path in Path(page["folder"].name).glob("*.py")}
    for module in set(sys.modules) - page["modules"]:
        if module in files:
            del sys.modules[module]
    for each, names in page["registries"]:
        for name in set(each._values) - names - set(each.own_names):
            del each._values[name]
    page["folder"].cleanup()


def save_file(example: Example) -> bool:
    """Save a block under the name in its first line, if there is one."""
    if found := FILE_COMMENT.match(example.parsed):
        Path(found[1]).write_text(example.parsed)
    return bool(found)


def run_or_save_python(example: Example) -> None:
    if not save_file(example):
        run_python(example)


def save_toml(example: Example) -> None:
    """Save a recipe, and check its keys unless it needs a plugin of the page."""
    if save_file(example) and not any(".register(" in file.read_text() for file in Path().glob("*.py")):
        load_recipe(FILE_COMMENT.match(example.parsed)[1])


def run_commands(example: Example) -> None:
    """Run the `vitrail` commands and the scripts of a block."""
    for line in example.parsed.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["vitrail"]:
            run_command(words[1:])
        elif words[:1] == ["python"]:
            runpy.run_path(words[1], run_name="__main__")


def run_command(words: list[str]) -> None:
    from vitrail.cli import _take_common_options, app

    _take_common_options(words)
    hub_id = HUB_ID.search(" ".join(words))
    if words[0] in SERVERS or (hub_id and not Path(hub_id[0].removeprefix("--model ")).exists()):
        return
    if words[0] == "train" and "--dry-run" not in words:
        words += shorten_training(words)
    if words[:2] == ["data", "make"] and "--episodes" in words:
        words[words.index("--episodes") + 1] = "60"
    if words[0] == "eval" and len(words) > 2:
        words += SHORTER_EVALUATIONS.get(words[2], [])
    app(words, result_action="return_value")


def shorten_training(words: list[str]) -> list[str]:
    """Return the overrides that train every stage of a recipe for two steps."""
    overrides = dict(word.split("=", 1) for word in words[2:] if "=" in word)
    shorter = {}
    for number, stage in enumerate(load_recipe(words[1], overrides).stages):
        shorter |= {f"stages.{number}.steps": 2, f"stages.{number}.validate": "[]"}
        shorter |= {f"stages.{number}.validate_every": 0, f"stages.{number}.validate_first": "false"}
        if getattr(stage.schedule, "warmup_steps", 0) > 1:
            shorter[f"stages.{number}.schedule.warmup_steps"] = 1
    return [f"{key}={value}" for key, value in shorter.items()]


PAGE_PARSERS = [
    CodeBlockParser("python", run_or_save_python),
    CodeBlockParser("toml", save_toml),
    CodeBlockParser("sh", run_commands),
]
