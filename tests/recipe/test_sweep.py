"""Sweeps: list of runs, no repeated run, and the table."""

import json
import math
import shlex
import shutil

import pytest
import torch

from vitrail import recipe
from vitrail.cli.eval_command import app as eval_app
from vitrail.cli.sweep_command import run_sweep_command as command
from vitrail.errors import ConfigError, TrainError, TrainingInterrupted
from vitrail.models.vlm import VLM
from vitrail.recipe import sweep

SMALL = {
    "name": "small",
    "description": "a test",
    "recipe": "smoke",
    "seeds": [1, 2],
    "overrides": {"stages.0.validate": [], "stages.0.validate_every": 0},
    "variants": [{"name": "one"}, {"name": "Two!", "overrides": {"stages.0.batch_size": 4}}],
    "tests": {"a": ["suite", "--word"]},
}


asked: list = []


@pytest.fixture
def quick(monkeypatch):
    """Training that leaves a folder, and a test that gives its seed for a score."""
    done: list = []
    asked.clear()

    def train(chosen, out, *, device=None, quiet=False):
        done.append((chosen.stages[0].batch_size, chosen.seed))
        (out / "final").mkdir(parents=True, exist_ok=True)
        (out / chosen.stages[0].name / "checkpoints").mkdir(parents=True, exist_ok=True)
        judged = [
            {"step": 1, "validation/x/loss": 9.0},
            {"step": chosen.stages[0].steps, "validation/x/loss": 5.0, "loss": 3.0},
        ]
        (out / chosen.stages[0].name / "log.jsonl").write_text("\n".join(map(json.dumps, judged)) + "\n")

    def test(model, words, file, **_):
        assert words[0] == "suite" and model.name == "final"
        asked.append(words)
        file.parent.mkdir(parents=True, exist_ok=True)
        seed = int(model.parent.name.removeprefix("seed-"))
        file.write_text(json.dumps({"scores": [{"name": "  share", "value": seed / 10, "subset": {"width": 8}}]}))

    monkeypatch.setattr("vitrail.recipe.train_recipe", train)
    return done, test


def test_every_variant_runs_once_per_seed(quick, tmp_path):
    done, test = quick
    chosen = sweep.Sweep.from_dict(SMALL)
    batch = recipe.load_recipe("smoke").stages[0].batch_size
    for _ in range(2):
        for run in sweep.list_runs(chosen, tmp_path):
            sweep.execute_run(chosen, run, test)
    assert done == [(batch, 1), (4, 1), (batch, 2), (4, 2)]
    assert (tmp_path / "two" / "seed-2" / "final").is_dir() and not list(tmp_path.rglob("checkpoints"))
    other = sweep.Sweep.from_dict(
        {**SMALL, "overrides": {"stages.0.validate": [], "stages.0.validate_every": 0, "stages.0.optim.lr": 1e-5}}
    )
    sweep.execute_run(other, sweep.list_runs(other, tmp_path)[0], test)
    assert len(done) == 5  # another recipe is another run


def test_overrides_may_be_strings_numbers_and_tables(tmp_path):
    changes = {"description": "1", "stages.0.optim": {"lr": 0.5}, "stages.0.trainable": ["*"]}
    chosen = sweep.Sweep.from_dict({**SMALL, "variants": [{"name": "a", "overrides": changes}]})
    found = chosen.load_recipe(chosen.variants[0], 3)
    assert (found.description, found.stages[0].optim.lr, found.seed) == ("1", 0.5, 3)


def test_changed_tests_and_broken_files_run_again(quick, tmp_path):
    done, test = quick
    chosen = sweep.Sweep.from_dict(SMALL)
    run = sweep.list_runs(chosen, tmp_path)[0]
    sweep.execute_run(chosen, run, test)
    other = sweep.Sweep.from_dict({**SMALL, "tests": {"a": ["suite", "--other"]}})
    sweep.execute_run(other, run, test)
    (run.folder / "tests" / "a.json").write_text('{"scores": [')
    assert not [row for row in sweep.build_table(other, tmp_path) if row.test == "a"]
    sweep.execute_run(other, run, test)
    assert asked == [("suite", "--word"), ("suite", "--other"), ("suite", "--other")] and len(done) == 1


def test_runtime_settings_do_not_change_the_fingerprint(quick, tmp_path):
    done, test = quick
    for workers in (0, 2):
        chosen = sweep.Sweep.from_dict({**SMALL, "overrides": {"stages.0.num_workers": workers}})
        sweep.execute_run(chosen, sweep.list_runs(chosen, tmp_path)[0], test)
    assert len(done) == 1


def test_retrained_checkpoint_changes_the_fingerprint(quick, tmp_path):
    done, test = quick
    start = tmp_path / "tower"
    start.mkdir()
    (start / "model.safetensors").write_bytes(b"one")
    changes = {"model.parts": {"blocks": {"checkpoint": str(start)}}}
    chosen = sweep.Sweep.from_dict({**SMALL, "variants": [{"name": "a", "overrides": changes}]})
    run = sweep.list_runs(chosen, tmp_path / "out")[0]
    seen = chosen.load_recipe(run.variant, run.seed)
    before = recipe.compute_identity(recipe.describe_run(seen, {}))
    for content, runs in ((b"one", 1), (b"one", 1), (b"two", 2)):
        (start / "model.safetensors").write_bytes(content)
        sweep.execute_run(chosen, run, test)
        assert len(done) == runs
    assert recipe.compute_identity(recipe.describe_run(seen, {})) != before  # nor is it gone on with
    assert list(recipe.hash_checkpoints(seen)) == [str(start)]


def test_package_is_hashed_without_fetching(monkeypatch):
    monkeypatch.setattr("vitrail.hub.packages.fetch_package", lambda *_: pytest.fail("fetched"))
    gates = sweep.load_sweep("vlm-gates")
    parts = {"decoder": {"checkpoint": "stories15M", "part": ""}}
    changes = {**gates.overrides, "model.parts": parts}
    chosen = gates.replace(overrides=changes, variants=gates.variants[:1])
    [digest] = recipe.hash_checkpoints(chosen.load_recipe(chosen.variants[0], 0)).values()
    assert len(digest.split()[0]) == 64


def test_origins_are_recorded_at_training(quick, tmp_path, monkeypatch):
    _, test = quick
    chosen = sweep.Sweep.from_dict({**SMALL, "seeds": [1]})
    one, other = sweep.list_runs(chosen, tmp_path)
    for run, commit in ((one, "aaa"), (other, "bbb"), (one, "ccc")):  # the last was done before
        monkeypatch.setenv("COMMIT", commit)
        sweep.execute_run(chosen, run, test, device="cpu")
    found = sweep.collect_origins(chosen, tmp_path)
    assert found["commit"] == "aaa, bbb" and "CPU" in found["device"] and "note" not in found
    (one.folder / sweep.ORIGIN_FILE).unlink()
    assert sweep.collect_origins(chosen, tmp_path)["note"].startswith("the origin of 1 of 2 runs")


def test_failed_run_does_not_stop_the_others(quick, tmp_path, monkeypatch, capsys):
    _, test = quick
    monkeypatch.setattr("vitrail.cli.sweep_command._run_eval", test)
    good = recipe.train_recipe

    def train(chosen, out, **more):
        if chosen.seed == 1:
            raise TrainError("step 3 is not a number")
        good(chosen, out, **more)

    monkeypatch.setattr("vitrail.recipe.train_recipe", train)
    file = tmp_path / "small.toml"
    lines = ['name = "small"', 'description = "x"', 'recipe = "smoke"', "seeds = [1, 3]", "[tests]", 'a = ["suite"]']
    file.write_text("\n".join([*lines, "[[variants]]", 'name = "one"', ""]))
    with pytest.raises(TrainError, match="one, seed 1: step 3"):
        command(str(file), out=tmp_path / "out")
    assert "0.3000  0.3000" in capsys.readouterr().out  # of one seed, and so without an interval
    file.write_text(file.read_text().replace('name = "small"', 'name = "other"'))
    with pytest.raises(ConfigError, match="small"):
        command(str(file), out=tmp_path / "out")


def test_shares_partition_the_runs(tmp_path):
    chosen = sweep.Sweep.from_dict({**SMALL, "seeds": [0, 1, 2]})
    every = sweep.list_runs(chosen, tmp_path)
    shares = [sweep.list_runs(chosen, tmp_path, (i, 4)) for i in range(4)]
    assert sorted(run.name for share in shares for run in share) == sorted(run.name for run in every)


def test_table_has_means_and_intervals(quick, tmp_path):
    _, test = quick
    chosen = sweep.Sweep.from_dict({**SMALL, "seeds": [1, 2, 6]})
    for run in sweep.list_runs(chosen, tmp_path):
        sweep.execute_run(chosen, run, test)
    first, judged, second, _ = sweep.build_table(chosen, tmp_path)
    assert (judged.test, judged.score, judged.mean) == ("learn", "validation/x/loss", 5.0)
    assert (first.variant, second.variant, first.score) == ("one", "Two!", "share, width 8")
    assert first.values == {1: 0.1, 2: 0.2, 6: 0.6} and first.mean == pytest.approx(0.3)
    t = 0.95 / math.sqrt(2 * 0.975 * 0.025)  # Student's quantile in closed form: two degrees of freedom
    half = t * math.sqrt((0.04 + 0.01 + 0.09) / 2) / math.sqrt(3)
    assert first.interval == pytest.approx((0.3 - half, 0.3 + half))
    assert sweep.SweepRow("v", "t", "s", {0: 1.0}).interval is None
    many = sweep.SweepRow("v", "t", "s", {seed: float(seed % 2) for seed in range(100)})
    assert many.interval == pytest.approx((0.5 - 1.98422 * 0.0502519, 0.5 + 1.98422 * 0.0502519), abs=1e-6)


def test_command_prints_and_saves_the_table(quick, tmp_path, capsys, monkeypatch):
    _, test = quick
    monkeypatch.setattr("vitrail.cli.sweep_command._run_eval", test)
    file = tmp_path / "small.toml"
    file.write_text(
        """name = "small"
description = "x"
recipe = "smoke"
seeds = [1, 3]
[tests]
a = ["suite", "--word"]
[[variants]]
name = "one"
"""
    )
    command(str(file), out=tmp_path / "out")
    assert "0.2000 [" in capsys.readouterr().out
    row, _ = json.loads((tmp_path / "out" / "table.json").read_text())
    assert row["mean"] == pytest.approx(0.2) and row["values"] == {"1": 0.1, "3": 0.3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variants": []}, "has no runs"),
        ({"variants": [{"name": "A b"}, {"name": "a-b"}]}, "repeats a variant"),
        ({"seeds": [1, 1]}, "repeats"),
        ({"overrides": {"seed": 3}}, "seeds"),
        ({"tests": {"a b": ["x"], "a-b": ["y"]}}, "two tests"),
    ],
)
def test_invalid_sweeps_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        sweep.Sweep.from_dict({**SMALL, **change})


def test_invalid_override_is_refused_before_training(quick, tmp_path):
    bad = sweep.Sweep.from_dict(
        {**SMALL, "variants": [{"name": "a"}, {"name": "b", "overrides": {"stages.0.stepps": 3}}]}
    )
    with pytest.raises(ConfigError, match="stepps"):
        sweep.list_runs(bad, tmp_path)
    start = {"model.parts": {"blocks": {"checkpoint": "out/not/there"}}}
    lost = sweep.Sweep.from_dict({**SMALL, "variants": [{"name": "a", "overrides": start}]})
    with pytest.raises(ConfigError, match="does not exist"):
        sweep.check_checkpoints(lost, tmp_path)
    with pytest.raises(ConfigError, match="no sweep"):
        sweep.load_sweep("nothing")


@pytest.mark.parametrize("name", [path.stem for path in sweep.sweep_folder().glob("*.toml")])
def test_every_sweep_loads(name, tmp_path):
    found = sweep.load_sweep(name)
    assert found.name == name and sweep.list_runs(found, tmp_path)


# ---- what is trained before -------------------------------------------------------------------------------------

TINY = """
name = "{name}"
description = "x"
tokenizer = {{ {words} }}

[model]
kind = "decoder"
parts = {{ {parts} }}

[model.config]
vocab_size = 300
layers = 1
rotary = {{ head_dim = 8 }}
block = {{ width = 16, norm = "rms", attention = {{ heads = 2 }}, mlp = {{ kind = "gated", intermediate_size = 16 }} }}

[sources.docs]
kind = "text"
files = ["text.txt"]
window_length = 8

[[stages]]
name = "learn"
task = "text"
steps = 1
batch_size = 2
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
        words = f'checkpoint = "out/{start}/final"' if start else "vocab_size = 300"
        parts = f'blocks = {{ checkpoint = "out/{start}/final" }}' if start else ""
        (tmp_path / f"{name}.toml").write_text(TINY.format(name=name, words=words, parts=parts))
    file = tmp_path / "chain.toml"
    file.write_text(
        """name = "chain"
description = "x"
recipe = "third.toml"
seeds = [0]
requires = ["first.toml", "second.toml"]
[[variants]]
name = "one"
"""
    )
    return file


def test_required_recipes_are_trained_first(chain, tmp_path, capsys):
    command(str(chain), out=tmp_path / "runs", device="cpu")
    output = capsys.readouterr().out.splitlines()
    commands = [f"vitrail train {name}.toml --out out/{name}" for name in ("first", "second")]
    assert output[:2] == [f"required: {one}" for one in commands]
    assert all((tmp_path / "out" / name / "final").is_dir() for name in ("first", "second"))
    assert (tmp_path / "runs" / "one" / "seed-0" / "final").is_dir()
    assert not sweep.list_missing_requirements(sweep.load_sweep(chain))


def test_runs_are_saved_under_the_sweep_name(chain, tmp_path):
    command(str(chain), device="cpu")
    assert (tmp_path / "out" / "chain" / "one" / "seed-0" / "final").is_dir()
    assert (tmp_path / "out" / "chain" / "table.json").is_file()


def test_missing_requirements_print_their_commands(chain, tmp_path):
    with pytest.raises(ConfigError, match=r"checkpoint out/second/final of") as caught:
        command(str(chain), out=tmp_path / "runs", train=False)
    lines = [line.strip() for line in caught.value.remedy.splitlines()[1:]]
    assert lines == [f"vitrail train {name}.toml --out out/{name}" for name in ("first", "second")]
    assert not (tmp_path / "out").exists() and not (tmp_path / "runs").exists()


def test_smoke_test_trains_one_step_and_saves_nothing(chain, tmp_path, capsys, monkeypatch):
    trained = []

    def train(chosen, out, **more):
        trained.append(
            (chosen.name, chosen.stages[0].steps, chosen.stages[0].batch_size, recipe.collect_checkpoints(chosen))
        )
        return good(chosen, out, **more)

    good = recipe.train_recipe
    monkeypatch.setattr("vitrail.recipe.train_recipe", train)
    changed = chain.read_text().replace(
        "seeds = [0]",
        """seeds = [0, 1]
overrides= { "stages.0.steps" = 9000 }""",
    )
    chain.write_text(changed + '[[variants]]\nname = "two"\n')
    before = set(tmp_path.iterdir())
    command(str(chain), device="cpu", smoke_test=True)
    assert capsys.readouterr().out.splitlines() == [f"chain: {name}: ok" for name in ("one", "two")]
    assert set(tmp_path.iterdir()) == before
    assert [name for name, *_ in trained] == ["first", "second", "third", "third"]  # of each variant one seed
    assert all((steps, batch) == (1, 2) for _, steps, batch, _ in trained)
    starts = [start for *_, found in trained for start in found.values()]
    assert starts and not any(start.startswith("out/") for start in starts)  # those that were rehearsed


def test_smoke_test_finds_late_errors(chain, tmp_path, capsys):
    more = (
        '[tests]\nscore = ["retrieval", "--data", "nowhere"]\n[[variants]]\nname = "one"\n[[variants]]\nname = "two"\n'
    )
    chain.write_text(chain.read_text().replace('[[variants]]\nname = "one"\n', more))
    with pytest.raises(ConfigError, match="these variants fail: chain: one, chain: two"):
        command(str(chain), out=tmp_path / "runs", device="cpu", smoke_test=True)
    output = capsys.readouterr().out.splitlines()
    assert len(output) == 2 and all("Decoder" in line for line in output)  # what the test says of such a model


def test_smoke_test_names_the_failing_requirement(chain, tmp_path, monkeypatch):
    def train(chosen, out, **_):
        raise (
            ConfigError("no room", "make some") if chosen.name == "second" else TrainingInterrupted("stopped by SIGINT")
        )

    monkeypatch.setattr("vitrail.recipe.train_recipe", train)
    (tmp_path / "out" / "first" / "final").mkdir(parents=True)
    with pytest.raises(ConfigError, match="required recipe out/second: no room"):
        command(str(chain), out=tmp_path / "runs", device="cpu", smoke_test=True)
    (tmp_path / "out" / "second" / "final").mkdir(parents=True)
    with pytest.raises(TrainingInterrupted):  # a signal is for all, and no fault of the variant's
        command(str(chain), out=tmp_path / "runs", device="cpu", smoke_test=True)


def test_only_missing_requirements_are_trained(chain, tmp_path):
    """Existing checkpoints, and those needed only to train them, are not trained."""
    (tmp_path / "out" / "first" / "final").mkdir(parents=True)
    assert [need.recipe for need in sweep.list_missing_requirements(sweep.load_sweep(chain))] == ["second.toml"]
    (tmp_path / "out" / "first" / "final").rmdir()
    (tmp_path / "out" / "second" / "final").mkdir(parents=True)
    assert not sweep.list_missing_requirements(sweep.load_sweep(chain))


def test_recipe_may_be_required_twice(chain, tmp_path):
    changed = {"recipe": "first.toml", "name": "second", "overrides": {"stages.0.steps": 2, "description": "it's"}}
    optim = {"kind": "adamw", "lr": 1e-3, "param_groups": [{"part": "blocks", "lr": 2e-3}]}
    changed["overrides"] |= {"stages.0.optim": optim, "model.parts": {}}
    [need] = sweep.list_missing_requirements(
        sweep.load_sweep(chain).replace(requires=("first.toml", sweep.RequiredRecipe.from_dict(changed)))
    )
    assert need.load_recipe().stages[0].steps == 2 and need.load_recipe().description == "it's"
    _, _, name, *changes, _, out = shlex.split(need.train_command)
    assert (name, out) == ("first.toml", "out/second")
    assert recipe.load_recipe(name, dict(change.split("=", 1) for change in changes)) == need.load_recipe()


@pytest.mark.slow  # every recipe's model is built, without weights
@pytest.mark.parametrize("name", [path.stem for path in sweep.sweep_folder().glob("*.toml")])
def test_every_sweep_lists_its_requirements(name, tmp_path, monkeypatch):
    """In a clean folder, in an order in which each finds what it starts from."""
    monkeypatch.chdir(tmp_path)
    found = sweep.load_sweep(name)
    needs = sweep.list_missing_requirements(found)
    assert len(needs) == len(found.requires)
    for need in needs:
        assert not sweep._missing_checkpoints(need.load_recipe())
        (need.folder / "final").mkdir(parents=True)
    assert not any(sweep._missing_checkpoints(found.load_recipe(variant, 0)) for variant in found.variants)


def test_remaining_runs_form_one_queue(chain, tmp_path):
    """What two sweeps start from is made once; one sweep comes whole before the other."""
    other = tmp_path / "other.toml"
    text = chain.read_text().replace("seeds = [0]", "seeds = [0, 1]")
    chain.write_text(text)
    other.write_text(text.replace('name = "chain"', 'name = "other"'))
    outs = {str(chain): tmp_path / "a", str(other): tmp_path / "b"}
    queue = {job.name: job for job in sweep.build_job_queue(outs, "cpu")}
    seeds = [f"{name}: one, seed {seed}" for name in ("chain", "other") for seed in (0, 1)]
    assert list(queue) == ["out/first", "out/second", *seeds]
    assert [job.depends_on for job in queue.values()] == [(), ("out/first",), *[("out/second",)] * 4]
    assert queue["out/first"].command[3:] == ("train", "first.toml", "--out", "out/first", "--device", "cpu")
    assert queue["other: one, seed 1"].command[-4:] == ("--share", "1/2", "--device", "cpu")
    command(str(other), out=tmp_path / "b", device="cpu")
    left = [job.name for job in sweep.build_job_queue(outs, "cpu")]
    assert left == ["chain: one, seed 0", "chain: one, seed 1"]  # what is done is not begun again


@pytest.mark.slow  # three processes
def test_parallel_runs_equal_serial_runs(chain, tmp_path, capsys):
    command(str(chain), out=tmp_path / "runs", jobs=2, device="cpu")
    assert capsys.readouterr().out.splitlines()[0] == "required: vitrail train first.toml --out out/first"
    assert (tmp_path / "runs" / "one" / "seed-0" / "final").is_dir() and (tmp_path / "out" / "first.log").is_file()
    assert not sweep.build_job_queue({str(chain): tmp_path / "runs"})


@pytest.mark.parametrize("name", sorted(file.stem for file in sweep.sweep_folder().glob("*.toml")))
def test_options_of_test_commands_exist(name):
    for suite, *options in sweep.load_sweep(name).tests.values():
        eval_app.parse_args([suite, "MODEL", *options], exit_on_error=False, print_error=False)


def test_missing_checkpoint_is_refused_before_training(chain, tmp_path):
    chain.write_text(
        chain.read_text()
        + """overrides= { "model.parts" = { blocks = { checkpoint= "out/fourth/final", part = "blocks" } } }
"""
    )
    for jobs in (1, 2):
        with pytest.raises(ConfigError, match="checkpoint out/fourth/final of"):
            command(str(chain), out=tmp_path / "runs", jobs=jobs, device="cpu")
    assert not (tmp_path / "out").exists()


def test_existing_checkpoint_skips_training(tmp_path, monkeypatch):
    """QLIP on scenes, in 8 bits: a sweep finds it where it would have been trained, and its tower fits."""
    kept = sweep.recipes.recipe_folder().parent / "results" / "starts" / "qlip-scenes"
    monkeypatch.chdir(tmp_path)
    chosen = sweep.load_sweep("vlm-fit")
    assert [need.recipe for need in sweep.list_missing_requirements(chosen)] == ["clip-scenes", "qlip-scenes"]
    shutil.copytree(kept, "out/qlip-scenes/final")
    assert not sweep.list_missing_requirements(chosen)
    found = chosen.load_recipe(chosen.variants[0], 0)
    with torch.device("meta"):
        tower = VLM(found.build_model_config()).tower
    tower.to_empty(device="cpu")
    holder = torch.nn.ModuleDict({"tower": tower})
    recipe.load_pretrained_part(holder, "tower", found.model.parts["tower"])
    assert all(weight.isfinite().all() and weight.std() > 0 for weight in tower.parameters() if weight.ndim > 1)
