"""Recipes: each runs, and what cannot be is refused before anything is built."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from vitrail import hub, recipe
from vitrail.cli import train as cli
from vitrail.cli.write import write
from vitrail.config import lay
from vitrail.data.text import TextConfig
from vitrail.errors import ConfigError, TrainError
from vitrail.processing.text import Tokenizer
from vitrail.train.trainer import Trainer

NEEDS_PACKAGE = {"stories-lora"} | {
    name for name in recipe.names() if not all(isinstance(s, TextConfig) for s in recipe.read(name).sources.values())
}


@pytest.mark.parametrize("name", [*recipe.names(), *recipe.untested()])
def test_every_recipe_is_read_and_its_file_is_called_as_it_is(name):
    assert recipe.read(name).name == name.removeprefix("untested/")


@pytest.mark.parametrize("name", recipe.names())
def test_a_recipe_without_a_result_is_not_among_the_tested(name):
    assert name == "smoke" or (recipe.folder().parent / "results" / f"{name}.json").is_file()


@pytest.mark.parametrize("name", [name for name in recipe.names() if name not in NEEDS_PACKAGE])
def test_every_recipe_runs_one_step(name, tmp_path):
    small = recipe.tiny(recipe.read(name))
    made = recipe.train(small, tmp_path, quiet=True)
    again = hub.load(tmp_path / "final")
    ids = torch.arange(5)[None]
    assert torch.equal(again(ids), made.eval()(ids))
    assert hub.tokenizer(tmp_path / "final").size <= again.config.vocab


def test_um3_mixes_as_it_is_told_and_calms_down():
    mix, calm = recipe.read("um3-scenes").stages
    samples = mix.steps * mix.batch
    for index, text in ((0, 60), (samples, 12), (2 * samples, 12)):
        assert mix.mixture.at(index) == pytest.approx([text / (text + 4), 1 / (text + 4), 3 / (text + 4)])
    assert mix.mixture.over == samples and calm.mixture.at(0) == pytest.approx(mix.mixture.at(samples))
    for calmed, mixed in zip((calm.optim, *calm.optim.rates), (mix.optim, *mix.optim.rates), strict=True):
        assert calmed.lr == pytest.approx(mixed.lr / 10)
    assert "text-test" in mix.judge and mix.judge_first


def test_texts_longer_than_the_context_are_refused_before_a_step():
    with pytest.raises(ConfigError, match=r"texts of 100,000 tokens .* made for 256") as error:
        recipe.read("smoke", {"sources.docs.length": "100000"})
    assert "sources.docs.length" in error.value.remedy


def test_what_is_mistyped_is_named_as_it_was_given(tmp_path):
    with pytest.raises(ConfigError, match="Expected `int`") as error:
        recipe.read("smoke", {"stages.0.steps": '"abc"'})
    assert "stages.0.steps" in error.value.remedy
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"x\.json is no recipe") as error:
        recipe.read(tmp_path / "x.json")
    assert ".toml" in error.value.remedy


def test_sources_of_one_atlas_share_it(monkeypatch):
    opened = []
    monkeypatch.setattr(recipe, "open_atlas", lambda name: opened.append(name) or object())
    monkeypatch.setattr(recipe, "NamedSource", lambda config, name: None)
    shown = recipe._pictures(recipe.read("mini"))
    assert sorted(opened) == ["emoji", "flat", "older"]
    assert shown["read"].atlas is shown["words"].atlas is not shown["older"].atlas


def test_what_is_not_trained_yet_is_named_with_the_command_that_trains_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = recipe.tiny(recipe.read("untested/mini-vlm-qformer"))
    with pytest.raises(
        ConfigError,
        match=r"tower starts from out/clip-scenes/final.*\n.*train clip-scenes --out out/clip-scenes$",
    ):
        recipe.train(small, tmp_path / "run", quiet=True)
    (tmp_path / "out/clip-scenes/final").mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=r"connector .*\n.*vitrail train untested/qformer-scenes --out out/qformer-scenes$"
    ):
        recipe.train(small, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_not_run_again(tmp_path, monkeypatch):
    small = recipe.tiny(recipe.read("smoke"))
    first = recipe.train(small, tmp_path, quiet=True)
    monkeypatch.setattr("vitrail.train.trainer.Trainer._one_step", None)
    second = recipe.train(small, tmp_path, quiet=True)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_a_run_stops_behind_a_stage_and_goes_on_as_if_it_had_not(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("one two three four five six seven eight nine ten\n" * 400)
    small = recipe.tiny(recipe.read("smoke", {"tokenizer.train": "280", "stages.0.save_every": "1"}))
    docs = small.sources["docs"].with_(package=None, files=(str(text),))
    first = small.stages[0].with_(steps=2)
    small = small.with_(stages=(first, first.with_(name="more")), sources={"docs": docs})
    whole = recipe.train(small, tmp_path / "whole", quiet=True)
    half = recipe.train(small, tmp_path / "half", until="learn", quiet=True)
    assert not (tmp_path / "half" / "final").exists() and not (tmp_path / "half" / "more").exists()
    kept = hub.load(tmp_path / "half" / "learn" / "final")
    assert all(torch.equal(a, b) for a, b in zip(kept.parameters(), half.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(kept.parameters(), whole.parameters(), strict=True))
    recipe.train(small, tmp_path / "half", until="more", quiet=True)
    again = hub.load(tmp_path / "half" / "final")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), whole.parameters(), strict=True))
    unread = {**small.sources, "unread": docs.with_(files=("gone.txt",))}  # by any stage that is left
    rest = recipe.begun(small.with_(sources=unread), "more", str(tmp_path / "half" / "learn" / "final"))
    assert [stage.name for stage in rest.stages] == ["more"] and set(rest.sources) == {"docs"}
    elsewhere = recipe.train(rest, tmp_path / "elsewhere", quiet=True)
    assert all(torch.equal(a, b) for a, b in zip(elsewhere.parameters(), whole.parameters(), strict=True))
    for more, says in (
        ({"until": "nowhere"}, r"no stage 'nowhere'.*\n.*learn"),
        ({"since": "nowhere", "start": "smoke"}, r"no stage 'nowhere'.*\n.*learn"),
        ({"since": "learn"}, "--since and --start go together"),
        ({"start": "stories15M"}, "--since and --start go together"),
    ):
        with pytest.raises(ConfigError, match=says):
            cli.train("smoke", out=tmp_path / "none", **more)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("model.config.layrs=3", r"layrs.*\n.*layers"),
        ("model.config.block.attention.heads=3", "3 heads|divide|share"),
        ("model.config.rotary.head_dim=8", "head_dim"),
        ("model.config.vocab=100", "vocab"),
        ("stages.0.stepps=3", "stepps"),
        ("stages.7.steps=3", "leads nowhere"),
        ("stages.0.mixture.weights={}", "draws from nothing"),
        ("stages.0.mixture.weights={nowhere=1}", "nowhere"),
        ("stages.0.judge=['nowhere']", "nowhere"),
        ("stages.0.task=paint", "paint"),
        ("stages.0.train=['tower']", "tower"),
        ("stages.0.optim.lr=fast", "lr"),
        ("stages.0.schedule.kind=square", "square|Invalid"),
        ("tokenizer.train=10", "vocab_size"),
        ("model.kind=oracle", "oracle"),
        ("sources.docs.kind=llava", r"'llava'.*\n.*known: text, scenes"),
        ("sources.docs.kind=txt", "did you mean 'text'"),
        ("sources.docs.package=encyclopedia", "encyclopedia|Invalid"),
        ("stages=[]", "no stage"),
    ],
)
def test_what_cannot_be_is_refused(change, says, tmp_path):
    with pytest.raises(Exception, match=says) as error:
        cli.train("smoke", change, out=tmp_path)
    assert error.type.__module__ == "vitrail.errors"
    assert not list(tmp_path.glob("learn/checkpoints/*"))


def test_unknown_recipes_and_changes_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nope.*\n.*smoke"):
        cli.train("nope", out=tmp_path)
    with pytest.raises(ConfigError, match="key=value"):
        cli.train("smoke", "steps", out=tmp_path)
    (tmp_path / "broken.toml").write_text("name = ")
    with pytest.raises(ConfigError, match="no TOML"):
        cli.train(str(tmp_path / "broken.toml"), out=tmp_path)


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
def test_changes_may_stand_on_several_lines(text, value):
    data = {}
    lay(data, "key", text)
    assert data == {"key": value}


def test_changes_stay_as_they_were_given():
    given = {"stages.0.optim": {"lr": 1e-3}, "stages.0.optim.lr": "2e-3"}
    recipe.read("reference", dict(given))
    assert given == {"stages.0.optim": {"lr": 1e-3}, "stages.0.optim.lr": "2e-3"}


def test_how_a_run_is_run_may_change_and_what_it_learns_may_not(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("one two three four five six seven eight nine ten\n" * 400)
    mine = {"sources.docs": f"{{kind='text', files=['{text}'], length=32}}"}
    mine |= {
        "sources.docs-test": f"{{kind='text', files=['{text}'], length=32, part='test'}}",
        "tokenizer.train": "280",
    }
    small = {**mine, "stages.0.steps": "2", "stages.0.batch": "2", "stages.0.schedule": "{kind='constant'}"}
    small |= {"stages.0.judge_every": "0", "stages.0.save_every": "1"}
    out = tmp_path / "out"
    recipe.train(recipe.read("smoke", small), out, quiet=True)
    recipe.train(recipe.read("smoke", small | {"stages.0.workers": "1", "stages.0.save_every": "7"}), out, quiet=True)
    with pytest.raises(TrainError, match="another recipe"):
        recipe.train(recipe.read("smoke", small | {"stages.0.optim.lr": "0.5"}), out, quiet=True)
    words = (out / "tokenizer" / "tokenizer.json").read_text()
    text.write_text("other words altogether, and more of them than before\n" * 400)
    with pytest.raises(TrainError, match="another recipe"):
        recipe.train(recipe.read("smoke", small), out, quiet=True)
    shutil.rmtree(out / "learn")  # nothing was learned yet: the tokenizer is made anew, not taken over
    recipe.train(recipe.read("smoke", small), out, quiet=True)
    assert (out / "tokenizer" / "tokenizer.json").read_text() != words


def test_a_tokenizer_half_saved_is_made_again(tmp_path, monkeypatch):
    small = recipe.tiny(recipe.read("smoke"))
    whole = recipe.train(small, tmp_path / "whole", quiet=True)
    plain = Tokenizer.save

    def killed(self, folder):
        plain(self, folder)
        (Path(folder) / "tokenizer_config.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(Tokenizer, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        recipe.train(small, tmp_path / "cut", quiet=True)
    monkeypatch.setattr(Tokenizer, "save", plain)
    again = recipe.train(small, tmp_path / "cut", quiet=True)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


def test_adapters_beside_weights_that_all_train_are_refused():
    with pytest.raises(ConfigError, match=r"LoRA.*\n.*\*\.lora"):
        recipe.read("stories-lora", {"stages.0.train": "['*']"})


def test_recipes_are_listed(capsys):
    """Those without a kept result apart."""
    cli.list_recipes()
    trained, others = capsys.readouterr().out.split("\nnot yet trained:\n")
    assert [line.split()[0] for line in trained.splitlines()] == recipe.names()
    assert [line.split()[0] for line in others.splitlines()] == recipe.untested()


@pytest.mark.slow
def test_smoke_learns(tmp_path):
    recipe.train(recipe.read("smoke"), tmp_path, quiet=True)
    rows = [json.loads(line) for line in (tmp_path / "learn" / "log.jsonl").read_text().splitlines()]
    assert rows[-1]["judge/docs-test/text"] < 5.0 < rows[0]["loss"]


def _needs(chosen: recipe.Recipe) -> set[str]:
    """Recipes that it starts from."""
    return {Path(start).parent.name for start in recipe.started_from(chosen).values() if start.startswith("out/")}


@pytest.mark.slow
def test_every_recipe_runs_one_step_on_its_own_data_behind_those_it_starts_from(tmp_path, monkeypatch):
    """But for those whose data are recorded or written first: episodes of simulators, and talks."""
    if shutil.which("npm") is None:
        pytest.skip("packages come with npm")
    monkeypatch.chdir(tmp_path)
    write("", count=40, tokens=100, temperature=1.0, seed=0, out=Path("out/stories.jsonl"))  # as um3-scenes says
    left = {name: recipe.read(name) for name in (*recipe.names(), *recipe.untested())}
    made = {"genie-coinrun", "genie-pocket", "chat-llava"}
    left = {name: chosen for name, chosen in left.items() if chosen.name not in made}
    done: set[str] = set()
    while ready := [name for name, chosen in left.items() if _needs(chosen) <= done]:
        for name in ready:
            chosen = left.pop(name)
            recipe.train(recipe.tiny(chosen), Path("out", chosen.name), quiet=True)
            assert Path("out", chosen.name, "final", "vitrail.json").is_file()
            done.add(chosen.name)
    assert not left


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reference", "stories-lora"])
def test_curves_start_as_pinned(name, tmp_path):
    """The first steps of a recipe trained to a result follow its kept curve."""
    if name in NEEDS_PACKAGE and shutil.which("npm") is None:
        pytest.skip("stories15M comes with npm")
    kept = json.loads((Path(__file__).parents[1] / "results" / f"{name}.json").read_text())["curve"][:5]
    run = recipe.read(name, {"stages.0.save_every": "5", "stages.0.judge_every": "0"})
    with pytest.raises(TrainError, match="SIGTERM after step 5"):
        _stopped_after(run, 5, tmp_path)
    rows = [json.loads(line)["loss"] for line in (tmp_path / run.stages[0].name / "log.jsonl").read_text().splitlines()]
    assert rows == pytest.approx([row["loss"] for row in kept], rel=1e-2)


def _stopped_after(run, steps: int, out: Path) -> None:
    plain = Trainer._one_step

    def counted(self, *given):
        if self.step == steps - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_one_step", counted)
        recipe.train(run, out, quiet=True)


def test_episodes_are_a_source():
    read = recipe.read("smoke", {"sources.play": '{kind = "episodes", folder = "out/pocket", length = 4}'})
    play = read.sources["play"]
    assert (play.folder, play.length, play.part) == ("out/pocket", 4, "train")  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"mixture.weights names 'play', which the task 'text' cannot read"):
        recipe.read("smoke", {"sources.play": read.sources["play"].plain(), "stages.0.mixture.weights": {"play": 1.0}})
