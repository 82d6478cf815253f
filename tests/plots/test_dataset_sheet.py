"""Contact sheets of datasets."""

import json

import numpy as np
import pytest
from PIL import Image

from data.scenes.conftest import drawn
from vitrail.cli.data_command import app
from vitrail.data.scenes.atlas import Atlas
from vitrail.data.scenes.frame_sprites import draw_frame_sprites
from vitrail.data.scenes.word_sprites import BUILT_IN_FONTS, draw_word_sprites
from vitrail.data.shards import write_shards
from vitrail.errors import VitrailError
from vitrail.plots.dataset_sheet import draw_dataset

TEXTS = ["tea", "red", "ten", "sun", "map", "fox", "two", "ice", "bird"]


@pytest.fixture(scope="module")
def atlas(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("atlas") / "shapes.safetensors"
    Atlas.build(
        [
            *drawn(),
            *draw_frame_sprites(),
            *draw_word_sprites(TEXTS, BUILT_IN_FONTS[:1]),
        ]
    ).save(path)
    return str(path)


def run(*words: str) -> None:
    app(list(words), result_action="return_value")


def test_scenes_are_rendered_and_drawn(atlas, tmp_path, capsys):
    run("make", "crowded", "--out", str(tmp_path / "made"), "--count", "8", "--image-size", "32", "--atlas", atlas)
    output = capsys.readouterr().out
    assert "8 scenes in 1 shards" in output and "existence_random" in output and "blind" in output
    made = tmp_path / "made"
    for what in ("crowded", str(made), str(made / "*.tar"), str(made / "crowded-000000.tar")):
        run("show", what, "--out", str(tmp_path / "sheet.png"), "--count", "4", "--atlas", atlas, "--image-size", "64")
        with Image.open(tmp_path / "sheet.png") as sheet:
            assert min(sheet.size) > 150
    run("make", "crowded", "--out", str(tmp_path / "made"), "--count", "8", "--image-size", "32", "--atlas", atlas)
    assert len(list(made.glob("*.tar"))) == 1  # not written again
    with pytest.raises(VitrailError, match=r"other samples|another"):
        run(
            "make", "crowded", "--out", str(made), "--count", "8", "--image-size", "32", "--atlas", atlas, "--seed", "7"
        )
    for bad in (
        ["--count", "0"],
        ["--count", "-3"],
        ["--start", "-5"],
        ["--start", "1073741824"],
        ["--image-size", "7"],
    ):
        with pytest.raises(VitrailError):
            run("make", "crowded", "--out", str(tmp_path / "bad"), "--atlas", atlas, *bad)
    assert not (tmp_path / "bad").exists()


def test_formats_are_drawn_and_unreadable_samples_are_counted(tmp_path, capsys):
    for i in range(3):
        Image.fromarray(np.full((40, 60, 3), 60 * i, np.uint8)).save(tmp_path / f"{i}.png")
    (tmp_path / "2.png").write_bytes(b"not a picture")
    images = [{"id": i, "file_name": f"{i}.png", "width": 60, "height": 40} for i in range(3)]
    things = [{"id": i, "image_id": i, "category_id": 1, "bbox": [5, 5, 20, 20], "area": 400, "iscrowd": 0,
               "segmentation": []} for i in range(3)]  # fmt: skip
    file = {"images": images, "annotations": things, "categories": [{"id": 1, "name": "cat"}]}
    (tmp_path / "coco.json").write_text(json.dumps(file))
    (tmp_path / "1.png").unlink()
    sheet = draw_dataset(str(tmp_path / "coco.json"))
    assert "2 of 3 samples cannot be read; the first: sample 1: image '1.png' is not in" in capsys.readouterr().err
    assert sheet.width > 200 and np.asarray(sheet).std() > 10
    assert draw_dataset(str(tmp_path)).width > 100
    (tmp_path / "annotations").mkdir()
    (tmp_path / "coco.json").rename(tmp_path / "annotations" / "coco.json")
    assert draw_dataset(str(tmp_path / "annotations" / "coco.json"), image_folder=tmp_path).width > 200
    with pytest.raises(VitrailError, match=r"coco\.json: none of 3 samples .* image '0\.png'.*\n.*--image-folder"):
        draw_dataset(str(tmp_path / "annotations" / "coco.json"))


def test_unreadable_shard_members_are_named(tmp_path, capsys):
    samples = [{"__key__": f"s/{i}", "png": Image.new("RGB", (20, 20), (80 * i, 20, 200))} for i in range(3)]
    (path,) = write_shards(samples, tmp_path, quiet=True)
    data = bytearray(path.read_bytes())
    position = data.index(b"s/1.png") + 512
    data[position : position + 8] = bytes(8)
    path.write_bytes(data)
    assert draw_dataset(str(path)).width > 100
    assert "1 of 3 samples cannot be read; the first: shard-000000.tar: s/1.png" in capsys.readouterr().err


def test_unknown_data_raises_and_suggests_the_nearest_name(tmp_path):
    with pytest.raises(VitrailError, match=r"crowdd.*\n.*crowded"):
        draw_dataset("crowdd")
    with pytest.raises(VitrailError, match="holds no images"):
        draw_dataset("emojibase")
    with pytest.raises(VitrailError, match="0 samples"):
        draw_dataset("crowded", count=0)
    with pytest.raises(VitrailError, match="not an image format"):
        run("show", "crowded", "--out", str(tmp_path / "sheet.doc"))
    with pytest.raises(VitrailError, match=r"no atlas|unknown atlas"):
        draw_dataset("crowded", atlas="emojy")


def test_folder_counts_as_shards_only_without_other_files(tmp_path):
    folder = tmp_path / "pics {2020}"  # braces are a pattern only if no such folder exists
    folder.mkdir()
    for i in range(3):
        Image.new("RGB", (30, 30), (80 * i, 20, 200)).save(folder / f"{i}.png")
    alone = draw_dataset(str(folder))
    (folder / "backup.tar").write_bytes(b"")
    assert np.array_equal(np.asarray(draw_dataset(str(folder))), np.asarray(alone))
