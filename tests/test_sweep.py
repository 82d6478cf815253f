"""Sweeps: what is run, that nothing is run twice, and the table."""

import json
import math
import shlex
import shutil

import pytest
import torch

from vitrail import recipe, sweep
from vitrail.cli.sweep import sweep as command
from vitrail.errors import ConfigError, Stopped, TrainError
from vitrail.models.vlm import VLM

SMALL = {
    "name": "small",
    "says": "a test",
    "recipe": "smoke",
    "seeds": [1, 2],
    "changes": {"stages.0.judge_every": 0},
    "variants": [{"name": "one"}, {"name": "Two!", "changes": {"stages.0.batch": 4}}],
    "tests": {"a": ["suite", "--word"]},
}


asked: list = []


@pytest.fixture
def quick(monkeypatch):
    """Training that leaves a folder, and a test that gives its seed for a score."""
    done: list = []
    asked.clear()

    def train(chosen, out, *, device=None, quiet=False):
        done.append((chosen.stages[0].batch, chosen.seed))
        (out / "final").mkdir(parents=True, exist_ok=True)
        (out / chosen.stages[0].name / "checkpoints").mkdir(parents=True, exist_ok=True)
        judged = [{"step": 1, "judge/x/loss": 9.0}, {"step": chosen.stages[0].steps, "judge/x/loss": 5.0, "loss": 3.0}]
        (out / chosen.stages[0].name / "log.jsonl").write_text("\n".join(map(json.dumps, judged)) + "\n")

    def test(model, words, file, **_):
        assert words[0] == "suite" and model.name == "final"
        asked.append(words)
        file.parent.mkdir(parents=True, exist_ok=True)
        seed = int(model.parent.name.removeprefix("seed-"))
        file.write_text(json.dumps({"scores": [{"name": "  share", "value": seed / 10, "part": {"width": 8}}]}))

    monkeypatch.setattr("vitrail.sweep.recipes.train", train)
    return done, test


def test_every_variant_is_run_from_every_seed_and_none_twice(quick, tmp_path):
    done, test = quick
    chosen = sweep.Sweep.read(SMALL)
    batch = recipe.read("smoke").stages[0].batch
    for _ in range(2):
        for run in sweep.runs(chosen, tmp_path):
            sweep.do(chosen, run, test)
    assert done == [(batch, 1), (4, 1), (batch, 2), (4, 2)]
    assert (tmp_path / "two" / "seed-2" / "final").is_dir() and not list(tmp_path.rglob("checkpoints"))
    other = sweep.Sweep.read({**SMALL, "changes": {"stages.0.judge_every": 0, "stages.0.optim.lr": 1e-5}})
    sweep.do(other, sweep.runs(other, tmp_path)[0], test)
    assert len(done) == 5  # another recipe is another run


def test_changes_may_be_text_numbers_and_tables(tmp_path):
    changes = {"says": "1", "stages.0.optim": {"lr": 0.5}, "stages.0.train": ["*"]}
    chosen = sweep.Sweep.read({**SMALL, "variants": [{"name": "a", "changes": changes}]})
    found = chosen.read_recipe(chosen.variants[0], 3)
    assert (found.says, found.stages[0].optim.lr, found.seed) == ("1", 0.5, 3)


def test_another_question_is_asked_anew_and_broken_answers_too(quick, tmp_path):
    done, test = quick
    chosen = sweep.Sweep.read(SMALL)
    run = sweep.runs(chosen, tmp_path)[0]
    sweep.do(chosen, run, test)
    other = sweep.Sweep.read({**SMALL, "tests": {"a": ["suite", "--other"]}})
    sweep.do(other, run, test)
    (run.folder / "tests" / "a.json").write_text('{"scores": [')
    assert not [row for row in sweep.table(other, tmp_path) if row.test == "a"]
    sweep.do(other, run, test)
    assert asked == [("suite", "--word"), ("suite", "--other"), ("suite", "--other")] and len(done) == 1


def test_how_a_run_is_run_does_not_make_it_another(quick, tmp_path):
    done, test = quick
    for workers in (0, 2):
        chosen = sweep.Sweep.read({**SMALL, "changes": {"stages.0.workers": workers}})
        sweep.do(chosen, sweep.runs(chosen, tmp_path)[0], test)
    assert len(done) == 1


def test_a_start_that_was_trained_anew_makes_another_run(quick, tmp_path):
    done, test = quick
    start = tmp_path / "tower"
    start.mkdir()
    (start / "model.safetensors").write_bytes(b"one")
    changes = {"model.parts": {"blocks": {"start": str(start)}}}
    chosen = sweep.Sweep.read({**SMALL, "variants": [{"name": "a", "changes": changes}]})
    run = sweep.runs(chosen, tmp_path / "out")[0]
    seen = chosen.read_recipe(run.variant, run.seed)
    before = recipe.identity(seen, {})
    for content, runs in ((b"one", 1), (b"one", 1), (b"two", 2)):
        (start / "model.safetensors").write_bytes(content)
        sweep.do(chosen, run, test)
        assert len(done) == runs
    assert recipe.identity(seen, {}) != before  # nor is it gone on with
    assert list(recipe.starts(seen)) == [str(start)]


def test_a_package_is_told_without_being_fetched(monkeypatch):
    monkeypatch.setattr("vitrail.hub.packages.fetch", lambda *_: pytest.fail("fetched"))
    gates = sweep.read("vlm-gates")
    parts = {"decoder": {"start": "stories15M", "part": ""}}
    changes = {**gates.changes, "model.parts": parts}
    chosen = gates.with_(changes=changes, variants=gates.variants[:1])
    [digest] = recipe.starts(chosen.read_recipe(chosen.variants[0], 0)).values()
    assert len(digest.split()[0]) == 64


def test_where_a_run_comes_from_is_kept_as_it_was_trained(quick, tmp_path, monkeypatch):
    _, test = quick
    chosen = sweep.Sweep.read({**SMALL, "seeds": [1]})
    one, other = sweep.runs(chosen, tmp_path)
    for run, commit in ((one, "aaa"), (other, "bbb"), (one, "ccc")):  # the last was done before
        monkeypatch.setenv("COMMIT", commit)
        sweep.do(chosen, run, test, device="cpu")
    found = sweep.origins(chosen, tmp_path)
    assert found["commit"] == "aaa, bbb" and "CPU" in found["device"] and "note" not in found
    (one.folder / sweep.ORIGIN).unlink()
    assert sweep.origins(chosen, tmp_path)["note"].startswith("of 1 of 2 runs")


def test_one_bad_run_does_not_hold_up_the_others(quick, tmp_path, monkeypatch, capsys):
    _, test = quick
    monkeypatch.setattr("vitrail.cli.sweep._test", test)
    good = recipe.train

    def train(chosen, out, **more):
        if chosen.seed == 1:
            raise TrainError("step 3 is not a number")
        good(chosen, out, **more)

    monkeypatch.setattr("vitrail.sweep.recipes.train", train)
    file = tmp_path / "small.toml"
    lines = ['name = "small"', 'says = "x"', 'recipe = "smoke"', "seeds = [1, 3]", "[tests]", 'a = ["suite"]']
    file.write_text("\n".join([*lines, "[[variants]]", 'name = "one"', ""]))
    with pytest.raises(TrainError, match="one, seed 1: step 3"):
        command(str(file), out=tmp_path / "out")
    assert "0.3000  0.3000" in capsys.readouterr().out  # of one seed, and so without an interval
    file.write_text(file.read_text().replace('name = "small"', 'name = "other"'))
    with pytest.raises(ConfigError, match="small"):
        command(str(file), out=tmp_path / "out")


def test_shares_are_whole_and_do_not_overlap(tmp_path):
    chosen = sweep.Sweep.read({**SMALL, "seeds": [0, 1, 2]})
    every = sweep.runs(chosen, tmp_path)
    shares = [sweep.runs(chosen, tmp_path, (i, 4)) for i in range(4)]
    assert sorted(run.name for share in shares for run in share) == sorted(run.name for run in every)


def test_the_table_has_means_and_students_intervals(quick, tmp_path):
    _, test = quick
    chosen = sweep.Sweep.read({**SMALL, "seeds": [1, 2, 6]})
    for run in sweep.runs(chosen, tmp_path):
        sweep.do(chosen, run, test)
    first, judged, second, _ = sweep.table(chosen, tmp_path)
    assert (judged.test, judged.score, judged.mean) == ("learn", "judge/x/loss", 5.0)
    assert (first.variant, second.variant, first.score) == ("one", "Two!", "share, width 8")
    assert first.values == {1: 0.1, 2: 0.2, 6: 0.6} and first.mean == pytest.approx(0.3)
    t = 0.95 / math.sqrt(2 * 0.975 * 0.025)  # Student's quantile in closed form: two degrees of freedom
    half = t * math.sqrt((0.04 + 0.01 + 0.09) / 2) / math.sqrt(3)
    assert first.interval == pytest.approx((0.3 - half, 0.3 + half))
    assert sweep.Row("v", "t", "s", {0: 1.0}).interval is None
    many = sweep.Row("v", "t", "s", {seed: float(seed % 2) for seed in range(100)})
    assert many.interval == pytest.approx((0.5 - 1.98422 * 0.0502519, 0.5 + 1.98422 * 0.0502519), abs=1e-6)


def test_the_command_shows_and_keeps_the_table(quick, tmp_path, capsys, monkeypatch):
    _, test = quick
    monkeypatch.setattr("vitrail.cli.sweep._test", test)
    file = tmp_path / "small.toml"
    file.write_text(
        'name = "small"\nsays = "x"\nrecipe = "smoke"\nseeds = [1, 3]\n[tests]\na = ["suite", "--word"]\n'
        '[[variants]]\nname = "one"\n'
    )
    command(str(file), out=tmp_path / "out")
    assert "0.2000 [" in capsys.readouterr().out
    row, _ = json.loads((tmp_path / "out" / "table.json").read_text())
    assert row["mean"] == pytest.approx(0.2) and row["values"] == {"1": 0.1, "3": 0.3}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"variants": []}, "nothing to run"),
        ({"variants": [{"name": "A b"}, {"name": "a-b"}]}, "twice"),
        ({"seeds": [1, 1]}, "twice"),
        ({"changes": {"seed": 3}}, "seeds"),
        ({"tests": {"a b": ["x"], "a-b": ["y"]}}, "test twice"),
    ],
)
def test_what_cannot_be_is_refused(change, says):
    with pytest.raises(ConfigError, match=says):
        sweep.Sweep.read({**SMALL, **change})


def test_a_bad_change_is_refused_before_anything_is_run(quick, tmp_path):
    bad = sweep.Sweep.read({**SMALL, "variants": [{"name": "a"}, {"name": "b", "changes": {"stages.0.stepps": 3}}]})
    with pytest.raises(ConfigError, match="stepps"):
        sweep.runs(bad, tmp_path)
    start = {"model.parts": {"blocks": {"start": "out/not/there"}}}
    lost = sweep.Sweep.read({**SMALL, "variants": [{"name": "a", "changes": start}]})
    with pytest.raises(ConfigError, match="not there"):
        sweep.check_starts(lost, tmp_path)
    with pytest.raises(ConfigError, match="no sweep"):
        sweep.read("nothing")


@pytest.mark.parametrize("name", [path.stem for path in sweep.folder().glob("*.toml")])
def test_every_sweep_is_read(name, tmp_path):
    found = sweep.read(name)
    assert found.name == name and sweep.runs(found, tmp_path)


# ---- what is trained before -------------------------------------------------------------------------------------

TINY = """
name = "{name}"
says = "x"
tokenizer = {{ {words} }}

[model]
kind = "decoder"
parts = {{ {parts} }}

[model.config]
vocab = 300
layers = 1
rotary = {{ head_dim = 8 }}
block = {{ width = 16, norm = "rms", attention = {{ heads = 2 }}, mlp = {{ kind = "gated", hidden = 16 }} }}

[sources.docs]
kind = "text"
files = ["text.txt"]
length = 8

[[stages]]
name = "learn"
task = "text"
steps = 1
batch = 2
mixture = {{ weights = {{ docs = 1.0 }} }}
optim = {{ kind = "adamw", lr = 3e-3 }}
"""


@pytest.fixture
def chain(tmp_path, monkeypatch):
    """Three recipes, each from the one before, and a sweep over the last that needs the others."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("one two three four five six seven eight nine ten " * 200)
    before = {"first": "", "second": "first", "third": "second"}
    for name, start in before.items():
        words = f'start = "out/{start}/final"' if start else "train = 300"
        parts = f'blocks = {{ start = "out/{start}/final" }}' if start else ""
        (tmp_path / f"{name}.toml").write_text(TINY.format(name=name, words=words, parts=parts))
    file = tmp_path / "chain.toml"
    file.write_text(
        'name = "chain"\nsays = "x"\nrecipe = "third.toml"\nseeds = [0]\nneeds = ["first.toml", "second.toml"]\n'
        '[[variants]]\nname = "one"\n'
    )
    return file


def test_what_a_sweep_starts_from_is_trained_first(chain, tmp_path, capsys):
    command(str(chain), out=tmp_path / "runs", device="cpu")
    said = capsys.readouterr().out.splitlines()
    commands = [f"vitrail train {name}.toml --out out/{name}" for name in ("first", "second")]
    assert said[:2] == [f"first: {one}" for one in commands]
    assert all((tmp_path / "out" / name / "final").is_dir() for name in ("first", "second"))
    assert (tmp_path / "runs" / "one" / "seed-0" / "final").is_dir()
    assert not sweep.missing(sweep.read(chain))


def test_runs_lie_in_a_folder_of_the_sweeps_name(chain, tmp_path):
    command(str(chain), device="cpu")
    assert (tmp_path / "out" / "chain" / "one" / "seed-0" / "final").is_dir()
    assert (tmp_path / "out" / "chain" / "table.json").is_file()


def test_without_training_the_commands_are_told(chain, tmp_path):
    with pytest.raises(ConfigError, match=r"starts from out/second/final") as caught:
        command(str(chain), out=tmp_path / "runs", train=False)
    lines = [line.strip() for line in caught.value.remedy.splitlines()[1:]]
    assert lines == [f"vitrail train {name}.toml --out out/{name}" for name in ("first", "second")]
    assert not (tmp_path / "out").exists() and not (tmp_path / "runs").exists()


def test_a_rehearsal_trains_a_step_of_all_and_leaves_nothing(chain, tmp_path, capsys, monkeypatch):
    trained = []

    def train(chosen, out, **more):
        trained.append((chosen.name, chosen.stages[0].steps, chosen.stages[0].batch, recipe.started_from(chosen)))
        return good(chosen, out, **more)

    good = recipe.train
    monkeypatch.setattr("vitrail.sweep.recipes.train", train)
    changed = chain.read_text().replace("seeds = [0]", 'seeds = [0, 1]\nchanges = { "stages.0.steps" = 9000 }')
    chain.write_text(changed + '[[variants]]\nname = "two"\n')
    before = set(tmp_path.iterdir())
    command(str(chain), device="cpu", rehearse=True)
    assert capsys.readouterr().out.splitlines() == [f"chain: {name}: is trained and tested" for name in ("one", "two")]
    assert set(tmp_path.iterdir()) == before
    assert [name for name, *_ in trained] == ["first", "second", "third", "third"]  # of each variant one seed
    assert all((steps, batch) == (1, 2) for _, steps, batch, _ in trained)
    starts = [start for *_, found in trained for start in found.values()]
    assert starts and not any(start.startswith("out/") for start in starts)  # those that were rehearsed


def test_a_rehearsal_finds_what_would_fail_at_the_end(chain, tmp_path, capsys):
    more = (
        '[tests]\nscore = ["retrieval", "--data", "nowhere"]\n[[variants]]\nname = "one"\n[[variants]]\nname = "two"\n'
    )
    chain.write_text(chain.read_text().replace('[[variants]]\nname = "one"\n', more))
    with pytest.raises(ConfigError, match="would fail: chain: one, chain: two"):
        command(str(chain), out=tmp_path / "runs", device="cpu", rehearse=True)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and all("Decoder" in line for line in said)  # what the test says of such a model


def test_a_rehearsal_says_which_start_cannot_be_trained(chain, tmp_path, monkeypatch):
    def train(chosen, out, **_):
        raise ConfigError("no room", "make some") if chosen.name == "second" else Stopped("stopped by SIGINT")

    monkeypatch.setattr("vitrail.sweep.recipes.train", train)
    (tmp_path / "out" / "first" / "final").mkdir(parents=True)
    with pytest.raises(ConfigError, match="out/second, which it starts from: no room"):
        command(str(chain), out=tmp_path / "runs", device="cpu", rehearse=True)
    (tmp_path / "out" / "second" / "final").mkdir(parents=True)
    with pytest.raises(Stopped):  # a signal is for all, and no fault of the variant's
        command(str(chain), out=tmp_path / "runs", device="cpu", rehearse=True)


def test_only_what_is_missing_is_trained(chain, tmp_path):
    """Neither what is there, nor what only served to train what is there."""
    (tmp_path / "out" / "first" / "final").mkdir(parents=True)
    assert [need.recipe for need in sweep.missing(sweep.read(chain))] == ["second.toml"]
    (tmp_path / "out" / "first" / "final").rmdir()
    (tmp_path / "out" / "second" / "final").mkdir(parents=True)
    assert not sweep.missing(sweep.read(chain))


def test_one_recipe_may_be_needed_twice(chain, tmp_path):
    changed = {"recipe": "first.toml", "name": "second", "changes": {"stages.0.steps": 2, "says": "it's"}}
    optim = {"kind": "adamw", "lr": 1e-3, "rates": [{"part": "blocks", "lr": 2e-3}]}
    changed["changes"] |= {"stages.0.optim": optim, "model.parts": {}}
    [need] = sweep.missing(sweep.read(chain).with_(needs=("first.toml", sweep.Need.read(changed))))
    assert need.read_recipe().stages[0].steps == 2 and need.read_recipe().says == "it's"
    _, _, name, *changes, _, out = shlex.split(need.command)
    assert (name, out) == ("first.toml", "out/second")
    assert recipe.read(name, dict(change.split("=", 1) for change in changes)) == need.read_recipe()


@pytest.mark.slow  # every recipe's model is built, without weights
@pytest.mark.parametrize("name", [path.stem for path in sweep.folder().glob("*.toml")])
def test_every_sweep_names_what_it_needs(name, tmp_path, monkeypatch):
    """In a clean folder, in an order in which each finds what it starts from."""
    monkeypatch.chdir(tmp_path)
    found = sweep.read(name)
    needs = sweep.missing(found)
    assert len(needs) == len(found.needs)
    for need in needs:
        assert not sweep._absent(need.read_recipe())
        (need.folder / "final").mkdir(parents=True)
    assert not any(sweep._absent(found.read_recipe(variant, 0)) for variant in found.variants)


def test_what_is_left_of_some_sweeps_is_one_queue(chain, tmp_path):
    """What two sweeps start from is made once; one sweep comes whole before the other."""
    other = tmp_path / "other.toml"
    text = chain.read_text().replace("seeds = [0]", "seeds = [0, 1]")
    chain.write_text(text)
    other.write_text(text.replace('name = "chain"', 'name = "other"'))
    outs = {str(chain): tmp_path / "a", str(other): tmp_path / "b"}
    queue = {job.name: job for job in sweep.queue(outs, "cpu")}
    seeds = [f"{name}: one, seed {seed}" for name in ("chain", "other") for seed in (0, 1)]
    assert list(queue) == ["out/first", "out/second", *seeds]
    assert [job.after for job in queue.values()] == [(), ("out/first",), *[("out/second",)] * 4]
    assert queue["out/first"].words[3:] == ("train", "first.toml", "--out", "out/first", "--device", "cpu")
    assert queue["other: one, seed 1"].words[-4:] == ("--share", "1/2", "--device", "cpu")
    command(str(other), out=tmp_path / "b", device="cpu")
    left = [job.name for job in sweep.queue(outs, "cpu")]
    assert left == ["chain: one, seed 0", "chain: one, seed 1"]  # what is done is not begun again


@pytest.mark.slow  # three processes
def test_side_by_side_they_end_like_one_after_the_other(chain, tmp_path, capsys):
    command(str(chain), out=tmp_path / "runs", jobs=2, device="cpu")
    assert capsys.readouterr().out.splitlines()[0] == "first: vitrail train first.toml --out out/first"
    assert (tmp_path / "runs" / "one" / "seed-0" / "final").is_dir() and (tmp_path / "out" / "first.log").is_file()
    assert not sweep.queue({str(chain): tmp_path / "runs"})


def test_a_start_that_nobody_makes_is_refused_before_the_others_are_made(chain, tmp_path):
    chain.write_text(
        chain.read_text()
        + 'changes = { "model.parts" = { blocks = { start = "out/fourth/final", part = "blocks" } } }\n'
    )
    for jobs in (1, 2):
        with pytest.raises(ConfigError, match="starts from out/fourth/final"):
            command(str(chain), out=tmp_path / "runs", jobs=jobs, device="cpu")
    assert not (tmp_path / "out").exists()


def test_the_start_that_is_kept_spares_its_training(tmp_path, monkeypatch):
    """QLIP on scenes, in 8 bits: a sweep finds it where it would have been trained, and its tower fits."""
    kept = sweep.recipes.folder().parent / "results" / "starts" / "qlip-scenes"
    monkeypatch.chdir(tmp_path)
    chosen = sweep.read("vlm-fit")
    assert [need.recipe for need in sweep.missing(chosen)] == ["clip-scenes", "qlip-scenes"]
    shutil.copytree(kept, "out/qlip-scenes/final")
    assert not sweep.missing(chosen)
    found = chosen.read_recipe(chosen.variants[0], 0)
    with torch.device("meta"):
        tower = VLM(found.model_config()).tower
    tower.to_empty(device="cpu")
    holder = torch.nn.ModuleDict({"tower": tower})
    recipe._start(holder, "tower", found.model.parts["tower"])
    assert all(weight.isfinite().all() and weight.std() > 0 for weight in tower.parameters() if weight.ndim > 1)
