"""`vitrail recipes show | copy | schema`, and `vitrail train --dry-run`."""

import json
import tomllib

import jsonschema
import pytest
import torch

from vitrail import recipe
from vitrail.cli import recipes_command, train_command
from vitrail.errors import ConfigError, TrainError
from vitrail.registry import MODELS


def test_show_prints_the_file(capsys):
    recipes_command.show_recipe("codec-fsq")
    assert capsys.readouterr().out == recipe.find_recipe_file("codec-fsq").read_text()


def test_show_resolved_prints_all_settings(capsys):
    recipes_command.show_recipe("codec-fsq", "seed=3", resolved=True)
    shown = tomllib.loads(capsys.readouterr().out)
    expected = recipe.load_recipe("codec-fsq", {"seed": "3"}).to_dict()
    assert shown["seed"] == 3 and "base" not in shown
    assert shown["stages"][0]["optim"] == json.loads(json.dumps(expected["stages"][0]["optim"]))


def test_resolved_output_is_a_recipe_of_its_own(tmp_path, capsys):
    recipes_command.show_recipe("mini-vlm", resolved=True)
    file = tmp_path / "mini-vlm.toml"
    file.write_text(capsys.readouterr().out)
    assert recipe.load_recipe(file) == recipe.load_recipe("mini-vlm")


def test_overrides_need_resolved():
    with pytest.raises(ConfigError, match="--resolved"):
        recipes_command.show_recipe("smoke", "seed=3")


def test_copy(tmp_path, capsys):
    file = tmp_path / "own.toml"
    recipes_command.copy_recipe("smoke", file)
    assert file.read_bytes() == recipe.find_recipe_file("smoke").read_bytes()
    assert f"vitrail train {file}" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="already exists"):
        recipes_command.copy_recipe("smoke", file)
    with pytest.raises(ConfigError, match=r"not a \.toml file.*\n.*use own\.toml"):
        recipes_command.copy_recipe("smoke", tmp_path / "own.yaml")
    with pytest.raises(ConfigError, match="cannot be written"):
        recipes_command.copy_recipe("smoke", tmp_path / "missing" / "own.toml")


def test_copies_of_extending_recipes_load_anywhere(tmp_path):
    file = tmp_path / "own.toml"
    recipes_command.copy_recipe("codec-fsq", file)
    copied, original = recipe.load_recipe(file), recipe.load_recipe("codec-fsq")
    assert copied.stages == original.stages and copied.model == original.model


@pytest.fixture(scope="module")
def schema(tmp_path_factory) -> dict:
    file = tmp_path_factory.mktemp("schema") / "recipe.schema.json"
    recipes_command.print_schema(out=file)
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", [*recipe.list_recipe_names(), *recipe.list_untested_recipe_names()])
def test_schema_accepts_the_shipped_recipes(schema, name):
    data = tomllib.loads(recipe.find_recipe_file(name).read_text())
    jsonschema.validate(data, schema)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data["stages"][0].update(steps="many"), "many"),
        (lambda data: data["stages"][0].update(stepps=3), "stepps"),
        (lambda data: data["sources"]["docs"].update(kind="txt"), "txt"),
        (lambda data: data["sources"]["docs"].update(window_length="long"), "long"),
        (lambda data: data.update(sorces={}), "sorces"),
    ],
)
def test_schema_refuses_what_the_reader_refuses(schema, change, message):
    data = tomllib.loads(recipe.find_recipe_file("smoke").read_text())
    jsonschema.validate(data, schema)
    change(data)
    with pytest.raises(jsonschema.ValidationError, match=message):
        jsonschema.validate(data, schema)
    with pytest.raises(ConfigError):
        recipe.Recipe.from_dict(data)


def test_dry_run_counts_what_is_trained(capsys):
    train_command.train_recipe("smoke", "stages.0.steps=70", "stages.0.batch_size=3", dry_run=True)
    out = capsys.readouterr().out
    model = recipe.load_recipe("smoke").build_model_config()
    with torch.device("meta"):
        count = sum(p.numel() for p in MODELS["decoder"](model).parameters())
    assert f"{count:,} parameters" in out and "steps 70, batch size 3, samples 210" in out


def test_dry_run_builds_the_model_of_a_checkpoint(tmp_path, capsys):
    file = tmp_path / "mine.toml"
    file.write_text(
        'name = "mine"\ndescription = "a checkpoint that is no decoder"\nmodel.checkpoint = "mini-vlm"\n'
        'tokenizer.checkpoint = "mini-vlm"\nsources.own = { kind = "conversations", path = "own.json" }\n'
        '[[stages]]\nname = "tune"\ntask = "chat"\nsteps = 7\nbatch_size = 2\nmixture = { weights = { own = 1 } }\n'
        "optim = { lr = 1e-4 }\n"
    )
    train_command.train_recipe(str(file), dry_run=True)
    out = capsys.readouterr().out
    assert "model: VLM, " in out and "steps 7, batch size 2" in out


def test_dry_run_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train_command.train_recipe("smoke", dry_run=True, out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def trained(tmp_path):
    """A finished run of a shrunk recipe, and its recipe."""
    text = tmp_path / "a.txt"
    text.write_text("one two three four five six seven eight nine ten\n" * 400)
    small = recipe.shrink_recipe(recipe.load_recipe("smoke", {"tokenizer.vocab_size": "280"}))
    small = small.replace(sources={"docs": small.sources["docs"].replace(package=None, files=(str(text),))})
    small = small.replace(stages=(small.stages[0].replace(steps=2),))
    recipe.train_recipe(small, tmp_path / "run", quiet=True)
    return small, tmp_path / "run"


def test_finished_run_is_extended_by_more_steps(trained, tmp_path):
    """The schedule of `smoke` depends on the number of steps, so that only the data order can be compared."""
    small, folder = trained
    longer = small.replace(stages=(small.stages[0].replace(steps=4),))
    recipe.train_recipe(longer, folder, quiet=True)
    rows = [json.loads(line) for line in (folder / "learn" / "log.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "loss" in row]
    assert steps == sorted(set(steps)) and steps[-1] == 4


def test_other_changes_name_the_key(trained):
    small, folder = trained
    for changed, key in (
        (small.replace(seed=small.seed + 1), "seed was"),
        (small.replace(stages=(small.stages[0].replace(steps=1),)), r"stages\.0\.steps was 2 and is 1"),
        (small.replace(stages=(small.stages[0].replace(batch_size=3),)), r"stages\.0\.batch_size was"),
    ):
        with pytest.raises(TrainError, match=key):
            recipe.train_recipe(changed, folder, quiet=True)
