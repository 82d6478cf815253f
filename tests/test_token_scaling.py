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
from vitrail.cli.scaling_run import SMOKE, _change
from vitrail.data.scenes.letters import BUILT_IN, word_sprites
from vitrail.data.scenes.sprites import Atlas
from vitrail.errors import ConfigError
from vitrail.lab.scores import read_scores
from vitrail.token_scaling import ALONE, QFORMER, TOLD, Design, Experiment


def test_the_default_design(tmp_path):
    made = Experiment(Design(), tmp_path, "cpu")
    base, queries, runs = (made.sweep_of(phase) for phase in ("base", "queries", "runs"))
    assert len(base.tests) == 3 * 5 + 1  # of 64 patches no more than 64 tokens are left
    fused, plain = (queries.read_recipe(variant, 0) for variant in queries.variants)
    assert fused.model.config["queries"]["first"] == plain.model.config["connector"]["queries"] == 128
    assert {part.start for part in fused.model.parts.values()} == {str(made.end("base"))}
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
    base, queries = (recipe.read(f"untested/scaling-{name}") for name in ("base", "queries"))
    assert {k: v for k, v in queries.model.config.items() if k != "queries"} == base.model.config
    seeds = [source.seed for r in (base, queries) for source in r.sources.values() if hasattr(source, "seed")]
    assert len(set(seeds)) == len(seeds)
    unseen, seen = queries.sources["unseen"], queries.sources["scenes"]
    assert not set(unseen.scene["vendors"]) & set(seen.scene["vendors"])
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
    other = Experiment(Design(changes={"sources.scenes.seed": 5}), tmp_path, "cpu")
    assert first.folder == more.folder != other.folder
    assert other.base.sources["scenes"].seed == other.recipe.sources["scenes"].seed == 5
    longer = Experiment(Design(changes={"stages.1.steps": 700}), tmp_path, "cpu")  # which the base alone has
    assert longer.base.stages[1].steps == 700 and longer.recipe == first.recipe


@pytest.mark.parametrize(
    ("design", "said"),
    [
        ({"tokens": (1, 8)}, "three or more"),
        ({"tokens": (8, 1, 16)}, "ascending"),
        ({"steps": 1}, "two steps"),
        ({"changes": {"stages.0.stepps": 3}}, "stages.0.stepps"),
        ({"queries": "untested/scaling-base"}, "give two recipes"),
        ({"queries": "untested/mini-vlm"}, "no model.config.queries"),
    ],
)
def test_what_cannot_be(design, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        Experiment(Design(**design), tmp_path, "cpu")


def test_a_tower_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="out/qlip-scenes/final"):
        scaling_run.run(out=tmp_path / "out", device="cpu")


@pytest.fixture
def changes(tmp_path) -> list[str]:
    """Pictures that are drawn here, for `--smoke`."""
    sprites = chain(drawn(), word_sprites(["tea", "red", "ten", "sun", "map", "fox"], BUILT_IN[:2]))
    Atlas.build(sprites).save(tmp_path / "atlas.safetensors")
    for name in ("lemon", "cherry"):
        (tmp_path / "fruit").mkdir(exist_ok=True)
        Image.new("RGB", (16, 16), "red").save(tmp_path / "fruit" / f"{name}.png")
    scene = 'scene={objects=[1, 4], inside=0.0, word=0.5, vendors=["%s"]}'
    named = f'{{kind="named", data=["{tmp_path / "fruit"}"], side=16}}'
    return [
        *(f"sources.{name}.atlas={tmp_path / 'atlas.safetensors'}" for name in ("scenes", "unseen")),
        f"sources.scenes.{scene % 'left'}",
        f"sources.unseen.{scene % 'right'}",
        *(f"sources.{name}={named}" for name in ("named", "unseen-named")),
    ]


def test_smoke_shrinks_both(changes, tmp_path):
    laid = deepcopy(SMOKE) | dict(map(_change, changes))
    made = Experiment(Design(tokens=(1, 4, 16), changes=laid), tmp_path, "cpu")
    for one in (made.base, made.recipe):
        assert one.model.config["tower"]["block"]["width"] == 16 and one.stages[0].steps == 2
    assert not made.base.model.parts and "queries.embed" in made.parts


@pytest.mark.slow
def test_all_of_it_runs_and_goes_on(changes, tmp_path, monkeypatch, capsys):
    app = App(result_action="return_value")
    app.command("vitrail.cli.scaling:app", name="scaling")
    out = tmp_path / "out"
    words = ["scaling", "run", *changes, "--out", str(out), "--smoke", "--device", "cpu"]
    app(words, exit_on_error=False)
    said = capsys.readouterr().out
    assert "α of reading − α of existence_random, with question" in said
    found = json.loads((out / "scaling.json").read_text())
    ways = {(p["way"], p["tokens"]) for p in found["scores"]}
    trained = ("with question", "without question", "Q-Former", "question withheld", "another question")
    assert ways == {(w, n) for w in (*trained, "VisPruner", "VisionZip", "pooling") for n in (1, 4, 16)} | {
        ("all patches", 16)
    }
    kinds = {p["kind"] for p in found["scores"]}
    assert {"reading", "naming"} < kinds and found["questions"]["naming"]["of"] == 2
    assert read_scores(out / "scores-with-question.csv").keys() == kinds
    assert all(f">{kind}</text>" in (out / "scaling.svg").read_text() for kind in kinds)

    design = Design.read(json.loads((out / "design.json").read_text()))
    made = Experiment(design, out, "cpu")
    base, run = hub.load(made.end("base")), made.planned("runs")[0]
    tuned = hub.load(run.folder / "final")
    assert all((a == b).all() for a, b in zip(base.decoder.parameters(), tuned.decoder.parameters(), strict=True))
    assert not list(out.rglob("checkpoints"))

    monkeypatch.setattr("vitrail.recipe.train", None)  # nothing is trained again, and what was not tested is
    (run.folder / "tests" / "own.json").unlink()
    app(words, exit_on_error=False)
    again = json.loads((out / "scaling.json").read_text())
    assert {key: again[key] for key in again if key != "origin"} == {
        key: found[key] for key in found if key != "origin"
    }
