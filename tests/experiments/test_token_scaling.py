"""The token-scaling experiment: planned runs, a shrunken end-to-end run, and resuming it."""

import json
from copy import deepcopy
from itertools import chain

import pytest
from PIL import Image

from data.scenes.conftest import drawn
from experiments.token_scaling import run_command as scaling_run_command
from experiments.token_scaling.__main__ import app
from experiments.token_scaling.contrasts import ScorePoint
from experiments.token_scaling.run_command import (
    DECLARED_CONTRASTS,
    SMOKE_TEST_OVERRIDES,
    _parse_override,
    _write_scores_csv,
    compute_contrasts,
)
from experiments.token_scaling.token_scaling_config import TokenScalingConfig
from experiments.token_scaling.token_scaling_experiment import (
    Q_FORMER,
    QUESTION_WITHHELD,
    SOURCE_FILE,
    WITH_QUESTION,
    WITHOUT_QUESTION,
    TokenScalingExperiment,
)
from vitrail import hub, recipe
from vitrail.data.scenes.atlas import Atlas
from vitrail.data.scenes.word_sprites import BUILT_IN_FONTS, draw_word_sprites
from vitrail.errors import ConfigError, DataError
from vitrail.lab.scaling_law import fit_law
from vitrail.lab.score_tables import read_score_table


def test_default_config(tmp_path):
    made = TokenScalingExperiment(TokenScalingConfig(), tmp_path, "cpu")
    base, queries, runs = (made.get_sweep(phase) for phase in ("base", "queries", "runs"))
    assert len(base.tests) == 4 * 5 + 1  # at most 64 tokens of 64 patches
    fused, alone, plain = (queries.load_recipe(variant, 0) for variant in queries.variants)
    assert fused.model.config["queries"]["first_queries"] == plain.model.config["connector"]["num_queries"] == 128
    assert {part.checkpoint for part in fused.model.parts.values()} == {str(made.get_final_folder("base"))}
    assert alone.model.config["queries"] == fused.model.config["queries"] | {
        "question_mode": "never"
    }  # from the first step
    assert (alone.model.parts, alone.stages) == (fused.model.parts, fused.stages)
    assert set(plain.model.parts) == {"tower", "decoder"} and plain.stages[0].trainable == ("connector",)
    assert "decoder" not in fused.stages[0].trainable
    assert len(made.list_runs("runs")) == 6 * 3 * 3
    assert {v.name for v in runs.variants} == {
        f"{w} {n}" for w in (WITH_QUESTION, WITHOUT_QUESTION, Q_FORMER) for n in TokenScalingConfig().tokens
    }
    for run in made.list_runs("runs")[:18]:
        read = runs.load_recipe(run.variant, run.seed)
        assert (read.stages[0].steps, set(read.sources)) == (200, {"scenes", "named"})
        assert "decoder" not in read.stages[0].trainable


def test_both_recipes_share_one_base():
    """The queries recipe matches the base, and test sources are never trained on."""
    base, queries = (recipe.load_recipe(f"scaling-{name}") for name in ("base", "queries"))
    assert {k: v for k, v in queries.model.config.items() if k != "queries"} == base.model.config
    seeds = [source.seed for r in (base, queries) for source in r.sources.values() if hasattr(source, "seed")]
    assert len(set(seeds)) == len(seeds)
    unseen, seen = queries.sources["unseen"], queries.sources["scenes"]
    assert not set(unseen.scene["vendors"]) & set(seen.scene["vendors"])
    fonts = {font.name for font in BUILT_IN_FONTS}
    assert set(unseen.scene["fonts"]) | set(seen.scene["fonts"]) == fonts and len(unseen.scene["fonts"]) == 1
    assert not set(unseen.scene["fonts"]) & {*seen.scene["fonts"], *base.sources["scenes"].scene["fonts"]}
    assert not set(queries.sources["unseen-named"].datasets) & set(queries.sources["named"].datasets)
    assert queries.task_settings(0).question_kinds == base.task_settings(1).question_kinds


def test_parallel_jobs_are_balanced(tmp_path):
    planned = TokenScalingExperiment(TokenScalingConfig(), tmp_path, "cpu").list_runs("runs")
    for jobs in range(2, 7):
        loads = [sum(int(run.variant.name.split()[-1]) for run in planned[i::jobs]) for i in range(jobs)]
        assert max(loads) < 3 * min(loads)


def test_changed_recipes_use_another_folder(tmp_path):
    first = TokenScalingExperiment(TokenScalingConfig(), tmp_path, "cpu")
    more = TokenScalingExperiment(TokenScalingConfig(seeds=(0, 1, 2, 3), num_questions=50), tmp_path, "cpu")
    other = TokenScalingExperiment(TokenScalingConfig(changes={"queries.sources.scenes.seed": 5}), tmp_path, "cpu")
    assert first.folder == more.folder != other.folder
    assert other.recipe.sources["scenes"].seed == 5 and other.base == first.base
    longer = TokenScalingExperiment(
        TokenScalingConfig(changes={"stages.1.steps": 700}), tmp_path, "cpu"
    )  # a key of the base only
    assert longer.base.stages[1].steps == 700 and longer.recipe == first.recipe
    fewer = TokenScalingExperiment(TokenScalingConfig(changes={"base.stages.0.steps": 70}), tmp_path, "cpu")
    assert fewer.base.stages[0].steps == 70 and fewer.recipe == first.recipe


@pytest.mark.parametrize(
    ("design", "output"),
    [
        ({"tokens": (1, 8)}, "three or more"),
        ({"tokens": (8, 1, 16)}, "ascending"),
        ({"steps": 1}, "two steps"),
        ({"changes": {"stages.0.stepps": 3}}, "stages.0.stepps"),
        ({"changes": {"base.sources.unseen.seed": 3}}, "recipe of base has no key 'sources.unseen.seed'"),
        ({"changes": {"stages.0.steps": 3}}, "write base.stages.0.steps or queries.stages.0.steps"),
        ({"queries": "scaling-base"}, "give two recipes"),
        ({"queries": "mini-vlm"}, "no model.config.queries"),
    ],
)
def test_invalid_configs_raise(design, output, tmp_path):
    with pytest.raises(ConfigError, match=output):
        TokenScalingExperiment(TokenScalingConfig(**design), tmp_path, "cpu")


def test_missing_tower_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="out/clip-scenes/final"):
        scaling_run_command.run_experiment(out=tmp_path / "out", device="cpu")


def test_dry_run_lists_the_runs(tmp_path, capsys):
    scaling_run_command.run_experiment(out=tmp_path / "out", device="cpu", dry_run=True)
    output = capsys.readouterr().out
    base, queries, runs = (
        next(x for x in output.splitlines() if x.startswith(f"{p} ")) for p in ("base", "queries", "runs")
    )
    assert base.split()[1:6] == ["1", "0", "300", "+", "2400"] and runs.split()[1:4] == ["54", "0", "200"]
    assert "without question 16" in output and queries.split()[5] == "0"
    assert f"{1000 * 3 * 54 * 7:,}" in runs and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("right", "refused"), [({"reading": 30, "existence_random": 90}, None),
                                                ({"reading": 30, "existence_random": 55}, "existence_random 55.0%"),
                                                ({"reading": 2, "existence_random": 90}, "reading 2.0%")])  # fmt: skip
def test_blind_base_stops_the_experiment(right, refused, tmp_path, monkeypatch):
    made = TokenScalingExperiment(TokenScalingConfig(num_questions=100), tmp_path, "cpu")
    [base] = made.list_runs("base")
    blind = {"existence_random": 0.5, "reading": 0.01}
    scores = [
        {"name": kind, "value": right.get(kind, 50) / 100, "count": 100, "baselines": {"blind": blind.get(kind, 0.9)}}
        for kind in (*made.settings.question_kinds, "naming")
    ]
    for name, words in made.get_sweep("base").tests.items():
        file = base.folder / "tests" / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"arguments": words, "scores": scores}))
    if refused is None:
        made.check_base(("reading", "existence_random"))
        return
    with pytest.raises(DataError, match=f"not better than a blind guess: {refused}") as error:
        made.check_base(("reading", "existence_random"))
    assert "--anyway" in error.value.remedy
    asked = []
    monkeypatch.setattr(scaling_run_command, "_run_phase", lambda experiment, phase, *rest: asked.append(phase))
    monkeypatch.setattr(scaling_run_command, "check_checkpoints", lambda *words: None)
    monkeypatch.setattr(scaling_run_command, "report_experiment", lambda *words: None)
    with pytest.raises(DataError, match="not better than a blind guess"):
        scaling_run_command.run_experiment(out=tmp_path, count=100, device="cpu")
    assert asked == ["base"]
    scaling_run_command.run_experiment(out=tmp_path, count=100, device="cpu", ignore_base_check=True)
    assert asked == ["base", "base", "queries", "runs"]


def test_contrasts_have_few_verdicts_and_one_control():
    points = []
    for seed in range(3):
        for n in (1, 8, 64):
            for kind in ("reading", "existence_random", "unanswerable_colour", "naming"):
                share = 0.2 + 0.05 * n**0.3 + 0.01 * seed * (kind == "reading")
                for method, more in (
                    (WITH_QUESTION, 0.1 * (kind != "naming")),
                    (WITHOUT_QUESTION, 0),
                    (QUESTION_WITHHELD, 0.01 * seed),
                ):
                    blind = 0.25 if kind == "existence_random" else 0.0
                    points.append(
                        ScorePoint(
                            method=method, tokens=n, seed=seed, kind=kind, value=share + more, count=9, blind=blind
                        )
                    )
    found = compute_contrasts(points)
    assert {name for name, one in found.items() if one and one.sign} == set(DECLARED_CONTRASTS) == set(list(found)[:3])
    assert found["with question over without question, questions that point less naming"].value == pytest.approx(0.1)
    assert not [name for name in found if "less" in name and not name.endswith("less naming")]
    raw, above = (
        found[f"α of reading − α of existence_random, {by}, {WITH_QUESTION}"] for by in ("as scored", "above chance")
    )
    assert abs(raw.value) < 0.02 < above.value and above.over == "numbers of tokens"
    assert found["with question over another question, reading"] is None  # not tested


def test_tables_skip_zero_scores(tmp_path):
    shares = {1: 0.0, 8: 0.25, 16: 0.5, 32: 0.5}
    points = [
        ScorePoint(method=WITH_QUESTION, tokens=n, seed=0, kind="reading", value=v, count=8) for n, v in shares.items()
    ]
    _write_scores_csv(points, WITH_QUESTION, ["reading"], tmp_path / "scores.csv")
    assert read_score_table(tmp_path / "scores.csv")["reading"] == ((8, 16, 32), (25, 50, 50))


@pytest.fixture
def changes(tmp_path) -> list[str]:
    """Overrides of the sources with tiny rendered images, for `--smoke-test`."""
    sprites = chain(drawn(), draw_word_sprites(["tea", "red", "ten", "sun", "map", "fox"], BUILT_IN_FONTS[:2]))
    Atlas.build(sprites).save(tmp_path / "atlas.safetensors")
    for name in ("lemon", "cherry"):
        (tmp_path / "fruit").mkdir(exist_ok=True)
        Image.new("RGB", (16, 16), "red").save(tmp_path / "fruit" / f"{name}.png")
    scene = 'scene={objects=[1, 4], inside_probability=0.0, word_probability=0.5, vendors=["%s"]}'
    both = ("base.sources.scenes", "queries.sources.scenes")
    named = f'{{kind="named", datasets=["{tmp_path / "fruit"}"], image_size=16}}'
    return [
        *(f"{name}.atlas={tmp_path / 'atlas.safetensors'}" for name in (*both, "sources.unseen")),
        *(f"{name}.{scene % 'left'}" for name in both),
        f"sources.unseen.{scene % 'right'}",
        *(f"{name}={named}" for name in ("base.sources.named", "queries.sources.named", "sources.unseen-named")),
    ]


def test_smoke_test_shrinks_both_recipes(changes, tmp_path):
    laid_out = deepcopy(SMOKE_TEST_OVERRIDES) | dict(map(_parse_override, changes))
    made = TokenScalingExperiment(TokenScalingConfig(tokens=(1, 4, 16), changes=laid_out), tmp_path, "cpu")
    for one in (made.base, made.recipe):
        assert one.model.config["tower"]["block"]["width"] == 16 and one.stages[0].steps == 2
    assert not made.base.model.parts and "queries.embed" in made.parts
    queries = made.get_sweep("queries")
    for _ in range(2):  # variants do not modify each other
        result = [queries.load_recipe(variant, 0).model.config["queries"] for variant in queries.variants]
        assert [one and one["question_mode"] for one in result] == ["always", "never", None]


@pytest.mark.slow
def test_experiment_runs_and_resumes(changes, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    words = ["run", *changes, "--out", str(out), "--smoke-test", "--device", "cpu"]
    app(words, exit_on_error=False, result_action="return_value")
    output = capsys.readouterr().out
    assert "α of reading − α of existence_random, above chance, with question" in output
    found = json.loads((out / "scaling.json").read_text())
    methods = {(p["method"], p["tokens"]) for p in found["scores"]}
    trained = ("with question", "without question", "Q-Former", "question withheld", "another question")
    assert methods == {
        (w, n) for w in (*trained, "VisPruner", "VisionZip", "pooling", "random") for n in (1, 4, 16)
    } | {("all patches", 16)}
    kinds = {p["kind"] for p in found["scores"]}
    assert {"reading", "naming"} < kinds and found["questions"]["naming"] == {"count": 2, "blind": 0.5}
    for method, laws in found["laws"].items():
        table = read_score_table(out / f"scores-{method.replace(' ', '-').lower()}.csv")
        assert table.keys() == laws.keys()
        assert all(
            fit_law(*column).alpha == pytest.approx(laws[k]["parameters"]["alpha"]) for k, column in table.items()
        )
    assert all(f">{kind}</text>" in (out / "scaling.svg").read_text() for kind in kinds)

    [file] = out.glob("*/design.json")
    design = TokenScalingConfig.from_dict(json.loads(file.read_text()))
    made = TokenScalingExperiment(design, out, "cpu")
    base, run = hub.load(made.get_final_folder("base")), made.list_runs("runs")[0]
    tuned = hub.load(run.folder / "final")
    assert all((a == b).all() for a, b in zip(base.decoder.parameters(), tuned.decoder.parameters(), strict=True))
    assert not list(out.rglob("checkpoints"))
    never = hub.load(made.get_final_folder("queries", 1)).config.queries
    assert (
        never.question_mode
        == hub.load(made.get_start_folder(WITHOUT_QUESTION, 4)).config.queries.question_mode
        == "never"
    )

    test = run.folder / "tests" / "own.json"
    whole = test.read_text()
    test.write_text(json.dumps({**json.loads(whole), "scores": json.loads(whole)["scores"][1:]}))
    with pytest.raises(DataError, match=r"1 planned tests .* 'with question 16, seed 0: own'"):
        made.load_points()
    test.write_text(whole)

    start = made.get_start_folder(WITH_QUESTION, 4) / SOURCE_FILE
    weights = start.read_text()
    start.write_text("others")
    TokenScalingExperiment(design, out, "cpu").write_starts()
    assert start.read_text() == weights

    monkeypatch.setattr("vitrail.recipe.train_recipe", None)  # nothing is trained again; missing tests run
    (run.folder / "tests" / "own.json").unlink()
    app(words, exit_on_error=False, result_action="return_value")
    again = json.loads((out / "scaling.json").read_text())
    assert {key: again[key] for key in again if key != "origin"} == {
        key: found[key] for key in found if key != "origin"
    }
