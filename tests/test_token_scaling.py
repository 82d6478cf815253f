"""The protocol of `vitrail scaling run`: what is planned, and that all of it runs, shrunk, and goes on."""

import json
from copy import deepcopy
from itertools import chain

import pytest
from cyclopts import App
from PIL import Image

from data.scenes.conftest import drawn
from vitrail import hub, recipe
from vitrail.cli import scaling_run
from vitrail.cli.scaling_run import DECLARED, SMOKE, _change, _table, answers
from vitrail.data.scenes.letters import BUILT_IN, word_sprites
from vitrail.data.scenes.sprites import Atlas
from vitrail.errors import ConfigError, DataError
from vitrail.lab.contrasts import Point
from vitrail.lab.scaling import fit
from vitrail.lab.scores import read_scores
from vitrail.token_design import Design
from vitrail.token_scaling import ALONE, CUT_FROM, QFORMER, TOLD, WITHHELD, Experiment


def test_the_default_design(tmp_path):
    made = Experiment(Design(), tmp_path, "cpu")
    base, queries, runs = (made.sweep_of(phase) for phase in ("base", "queries", "runs"))
    assert len(base.tests) == 4 * 5 + 1  # of 64 patches no more than 64 tokens are left
    fused, alone, plain = (queries.read_recipe(variant, 0) for variant in queries.variants)
    assert fused.model.config["queries"]["first"] == plain.model.config["connector"]["queries"] == 128
    assert {part.start for part in fused.model.parts.values()} == {str(made.end("base"))}
    assert alone.model.config["queries"] == fused.model.config["queries"] | {"question": "never"}  # from its first step
    assert (alone.model.parts, alone.stages) == (fused.model.parts, fused.stages)
    assert set(plain.model.parts) == {"tower", "decoder"} and plain.stages[0].train == ("connector",)
    assert "decoder" not in fused.stages[0].train
    assert len(made.planned("runs")) == 6 * 3 * 3
    assert {v.name for v in runs.variants} == {f"{w} {n}" for w in (TOLD, ALONE, QFORMER) for n in Design().tokens}
    for run in made.planned("runs")[:18]:
        read = runs.read_recipe(run.variant, run.seed)
        assert (read.stages[0].steps, set(read.sources)) == (200, {"scenes", "named"})
        assert "decoder" not in read.stages[0].train


def test_both_recipes_are_of_one_base():
    """What is put on the base is made as it is, and what is tested is never trained on."""
    base, queries = (recipe.read(f"scaling-{name}") for name in ("base", "queries"))
    assert {k: v for k, v in queries.model.config.items() if k != "queries"} == base.model.config
    seeds = [source.seed for r in (base, queries) for source in r.sources.values() if hasattr(source, "seed")]
    assert len(set(seeds)) == len(seeds)
    unseen, seen = queries.sources["unseen"], queries.sources["scenes"]
    assert not set(unseen.scene["vendors"]) & set(seen.scene["vendors"])
    fonts = {font.name for font in BUILT_IN}
    assert set(unseen.scene["fonts"]) | set(seen.scene["fonts"]) == fonts and len(unseen.scene["fonts"]) == 1
    assert not set(unseen.scene["fonts"]) & {*seen.scene["fonts"], *base.sources["scenes"].scene["fonts"]}
    assert not set(queries.sources["unseen-named"].data) & set(queries.sources["named"].data)
    assert queries.settings(0).kinds == base.settings(1).kinds


def test_jobs_side_by_side_get_few_tokens_and_many(tmp_path):
    planned = Experiment(Design(), tmp_path, "cpu").planned("runs")
    for jobs in range(2, 7):
        loads = [sum(int(run.variant.name.split()[-1]) for run in planned[i::jobs]) for i in range(jobs)]
        assert max(loads) < 3 * min(loads)


def test_other_recipes_start_anew(tmp_path):
    first = Experiment(Design(), tmp_path, "cpu")
    more = Experiment(Design(seeds=(0, 1, 2, 3), count=50), tmp_path, "cpu")
    other = Experiment(Design(changes={"queries.sources.scenes.seed": 5}), tmp_path, "cpu")
    assert first.folder == more.folder != other.folder
    assert other.recipe.sources["scenes"].seed == 5 and other.base == first.base
    longer = Experiment(Design(changes={"stages.1.steps": 700}), tmp_path, "cpu")  # which the base alone has
    assert longer.base.stages[1].steps == 700 and longer.recipe == first.recipe
    fewer = Experiment(Design(changes={"base.stages.0.steps": 70}), tmp_path, "cpu")
    assert fewer.base.stages[0].steps == 70 and fewer.recipe == first.recipe


@pytest.mark.parametrize(
    ("design", "said"),
    [
        ({"tokens": (1, 8)}, "three or more"),
        ({"tokens": (8, 1, 16)}, "ascending"),
        ({"steps": 1}, "two steps"),
        ({"changes": {"stages.0.stepps": 3}}, "stages.0.stepps"),
        ({"changes": {"base.sources.unseen.seed": 3}}, "sources.unseen.seed' in the recipe of base"),
        ({"changes": {"stages.0.steps": 3}}, "write base.stages.0.steps or queries.stages.0.steps"),
        ({"queries": "scaling-base"}, "give two recipes"),
        ({"queries": "mini-vlm"}, "no model.config.queries"),
    ],
)
def test_what_cannot_be(design, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        Experiment(Design(**design), tmp_path, "cpu")


def test_a_tower_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="out/clip-scenes/final"):
        scaling_run.run(out=tmp_path / "out", device="cpu")


def test_what_would_be_run_is_said(tmp_path, capsys):
    scaling_run.run(out=tmp_path / "out", device="cpu", dry=True)
    said = capsys.readouterr().out
    base, queries, runs = (
        next(x for x in said.splitlines() if x.startswith(f"{p} ")) for p in ("base", "queries", "runs")
    )
    assert base.split()[1:6] == ["1", "0", "300", "+", "2400"] and runs.split()[1:4] == ["54", "0", "200"]
    assert "without question 16" in said and queries.split()[5] == "0"
    assert f"{1000 * 3 * 54 * 7:,}" in runs and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("right", "refused"), [({"reading": 30, "existence_random": 90}, None),
                                                ({"reading": 30, "existence_random": 55}, "existence_random 55.0%"),
                                                ({"reading": 2, "existence_random": 90}, "reading 2.0%")])  # fmt: skip
def test_a_base_that_sees_nothing_ends_it(right, refused, tmp_path, monkeypatch):
    made = Experiment(Design(count=100), tmp_path, "cpu")
    [base] = made.planned("base")
    blind = {"existence_random": 0.5, "reading": 0.01}
    scores = [
        {"name": kind, "value": right.get(kind, 50) / 100, "of": 100, "beside": {"blind": blind.get(kind, 0.9)}}
        for kind in (*made.settings.kinds, "naming")
    ]
    for name, words in made.sweep_of("base").tests.items():
        file = base.folder / "tests" / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"asked": words, "scores": scores}))
    if refused is None:
        made.check_base(("reading", "existence_random"))
        return
    with pytest.raises(DataError, match=f"not told from a guess: {refused}") as error:
        made.check_base(("reading", "existence_random"))
    assert "--anyway" in error.value.remedy
    asked = []
    monkeypatch.setattr(scaling_run, "_phase", lambda experiment, phase, *rest: asked.append(phase))
    monkeypatch.setattr(scaling_run, "check_starts", lambda *words: None)
    monkeypatch.setattr(scaling_run, "tell", lambda *words: None)
    with pytest.raises(DataError, match="not told from a guess"):
        scaling_run.run(out=tmp_path, count=100, device="cpu")
    assert asked == ["base"]
    scaling_run.run(out=tmp_path, count=100, device="cpu", anyway=True)
    assert asked == ["base", "base", "queries", "runs"]


def test_answers_have_few_verdicts_and_one_control():
    points = []
    for seed in range(3):
        for n in (1, 8, 64):
            for kind in ("reading", "existence_random", "unanswerable_colour", "naming"):
                share = 0.2 + 0.05 * n**0.3 + 0.01 * seed * (kind == "reading")
                for way, more in ((TOLD, 0.1 * (kind != "naming")), (ALONE, 0), (WITHHELD, 0.01 * seed)):
                    blind = 0.25 if kind == "existence_random" else 0.0
                    points.append(Point(way=way, tokens=n, seed=seed, kind=kind, value=share + more, of=9, blind=blind))
    found = answers(points)
    assert {name for name, one in found.items() if one and one.sign} == set(DECLARED) == set(list(found)[:3])
    assert found["with question over without question, questions that point less naming"].value == pytest.approx(0.1)
    assert not [name for name in found if "less" in name and not name.endswith("less naming")]
    raw, above = (found[f"α of reading − α of existence_random, {by}, {TOLD}"] for by in ("as scored", "above chance"))
    assert abs(raw.value) < 0.02 < above.value and above.over == "numbers of tokens"
    assert found["with question over another question, reading"] is None  # which was not tested


def test_tables_leave_out_what_has_no_logarithm(tmp_path):
    shares = {1: 0.0, 8: 0.25, 16: 0.5, 32: 0.5}
    points = [Point(way=TOLD, tokens=n, seed=0, kind="reading", value=v, of=8) for n, v in shares.items()]
    _table(points, TOLD, ["reading"], tmp_path / "scores.csv")
    assert read_scores(tmp_path / "scores.csv")["reading"] == ((8, 16, 32), (25, 50, 50))


@pytest.fixture
def changes(tmp_path) -> list[str]:
    """Pictures that are drawn here, for `--smoke`."""
    sprites = chain(drawn(), word_sprites(["tea", "red", "ten", "sun", "map", "fox"], BUILT_IN[:2]))
    Atlas.build(sprites).save(tmp_path / "atlas.safetensors")
    for name in ("lemon", "cherry"):
        (tmp_path / "fruit").mkdir(exist_ok=True)
        Image.new("RGB", (16, 16), "red").save(tmp_path / "fruit" / f"{name}.png")
    scene = 'scene={objects=[1, 4], inside=0.0, word=0.5, vendors=["%s"]}'
    both = ("base.sources.scenes", "queries.sources.scenes")
    named = f'{{kind="named", data=["{tmp_path / "fruit"}"], side=16}}'
    return [
        *(f"{name}.atlas={tmp_path / 'atlas.safetensors'}" for name in (*both, "sources.unseen")),
        *(f"{name}.{scene % 'left'}" for name in both),
        f"sources.unseen.{scene % 'right'}",
        *(f"{name}={named}" for name in ("base.sources.named", "queries.sources.named", "sources.unseen-named")),
    ]


def test_smoke_shrinks_both(changes, tmp_path):
    laid = deepcopy(SMOKE) | dict(map(_change, changes))
    made = Experiment(Design(tokens=(1, 4, 16), changes=laid), tmp_path, "cpu")
    for one in (made.base, made.recipe):
        assert one.model.config["tower"]["block"]["width"] == 16 and one.stages[0].steps == 2
    assert not made.base.model.parts and "queries.embed" in made.parts
    queries = made.sweep_of("queries")
    for _ in range(2):  # what one variant lays over a table reaches no other
        told = [queries.read_recipe(variant, 0).model.config["queries"] for variant in queries.variants]
        assert [one and one["question"] for one in told] == ["always", "never", None]


@pytest.mark.slow
def test_all_of_it_runs_and_goes_on(changes, tmp_path, monkeypatch, capsys):
    app = App(result_action="return_value")
    app.command("vitrail.cli.scaling:app", name="scaling")
    out = tmp_path / "out"
    words = ["scaling", "run", *changes, "--out", str(out), "--smoke", "--device", "cpu"]
    app(words, exit_on_error=False)
    said = capsys.readouterr().out
    assert "α of reading − α of existence_random, above chance, with question" in said
    found = json.loads((out / "scaling.json").read_text())
    ways = {(p["way"], p["tokens"]) for p in found["scores"]}
    trained = ("with question", "without question", "Q-Former", "question withheld", "another question")
    assert ways == {(w, n) for w in (*trained, "VisPruner", "VisionZip", "pooling", "random") for n in (1, 4, 16)} | {
        ("all patches", 16)
    }
    kinds = {p["kind"] for p in found["scores"]}
    assert {"reading", "naming"} < kinds and found["questions"]["naming"] == {"of": 2, "blind": 0.5}
    for way, laws in found["laws"].items():
        table = read_scores(out / f"scores-{way.replace(' ', '-').lower()}.csv")
        assert table.keys() == laws.keys()
        assert all(fit(*column).alpha == pytest.approx(laws[k]["parameters"]["alpha"]) for k, column in table.items())
    assert all(f">{kind}</text>" in (out / "scaling.svg").read_text() for kind in kinds)

    [file] = out.glob("*/design.json")
    design = Design.read(json.loads(file.read_text()))
    made = Experiment(design, out, "cpu")
    base, run = hub.load(made.end("base")), made.planned("runs")[0]
    tuned = hub.load(run.folder / "final")
    assert all((a == b).all() for a, b in zip(base.decoder.parameters(), tuned.decoder.parameters(), strict=True))
    assert not list(out.rglob("checkpoints"))
    never = hub.load(made.end("queries", 1)).config.queries
    assert never.question == hub.load(made.start(ALONE, 4)).config.queries.question == "never"

    test = run.folder / "tests" / "own.json"
    whole = test.read_text()
    test.write_text(json.dumps({**json.loads(whole), "scores": json.loads(whole)["scores"][1:]}))
    with pytest.raises(DataError, match=r"1 planned tests .* 'with question 16, seed 0: own'"):
        made.points()
    test.write_text(whole)

    start = made.start(TOLD, 4) / CUT_FROM
    weights = start.read_text()
    start.write_text("others")
    Experiment(design, out, "cpu").cut()
    assert start.read_text() == weights

    monkeypatch.setattr("vitrail.recipe.train", None)  # nothing is trained again, and what was not tested is
    (run.folder / "tests" / "own.json").unlink()
    app(words, exit_on_error=False)
    again = json.loads((out / "scaling.json").read_text())
    assert {key: again[key] for key in again if key != "origin"} == {
        key: found[key] for key in found if key != "origin"
    }
