"""DrawingJudge with detectors that detect everything, nothing, and wrong colours."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from vitrail import hub, recipe
from vitrail.data.language import SceneLanguage, matches_spec
from vitrail.data.language.templates import DRAWING_PROMPT_KINDS
from vitrail.data.scenes.atlas import Atlas, Sprite
from vitrail.data.scenes.scene import COLOURS, GRID
from vitrail.data.scenes.scene_source import SceneSource, SceneSourceConfig
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import ConfigError
from vitrail.evals.drawing_judge import DrawingJudge, compute_error_rates, measure_judge_error, sample_labelled_scenes
from vitrail.evals.scores import Proportion
from vitrail.models.detector import Detections, Detector, DetectorConfig, normalize_images
from vitrail.nn import AttentionConfig, BlockConfig
from vitrail.nn.mlp import PlainMLPConfig
from vitrail.tasks.detection_task import DetectionTask, augment_scenes

NAMES = ("disc", "bar", "kite", "ring", "cross", "wedge", "leaf", "drop", "arch", "tooth")


def shapes() -> Atlas:
    """Atlas of ten shapes from two vendors."""

    def drawn(i, hand):
        picture = Image.new("RGBA", (64, 64))
        pen = ImageDraw.Draw(picture)
        points = np.random.default_rng(100 * hand + i).integers(2, 62, (3 + i % 4, 2))
        pen.polygon([tuple(map(int, p)) for p in points], fill=(40 + 20 * i, 200 - 15 * i, 90 + 60 * hand, 255))
        pen.rectangle((28, 28, 36, 36), fill=(0, 0, 0, 255))
        return np.asarray(picture)

    return Atlas.build(
        Sprite(f"{hand}/{name}", str(hand), name, "thing", name, "shape", drawn(i, hand))
        for hand in range(2)
        for i, name in enumerate(NAMES)
    )


def source(atlas, **scene) -> SceneSource:
    scene = {"objects": [1, 4], "tint_probability": 0.8, "repeat_probability": 0.4, "combinations": "all"} | scene
    return SceneSource(SceneSourceConfig(atlas="-", preset="plain", scene=scene, image_size=48, seed=5), atlas)


def config() -> DetectorConfig:
    block = BlockConfig(width=32, attention=AttentionConfig(heads=2), mlp=PlainMLPConfig(intermediate_size=64))
    image = ViTConfig(layers=2, block=block, image_size=48, patch_size=8)
    return DetectorConfig(image=image, concepts=NAMES[::-1], colours=tuple(c.name for c in COLOURS))


class Oracle(Detector):
    """Detector that returns the last rendered scenes, with its own order of concepts."""

    def detect_objects(self, pixels, **_):
        s, table = self.scenes, self.table
        own = torch.tensor([NAMES[::-1].index(n) for n in table.names])
        concept = own[table.concept[s.sprite.clamp(min=0)]].where(s.is_filled, -1)
        colour = (s.colour + self.offset).where(s.is_filled, -1)
        seen = s.is_filled & self.sees
        return Detections(seen.float(), s.box.float() / GRID, concept.where(seen, -1), colour, seen.sum(1))


@pytest.fixture
def made():
    atlas = shapes()
    words = SceneLanguage.build(atlas.table)
    oracle = Oracle(config())
    oracle.table, oracle.offset, oracle.sees = atlas.table, 0, True
    return source(atlas), words, oracle, DrawingJudge(oracle, words, atlas.table)


@pytest.mark.parametrize("kind", DRAWING_PROMPT_KINDS)
def test_judge_with_perfect_detections_has_no_errors(kind, made):
    where, words, oracle, judge = made
    spec, drawn = sample_labelled_scenes(words, where, kind, 60)
    truth = matches_spec(words, spec, drawn.scenes)
    assert bool(truth[::2].all()), "as they were drawn, they are right"
    assert float(truth[1::2].float().mean()) < 0.35, "altered, most are wrong"
    oracle.scenes = drawn.scenes
    assert torch.equal(judge.judge_images(spec, drawn.pixels), truth)
    oracle.sees = False
    error = compute_error_rates(judge.judge_images(spec, drawn.pixels), truth)
    assert error.false_rejects.value == 1 and error.false_accepts.value == 0


def test_wrong_colours_are_rejected(made):
    where, words, oracle, judge = made
    oracle.offset = 1
    refused = {}
    for kind in ("single", "colours"):
        spec, drawn = sample_labelled_scenes(words, where, kind, 60)
        oracle.scenes = drawn.scenes
        refused[kind] = compute_error_rates(
            judge.judge_images(spec, drawn.pixels), matches_spec(words, spec, drawn.scenes)
        ).false_rejects.value
    assert refused["single"] == 0 and refused["colours"] > 0.9


def test_error_rates_cover_all_kinds(made):
    where, _, oracle, judge = made

    def detect_objects(pixels, **_):
        none = torch.full((len(pixels), 3), -1)
        return Detections(torch.zeros(len(pixels), 3), torch.zeros(len(pixels), 3, 4), none, none, none[:, 0] + 1)

    oracle.detect_objects = detect_objects
    errors = measure_judge_error(judge, where, 50)
    assert list(errors) == [*DRAWING_PROMPT_KINDS, "all"]
    assert errors["all"].overall.total == 50 == sum(errors[kind].overall.total for kind in DRAWING_PROMPT_KINDS)
    assert errors["all"].false_rejects.value == 1


def test_wilson_intervals():
    low, high = Proportion(8, 10).interval  # 0.4902 … 0.9433 in tables of Wilson intervals
    assert abs(low - 0.4902) < 1e-3 and abs(high - 0.9433) < 1e-3
    assert Proportion(0, 0).interval == (0.0, 1.0) and "of 10" in str(Proportion(8, 10))


def test_unknown_concepts_raise(made):
    where, words, _, _ = made
    few = Detector(config().replace(concepts=NAMES[:3]))
    with pytest.raises(ConfigError, match="has no class for"):
        DrawingJudge(few, words, where.atlas.table)
    shown = DetectionTask(few, {"scenes": where}).sources["scenes"].atlas.table
    assert set(shown.names) == set(NAMES[:3])  # the scene that it returns


def test_detector_learns(made):
    where = made[0]
    torch.manual_seed(0)
    task = DetectionTask(Detector(config()), {"scenes": where})
    batch = task.collate([where[i] for i in range(32)])
    assert task.count_loss_terms(batch)["box"] == 32 and task.count_flops(batch) > 0
    optimizer = torch.optim.Adam(task.model.parameters(), 3e-3)
    first = None
    for _ in range(25):
        loss = sum(task.loss_weights[k] * v for k, v in task(batch).items())
        first = first or loss.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.7 * first


def test_augmented_scenes_keep_their_boxes():
    pixels = torch.full((64, 3, 64, 64), 128, dtype=torch.uint8)
    pixels[:, :, 16:32, 12:24] = 255  # one bright patch on grey
    boxes = torch.tensor([12, 16, 24, 32]).div(64).expand(64, 1, 4)
    x, moved, hue = augment_scenes(normalize_images(pixels), boxes, torch.full((64, 1), 3))
    assert 10 < int((moved[:, 0, 0] > 0.5).sum()) < 54 and 10 < int((hue < 0).sum()) < 54
    for b in (hue[:, 0] > 0).nonzero()[:, 0].tolist():  # other patches may be pale
        bright = x[b].abs().sum(0)
        rows, columns = (bright > bright.max() / 2).nonzero().unbind(1)
        found = torch.stack([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]) / 64
        assert float((found - moved[b, 0]).abs().max()) < 0.06  # the patch is at its box


def test_recipe_runs_on_any_atlas(tmp_path):
    shapes().save(tmp_path / "atlas.safetensors")
    changes = {f"sources.{name}.atlas": str(tmp_path / "atlas.safetensors") for name in ("mixed", "unseen")}
    changes |= {f"sources.{name}.scene.vendors": f"['{i}']" for i, name in enumerate(("mixed", "unseen"))}
    changes |= {
        "model.config.concepts": str(list(NAMES)),
        "model.config.image.layers": "1",
        "stages.0.dtype": "float32",
    }
    made = recipe.train_recipe(
        recipe.shrink_recipe(recipe.load_recipe("judge", changes)), tmp_path / "out", quiet=True
    ).eval()
    again = hub.load(tmp_path / "out" / "final")
    assert again.config == made.config and not list((tmp_path / "out" / "final").glob("tokenizer*"))
    pixels = torch.rand(1, 3, 96, 96)
    assert torch.equal(again(pixels).concept, made(pixels).concept)
    with pytest.raises(ConfigError, match="no source contains the concept 'unicorn'"):
        recipe.train_recipe(
            recipe.shrink_recipe(
                recipe.load_recipe("judge", changes | {"model.config.concepts": str(["unicorn", *NAMES])})
            ),
            tmp_path / "other",
            quiet=True,
        )
