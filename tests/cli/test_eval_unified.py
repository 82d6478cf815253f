"""`vitrail eval MODEL questions` and `drawing`, on a small model that knows nothing."""

import json
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from evals.test_fidelity import Eye
from evals.test_judge import config, shapes
from generate.test_answers import TEXTS, unified
from vitrail import hub
from vitrail.cli.eval import app
from vitrail.data.scenes.source import ScenesConfig
from vitrail.data.scenes.things import GROUPS
from vitrail.errors import ConfigError
from vitrail.evals.suites import talking
from vitrail.models.detector import Detector
from vitrail.processing.text import Tokenizer


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("vitrail.data.scenes.library.open_atlas", lambda name: shapes())
    hub.save(unified(order="masked"), tmp_path / "model", Tokenizer.train(TEXTS * 3, 300))
    torch.manual_seed(0)
    hub.save(Detector(config()), tmp_path / "judge")

    def call(suite, *words):
        out = tmp_path / "found.json"
        more = ["--device", "cpu", "--out", str(out)]
        app([suite, str(tmp_path / "model"), *map(str, words), *more], result_action="return_value")
        return json.loads(out.read_text()), capsys.readouterr().out

    return call


def test_questions(run):
    found, shown = run("questions", "--preset", "colours", "--kinds", "counting", "--kinds", "colour", "--count", 5)
    assert [score["name"] for score in found["scores"]] == ["counting", "colour", "refused though it can be answered"]
    assert [score["of"] for score in found["scores"]] == [5, 5, 10]
    assert "blind" in shown and found["preset"] == "colours" and found["unseen"] is False


def test_a_page_of_answers(run, tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.evals.suites.talking.GUESSED", 256)
    page = tmp_path / "found.html"
    run("questions", "--preset", "colours", "--kinds", "counting", "--count", 5, "--page", page)
    told = page.read_text()
    assert "<h3>how many there are</h3>" in told and "right: " in told and 1 <= told.count("data:image/png") <= 4


def test_a_page_of_drawings(run, tmp_path):
    page = tmp_path / "found.html"
    run("drawing", "--judge", tmp_path / "judge", "--count", 2, "--steps", 1, "--page", page)
    told = page.read_text()
    assert "<h3>two things of two colours</h3>" in told and told.count("data:image/png") == 12


def test_things_are_those_of_a_recipe(run, monkeypatch):
    names = sorted(set(shapes().table.names))[:4]
    sources = {
        "some": ScenesConfig(atlas="-", preset="plain", scene={"names": names}),
        "all": ScenesConfig(atlas="-", preset="plain"),
    }
    monkeypatch.setattr("vitrail.recipe.read", lambda name: SimpleNamespace(sources=sources))
    asked = ("questions", "--preset", "plain", "--kinds", "existence_random", "--count", 3, "--sizes", 0.3, 0.4)
    found, _ = run(*asked, "--names", "mine:some")
    assert found["names"] == names and found["sizes"] == [0.3, 0.4]
    monkeypatch.setitem(GROUPS, "few", tuple(names))
    assert run(*asked, "--names", "few")[0]["names"] == ["few"]
    for wrong, said in (("mine:any", "no scenes 'any'"), ("mine:all", "name no things"), ("mine", "RECIPE:SOURCE")):
        with pytest.raises(ConfigError, match=said):
            run(*asked, "--names", wrong)


def test_stress(run, monkeypatch):
    monkeypatch.setattr("vitrail.data.told.FITTED", 256)
    monkeypatch.setattr("vitrail.evals.suites.talking.GUESSED", 256)
    found, shown = run("stress", "--kinds", "colour", "--count", 1)
    names = [(score["name"], score["part"]["scenes"]) for score in found["scores"]]
    assert len(set(names)) == 12 and ("colour", "sub-patch") in names
    assert "colour, scenes occluded" in shown and "ordinary" in shown and 0 < found["patch"] < 1


def test_what_is_below_the_finest_patch_is_left_out_and_said(run, monkeypatch):
    from vitrail.cli import eval_unified

    monkeypatch.setattr("vitrail.data.told.FITTED", 256)
    monkeypatch.setattr("vitrail.evals.suites.talking.GUESSED", 256)
    opened = eval_unified.open_reader
    monkeypatch.setattr(eval_unified, "open_reader", lambda *of: opened(*of)._replace(patch=0.01))
    found, _ = run("stress", "--kinds", "colour", "--count", 1)
    assert {score["part"]["scenes"] for score in found["scores"]} == {
        "plain",
        "transparent",
        "moving",
        "occluded",
        "crowded",
    }
    assert found["left_out"] == ["sub-patch"]


def test_pictures_are_named_by_the_folder_they_lie_in(run, tmp_path):
    for name in ("cherry", "lemon"):
        (tmp_path / "fruit" / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (16, 16), "red").save(tmp_path / "fruit" / name / f"{number}.png")
    found, _ = run("naming", "--data", tmp_path / "fruit", "--names", "category")
    assert found["names"] == "category" and [score["of"] for score in found["scores"]] == [4, 2]


def test_drawing(run, tmp_path):
    found, _ = run("drawing", "--judge", tmp_path / "judge", "--count", 2, "--steps", 2, "--batch", 1, "--concepts", 8)
    assert [score["of"] for score in found["scores"]] == [2] * 6 + [12, 12]
    assert found["scores"][-1]["name"] == "true pictures through the codec" and "others" in found["scores"][0]["beside"]
    assert found["concepts"] == 8 and found["steps"] == 2


@pytest.mark.filterwarnings("ignore:FD-")
def test_fidelity(run, monkeypatch):
    scene = {"objects": [1, 3], "repeat": 0.4, "tint": 0.6, "combinations": "all"}
    sources = {"draw": ScenesConfig(atlas="flat", preset="plain", side=640, scene=scene)}
    monkeypatch.setattr("vitrail.recipe.read", lambda name: SimpleNamespace(sources=sources))
    monkeypatch.setattr("vitrail.hub.resnet50.load_resnet50", Eye)
    found, shown = run("fidelity", "--true", "mine:draw", "--count", 2, "--steps", 1, "--batch", 4)
    [score] = found["scores"]
    assert score["name"] == "FD-Eye" and score["of"] == 12 and score["points"] and score["value"] > 0
    assert set(score["beside"]) == {"true pictures in its codes", "other true pictures"} and "FD-Eye" in shown
    assert found["true"] == "mine:draw" and found["guidance"] == 3.0
    for wrong, said in (("mine:any", "no scenes 'any'"), ("flat", "'flat' says no recipe")):
        with pytest.raises(ConfigError, match=said):
            run("fidelity", "--true", wrong)


def test_true_pictures_may_be_a_recipes(run, tmp_path, monkeypatch):
    sources = {"draw": ScenesConfig(atlas="flat", preset="plain", side=640, scene={"objects": [1, 2], "repeat": 0.5})}
    monkeypatch.setattr("vitrail.recipe.read", lambda name: SimpleNamespace(sources=sources))
    shown, redrawn = [], talking.redrawn

    def watched(through, judge, source, *more, **how):
        shown.append(source.config)
        return redrawn(through, judge, source, *more, **how)

    monkeypatch.setattr(talking, "redrawn", watched)
    asked = ("drawing", "--judge", tmp_path / "judge", "--count", 1, "--steps", 1, "--concepts", 8, "--true")
    found, _ = run(*asked, "mine:draw")
    assert found["true"] == "mine:draw" and found["scores"][-1]["of"] == 6
    [config] = shown
    assert config.scene["objects"] == [1, 2] and config.preset == "plain" and config.side < 640  # the model's own
    monkeypatch.setattr(talking, "drawn", lambda *_, **__: pytest.fail("drawn"))
    with pytest.raises(ConfigError, match="no scenes 'any'"):
        run(*asked, "mine:any")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["questions", "--kinds", "countng"], "countng"),
        (["questions", "--kinds", "caption_short"], "caption_short.*word for word"),
        (["stress", "--kinds", "caption_long"], "caption_long.*word for word"),
        (["questions", "--preset", "colors"], "colors"),
        (["drawing", "--judge", "MODEL"], "no detector"),
    ],
)
def test_what_cannot_be_is_refused(run, words, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        run(*(str(tmp_path / "model") if word == "MODEL" else word for word in words))
