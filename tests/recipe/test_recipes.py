"""Recipes: each runs, and what cannot be is refused before anything is built."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from vitrail import hub, recipe
from vitrail.cli import train_command as cli
from vitrail.cli.recipes_command import print_recipes
from vitrail.cli.write_command import generate_text
from vitrail.config import set_by_path
from vitrail.data.scenes.scene_source import SceneSourceConfig
from vitrail.data.text_source import TextSourceConfig
from vitrail.errors import ConfigError, TrainError
from vitrail.processing.tokenizer import Tokenizer
from vitrail.recipe import recipe_building
from vitrail.training.trainer import Trainer

NEEDS_PACKAGE = {"stories-lora"} | {
    name
    for name in recipe.list_recipe_names()
    if not all(isinstance(s, TextSourceConfig) for s in recipe.load_recipe(name).sources.values())
}


@pytest.mark.parametrize("name", [*recipe.list_recipe_names(), *recipe.list_untested_recipe_names()])
def test_every_recipe_loads_and_matches_its_file_name(name):
    assert recipe.load_recipe(name).name == name.removeprefix("untested/")


@pytest.mark.parametrize("name", recipe.list_recipe_names())
def test_tested_recipes_have_results(name):
    assert name == "smoke" or (recipe.recipe_folder().parent / "results" / f"{name}.json").is_file()


@pytest.mark.parametrize("name", [name for name in recipe.list_recipe_names() if name not in NEEDS_PACKAGE])
def test_every_recipe_runs_one_step(name, tmp_path):
    small = recipe.shrink_recipe(recipe.load_recipe(name))
    made = recipe.train_recipe(small, tmp_path, quiet=True)
    again = hub.load(tmp_path / "final")
    ids = torch.arange(5)[None]
    assert torch.equal(again(ids), made.eval()(ids))
    assert hub.load_tokenizer(tmp_path / "final").vocab_size <= again.config.vocab_size


def test_um3_mixture_and_cooldown():
    mix, calm = recipe.load_recipe("um3-scenes").stages
    samples = mix.steps * mix.batch_size
    for index, text in ((0, 60), (samples, 12), (2 * samples, 12)):
        assert mix.mixture.weights_at(index) == pytest.approx([text / (text + 4), 1 / (text + 4), 3 / (text + 4)])
    assert mix.mixture.anneal_samples == samples and calm.mixture.weights_at(0) == pytest.approx(
        mix.mixture.weights_at(samples)
    )
    for calmed, mixed in zip((calm.optim, *calm.optim.param_groups), (mix.optim, *mix.optim.param_groups), strict=True):
        assert calmed.lr == pytest.approx(mixed.lr / 10)
    assert "text-test" in mix.validate and mix.validate_first


def test_texts_longer_than_the_context_are_refused():
    with pytest.raises(ConfigError, match=r"windows of 100,000 tokens, .*context is 256") as error:
        recipe.load_recipe("smoke", {"sources.docs.window_length": "100000"})
    assert "sources.docs.window_length" in error.value.remedy


def test_type_errors_name_the_key(tmp_path):
    with pytest.raises(ConfigError, match=r'stages\.0\.steps: expected a whole number, got "abc"') as error:
        recipe.load_recipe("smoke", {"stages.0.steps": '"abc"'})
    assert "stages.0.steps" in error.value.remedy
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"x\.json is not a recipe") as error:
        recipe.load_recipe(tmp_path / "x.json")
    assert ".toml" in error.value.remedy


def test_sources_share_an_atlas(monkeypatch):
    opened = []
    monkeypatch.setattr("vitrail.data.scenes.scene_source.open_atlas", lambda name: opened.append(name) or object())
    whole = recipe.load_recipe("mini")
    scenes = {name: config for name, config in whole.sources.items() if isinstance(config, SceneSourceConfig)}
    stages = tuple(
        stage.replace(
            mixture=stage.mixture.replace(weights=dict.fromkeys(scenes, 1.0)),
            validate=(),
            validate_every=0,
            validate_first=False,
        )
        for stage in whole.stages
    )
    shown = recipe_building.open_sources(whole.replace(sources=scenes, stages=stages))
    assert sorted(opened) == ["emoji", "flat", "older"]
    assert shown["read"].atlas is shown["words"].atlas is not shown["older"].atlas


def test_missing_checkpoint_names_its_train_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = recipe.shrink_recipe(recipe.load_recipe("untested/mini-vlm-qformer"))
    with pytest.raises(
        ConfigError,
        match=r"checkpoint out/clip-scenes/final of tower does not exist.*\n.*train clip-scenes --out out/clip-scenes$",
    ):
        recipe.train_recipe(small, tmp_path / "run", quiet=True)
    (tmp_path / "out/clip-scenes/final").mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=r"of connector .*\n.*vitrail train untested/qformer-scenes --out out/qformer-scenes$"
    ):
        recipe.train_recipe(small, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_finished_run_is_not_repeated(tmp_path, monkeypatch):
    small = recipe.shrink_recipe(recipe.load_recipe("smoke"))
    first = recipe.train_recipe(small, tmp_path, quiet=True)
    monkeypatch.setattr("vitrail.training.trainer.Trainer._train_step", None)
    second = recipe.train_recipe(small, tmp_path, quiet=True)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_run_stopped_after_a_stage_continues_equally(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("one two three four five six seven eight nine ten\n" * 400)
    small = recipe.shrink_recipe(
        recipe.load_recipe("smoke", {"tokenizer.vocab_size": "280", "stages.0.save_every": "1"})
    )
    docs = small.sources["docs"].replace(package=None, files=(str(text),))
    first = small.stages[0].replace(steps=2)
    small = small.replace(stages=(first, first.replace(name="more")), sources={"docs": docs})
    whole = recipe.train_recipe(small, tmp_path / "whole", quiet=True)
    half = recipe.train_recipe(small, tmp_path / "half", stop_after="learn", quiet=True)
    assert not (tmp_path / "half" / "final").exists() and not (tmp_path / "half" / "more").exists()
    kept = hub.load(tmp_path / "half" / "learn" / "final")
    assert all(torch.equal(a, b) for a, b in zip(kept.parameters(), half.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(kept.parameters(), whole.parameters(), strict=True))
    recipe.train_recipe(small, tmp_path / "half", stop_after="more", quiet=True)
    again = hub.load(tmp_path / "half" / "final")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), whole.parameters(), strict=True))
    unread = {**small.sources, "unread_pixels": docs.replace(files=("gone.txt",))}  # by any stage that is left
    rest = recipe.resume_from_stage(small.replace(sources=unread), "more", str(tmp_path / "half" / "learn" / "final"))
    assert [stage.name for stage in rest.stages] == ["more"] and set(rest.sources) == {"docs"}
    elsewhere = recipe.train_recipe(rest, tmp_path / "elsewhere", quiet=True)
    assert all(torch.equal(a, b) for a, b in zip(elsewhere.parameters(), whole.parameters(), strict=True))
    for more, message in (
        ({"stop_after": "nowhere"}, r"no stage 'nowhere'.*\n.*learn"),
        ({"start_stage": "nowhere", "checkpoint": "smoke"}, r"no stage 'nowhere'.*\n.*learn"),
        ({"start_stage": "learn"}, "--start-stage and --checkpoint go together"),
        ({"checkpoint": "stories15M"}, "--start-stage and --checkpoint go together"),
    ):
        with pytest.raises(ConfigError, match=message):
            cli.train_recipe("smoke", out=tmp_path / "none", **more)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.config.layrs=3", r"layrs.*\n.*layers"),
        ("model.config.block.attention.heads=3", "3 heads|divide|share"),
        ("model.config.rotary.head_dim=8", "head_dim"),
        ("model.config.vocab_size=100", "vocab"),
        ("stages.0.stepps=3", "stepps"),
        ("stages.7.steps=3", "does not exist"),
        ("stages.0.mixture.weights={}", "no positive weight"),
        ("stages.0.mixture.weights={nowhere=1}", "nowhere"),
        ("stages.0.validate=['nowhere']", "nowhere"),
        ("stages.0.task=paint", "paint"),
        ("stages.0.trainable=['tower']", "tower"),
        ("stages.0.optim.lr=fast", "lr"),
        ("stages.0.schedule.kind=square", "square|Invalid"),
        ("tokenizer.vocab_size=10", "vocab_size"),
        ("model.kind=oracle", "oracle"),
        ("sources.docs.kind=llava", r"'llava'.*\n.*known: clips, conversations"),
        ("sources.docs.kind=txt", "did you mean 'text'"),
        ("sources.docs.package=encyclopedia", "encyclopedia|Invalid"),
        ("stages=[]", "no stage"),
    ],
)
def test_invalid_overrides_are_refused(change, message, tmp_path):
    with pytest.raises(Exception, match=message) as error:
        cli.train_recipe("smoke", change, out=tmp_path)
    assert error.type.__module__ == "vitrail.errors"
    assert not list(tmp_path.glob("learn/checkpoints/*"))


def test_unknown_recipes_and_overrides_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nope.*\n.*smoke"):
        cli.train_recipe("nope", out=tmp_path)
    with pytest.raises(ConfigError, match="key=value"):
        cli.train_recipe("smoke", "steps", out=tmp_path)
    (tmp_path / "broken.toml").write_text("name = ")
    with pytest.raises(ConfigError, match="not valid TOML"):
        cli.train_recipe(str(tmp_path / "broken.toml"), out=tmp_path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[1, # one\n 2]", [1, 2]),
        ('"""a\nb"""', "a\nb"),
        ("{a = 1,\n b = 2}", {"a": 1, "b": 2}),
        ("1\nother = 2", "1\nother = 2"),
        ("as it stands", "as it stands"),
    ],
)
def test_overrides_on_several_lines(text, value):
    data = {}
    set_by_path(data, "key", text)
    assert data == {"key": value}


def test_overrides_are_not_modified():
    given = {"stages.0.optim": {"lr": 1e-3}, "stages.0.optim.lr": "2e-3"}
    recipe.load_recipe("reference", dict(given))
    assert given == {"stages.0.optim": {"lr": 1e-3}, "stages.0.optim.lr": "2e-3"}


def test_runtime_settings_may_change_on_resume(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("one two three four five six seven eight nine ten\n" * 400)
    mine = {"sources.docs": f"{{kind='text', files=['{text}'], window_length=32}}"}
    mine |= {
        "sources.docs-test": f"{{kind='text', files=['{text}'], window_length=32, split='test'}}",
        "tokenizer.vocab_size": "280",
    }
    small = {**mine, "stages.0.steps": "2", "stages.0.batch_size": "2", "stages.0.schedule": "{kind='constant'}"}
    small |= {"stages.0.validate": "[]", "stages.0.validate_every": "0", "stages.0.save_every": "1"}
    out = tmp_path / "out"
    recipe.train_recipe(recipe.load_recipe("smoke", small), out, quiet=True)
    recipe.train_recipe(
        recipe.load_recipe("smoke", small | {"stages.0.num_workers": "1", "stages.0.save_every": "7"}), out, quiet=True
    )
    with pytest.raises(TrainError, match="another recipe"):
        recipe.train_recipe(recipe.load_recipe("smoke", small | {"stages.0.optim.lr": "0.5"}), out, quiet=True)
    words = (out / "tokenizer" / "tokenizer.json").read_text()
    text.write_text("other words altogether, and more of them than before\n" * 400)
    with pytest.raises(TrainError, match="another recipe"):
        recipe.train_recipe(recipe.load_recipe("smoke", small), out, quiet=True)
    shutil.rmtree(out / "learn")  # nothing was learned yet: the tokenizer is made anew, not taken over
    recipe.train_recipe(recipe.load_recipe("smoke", small), out, quiet=True)
    assert (out / "tokenizer" / "tokenizer.json").read_text() != words


def test_partial_tokenizer_is_trained_again(tmp_path, monkeypatch):
    small = recipe.shrink_recipe(recipe.load_recipe("smoke"))
    whole = recipe.train_recipe(small, tmp_path / "whole", quiet=True)
    plain = Tokenizer.save

    def killed(self, folder):
        plain(self, folder)
        (Path(folder) / "tokenizer_config.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(Tokenizer, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        recipe.train_recipe(small, tmp_path / "cut", quiet=True)
    monkeypatch.setattr(Tokenizer, "save", plain)
    again = recipe.train_recipe(small, tmp_path / "cut", quiet=True)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


def test_lora_with_all_weights_trainable_is_refused():
    with pytest.raises(ConfigError, match=r"LoRA.*\n.*\*\.lora"):
        recipe.load_recipe("stories-lora", {"stages.0.trainable": "['*']"})


def test_recipes_are_listed(capsys):
    """Those without a kept result apart."""
    print_recipes()
    trained, others = capsys.readouterr().out.split("\nwithout a published result:\n")
    assert [line.split()[0] for line in trained.splitlines()] == recipe.list_recipe_names()
    assert [line.split()[0] for line in others.splitlines()] == recipe.list_untested_recipe_names()


@pytest.mark.slow
def test_smoke_learns(tmp_path):
    recipe.train_recipe(recipe.load_recipe("smoke"), tmp_path, quiet=True)
    rows = [json.loads(line) for line in (tmp_path / "learn" / "log.jsonl").read_text().splitlines()]
    assert rows[-1]["validation/docs-test/text"] < 5.0 < rows[0]["loss"]


def _needs(chosen: recipe.Recipe) -> set[str]:
    """Recipes that it starts from."""
    return {
        Path(start).parent.name for start in recipe.collect_checkpoints(chosen).values() if start.startswith("out/")
    }


@pytest.mark.slow
def test_every_recipe_runs_one_step_on_its_own_data(tmp_path, monkeypatch):
    """But for those whose data are recorded or written first: episodes of simulators, and talks."""
    if shutil.which("npm") is None:
        pytest.skip("packages come with npm")
    monkeypatch.chdir(tmp_path)
    generate_text(
        "", count=40, max_new_tokens=100, temperature=1.0, seed=0, out=Path("out/stories.jsonl")
    )  # as um3-scenes says
    left = {
        name: recipe.load_recipe(name) for name in (*recipe.list_recipe_names(), *recipe.list_untested_recipe_names())
    }
    made = {"genie-coinrun", "genie-pocket", "chat-llava"}
    left = {name: chosen for name, chosen in left.items() if chosen.name not in made}
    done: set[str] = set()
    while ready := [name for name, chosen in left.items() if _needs(chosen) <= done]:
        for name in ready:
            chosen = left.pop(name)
            recipe.train_recipe(recipe.shrink_recipe(chosen), Path("out", chosen.name), quiet=True)
            assert Path("out", chosen.name, "final", "vitrail.json").is_file()
            done.add(chosen.name)
    assert not left


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reference", "stories-lora"])
def test_training_curves_start_as_recorded(name, tmp_path):
    """The first steps of a recipe trained to a result follow its kept curve."""
    if name in NEEDS_PACKAGE and shutil.which("npm") is None:
        pytest.skip("stories15M comes with npm")
    kept = json.loads((Path(__file__).parents[2] / "results" / f"{name}.json").read_text())["curve"][:5]
    more = {"stages.0.validate": "[]", "stages.0.validate_every": "0"}
    run = recipe.load_recipe(name, {"stages.0.save_every": "5", **more})
    with pytest.raises(TrainError, match="SIGTERM after step 5"):
        _stopped_after(run, 5, tmp_path)
    rows = [json.loads(line)["loss"] for line in (tmp_path / run.stages[0].name / "log.jsonl").read_text().splitlines()]
    assert rows == pytest.approx([row["loss"] for row in kept], rel=1e-2)


def _stopped_after(run, steps: int, out: Path) -> None:
    plain = Trainer._train_step

    def counted(self, *given):
        if self.step == steps - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_train_step", counted)
        recipe.train_recipe(run, out, quiet=True)


def test_episodes_source():
    read = recipe.load_recipe(
        "smoke", {"sources.play": '{kind = "episodes", folder = "out/pocket", window_length = 4}'}
    )
    play = read.sources["play"]
    assert (play.folder, play.window_length, play.split) == ("out/pocket", 4, "train")  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"mixture.weights names 'play', which the task 'text' does not support"):
        recipe.load_recipe(
            "smoke", {"sources.play": read.sources["play"].to_dict(), "stages.0.mixture.weights": {"play": 1.0}}
        )
