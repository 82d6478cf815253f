"""`vitrail judge` with the detector that ships."""

import numpy as np
import pytest
from PIL import Image

from data.scenes.conftest import drawn
from vitrail.cli.judge_command import app
from vitrail.data.scenes.atlas import Atlas
from vitrail.errors import CheckpointError, ImageError


def run(*words: str) -> None:
    app(list(words), result_action="return_value")


def test_check_prints_every_kind(tmp_path, capsys):
    """Shapes labelled with names of things: the judge rejects nearly all."""
    names = ["cat", "dog", "bear", "bird", "fish", "house", "key", "lion", "owl", "pear", "pig", "rose"]
    renamed = [s._replace(name=names[i // 2], category="thing") for i, s in enumerate(drawn())]
    Atlas.build(renamed).save(tmp_path / "atlas.safetensors")
    run("check", "judge", "--count", "12", "--vendors", "left", "--atlas", str(tmp_path / "atlas.safetensors"))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [
        "single", "two", "counting", "colours", "position", "attribution", "all"
    ]  # fmt: skip
    assert "of 12" in lines[-1]


def test_detect_prints_and_draws_objects(tmp_path, capsys):
    Image.fromarray(np.full((60, 80, 3), 200, np.uint8)).save(tmp_path / "grey.png")
    run("detect", "judge", str(tmp_path / "grey.png"), "--out", str(tmp_path / "boxes.png"))
    assert "grey.png: nothing" in capsys.readouterr().out and (tmp_path / "boxes.png").exists()


def test_non_detectors_and_non_images_are_refused(tmp_path):
    from vitrail import hub
    from vitrail.encoders.vit import ViT, ViTConfig
    from vitrail.nn import AttentionConfig, BlockConfig
    from vitrail.nn.mlp import PlainMLPConfig

    block = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=PlainMLPConfig(intermediate_size=32))
    hub.save(ViT(ViTConfig(layers=1, block=block, image_size=16, patch_size=4)), tmp_path)
    with pytest.raises(CheckpointError, match="not a detector"):
        run("check", str(tmp_path))
    (tmp_path / "broken.png").write_bytes(b"no")
    with pytest.raises(ImageError, match=r"broken\.png"):
        run("detect", "judge", str(tmp_path / "broken.png"))
