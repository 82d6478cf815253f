"""The `vitrail` commands of the documentation and of the results files use commands, options and keys that exist."""

import json
import re
import shlex
from pathlib import Path

import pytest
from cyclopts import CycloptsError, MissingArgumentError

from vitrail.cli import app
from vitrail.cli.eval_command import app as eval_app
from vitrail.evals.suites.benchmarks import BENCHMARKS
from vitrail.evals.suites.text_benchmarks import TEXT_BENCHMARKS
from vitrail.recipe import load_recipe

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if "_generated" not in page.parts and page.name != "upgrading.md"]
RESULTS = sorted((ROOT / "results").rglob("*.json"))
PLACEHOLDERS = {"SEED": "0", "KIND": "adamw", "RATE": "1e-3", "WEIGHTS": "qlip-stage-2"}


def iter_commands(text: str):
    """Yield the commands of a page, and whether they are complete: those in its sentences may lack arguments."""
    for block in re.findall(r"^```(?:sh|bash|console|shell)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            yield from ((found, True) for found in re.findall(r'(?:^|&& |\$ )vitrail (?:"[^"]*"|[^&|>"])+', line))
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for span in re.findall(r"`(vitrail [^`]+)`", prose):
        yield " ".join(span.split()), False


def parse_command(command: str) -> None:
    words = shlex.split(command, comments=True)
    words = words[words.index("vitrail") + 1 :]
    if words[0] == "--plugin":
        words = words[2:]
    if words[0] == "COMMAND":
        return
    if words[:1] == ["eval"] and len(words) > 2 and words[1] != "compare":
        model, suite, *options = words[1:]
        if suite in (*BENCHMARKS, *TEXT_BENCHMARKS) and suite not in ("winoground", "aro"):
            suite, options = ("text" if suite in TEXT_BENCHMARKS else "benchmark"), [suite, *options]
        eval_app.parse_args([suite, model, *options], exit_on_error=False, print_error=False)
    else:
        app.parse_args(words, exit_on_error=False, print_error=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_pages_parse(page):
    wrong = []
    for command, is_complete in iter_commands(page.read_text()):
        try:
            parse_command(command)
        except CycloptsError as error:
            if is_complete or not isinstance(error, MissingArgumentError):
                wrong.append(f"{command}: {type(error).__name__}: {error}")
    assert not wrong


def iter_results_commands(value, key: str = ""):
    """Yield the `vitrail` commands of a results file, with values for the placeholders."""
    for name, child in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(child, dict | list):
            yield from iter_results_commands(child, key if isinstance(value, list) else name)
        elif (key if isinstance(value, list) else name) in ("command", "commands"):
            for command in re.findall(r"vitrail [^&;]+", str(child)):
                yield re.sub("|".join(PLACEHOLDERS), lambda found: PLACEHOLDERS[found[0]], command)


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_commands_of_results_files_parse(file):
    """The demo page and the report show these commands."""
    for command in iter_results_commands(json.loads(file.read_text())):
        parse_command(command)
        words = shlex.split(command)
        if words[1] == "train":
            load_recipe(words[2], dict(word.split("=", 1) for word in words[3:] if "=" in word))
