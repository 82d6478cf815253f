"""A third-party package: its components work in recipes and configs, and are listed with ours."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vitrail
from data.formats.conftest import MAKERS
from vitrail import registry
from vitrail.connectors import make_connector
from vitrail.errors import ConfigError
from vitrail.models.presets import VLM_PRESETS
from vitrail.models.vlm_config import VLMConfig
from vitrail.recipe.recipe_schema import Recipe
from vitrail.recipe.recipe_training import train_recipe
from vitrail.registry import BENCHMARKS, CONNECTORS, DATA_SOURCES, QUANTIZERS, TASKS

PACKAGE = Path(__file__).parent / "plugin_package"
BLOCK = {"width": 16, "attention": {"heads": 2}, "mlp": {"kind": "plain", "intermediate_size": 32}}
RECIPE = {
    "name": "example",
    "description": "a codec with a quantizer, data and task of a plugin",
    "model": {
        "kind": "codec",
        "config": {
            "quantizer": {"kind": "example-sign", "bits": 6},
            "post_quant": "none",
            "net": {
                "kind": "vit",
                "encoder": {"image_size": 8, "patch_size": 4, "layers": 1, "block": BLOCK},
                "decoder": {"image_size": 2, "patch_size": 1, "channels": 6, "layers": 1, "block": BLOCK},
            },
        },
    },
    "sources": {"train": {"kind": "example-stripes", "count": 8}},
    "stages": [
        {
            "name": "learn",
            "task": "example-reconstruction",
            "steps": 2,
            "batch_size": 4,
            "mixture": {"weights": {"train": 1.0}},
            "optim": {"kind": "adamw", "lr": 1e-3},
        }
    ],
}


class Answerer:
    def ask(self, media, question, **options):
        return "cxxxxxxxx"

    def ask_batch(self, media, questions, **options):
        return ["cxxxxxxxx"] * len(questions)


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Make the package importable as if it were installed: its folder, and a dist-info with its entry point."""
    info = tmp_path / "vitrail_example-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vitrail-example\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[vitrail.plugins]\nexample = vitrail_example.components\n")
    monkeypatch.syspath_prepend(str(PACKAGE))
    monkeypatch.syspath_prepend(str(tmp_path))
    registries = [value for value in vars(registry).values() if isinstance(value, registry.Registry)]
    values = [dict(each._values) for each in registries]
    registry.find_installed_plugins.cache_clear()
    yield tmp_path
    registry.find_installed_plugins.cache_clear()
    for each, before in zip(registries, values, strict=True):  # other tests see no plugin
        for name in each._values.keys() - before.keys():
            if name.startswith("example-"):
                del each._values[name]
    for module in [name for name in sys.modules if name.partition(".")[0] == "vitrail_example"]:
        del sys.modules[module]


def test_plugins_are_listed_after_our_components(plugin):
    for kind, name in (
        (CONNECTORS, "example-linear"),
        (QUANTIZERS, "example-sign"),
        (DATA_SOURCES, "example-stripes"),
        (TASKS, "example-reconstruction"),
        (BENCHMARKS, "example-vqa"),
    ):
        assert name in kind and name in kind.plugin_names and name not in kind.own_names
        with pytest.raises(ConfigError, match=f"from plugins: .*{name}"):
            kind["zzzz"]


@pytest.mark.slow
def test_a_recipe_trains_with_components_of_a_plugin(plugin, tmp_path):
    recipe = Recipe.from_dict(RECIPE)
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    model = train_recipe(recipe, tmp_path / "out", device="cpu", quiet=True)
    assert type(model.quantizer).__name__ == "SignQuantizer"


def test_a_vlm_config_accepts_the_connector_of_a_plugin(plugin):
    plain = VLM_PRESETS["llava-1.5-7b"].to_dict()
    config = VLMConfig.from_dict(
        plain | {"connector": {"kind": "example-linear", "in_features": 1024, "out_features": 4096}}
    )
    with torch.device("meta"):
        connector = make_connector(config.connector)
        assert connector(torch.empty(2, 5, 1024)).shape == (2, 5, 4096)


def test_help_shows_the_options_of_a_benchmark_of_a_plugin(plugin, capsys):
    from vitrail.cli.eval_command import app

    app(["model", "example-vqa", "--help"], result_action="return_value")
    shown = capsys.readouterr().out
    assert "--num-letters INT" in shown and "Letters that are compared." in shown and "--annotation-file" in shown
    assert "--boxes" not in shown  # an option of other benchmarks


def test_a_benchmark_of_a_plugin_runs_with_its_options(plugin, tmp_path, monkeypatch):
    made = MAKERS["vqa"][1](tmp_path)
    monkeypatch.setattr("vitrail.pipelines.loading.load", lambda *_, **__: Answerer())
    monkeypatch.setattr("vitrail.pipelines.loading.is_vlm", lambda _: True)
    found = [
        vitrail.evaluate("model", "example-vqa", data=made.path, device="cpu", num_letters=number, **made.options)
        for number in (1, 9)
    ]
    assert [result["accuracy"].value > 0 for result in found] == [True, False]
    assert found[1].settings["num_letters"] == 9 and found[1].suite == "example-vqa"
    with pytest.raises(ConfigError, match="did you mean 'num_letters'"):
        vitrail.evaluate("model", "example-vqa", data=made.path, num_leters=1)


@pytest.mark.parametrize("where", ["entry point", "option"])
def test_the_command_line_lists_plugins(plugin, where):
    folders = [
        str(Path(registry.__file__).parents[1]),
        str(PACKAGE),
        *([str(plugin)] if where == "entry point" else []),
    ]
    options = [] if where == "entry point" else ["--plugin", "vitrail_example.components"]
    code = f"import sys; sys.path[:0] = {folders!r}; sys.argv = ['vitrail', *{options!r}, 'eval', '--help']; "
    run = subprocess.run(
        [sys.executable, "-c", code + "from vitrail.cli import main; main()"], capture_output=True, text=True
    )
    assert "example-vqa" in run.stdout, run.stderr


@pytest.mark.parametrize("command", ["train", "recipes"])
def test_help_lists_the_components_of_a_plugin(plugin, monkeypatch, capsys, command):
    from vitrail.cli import main

    monkeypatch.setattr(sys, "argv", ["vitrail", command, "--help"])
    with pytest.raises(SystemExit):
        main()
    words = capsys.readouterr().out.replace(",", " ").split()
    assert {"example-linear", "example-sign", "example-stripes", "example-reconstruction", "projector"} <= set(words)


def test_a_plugin_can_be_a_file_of_the_current_folder(tmp_path):
    """The installed command, unlike `python -m`, does not search the current folder."""
    (tmp_path / "my_parts.py").write_text((PACKAGE / "vitrail_example" / "components.py").read_text())
    source = str(Path(registry.__file__).parents[1])
    code = f"import sys; sys.path[0] = {source!r}; sys.argv = ['vitrail', '--plugin', 'my_parts', 'eval', '--help']; "
    run = subprocess.run(
        [sys.executable, "-c", code + "from vitrail.cli import main; main()"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert "example-vqa" in run.stdout, run.stderr
