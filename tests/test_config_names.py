"""Names that become files or folders are refused if they are paths, wherever they are given."""

import pytest

from vitrail import recipe
from vitrail.config import check_name
from vitrail.data.sources.source_table import get_source
from vitrail.errors import ConfigError, DataError
from vitrail.hub.checkpoint_info import resolve_path
from vitrail.recipe.sweep import Sweep, load_sweep
from vitrail.registry import CONNECTORS, load_plugins

PATHS = ["/elsewhere", "..", "../up", "a/b", "a\\b", ".hidden", "a..b", "a.", "", "a\0b", "a\nb", "-rf", "x" * 101]
SWEEP = {"name": "s", "description": "", "recipe": "smoke", "variants": [{"name": "v"}], "tests": {"t": ["text"]}}


@pytest.mark.parametrize("name", PATHS)
def test_paths_are_not_names(name):
    with pytest.raises(ConfigError, match="not a valid name"):
        check_name(name, "key")


@pytest.mark.parametrize("name", ["/elsewhere", "..", "final", "Final", "tokenizer", "tests"])
def test_stage_names(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"stages\.name is .*, which is (reserved|not a valid name)"):
        recipe.load_recipe("smoke", {"stages.0.name": f'"{name}"'})
    assert not list(tmp_path.iterdir())


def test_stage_names_that_differ_in_case():
    small = recipe.load_recipe("smoke")
    with pytest.raises(ConfigError, match="two stages with the same name"):
        small.replace(stages=(small.stages[0], small.stages[0].replace(name="LEARN")))


def test_recipe_and_source_names():
    small = recipe.load_recipe("smoke")
    with pytest.raises(ConfigError, match=r"name is '\.\./x'"):
        small.replace(name="../x")
    with pytest.raises(ConfigError, match="sources is '/x'"):
        small.replace(sources={**small.sources, "/x": small.sources["docs"]})


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "../s"},
        {"variants": [{"name": ".."}]},
        {"variants": [{"name": "!!!"}]},
        {"tests": {"..": ["text"]}},
        {"requires": [{"recipe": "smoke", "name": "../../x"}]},
    ],
)
def test_sweep_names(wrong):
    assert Sweep.from_dict(SWEEP).name == "s"
    with pytest.raises(ConfigError, match="not a valid name"):
        Sweep.from_dict({**SWEEP, **wrong})


@pytest.mark.parametrize("name", ["../x", "/x", ".x", ""])
def test_component_names(name):
    with pytest.raises(ConfigError, match="not a valid name of a connector"):
        CONNECTORS.register(name, object())


@pytest.mark.parametrize("name", ["os./etc/passwd", "../x", "os..path", "a b/c"])
def test_plugin_names(name, monkeypatch):
    monkeypatch.delenv("VITRAIL_PLUGINS", raising=False)
    with pytest.raises(ConfigError, match="not the name of a module"):
        load_plugins([name])


@pytest.mark.parametrize("name", ["hf:../../x", "hf:a/../b", "hf:a/b@../../x", "../cifar10", "hf:/etc"])
def test_dataset_names(name):
    with pytest.raises(DataError):
        get_source(name)


def test_shipped_names_are_valid():
    for name in (*recipe.list_recipe_names(), *recipe.list_untested_recipe_names()):
        recipe.load_recipe(name)
    for file in (recipe.recipe_folder() / "sweeps").glob("*.toml"):
        load_sweep(file)
    with pytest.raises(Exception, match="does not exist"):
        resolve_path("../missing/model")
