"""The blocks and links of the documentation: every block has a language that a test reads, and every link a target."""

import importlib
import re
import shlex
import tomllib
from pathlib import Path

import jsonschema
import msgspec
import pytest
from cyclopts import CycloptsError

from test_docs_commands import PAGES, ROOT, iter_commands
from vitrail.recipe import load_recipe
from vitrail.recipe.schema_reference import build_json_schema
from vitrail.recipe.sweep import Sweep
from vitrail.registry import ENTRY_POINT_GROUP
from vitrail.stream.stream_description import StreamDescription

BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TESTED_LANGUAGES = {"python", "sh", "toml", "json"}  # sybil runs Python blocks; the tests here read the others
INTEGRATIONS = "vitrail.integrations"  # imports other frameworks
IS_CODE = re.compile(r"^\s*(vitrail [a-z]|import \w|from \w+ import |python |pip |make )", re.MULTILINE)


def list_blocks(page: Path, *languages: str) -> list[str]:
    return [text for language, text in BLOCK.findall(page.read_text()) if language in languages]


# Pages of `howto` name components of plugins; they are followed as a whole.
TOML_PAGES = [page for page in PAGES if page.parent.name != "howto" and list_blocks(page, "toml")]


def read_anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub and MyST name them."""
    text = BLOCK.sub("", page.read_text())
    headings = [re.sub(r"[`*]|\[|\]\([^)]*\)", "", line) for line in re.findall(r"^#+ (.*)", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_has_a_tested_language(page):
    """Output is `text`, which holds no code."""
    for language, text in BLOCK.findall(page.read_text()):
        assert language in TESTED_LANGUAGES or language == "text" or language.startswith("{"), (language, text[:80])
        assert language != "text" or not IS_CODE.search(text), text


def test_pages_do_not_replace_pages_of_sphinx():
    assert not {page.stem for page in (ROOT / "docs").glob("*.md")} & {"search", "genindex", "py-modindex"}


def test_index_is_ordered():
    index = (ROOT / "docs/index.md").read_text()
    captions = [caption.partition(":")[0] for caption in re.findall(r"^:caption: (.*)", index, re.MULTILINE)]
    order = ["Start", "Tutorials", "How to", "Concepts", "Reference", "Model cards", "Results", "Development"]
    assert list(dict.fromkeys(captions)) == order
    listed = re.findall(r"^([\w/-]+)$", index, re.MULTILINE)
    pages = {
        str(page.relative_to(ROOT / "docs").with_suffix("")) for page in PAGES if page.is_relative_to(ROOT / "docs")
    }
    assert sorted(listed) == sorted(pages - {"index"} | {"_generated/recipe-keys", "upgrading"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_have_targets(page):
    text = BLOCK.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target or "_generated" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert not anchor or anchor in read_anchors(file), target


def check_toml(text: str) -> None:
    """Read a block with the reader of its format. A part of a recipe is compared with the recipe schema."""
    values = tomllib.loads(text)
    if "variants" in values:
        msgspec.convert(values, Sweep)
    elif "samples" in values:
        msgspec.convert(values, StreamDescription)
    elif "project" in values:
        assert list(values["project"]["entry-points"]) == [ENTRY_POINT_GROUP]
    else:
        schema = build_json_schema()
        schema["$defs"]["Recipe"].pop("required")
        jsonschema.validate(values, schema)


@pytest.mark.parametrize("page", TOML_PAGES, ids=lambda page: page.name)
def test_toml_blocks_have_known_keys(page):
    for text in list_blocks(page, "toml"):
        check_toml(text)


def test_unknown_keys_of_a_toml_block_are_found():
    for text in ("[sources.x]\nkind = 'episodes'\nwindow = 3", "[modle]\nkind = 'vlm'", "[[samples]]\nnames = 'a'"):
        with pytest.raises((jsonschema.ValidationError, msgspec.ValidationError)):
            check_toml(text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_recipes_of_train_commands_exist(page):
    """Recipes and keys of overrides; recipes that a page itself writes are tested where the page is followed."""
    for command, is_complete in iter_commands(page.read_text()):
        words = shlex.split(command, comments=True)
        if is_complete and words[1] == "train" and not words[2].endswith(".toml"):
            load_recipe(words[2], dict(word.split("=", 1) for word in words[3:] if "=" in word))


@pytest.mark.parametrize("page", [page for page in PAGES if list_blocks(page, "sh")], ids=lambda page: page.name)
def test_scripts_of_shell_blocks_exist(page):
    for text in list_blocks(page, "sh"):
        for module, arguments in re.findall(r"^python -m (experiments\.\w+)([^\n#]*)", text, re.MULTILINE):
            application = importlib.import_module(f"{module}.__main__").app
            try:
                application.parse_args(shlex.split(arguments), exit_on_error=False, print_error=False)
            except CycloptsError as error:
                raise AssertionError(f"{module}{arguments}: {error}") from None
        for script in re.findall(r"^python (\w+/[\w/]+\.py)", text, re.MULTILINE):
            assert (ROOT / script).exists(), script
        for line in re.findall(r"^(?:from vitrail|import vitrail).*", text, re.MULTILINE):
            if INTEGRATIONS not in line:
                exec(line, {})
