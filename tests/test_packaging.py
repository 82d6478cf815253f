"""Distributions: the code wheel is small, and missing weights are reported with the command that installs them."""

import tomllib
import zlib
from pathlib import Path

import pytest

from vitrail.errors import CheckpointError
from vitrail.hub.checkpoint_info import BUNDLED_MODELS, list_bundled_models, resolve_path

ROOT = Path(__file__).parents[1]


def test_code_has_no_large_files():
    files = [file for folder in ("src/vitrail", "recipes") for file in (ROOT / folder).rglob("*") if file.is_file()]
    sources = [file for file in files if "__pycache__" not in file.parts]
    assert sum(len(zlib.compress(file.read_bytes())) for file in sources) < 5e6  # a wheel compresses each file
    assert not [file for file in sources if file.suffix == ".safetensors" and "weights" in file.parts]


def test_weights_are_a_distribution_of_their_own():
    assert tuple(list_bundled_models()) == BUNDLED_MODELS
    mini = tomllib.loads((ROOT / "packages/mini/pyproject.toml").read_text())["project"]
    main = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert main["optional-dependencies"]["mini"] == [mini["name"]] and main["version"] == mini["version"]


@pytest.mark.parametrize("name", BUNDLED_MODELS)
def test_missing_weights_name_the_extra(name, monkeypatch, tmp_path):
    monkeypatch.setattr("vitrail.hub.checkpoint_info.BUNDLED_MODELS_FOLDER", tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=f"weights of {name} are not installed") as caught:
        resolve_path(name)
    assert "pip install 'vitrail[mini]'" in caught.value.remedy
