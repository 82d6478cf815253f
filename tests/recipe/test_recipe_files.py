"""Recipe files: inheritance, formatting, and the resolved content of all shipped recipes."""

import hashlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail import recipe
from vitrail.errors import ConfigError
from vitrail.recipe import list_recipe_names, list_untested_recipe_names, read_recipe_file, resolve_recipe
from vitrail.recipe.toml_format import format_toml

NAMES = [*list_recipe_names(), *list_untested_recipe_names()]
RESOLVED = json.loads((Path(__file__).parent / "resolved_recipes.json").read_text())
BASE = {
    "name": "base",
    "description": "a base",
    "model": {"kind": "decoder", "config": {"layers": 2, "mlp": {"kind": "gated", "width": 4}}},
    "sources": {"one": {"kind": "text", "files": ["a"]}, "two": {"kind": "text", "files": ["b"], "seed": 1}},
    "stages": [
        {"name": "first", "steps": 1, "mixture": {"weights": {"one": 1, "two": 2}}, "optim": {"lr": 1.0, "eps": 0.1}},
        {"name": "second", "steps": 2, "mixture": {"weights": {"one": 1}}},
    ],
}


def resolved_hash(name: str) -> str:
    """A hash of a recipe without its description; the order of sources and of mixtures counts."""
    data = resolve_recipe(name)
    orders = [list(data["sources"]), *([*stage["mixture"]["weights"]] for stage in data["stages"])]
    del data["description"]
    return hashlib.sha256(json.dumps([data, orders], sort_keys=True).encode()).hexdigest()[:16]


@pytest.fixture
def resolve(tmp_path):
    """Own recipe → the recipe merged with BASE"""

    def resolved(own: dict) -> dict:
        (tmp_path / "base.toml").write_text(format_toml(BASE))
        (tmp_path / "own.toml").write_text(format_toml({"name": "own", "base": "base", **own}))
        return resolve_recipe(tmp_path / "own.toml")

    return resolved


@pytest.mark.parametrize("name", NAMES)
def test_resolved_recipes_are_unchanged(name):
    """Inheritance changes how recipes are written, not what they are. An intended change updates the hash."""
    assert resolved_hash(name) == RESOLVED[name]


def test_every_recipe_has_a_hash():
    assert sorted(RESOLVED) == sorted(NAMES)


def test_mini_vlm_and_its_variants_are_short():
    def count(name: str) -> int:
        text = (Path(__file__).parents[2] / "recipes" / f"{name}.toml").read_text()
        return sum(bool(line) and not line.startswith("#") for line in text.splitlines())

    assert len((Path(__file__).parents[2] / "recipes/mini-vlm.toml").read_text().splitlines()) < 60
    assert max(map(count, ("codec-fsq", "codec-kl", "codec-residual", "qlip-first"))) <= 7


def test_a_variant_needs_five_lines(tmp_path):
    lines = ('name = "narrow"', 'description = "one layer in the connector"', 'base = "mini-vlm"', "[model.config]")
    (tmp_path / "narrow.toml").write_text("\n".join([*lines, "connector = { layers = 1 }"]))
    narrow, plain = recipe.load_recipe(tmp_path / "narrow.toml"), recipe.load_recipe("mini-vlm")
    assert narrow.stages == plain.stages and narrow.sources == plain.sources
    assert narrow.model.config["connector"] == plain.model.config["connector"] | {"layers": 1}


def test_tables_merge_and_other_values_are_replaced(resolve):
    merged = resolve({"model": {"config": {"layers": 3}}, "sources": {"two": {"files": ["c"]}, "three": {"kind": "x"}}})
    assert merged["model"] == {"kind": "decoder", "config": {"layers": 3, "mlp": {"kind": "gated", "width": 4}}}
    assert list(merged["sources"]) == ["one", "two", "three"]
    assert merged["sources"]["two"] == {"kind": "text", "files": ["c"], "seed": 1}
    assert merged["stages"] == BASE["stages"] and "base" not in merged


def test_tables_of_another_kind_replace(resolve):
    merged = resolve({"model": {"config": {"mlp": {"kind": "plain", "depth": 1}}}})
    assert merged["model"]["config"]["mlp"] == {"kind": "plain", "depth": 1}


def test_keys_are_removed(resolve):
    merged = resolve({"remove": ["sources.one", "model.config.mlp.width"]})
    assert list(merged["sources"]) == ["two"] and merged["model"]["config"]["mlp"] == {"kind": "gated"}
    with pytest.raises(ConfigError, match=r"remove names 'sources\.ten'"):
        resolve({"remove": ["sources.ten"]})


def test_sources_extend_other_sources(resolve):
    merged = resolve({"remove": ["sources.two"], "sources": {"four": {"like": "two", "remove": ["seed"], "files": []}}})
    assert merged["sources"]["four"] == {"kind": "text", "files": []}  # a removed source can still be extended
    with pytest.raises(ConfigError, match=r"sources\.four\.like is 'five'"):
        resolve({"sources": {"four": {"like": "five"}}})
    with pytest.raises(ConfigError, match="like is 'four'"):
        resolve({"sources": {"four": {"like": "four"}}})


def test_stages_extend_stages_and_share_defaults(resolve):
    first = {"name": "first", "optim": {"lr": 2.0}, "mixture": {"weights": {"two": 1}}}
    more = {"name": "more", "like": "first", "steps": 9}
    merged = resolve({"stage_defaults": {"dtype": "bfloat16"}, "stages": [first, more, {"name": "new", "steps": 1}]})
    one, two, three = merged["stages"]
    assert one["optim"] == {"lr": 2.0, "eps": 0.1} and one["mixture"] == {"weights": {"two": 1}} and one["steps"] == 1
    assert two == {**one, "name": "more", "steps": 9}
    assert three == {"dtype": "bfloat16", "name": "new", "steps": 1}
    with pytest.raises(ConfigError, match=r"stages\.like is 'frist'.*\n.*'first'"):
        resolve({"stages": [{"name": "x", "like": "frist"}]})


def test_a_recipe_that_extends_itself_is_refused(tmp_path):
    (tmp_path / "a.toml").write_text('name = "a"\nbase = "b"\n')
    (tmp_path / "b.toml").write_text('name = "b"\nbase = "a"\n')
    with pytest.raises(ConfigError, match="a → b → a"):
        resolve_recipe(tmp_path / "a.toml")


VALUES = st.recursive(
    st.booleans() | st.integers(-(2**40), 2**40) | st.floats(-1e6, 1e6) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=6), VALUES, max_size=4))
def test_formatted_toml_reads_back(data):
    assert tomllib.loads(format_toml(data)) == data


@pytest.mark.parametrize("name", NAMES)
def test_formatted_recipes_read_back(name):
    data = read_recipe_file(name)
    assert tomllib.loads(format_toml(data)) == data


def test_listing_and_help_do_not_import_torch():
    script = (
        "import sys; from vitrail.cli import app\n"
        "for words in (['recipes'], ['train', '--help']):\n"
        "    app(words, result_action='return_value', exit_on_error=False)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    source = str(Path(__file__).parents[2] / "src")
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, env={"PYTHONPATH": source})
