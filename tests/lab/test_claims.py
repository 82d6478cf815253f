"""Claims: the rule, the reading of results, and the page that is kept."""

import json
import math
from pathlib import Path
from statistics import mean, stdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail import sweep as sweeps
from vitrail.cli import claims as command
from vitrail.errors import ConfigError, DataError, TrainError
from vitrail.lab.claims import Claim, claim, claims, judge
from vitrail.lab.claims_page import page
from vitrail.lab.kept import read_kept, read_several

ROOT = Path(__file__).parents[2]
ROW = {
    "name": "a",
    "says": "a is better",
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
        ([1.0, 1.1, 0.9], {"above": 0.0, "below": 2.0, "floor": -1.0}, "holds"),
        ([1.0, 1.1, 0.9], {"above": -0.5, "below": 0.5, "floor": -1.0}, "does not hold"),
        ([1.0, -1.0, 2.0], {"above": 0.0}, "undecided"),
        ([1.0, 1.0], {"above": 0.0}, "undecided"),  # two seeds
        ([1.0], {"above": 0.0}, "undecided"),
        ([0.0, 0.0, 0.0], {"above": 0.0}, "does not hold"),  # no difference is not above none
    ],
)
def test_the_rule(first, range, verdict):
    assert judge(Claim.read({**ROW, **range}), values(first, [0.0] * len(first))).verdict == verdict


@settings(max_examples=40)
@given(st.lists(st.tuples(numbers, numbers), min_size=3, max_size=6), numbers)
def test_the_interval_is_that_of_a_sweep_and_opposite_claims_never_both_hold(pairs, end):
    first, second = zip(*pairs, strict=True)
    up = judge(Claim.read({**ROW, "above": end}), values(first, second))
    down = judge(Claim.read({**ROW, "below": end}), values(first, second))
    differences = [a - b for a, b in pairs]
    low, high = sweeps.Row("", "", "", dict(enumerate(differences))).interval
    assert up.effect == pytest.approx(mean(differences))
    assert up.interval == pytest.approx((low, high), rel=1e-3, abs=1e-3 * (1 + stdev(differences)))
    assert not up.verdict == down.verdict == "holds"
    assert (up.verdict == "holds") <= (down.verdict == "does not hold")


def test_seeds_are_paired():
    steady = {("x", "t", "s"): {0: 1.0, 1: 5.0, 2: 9.0, 7: 99.0}, ("y", "t", "s"): {2: 8.9, 1: 4.8, 0: 0.8}}
    one = judge(Claim.read({**ROW, "above": 0.0}), steady)
    assert sorted(one.effects) == [0, 1, 2] and one.verdict == "holds"
    assert (one.first, one.second) == (5.0, pytest.approx(14.5 / 3))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_seed_that_diverged_leaves_it_undecided_and_is_named(value):
    one = judge(Claim.read({**ROW, "above": 0.0}), values([1.0, value, 1.0], [0.0, 0.0, 0.0]))
    assert one.verdict == "undecided" and one.interval is None
    assert str(one).endswith("[no interval]: undecided (3 seeds, not finite: seed 1)")


def test_two_that_have_learnt_nothing_are_not_called_alike():
    alike = {**ROW, "above": -0.05, "below": 0.05}
    with pytest.raises(ConfigError, match="give a floor"):
        Claim.read(alike)
    chosen = Claim.read({**alike, "floor": 0.6})
    for first, second, verdict in ((0.5, 0.5, "undecided"), (0.9, 0.59, "undecided"), (0.9, 0.9, "holds")):
        assert judge(chosen, values([first] * 3, [second] * 3)).verdict == verdict
    assert str(judge(chosen, values([0.9] * 3, [0.59] * 3))).endswith("undecided, no better than 60.0 %: y")
    loss = Claim.read({**alike, "floor": 10.0, "unit": "nats"})  # less is better
    assert judge(loss, values([3.0] * 3, [3.0] * 3)).verdict == "holds"
    assert judge(loss, values([10.4] * 3, [10.4] * 3)).blind == ["x", "y"]


def test_no_claim_about_a_vision_language_model_is_decided_by_blind_ones():
    for one in claims().values():
        if one.name.startswith("vlm-"):
            assert one.floor is not None, one.name
            three = dict.fromkeys(range(3), one.floor)
            blind = {(name, one.test, one.score): three for name in (one.first, one.second)}
            assert judge(one, blind).verdict == "undecided", one.name


def test_small_losses_are_told():
    assert claim("vlm-gates").range == "> −0.0010 nats and < 0.0010 nats"


def test_what_is_missing_is_named():
    with pytest.raises(DataError, match="no 's' of 't' for 'y'"):
        judge(Claim.read({**ROW, "above": 0.0}), {("x", "t", "s"): {0: 1.0}})
    with pytest.raises(DataError, match="share no seed"):
        judge(Claim.read({**ROW, "above": 0.0}), {("x", "t", "s"): {0: 1.0}, ("y", "t", "s"): {1: 1.0}})
    for wrong in ({}, {"above": 1.0, "below": 0.0, "floor": 0.0}, {"above": 0.0, "sweep": None}):
        with pytest.raises(ConfigError):
            Claim.read({**ROW, **wrong})
    with pytest.raises(ConfigError, match="qlip-words-fall"):
        claim("qlip-words-fal")


def test_results_of_each_form(tmp_path):
    table = [{"variant": "x", "test": "t", "score": "s", "values": {"0": 1, "2": 3.5}, "mean": 2.0, "interval": None}]
    (tmp_path / "bare.json").write_text(json.dumps(table))
    (tmp_path / "kept.json").write_text(json.dumps({"origin": {"commit": "abc"}, "table": table}))
    tests = {"t": {"command": "do it", "a-b-1": {"s": {"value": 4}}, "y-0": {"scores": {"s": {"value": 5}}, "use": []}}}
    (tmp_path / "tests.json").write_text(json.dumps({"evals": tests}))
    assert read_kept(tmp_path / "bare.json").values == {("x", "t", "s"): {0: 1.0, 2: 3.5}}
    assert read_kept(tmp_path / "kept.json").origin == {"commit": "abc"}
    assert read_kept(tmp_path / "tests.json").values == {("a-b", "t", "s"): {1: 4.0}, ("y", "t", "s"): {0: 5.0}}
    both = read_several([tmp_path / "kept.json", tmp_path / "tests.json"])
    assert both is not None and len(both.values) == 3 and set(both.origin) == {"kept", "tests"}
    assert read_several([tmp_path / "kept.json", tmp_path / "none.json"]) is None
    for broken in ("{", '{"table": [{"values": {"0": 1}}]}', '{"table": [3]}'):
        (tmp_path / "broken.json").write_text(broken)
        with pytest.raises(DataError, match=r"broken\.json"):
            read_kept(tmp_path / "broken.json")


def test_every_claim_is_of_a_sweep_and_of_variants_that_there_are():
    found = {one.sweep: sweeps.read(one.sweep) for one in claims().values() if one.sweep is not None}
    stages = {
        name: [stage.name for stage in read.read_recipe(read.variants[-1], 0).stages] for name, read in found.items()
    }
    for one in claims().values():
        if one.sweep is not None:
            assert {one.first, one.second} <= {variant.name for variant in found[one.sweep].variants}, one.name
            assert one.test in {*found[one.sweep].tests, *stages[one.sweep]}, one.name
        assert all(math.isfinite(end) for end in (one.above, one.below) if end is not None)


def test_the_page_is_what_the_command_writes(tmp_path, capsys):
    out = tmp_path / "claims.md"
    command.report(results=ROOT / "results", out=out)
    assert out.read_text() == (ROOT / "docs" / "claims.md").read_text(), "run `vitrail claims report`"
    assert page(ROOT / "results") == out.read_text()
    with pytest.raises(ConfigError, match="no folder"):
        command.report(results=tmp_path / "nowhere", out=out)
    capsys.readouterr()


def test_run_sweeps_and_judges(tmp_path, monkeypatch, capsys):
    chosen = claim("qlip-words-fall")
    asked, tables = [], {}

    def run_sweeps(outs, *, jobs, device, train):
        for name, out in outs.items():
            asked.append((name, jobs, device, train))
            sweep(name, out)
        return []

    def sweep(name, out):
        rows = [
            {"variant": variant, "test": one.test, "score": one.score, "values": {"0": a, "1": a, "2": a + 0.01}}
            for one in sorted(claims().values(), key=lambda one: one is chosen)
            if one.sweep == name
            for variant, a in ((one.first, 0.1), (one.second, 0.5))
        ]
        out.mkdir(parents=True, exist_ok=True)
        tables[out] = rows
        for n, run in enumerate(sweeps.runs(sweeps.read(name), out)[1:]):
            run.folder.mkdir(parents=True, exist_ok=True)
            then = {"date": "2020-01-01", "device": "abacus", "commit": f"c{n % 2}", "command": "vitrail sweep x"}
            (run.folder / sweeps.ORIGIN).write_text(json.dumps(then))

    def show_table(name, out, show):
        assert chosen.score in show
        (out / "table.json").write_text(json.dumps(tables[out]))

    monkeypatch.setattr("vitrail.cli.sweep.run_sweeps", run_sweeps)
    monkeypatch.setattr("vitrail.cli.sweep.show_table", show_table)
    monkeypatch.setattr("vitrail.sweep.is_done", lambda sweep, run: True)
    command.run("qlip-words-fall", out=tmp_path / "runs", jobs=2, device="cpu")
    assert asked == [("qlip-weights", 2, "cpu", True)]
    said = capsys.readouterr().out
    assert "−40.0 points [−40.0, −40.0]: holds" in said and "cannot decide" not in said
    monkeypatch.chdir(tmp_path)
    command.run("qlip-words-fall", out=tmp_path / "again", device="cpu", keep=True)
    kept = read_kept(tmp_path / "results" / "qlip-weights.json")
    assert kept.origin["command"].startswith("vitrail sweep qlip-weights --out") and kept.origin["device"] == "abacus"
    assert (kept.origin["date"], kept.origin["commit"]) == ("2020-01-01", "c0, c1")  # as trained, not as kept
    assert kept.origin["note"].startswith("of 1 of ")
    assert kept.values == read_kept(tmp_path / "again" / "table.json").values
    assert "−40.0 points" in (tmp_path / "docs" / "claims.md").read_text()
    capsys.readouterr()
    chosen = claim("fsq-level-with-vq")
    command.run(chosen.name, out=tmp_path / "few")
    assert (
        "'codec-rates' has 1 seed, and fewer than 3 cannot decide: give it seeds = [0, 1, 2]" in capsys.readouterr().out
    )
    with pytest.raises(ConfigError, match="no sweep of its own"):
        command.run("qlip-late-quantizer-psnr")


def test_claims_of_several_sweeps_are_run_together(tmp_path, monkeypatch, capsys):
    asked, rows = [], {}

    def run_sweeps(outs, **_):
        asked.append(dict(outs))
        for name, out in outs.items():
            out.mkdir(parents=True, exist_ok=True)
            ones = [one for one in claims().values() if one.sweep == name]
            rows[out] = [
                {"variant": variant, "test": one.test, "score": one.score, "values": {"0": a, "1": a, "2": a}}
                for one in ones
                for variant, a in ((one.first, 0.1), (one.second, 0.5))
                if name != "vlm-fit"  # of which nothing is known yet
            ]
        return ["vlm-fit: naive, seed 0: failed"]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vitrail.cli.sweep.run_sweeps", run_sweeps)
    monkeypatch.setattr(
        "vitrail.cli.sweep.show_table", lambda name, out, show: (out / "table.json").write_text(json.dumps(rows[out]))
    )
    monkeypatch.setattr("vitrail.sweep.is_done", lambda sweep, run: sweep.name != "vlm-fit")
    with pytest.raises(TrainError, match="vlm-fit: naive, seed 0"):
        command.run("vlm-mlp", "vlm-one-stage", "vlm-naive-crop", jobs=2, keep=True, results=tmp_path / "kept")
    assert asked == [{"vlm": Path("out/vlm"), "vlm-fit": Path("out/vlm-fit")}]
    said = capsys.readouterr().out
    assert said.count("claimed") == 3 and "the results have no" in said
    assert [file.name for file in (tmp_path / "kept").iterdir()] == ["vlm.json"]  # what is not whole is not kept
    with pytest.raises(ConfigError, match="one folder for the sweeps vlm, vlm-fit"):
        command.run("vlm-mlp", "vlm-naive-crop", out=tmp_path / "x")
    asked.clear()
    with pytest.raises(TrainError):
        command.run(out=None, jobs=2, results=tmp_path / "kept", device="cpu")
    wanted = {one.sweep for one in claims().values()} - {None, "vlm"}
    assert set(asked[0]) == wanted  # all that have a sweep, and no results yet
    monkeypatch.setattr("vitrail.lab.claims_page.found", lambda results: [(one, True) for one in claims().values()])
    command.run(results=tmp_path / "kept")
    assert len(asked) == 1 and "has its results" in capsys.readouterr().out


def test_claims_are_rehearsed_sweep_by_sweep_and_nothing_is_run(tmp_path, monkeypatch):
    asked = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vitrail.cli.sweep.rehearse_sweeps", lambda names, *, device: asked.append((*names, device)))
    monkeypatch.setattr("vitrail.cli.sweep.run_sweeps", lambda *_, **__: pytest.fail("run"))
    command.run("vlm-mlp", "vlm-one-stage", "vlm-naive-crop", device="cpu", rehearse=True, keep=True)
    assert asked == [("vlm", "vlm-fit", "cpu")] and not list(tmp_path.iterdir())


def test_the_list_names_all(tmp_path, capsys):
    command.list_claims(results=ROOT / "results")
    said = capsys.readouterr().out
    assert all(name in said for name in claims()) and ": holds" in said
    command.list_claims(results=tmp_path)
    assert capsys.readouterr().out.count("not run yet") == len(claims())
