"""Any data set as one picture."""

import json

import numpy as np
import pytest
from PIL import Image

from data.scenes.conftest import drawn
from vitrail.cli.data import app
from vitrail.data.scenes.frames import frame_sprites
from vitrail.data.scenes.letters import BUILT_IN, word_sprites
from vitrail.data.scenes.sprites import Atlas
from vitrail.errors import VitrailError
from vitrail.show.data import draw_data

TEXTS = ["tea", "red", "ten", "sun", "map", "fox", "two", "ice", "bird"]


@pytest.fixture(scope="module")
def atlas(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("atlas") / "shapes.safetensors"
    Atlas.build(
        [
            *drawn(),
            *frame_sprites(),
            *word_sprites(TEXTS, BUILT_IN[:1]),
        ]
    ).save(path)
    return str(path)


def run(*words: str) -> None:
    app(list(words), result_action="return_value")


def test_scenes_are_made_and_shown(atlas, tmp_path, capsys):
    run("make", "crowded", "--out", str(tmp_path / "made"), "--count", "8", "--side", "32", "--atlas", atlas)
    said = capsys.readouterr().out
    assert "8 scenes in 1 shards" in said and "existence_random" in said and "blind" in said
    made = tmp_path / "made"
    for what in ("crowded", str(made), str(made / "*.tar"), str(made / "crowded-000000.tar")):
        run("show", what, "--out", str(tmp_path / "sheet.png"), "--count", "4", "--atlas", atlas, "--side", "64")
        with Image.open(tmp_path / "sheet.png") as sheet:
            assert min(sheet.size) > 150
    run("make", "crowded", "--out", str(tmp_path / "made"), "--count", "8", "--side", "32", "--atlas", atlas)
    assert len(list(made.glob("*.tar"))) == 1  # it was there
    with pytest.raises(VitrailError, match=r"other samples|another"):  # and is not taken for what it is not
        run("make", "crowded", "--out", str(made), "--count", "8", "--side", "32", "--atlas", atlas, "--seed", "7")
    for bad in (["--count", "0"], ["--count", "-3"], ["--start", "-5"], ["--start", "1073741824"], ["--side", "7"]):
        with pytest.raises(VitrailError):
            run("make", "crowded", "--out", str(tmp_path / "bad"), "--atlas", atlas, *bad)
    assert not (tmp_path / "bad").exists()


def test_formats_are_shown_and_what_is_broken_is_named_in_its_place(tmp_path):
    for i in range(3):
        Image.fromarray(np.full((40, 60, 3), 60 * i, np.uint8)).save(tmp_path / f"{i}.png")
    (tmp_path / "2.png").write_bytes(b"not a picture")
    images = [{"id": i, "file_name": f"{i}.png", "width": 60, "height": 40} for i in range(3)]
    things = [{"id": i, "image_id": i, "category_id": 1, "bbox": [5, 5, 20, 20], "area": 400, "iscrowd": 0,
               "segmentation": []} for i in range(3)]  # fmt: skip
    file = {"images": images, "annotations": things, "categories": [{"id": 1, "name": "cat"}]}
    (tmp_path / "coco.json").write_text(json.dumps(file))
    (tmp_path / "1.png").unlink()
    sheet = draw_data(str(tmp_path / "coco.json"))
    assert sheet.width > 200 and np.asarray(sheet).std() > 10
    assert draw_data(str(tmp_path)).width > 100
    (tmp_path / "annotations").mkdir()
    (tmp_path / "coco.json").rename(tmp_path / "annotations" / "coco.json")
    assert draw_data(str(tmp_path / "annotations" / "coco.json"), pictures=tmp_path).width > 200


def test_unknown_data_is_refused_with_the_nearest_name(tmp_path):
    with pytest.raises(VitrailError, match=r"crowdd.*\n.*crowded"):
        draw_data("crowdd")
    with pytest.raises(VitrailError, match="holds no pictures"):
        draw_data("emojibase")
    with pytest.raises(VitrailError, match="0 samples"):
        draw_data("crowded", count=0)
    with pytest.raises(VitrailError, match="no kind of picture"):
        run("show", "crowded", "--out", str(tmp_path / "sheet.doc"))
    with pytest.raises(VitrailError, match="no atlas"):
        draw_data("crowded", atlas="emojy")


def test_a_folder_is_shards_only_if_nothing_else_is_in_it(tmp_path):
    folder = tmp_path / "pics {2020}"  # braces are a pattern only where no such folder is
    folder.mkdir()
    for i in range(3):
        Image.new("RGB", (30, 30), (80 * i, 20, 200)).save(folder / f"{i}.png")
    alone = draw_data(str(folder))
    (folder / "backup.tar").write_bytes(b"")
    assert np.array_equal(np.asarray(draw_data(str(folder))), np.asarray(alone))
