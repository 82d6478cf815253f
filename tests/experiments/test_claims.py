"""Claims: verdicts, results files and the generated page."""

import json
import math
from pathlib import Path
from statistics import mean, stdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.claims import __main__ as command
from experiments.claims.claims import Claim, evaluate_claim, get_claim, load_claims
from experiments.claims.claims_page import render_claims_page
from experiments.results_files import read_results_file, read_results_files
from vitrail.errors import ConfigError, DataError, TrainError
from vitrail.recipe import sweep as sweeps

ROOT = Path(__file__).parents[2]
ROW = {
    "name": "a",
    "description": "a is better",
    "source": "nobody",
    "published": "1 against 0",
    "sweep": "small",
    "test": "t",
    "score": "s",
    "unit": "points",
    "first": "x",
    "second": "y",
}
numbers = st.floats(-5, 5).map(lambda x: round(x, 3))


def values(first, second):
    return {("x", "t", "s"): dict(enumerate(first)), ("y", "t", "s"): dict(enumerate(second))}


@pytest.mark.parametrize(
    ("first", "range", "verdict"),
    [
        ([1.0, 1.1, 0.9], {"above": 0.0}, "holds"),
        ([1.0, 1.1, 0.9], {"below": 0.0}, "does not hold"),
        ([1.0, 1.1, 0.9], {"above": 1.0}, "undecided"),
        ([1.0, 1.1, 0.9], {"above": 0.0, "below": 2.0, "baseline": -1.0}, "holds"),
        ([1.0, 1.1, 0.9], {"above": -0.5, "below": 0.5, "baseline": -1.0}, "does not hold"),
        ([1.0, -1.0, 2.0], {"above": 0.0}, "undecided"),
        ([1.0, 1.0], {"above": 0.0}, "undecided"),  # two seeds
        ([1.0], {"above": 0.0}, "undecided"),
        ([0.0, 0.0, 0.0], {"above": 0.0}, "does not hold"),  # zero is not above zero
    ],
)
def test_verdict_rule(first, range, verdict):
    assert evaluate_claim(Claim.from_dict({**ROW, **range}), values(first, [0.0] * len(first))).verdict == verdict


@settings(max_examples=40)
@given(st.lists(st.tuples(numbers, numbers), min_size=3, max_size=6), numbers)
def test_interval_matches_the_sweep_and_opposite_claims_exclude_each_other(pairs, end):
    first, second = zip(*pairs, strict=True)
    up = evaluate_claim(Claim.from_dict({**ROW, "above": end}), values(first, second))
    down = evaluate_claim(Claim.from_dict({**ROW, "below": end}), values(first, second))
    differences = [a - b for a, b in pairs]
    low, high = sweeps.SweepRow("", "", "", dict(enumerate(differences))).interval
    assert up.effect == pytest.approx(mean(differences))
    assert up.interval == pytest.approx((low, high), rel=1e-3, abs=1e-3 * (1 + stdev(differences)))
    assert not up.verdict == down.verdict == "holds"
    assert (up.verdict == "holds") <= (down.verdict == "does not hold")


def test_seeds_are_paired():
    steady = {("x", "t", "s"): {0: 1.0, 1: 5.0, 2: 9.0, 7: 99.0}, ("y", "t", "s"): {2: 8.9, 1: 4.8, 0: 0.8}}
    one = evaluate_claim(Claim.from_dict({**ROW, "above": 0.0}), steady)
    assert sorted(one.effects) == [0, 1, 2] and one.verdict == "holds"
    assert (one.first_mean, one.second_mean) == (5.0, pytest.approx(14.5 / 3))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_diverged_seed_is_undecided_and_named(value):
    one = evaluate_claim(Claim.from_dict({**ROW, "above": 0.0}), values([1.0, value, 1.0], [0.0, 0.0, 0.0]))
    assert one.verdict == "undecided" and one.interval is None
    assert str(one).endswith("[no interval]: undecided (3 seeds, not finite: seed 1)")


def test_equality_needs_a_baseline():
    alike = {**ROW, "above": -0.05, "below": 0.05}
    with pytest.raises(ConfigError, match="has no baseline"):
        Claim.from_dict(alike)
    chosen = Claim.from_dict({**alike, "baseline": 0.6})
    for first, second, verdict in ((0.5, 0.5, "undecided"), (0.9, 0.59, "undecided"), (0.9, 0.9, "holds")):
        assert evaluate_claim(chosen, values([first] * 3, [second] * 3)).verdict == verdict
    assert str(evaluate_claim(chosen, values([0.9] * 3, [0.59] * 3))).endswith("undecided, not better than 60.0 %: y")
    loss = Claim.from_dict({**alike, "baseline": 10.0, "unit": "nats"})  # lower is better
    assert evaluate_claim(loss, values([3.0] * 3, [3.0] * 3)).verdict == "holds"
    assert evaluate_claim(loss, values([10.4] * 3, [10.4] * 3)).variants_below_baseline == ["x", "y"]


def test_vlm_claims_have_a_baseline_above_blind():
    for one in load_claims().values():
        if one.name.startswith("vlm-"):
            assert one.baseline is not None, one.name
            three = dict.fromkeys(range(3), one.baseline)
            blind = {(name, one.test, one.score): three for name in (one.first, one.second)}
            assert evaluate_claim(one, blind).verdict == "undecided", one.name


def test_small_differences_are_formatted():
    assert get_claim("vlm-gates").claimed_range == "> −0.0010 nats and < 0.0010 nats"


def test_missing_results_raise():
    with pytest.raises(DataError, match="lack score 's' of test 't' for 'y'"):
        evaluate_claim(Claim.from_dict({**ROW, "above": 0.0}), {("x", "t", "s"): {0: 1.0}})
    with pytest.raises(DataError, match="no common seed"):
        evaluate_claim(Claim.from_dict({**ROW, "above": 0.0}), {("x", "t", "s"): {0: 1.0}, ("y", "t", "s"): {1: 1.0}})
    for wrong in ({}, {"above": 1.0, "below": 0.0, "baseline": 0.0}, {"above": 0.0, "sweep": None}):
        with pytest.raises(ConfigError):
            Claim.from_dict({**ROW, **wrong})
    with pytest.raises(ConfigError, match="qlip-words-fall"):
        get_claim("qlip-words-fal")


def test_results_of_each_format_are_read(tmp_path):
    table = [{"variant": "x", "test": "t", "score": "s", "values": {"0": 1, "2": 3.5}, "mean": 2.0, "interval": None}]
    (tmp_path / "bare.json").write_text(json.dumps(table))
    (tmp_path / "kept.json").write_text(json.dumps({"origin": {"commit": "abc"}, "table": table}))
    tests = {"t": {"command": "do it", "a-b-1": {"s": {"value": 4}}, "y-0": {"scores": {"s": {"value": 5}}, "use": []}}}
    (tmp_path / "tests.json").write_text(json.dumps({"evals": tests}))
    assert read_results_file(tmp_path / "bare.json").values == {("x", "t", "s"): {0: 1.0, 2: 3.5}}
    assert read_results_file(tmp_path / "kept.json").origin == {"commit": "abc"}
    assert read_results_file(tmp_path / "tests.json").values == {("a-b", "t", "s"): {1: 4.0}, ("y", "t", "s"): {0: 5.0}}
    both = read_results_files([tmp_path / "kept.json", tmp_path / "tests.json"])
    assert both is not None and len(both.values) == 3 and set(both.origin) == {"kept", "tests"}
    assert read_results_files([tmp_path / "kept.json", tmp_path / "none.json"]) is None
    for broken in ("{", '{"table": [{"values": {"0": 1}}]}', '{"table": [3]}'):
        (tmp_path / "broken.json").write_text(broken)
        with pytest.raises(DataError, match=r"broken\.json"):
            read_results_file(tmp_path / "broken.json")


def test_every_claim_names_existing_sweeps_and_variants():
    found = {one.sweep: sweeps.load_sweep(one.sweep) for one in load_claims().values() if one.sweep is not None}
    stages = {
        name: [stage.name for stage in read.load_recipe(read.variants[-1], 0).stages] for name, read in found.items()
    }
    for one in load_claims().values():
        if one.sweep is not None:
            assert {one.first, one.second} <= {variant.name for variant in found[one.sweep].variants}, one.name
            assert one.test in {*found[one.sweep].tests, *stages[one.sweep]}, one.name
        assert all(math.isfinite(end) for end in (one.above, one.below) if end is not None)


def test_docs_page_is_up_to_date(tmp_path, capsys):
    out = tmp_path / "claims.md"
    command.write_claims_page(results=ROOT / "results", out=out)
    assert out.read_text() == (ROOT / "docs" / "claims.md").read_text(), "run `python -m experiments.claims report`"
    assert render_claims_page(ROOT / "results") == out.read_text()
    with pytest.raises(ConfigError, match="is not a folder"):
        command.write_claims_page(results=tmp_path / "nowhere", out=out)
    capsys.readouterr()


def test_run_prints_verdicts_and_saves_results(tmp_path, monkeypatch, capsys):
    chosen = get_claim("qlip-words-fall")
    asked, tables = [], {}

    def run_sweeps(outs, *, jobs, device, train):
        for name, out in outs.items():
            asked.append((name, jobs, device, train))
            sweep(name, out)
        return []

    def sweep(name, out):
        rows = [
            {"variant": variant, "test": one.test, "score": one.score, "values": {"0": a, "1": a, "2": a + 0.01}}
            for one in sorted(load_claims().values(), key=lambda one: one is chosen)
            if one.sweep == name
            for variant, a in ((one.first, 0.1), (one.second, 0.5))
        ]
        out.mkdir(parents=True, exist_ok=True)
        tables[out] = rows
        for n, run in enumerate(sweeps.list_runs(sweeps.load_sweep(name), out)[1:]):
            run.folder.mkdir(parents=True, exist_ok=True)
            then = {"date": "2020-01-01", "device": "abacus", "commit": f"c{n % 2}", "command": "vitrail sweep x"}
            (run.folder / sweeps.ORIGIN_FILE).write_text(json.dumps(then))

    def show_table(name, out, show):
        assert chosen.score in show
        (out / "table.json").write_text(json.dumps(tables[out]))

    monkeypatch.setattr("vitrail.cli.sweep_command.run_sweeps", run_sweeps)
    monkeypatch.setattr("vitrail.cli.sweep_command.print_results_table", show_table)
    monkeypatch.setattr("vitrail.recipe.sweep.is_done", lambda sweep, run: True)
    command.run_claims("qlip-words-fall", out=tmp_path / "runs", jobs=2, device="cpu")
    assert asked == [("qlip-weights", 2, "cpu", True)]
    output = capsys.readouterr().out
    assert "−40.0 points [−40.0, −40.0]: holds" in output and "cannot decide" not in output
    monkeypatch.chdir(tmp_path)
    command.run_claims("qlip-words-fall", out=tmp_path / "again", device="cpu", save=True)
    kept = read_results_file(tmp_path / "results" / "qlip-weights.json")
    assert kept.origin["command"].startswith("vitrail sweep qlip-weights --out") and kept.origin["device"] == "abacus"
    assert (kept.origin["date"], kept.origin["commit"]) == (
        "2020-01-01",
        "c0, c1",
    )  # origin of the training, not of the table
    assert kept.origin["note"].startswith("the origin of 1 of ")
    assert kept.values == read_results_file(tmp_path / "again" / "table.json").values
    assert "−40.0 points" in (tmp_path / "docs" / "claims.md").read_text()
    capsys.readouterr()
    chosen = get_claim("fsq-level-with-vq")
    command.run_claims(chosen.name, out=tmp_path / "few")
    assert "'codec-rates' has 1 seed, but a verdict needs 3: set seeds = [0, 1, 2]" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="has no sweep"):
        command.run_claims("qlip-late-quantizer-psnr")


def test_claims_of_several_sweeps_run_together(tmp_path, monkeypatch, capsys):
    asked, rows = [], {}

    def run_sweeps(outs, **_):
        asked.append(dict(outs))
        for name, out in outs.items():
            out.mkdir(parents=True, exist_ok=True)
            ones = [one for one in load_claims().values() if one.sweep == name]
            rows[out] = [
                {"variant": variant, "test": one.test, "score": one.score, "values": {"0": a, "1": a, "2": a}}
                for one in ones
                for variant, a in ((one.first, 0.1), (one.second, 0.5))
                if name != "vlm-fit"  # incomplete
            ]
        return ["vlm-fit: naive, seed 0: failed"]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vitrail.cli.sweep_command.run_sweeps", run_sweeps)
    monkeypatch.setattr(
        "vitrail.cli.sweep_command.print_results_table",
        lambda name, out, show: (out / "table.json").write_text(json.dumps(rows[out])),
    )
    monkeypatch.setattr("vitrail.recipe.sweep.is_done", lambda sweep, run: sweep.name != "vlm-fit")
    with pytest.raises(TrainError, match="vlm-fit: naive, seed 0"):
        command.run_claims("vlm-mlp", "vlm-one-stage", "vlm-naive-crop", jobs=2, save=True, results=tmp_path / "kept")
    assert asked == [{"vlm": Path("out/vlm"), "vlm-fit": Path("out/vlm-fit")}]
    output = capsys.readouterr().out
    assert output.count("claimed") == 3 and "results lack" in output
    assert [file.name for file in (tmp_path / "kept").iterdir()] == ["vlm.json"]  # incomplete sweeps are not saved
    with pytest.raises(ConfigError, match="the sweeps vlm, vlm-fit"):
        command.run_claims("vlm-mlp", "vlm-naive-crop", out=tmp_path / "x")
    asked.clear()
    with pytest.raises(TrainError):
        command.run_claims(out=None, jobs=2, results=tmp_path / "kept", device="cpu")
    wanted = {one.sweep for one in load_claims().values()} - {None, "vlm"}
    assert set(asked[0]) == wanted  # all claims with a sweep and without results
    monkeypatch.setattr(
        "experiments.claims.claims_page.iter_claim_results",
        lambda results: [(one, True) for one in load_claims().values()],
    )
    command.run_claims(results=tmp_path / "kept")
    assert len(asked) == 1 and "have results" in capsys.readouterr().out


def test_smoke_test_runs_no_sweep(tmp_path, monkeypatch):
    asked = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "vitrail.cli.sweep_command.smoke_test_sweeps", lambda names, *, device: asked.append((*names, device))
    )
    monkeypatch.setattr("vitrail.cli.sweep_command.run_sweeps", lambda *_, **__: pytest.fail("run"))
    command.run_claims("vlm-mlp", "vlm-one-stage", "vlm-naive-crop", device="cpu", smoke_test=True, save=True)
    assert asked == [("vlm", "vlm-fit", "cpu")] and not list(tmp_path.iterdir())


def test_list_prints_all_claims(tmp_path, capsys):
    command.list_claims(results=ROOT / "results")
    output = capsys.readouterr().out
    assert all(name in output for name in load_claims()) and ": holds" in output
    command.list_claims(results=tmp_path)
    assert capsys.readouterr().out.count("not run yet") == len(load_claims())
