"""Sphinx configuration: `make docs` builds the site into out/docs."""

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

project = "Vitrail"
copyright = "the Vitrail developers"
extensions = ["myst_parser", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_heading_anchors = 4
suppress_warnings = ["myst.xref_missing", "myst.header"]  # pages also link to files of the repository
html_theme = "furo"
html_title = "Vitrail"

API_PACKAGES = (
    *("vitrail", "vitrail.pipelines", "vitrail.hub", "vitrail.models", "vitrail.backbones", "vitrail.encoders"),
    *("vitrail.connectors", "vitrail.codecs", "vitrail.codecs.quantizers", "vitrail.stream", "vitrail.generate"),
    *("vitrail.processing", "vitrail.nn", "vitrail.data", "vitrail.recipe", "vitrail.tasks", "vitrail.training"),
    *("vitrail.evals", "vitrail.evals.metrics", "vitrail.objectives", "vitrail.control", "vitrail.lab"),
    *("vitrail.plots", "vitrail.search"),
)


def describe_member(name: str, member: Any) -> list[str]:
    """Return the Markdown lines of one class or function: heading, signature, docstring and public methods."""
    try:
        signature = str(inspect.signature(member))
    except (TypeError, ValueError):
        signature = ""
    kind = "class " if inspect.isclass(member) else ""
    lines = [f"### {name}", "", "```text", f"{kind}{name}{signature}", "```", "", inspect.getdoc(member) or "", ""]
    if inspect.isclass(member):
        for key, method in vars(member).items():
            if inspect.isfunction(method) and not key.startswith("_") and inspect.getdoc(method):
                first_line = (inspect.getdoc(method) or "").splitlines()[0]
                lines.append(f"- `{key}{inspect.signature(method)}`: {first_line}")
        lines.append("")
    return lines


def write_api_pages(folder: Path) -> None:
    """Write one page for each package of `API_PACKAGES` from its `__all__`."""
    for package in API_PACKAGES:
        module = importlib.import_module(package)
        lines = [f"# {package}", "", inspect.getdoc(module) or "", ""]
        for name in getattr(module, "__all__", ()):
            member = getattr(module, name)
            if inspect.isclass(member) or inspect.isfunction(member):
                lines += describe_member(name, member)
        write_page(folder / f"{package}.md", lines)


def write_command_pages(folder: Path) -> None:
    """Write one page for each command from its help."""
    from vitrail.cli import COMMANDS, get_command

    for name in COMMANDS:
        text = get_command(name).generate_docs(heading_level=1, usage_name=f"vitrail {name}")
        text = re.sub(r"^# .*", f"# vitrail {name}", text, count=1)
        text = re.sub(rf"^vitrail {name}.* {name} MODEL", f"vitrail {name} MODEL", text, flags=re.MULTILINE)
        text = re.sub(r"## Table of Contents\n.*?\n(?=\*\*|#)", "", text, flags=re.DOTALL)
        write_page(folder / f"{name}.md", [text])


def write_recipe_page(folder: Path) -> None:
    """Write the page of all recipe keys."""
    from vitrail.recipe.key_reference import build_key_reference

    intro = (
        "Every key of recipes, sweeps and scenes, from the configs that read them.",
        "`vitrail recipes schema` prints the same as a JSON schema for editors.",
    )
    write_page(folder / "recipe-keys.md", ["# Recipe keys", "", *intro, *build_key_reference()])


def write_page(file: Path, lines: list[str]) -> None:
    """Write a generated page if its text changed, so that Sphinx rebuilds only what is new."""
    text = "\n".join(lines)
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists() or file.read_text() != text:
        file.write_text(text)


def write_generated_pages(app: Any) -> None:
    """Write all generated pages below `docs/_generated`, and remove the pages of removed commands and packages."""
    from vitrail.cli import COMMANDS

    folder = Path(app.srcdir) / "_generated"
    for page in folder.glob("*/*.md"):
        if page.stem not in (*COMMANDS, *API_PACKAGES):
            page.unlink()
    write_api_pages(folder / "api")
    write_command_pages(folder / "commands")
    write_recipe_page(folder)


def setup(app: Any) -> None:
    app.connect("builder-inited", write_generated_pages)
