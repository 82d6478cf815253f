"""The judge's arithmetic, with detectors that see everything, nothing, and the wrong colour."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from vitrail import hub, recipe
from vitrail.data.scenes.scene import COLOURS, GRID
from vitrail.data.scenes.source import ScenesConfig, SceneSource
from vitrail.data.scenes.sprites import Atlas, Sprite
from vitrail.data.words import Words, matches
from vitrail.data.words.templates import DRAWINGS
from vitrail.encoders.vit import ViTConfig
from vitrail.errors import ConfigError
from vitrail.evals.judge import Judge, check, judge_error, labelled
from vitrail.evals.shares import Share
from vitrail.models.detector import Detector, DetectorConfig, Found, seen
from vitrail.nn import AttentionConfig, BlockConfig
from vitrail.nn.mlp import PlainConfig
from vitrail.tasks.detect import DetectTask, worn

NAMES = ("disc", "bar", "kite", "ring", "cross", "wedge", "leaf", "drop", "arch", "tooth")


def shapes() -> Atlas:
    """Ten shapes in two hands."""

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
    scene = {"objects": [1, 4], "tint": 0.8, "repeat": 0.4, "combinations": "all"} | scene
    return SceneSource(ScenesConfig(atlas="-", preset="plain", scene=scene, side=48, seed=5), atlas)


def config() -> DetectorConfig:
    block = BlockConfig(width=32, attention=AttentionConfig(heads=2), mlp=PlainConfig(hidden=64))
    image = ViTConfig(layers=2, block=block, image=48, patch=8)
    return DetectorConfig(image=image, concepts=NAMES[::-1], colours=tuple(c.name for c in COLOURS))


class Oracle(Detector):
    """Knows the scenes that were drawn last, in its own order of names."""

    def find(self, pixels, **_):
        s, table = self.scenes, self.table
        own = torch.tensor([NAMES[::-1].index(n) for n in table.names])
        concept = own[table.concept[s.sprite.clamp(min=0)]].where(s.filled, -1)
        colour = (s.colour + self.off).where(s.filled, -1)
        seen = s.filled & self.sees
        return Found(seen.float(), s.box.float() / GRID, concept.where(seen, -1), colour, seen.sum(1))


@pytest.fixture
def made():
    atlas = shapes()
    words = Words.of(atlas.table)
    oracle = Oracle(config())
    oracle.table, oracle.off, oracle.sees = atlas.table, 0, True
    return source(atlas), words, oracle, Judge(oracle, words, atlas.table)


@pytest.mark.parametrize("kind", DRAWINGS)
def test_a_judge_that_sees_all_is_right(kind, made):
    where, words, oracle, judge = made
    spec, drawn = labelled(words, where, kind, 60)
    truth = matches(words, spec, drawn.scenes)
    assert bool(truth[::2].all()), "as they were drawn, they are right"
    assert float(truth[1::2].float().mean()) < 0.35, "altered, most are wrong"
    oracle.scenes = drawn.scenes
    assert torch.equal(judge.right(spec, drawn.pixels), truth)
    oracle.sees = False
    error = judge_error(judge.right(spec, drawn.pixels), truth)
    assert error.refused.value == 1 and error.taken.value == 0


def test_the_wrong_colour_is_noticed_where_colours_are_asked_for(made):
    where, words, oracle, judge = made
    oracle.off = 1
    refused = {}
    for kind in ("single", "colours"):
        spec, drawn = labelled(words, where, kind, 60)
        oracle.scenes = drawn.scenes
        refused[kind] = judge_error(judge.right(spec, drawn.pixels), matches(words, spec, drawn.scenes)).refused.value
    assert refused["single"] == 0 and refused["colours"] > 0.9


def test_check_covers_all_kinds_and_counts_every_picture(made):
    where, _, oracle, judge = made

    def find(pixels, **_):
        none = torch.full((len(pixels), 3), -1)
        return Found(torch.zeros(len(pixels), 3), torch.zeros(len(pixels), 3, 4), none, none, none[:, 0] + 1)

    oracle.find = find
    errors = check(judge, where, 50)
    assert list(errors) == [*DRAWINGS, "all"]
    assert errors["all"].all.of == 50 == sum(errors[kind].all.of for kind in DRAWINGS)
    assert errors["all"].refused.value == 1


def test_intervals_are_wilsons():
    low, high = Share(8, 10).interval  # 0.4902 … 0.9433 in every table
    assert abs(low - 0.4902) < 1e-3 and abs(high - 0.9433) < 1e-3
    assert Share(0, 0).interval == (0.0, 1.0) and "of 10" in str(Share(8, 10))


def test_unknown_things_are_refused(made):
    where, words, _, _ = made
    few = Detector(config().with_(concepts=NAMES[:3]))
    with pytest.raises(ConfigError, match="does not know"):
        Judge(few, words, where.atlas.table)
    shown = DetectTask(few, {"scenes": where}).sources["scenes"].atlas.table
    assert set(shown.names) == set(NAMES[:3])  # it is shown what it knows


def test_the_task_learns_to_find(made):
    where = made[0]
    torch.manual_seed(0)
    task = DetectTask(Detector(config()), {"scenes": where})
    batch = task.collate([where[i] for i in range(32)])
    assert task.counts(batch)["box"] == 32 and task.flops(batch) > 0
    optimizer = torch.optim.Adam(task.model.parameters(), 3e-3)
    first = None
    for _ in range(25):
        loss = sum(task.weights[k] * v for k, v in task(batch).items())
        first = first or loss.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.7 * first


def test_worn_pictures_keep_their_boxes():
    pixels = torch.full((64, 3, 64, 64), 128, dtype=torch.uint8)
    pixels[:, :, 16:32, 12:24] = 255  # one bright patch on grey
    boxes = torch.tensor([12, 16, 24, 32]).div(64).expand(64, 1, 4)
    x, moved, hue = worn(seen(pixels), boxes, torch.full((64, 1), 3))
    assert 10 < int((moved[:, 0, 0] > 0.5).sum()) < 54 and 10 < int((hue < 0).sum()) < 54
    for b in (hue[:, 0] > 0).nonzero()[:, 0].tolist():  # the others may be pale
        bright = x[b].abs().sum(0)
        rows, columns = (bright > bright.max() / 2).nonzero().unbind(1)
        found = torch.stack([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]) / 64
        assert float((found - moved[b, 0]).abs().max()) < 0.06  # the patch is where its box is


def test_the_recipe_runs_on_any_atlas(tmp_path):
    shapes().save(tmp_path / "atlas.safetensors")
    changes = {f"sources.{name}.atlas": str(tmp_path / "atlas.safetensors") for name in ("mixed", "unseen")}
    changes |= {f"sources.{name}.scene.vendors": f"['{i}']" for i, name in enumerate(("mixed", "unseen"))}
    changes |= {
        "model.config.concepts": str(list(NAMES)),
        "model.config.image.layers": "1",
        "stages.0.dtype": "float32",
    }
    made = recipe.train(recipe.tiny(recipe.read("judge", changes)), tmp_path / "out", quiet=True).eval()
    again = hub.load(tmp_path / "out" / "final")
    assert again.config == made.config and not list((tmp_path / "out" / "final").glob("tokenizer*"))
    pixels = torch.rand(1, 3, 96, 96)
    assert torch.equal(again(pixels).concept, made(pixels).concept)
    with pytest.raises(ConfigError, match="no source shows 'unicorn'"):
        recipe.train(
            recipe.tiny(recipe.read("judge", changes | {"model.config.concepts": str(["unicorn", *NAMES])})),
            tmp_path / "other",
            quiet=True,
        )
