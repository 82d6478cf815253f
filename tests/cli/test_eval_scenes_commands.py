"""`vitrail eval MODEL questions` and `drawing` on a small untrained model."""

import json
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from evals.test_drawing_fidelity import Eye
from evals.test_drawing_judge import config, shapes
from generate.test_unified_generation import TEXTS, unified
from vitrail import hub
from vitrail.cli.eval_command import app
from vitrail.data.scenes.scene_source import SceneSourceConfig
from vitrail.data.scenes.thing_names import THING_GROUPS
from vitrail.errors import ConfigError, VitrailError
from vitrail.evals.suites import scene_benchmarks
from vitrail.models.detector import Detector
from vitrail.processing.tokenizer import Tokenizer


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("vitrail.data.scenes.atlas_library.open_atlas", lambda name: shapes())
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
    assert [score["name"] for score in found["scores"]] == ["counting", "colour", "refusals of answerable questions"]
    assert [score["count"] for score in found["scores"]] == [5, 5, 10]
    assert "blind" in shown and found["preset"] == "colours" and found["held_out"] is False


def test_html_page_of_answers(run, tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.evals.suites.scene_benchmarks.BASELINE_SCENES", 256)
    page = tmp_path / "found.html"
    run("questions", "--preset", "colours", "--kinds", "counting", "--count", 5, "--page", page)
    result = page.read_text()
    assert "<h3>how many there are</h3>" in result and "right: " in result and 1 <= result.count("data:image/png") <= 4


def test_html_page_of_drawings(run, tmp_path):
    page = tmp_path / "found.html"
    run("drawing", "--judge", tmp_path / "judge", "--count", 2, "--steps", 1, "--page", page)
    result = page.read_text()
    assert "<h3>two things of two colours</h3>" in result and result.count("data:image/png") == 12


def test_image_size_and_aspect_ratio_of_scenes(run, monkeypatch):
    from vitrail.evals.context import SceneAnswerModel
    from vitrail.pipelines.evaluation_context import PipelineContext

    monkeypatch.setattr("vitrail.evals.suites.scene_benchmarks.BASELINE_SCENES", 256)
    shapes_seen = []

    def answer(pixels, questions):
        shapes_seen.append(tuple(pixels.shape[1:]))
        return ["red"] * len(questions)

    monkeypatch.setattr(
        PipelineContext, "load_scene_answer_model", lambda *_: SceneAnswerModel(answer, 32, patch_fraction=0.1)
    )
    asked = ("questions", "--preset", "colours", "--kinds", "colour", "--count", 5)
    run(*asked)
    found, _ = run(*asked, "--image-size", 24, "--aspect-ratio", 2, 1)
    assert set(shapes_seen) == {(3, 32, 32), (3, 24, 48)}
    assert found["aspect_ratio"] == [2, 1] and found["image_size"] == 24


def test_things_of_a_recipe(run, monkeypatch):
    names = sorted(set(shapes().table.names))[:4]
    sources = {
        "some": SceneSourceConfig(atlas="-", preset="plain", scene={"things": names}),
        "all": SceneSourceConfig(atlas="-", preset="plain"),
    }
    monkeypatch.setattr("vitrail.recipe.load_recipe", lambda name: SimpleNamespace(sources=sources))
    asked = ("questions", "--preset", "plain", "--kinds", "existence_random", "--count", 3, "--sizes", 0.3, 0.4)
    found, _ = run(*asked, "--things", "mine:some")
    assert found["things"] == names and found["sizes"] == [0.3, 0.4]
    monkeypatch.setitem(THING_GROUPS, "few", tuple(names))
    assert run(*asked, "--things", "few")[0]["things"] == ["few"]
    for wrong, output in (
        ("mine:any", "no source of scenes 'any'"),
        ("mine:all", "are not restricted to some things"),
        ("mine", "RECIPE:SOURCE"),
    ):
        with pytest.raises(ConfigError, match=output):
            run(*asked, "--things", wrong)


def test_stress(run, monkeypatch):
    monkeypatch.setattr("vitrail.data.scene_annotations.BALANCE_SCENES", 256)
    monkeypatch.setattr("vitrail.evals.suites.scene_benchmarks.BASELINE_SCENES", 256)
    found, shown = run("stress", "--kinds", "colour", "--count", 1)
    names = [(score["name"], score["subset"]["scenes"]) for score in found["scores"]]
    assert len(set(names)) == 12 and ("colour", "sub-patch") in names
    assert "colour, scenes occluded" in shown and "ordinary" in shown and 0 < found["patch_fraction"] < 1


def test_scenes_below_patch_size_are_skipped_with_a_note(run, monkeypatch):
    from vitrail.pipelines.evaluation_context import PipelineContext

    monkeypatch.setattr("vitrail.data.scene_annotations.BALANCE_SCENES", 256)
    monkeypatch.setattr("vitrail.evals.suites.scene_benchmarks.BASELINE_SCENES", 256)
    opened = PipelineContext.load_scene_answer_model
    monkeypatch.setattr(
        PipelineContext, "load_scene_answer_model", lambda *of: opened(*of)._replace(patch_fraction=0.01)
    )
    found, _ = run("stress", "--kinds", "colour", "--count", 1)
    assert {score["subset"]["scenes"] for score in found["scores"]} == {
        "plain",
        "transparent",
        "moving",
        "occluded",
        "crowded",
    }
    assert found["skipped"] == ["sub-patch"]


def test_naming_by_folder(run, tmp_path):
    for name in ("cherry", "lemon"):
        (tmp_path / "fruit" / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (16, 16), "red").save(tmp_path / "fruit" / name / f"{number}.png")
    found, _ = run("naming", "--data", tmp_path / "fruit", "--name-from", "category")
    assert found["name_from"] == "category" and [score["count"] for score in found["scores"]] == [4, 2]


def test_drawing(run, tmp_path):
    found, _ = run(
        "drawing", "--judge", tmp_path / "judge", "--count", 2, "--steps", 2, "--batch-size", 1, "--concepts", 8
    )
    assert [score["count"] for score in found["scores"]] == [2] * 6 + [12, 12]
    assert (
        found["scores"][-1]["name"] == "true images through the codec"
        and "other prompts" in found["scores"][0]["baselines"]
    )
    assert found["concepts"] == 8 and found["steps"] == 2


@pytest.mark.filterwarnings("ignore:FD-")
def test_fidelity(run, monkeypatch):
    scene = {"objects": [1, 3], "repeat_probability": 0.4, "tint_probability": 0.6, "combinations": "all"}
    sources = {"draw": SceneSourceConfig(atlas="flat", preset="plain", image_size=640, scene=scene)}
    monkeypatch.setattr("vitrail.recipe.load_recipe", lambda name: SimpleNamespace(sources=sources))
    monkeypatch.setattr("vitrail.hub.resnet50_weights.load_resnet50", Eye)
    found, shown = run("fidelity", "--true-scenes", "mine:draw", "--count", 2, "--steps", 1, "--batch-size", 4)
    [score] = found["scores"]
    assert score["name"] == "FD-Eye" and score["count"] == 12 and score["unit"] == "distance" and score["value"] > 0
    assert set(score["baselines"]) == {"true images in its codes", "other true images"} and "FD-Eye" in shown
    assert found["true_scenes"] == "mine:draw" and found["guidance_scale"] == 3.0
    for wrong, output in (("mine:any", "no source of scenes 'any'"), ("flat", "'flat' names no recipe")):
        with pytest.raises(ConfigError, match=output):
            run("fidelity", "--true-scenes", wrong)


def test_true_images_of_a_recipe(run, tmp_path, monkeypatch):
    sources = {
        "draw": SceneSourceConfig(
            atlas="flat", preset="plain", image_size=640, scene={"objects": [1, 2], "repeat_probability": 0.5}
        )
    }
    monkeypatch.setattr("vitrail.recipe.load_recipe", lambda name: SimpleNamespace(sources=sources))
    shown, redrawn = [], scene_benchmarks.evaluate_drawing_ceiling

    def watched(through, judge, source, *more, **how):
        shown.append(source.config)
        return redrawn(through, judge, source, *more, **how)

    monkeypatch.setattr(scene_benchmarks, "evaluate_drawing_ceiling", watched)
    asked = ("drawing", "--judge", tmp_path / "judge", "--count", 1, "--steps", 1, "--concepts", 8, "--true-images")
    found, _ = run(*asked, "mine:draw")
    assert found["true_images"] == "mine:draw" and found["scores"][-1]["count"] == 6
    [config] = shown
    assert config.scene["objects"] == [1, 2] and config.preset == "plain" and config.image_size < 640  # the model's own
    monkeypatch.setattr(scene_benchmarks, "evaluate_drawings", lambda *_, **__: pytest.fail("drawn"))
    with pytest.raises(ConfigError, match="no source of scenes 'any'"):
        run(*asked, "mine:any")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["questions", "--kinds", "countng"], "countng"),
        (["questions", "--kinds", "caption_short"], "cannot be scored by exact match"),
        (["stress", "--kinds", "caption_long"], "cannot be scored by exact match"),
        (["questions", "--preset", "colors"], "colors"),
        (["drawing", "--judge", "MODEL"], "is a UnifiedModel, not a detector"),
    ],
)
def test_invalid_options_are_refused(run, words, message, tmp_path):
    with pytest.raises(VitrailError, match=message):
        run(*(str(tmp_path / "model") if word == "MODEL" else word for word in words))
