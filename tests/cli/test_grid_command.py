import shutil

import pytest
from cyclopts import App
from PIL import Image

from vitrail.errors import ConfigError, ImageError, VitrailError
from vitrail.processing.resolution_policies import PRESETS
from vitrail.registry import RESOLUTION_POLICIES


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    app = App(result_action="return_value")
    app.command("vitrail.cli.grid_command:draw_grids", name="grid")
    return lambda *words: app(["grid", *map(str, words)], exit_on_error=False)


@pytest.fixture
def photo(tmp_path):
    path = tmp_path / "photo.png"
    Image.new("RGB", (672, 672), "teal").save(path)
    return path


def test_table_and_sheet(run, photo, capsys, tmp_path):
    run(photo)
    out = capsys.readouterr().out
    assert f"{photo}  672×672  → out/grid/photo-grid.png" in out
    rows = {line.split()[0]: line.split()[1:3] for line in out.splitlines()[2:]}
    assert list(rows) == list(RESOLUTION_POLICIES)
    assert rows["anyres"] == ["5", "2,928"] and rows["hd9"] == ["10", "1,450"] and rows["native"] == ["1", "576"]
    with Image.open(tmp_path / "out/grid/photo-grid.png") as sheet:
        assert sheet.width > 1000


def test_chosen_policies(run, photo, capsys, tmp_path):
    run(photo, "--policy", "naflex", "--policy", "qwen3-vl", "--out", tmp_path / "sheets")
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == ["naflex", "qwen3-vl"]
    assert (tmp_path / "sheets/photo-grid.png").exists()
    with pytest.raises(ConfigError, match="did you mean 'naflex'"):
        run(photo, "--policy", "naflx")


def test_unreadable_image_does_not_stop_the_others(run, photo, capsys, tmp_path):
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"\xff\xd8\xff\xe0 nonsense")
    other = tmp_path / "deeper" / "photo.jpg"
    other.parent.mkdir()
    Image.new("RGB", (10, 20)).save(other)
    with pytest.raises(ImageError) as caught:
        run(photo, broken, tmp_path / "absent.png", other, "--policy", "naive")
    assert "2 of 4" in caught.value.problem
    assert "broken.jpg" in caught.value.problem and "absent.png" in caught.value.problem
    assert sorted(path.name for path in (tmp_path / "out/grid").iterdir()) == ["photo-grid-2.png", "photo-grid.png"]
    assert capsys.readouterr().out.count("→") == 2


def test_single_unreadable_image_raises_its_error(run, tmp_path):
    with pytest.raises(ImageError, match=r"absent\.png does not exist") as caught:
        run(tmp_path / "absent.png")
    assert caught.value.remedy


def test_frames(run, tmp_path, capsys):
    path = tmp_path / "moving.gif"
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(path, save_all=True, append_images=frames[1:])
    with pytest.raises(ImageError, match="frames"):
        run(path)
    run(path, "--frame", 1, "--policy", "naive")
    assert "moving.gif  8×8" in capsys.readouterr().out


def test_refusing_policy_is_listed(run, tmp_path, capsys):
    path = tmp_path / "strip.png"
    Image.new("RGB", (1000, 3)).save(path)
    run(path, "--policy", "native", "--policy", "naive")
    out = capsys.readouterr().out
    assert "native      —       —  refused" in out and "naive       1     576" in out


def test_unwritable_output_is_refused(run, photo, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(VitrailError, match="cannot be written"):
        run(photo, "--out", tmp_path / "file", "--policy", "naive")


def test_help_names_every_policy(run, capsys):
    run("--help")
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Example: vitrail grid photo.jpg" in text
    assert not [name for name in [*RESOLUTION_POLICIES, *PRESETS] if name not in text]


def test_images_are_never_overwritten(run, photo, tmp_path):
    shutil.copy(photo, tmp_path / "photo-grid.png")
    before = {path: path.read_bytes() for path in tmp_path.glob("*.png")}
    run("photo.png", tmp_path / "photo-grid.png", "--out", ".", "--policy", "naive")
    assert {path: path.read_bytes() for path in before} == before
    assert {path.name for path in tmp_path.glob("*.png")} - {path.name for path in before} == {
        "photo-grid-2.png",
        "photo-grid-grid.png",
    }


def test_max_pixels_option(run, photo, capsys):
    with pytest.raises(ImageError, match="pixels, more than the limit of") as caught:
        run(photo, "--max-pixels", 1000)
    assert "--max-pixels" in caught.value.remedy
    run(photo, "--max-pixels", 672 * 672, "--policy", "naive")
    assert "672×672" in capsys.readouterr().out


def test_empty_file_name_is_refused(run):
    with pytest.raises(ImageError, match="no image is given"):
        run("")
