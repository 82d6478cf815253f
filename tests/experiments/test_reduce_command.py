"""The command `python -m experiments.token_scaling reduce`."""

import json

import pytest

from data.scenes.conftest import drawn
from experiments.token_scaling.__main__ import app
from helpers import randomize
from models.test_unified_model import made
from vitrail import hub
from vitrail.data.scenes.atlas import Atlas
from vitrail.errors import ConfigError
from vitrail.models.unified_model import UnifiedModel
from vitrail.processing.tokenizer import Tokenizer

TEXT = "is there a circle? yes no what colour is the square? the red cube and the blue ball. " * 3


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def call(*words) -> str:
        app(list(map(str, words)), exit_on_error=False, result_action="return_value")
        return capsys.readouterr().out

    return call


def save_model(folder) -> None:
    """Save a small unified model with random weights."""
    tokenizer = Tokenizer.train([TEXT], 300)
    config = made(order="masked", image_input="features").config
    model = UnifiedModel(config.replace(decoder=config.decoder.replace(vocab_size=tokenizer.vocab_size)))
    hub.save(randomize(model, 3, 0.3).eval(), folder, tokenizer)


def test_reduce_evaluates_and_resumes(run, tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.token_scaling.exact_match.NUM_BASELINE_SCENES", 128)
    save_model(tmp_path / "model")
    Atlas.build(drawn()).save(tmp_path / "atlas.safetensors")
    options = ["reduce", tmp_path / "model", "--atlas", tmp_path / "atlas.safetensors", "--kinds", "existence_random"]
    options += ["--preset", "colours", "--kinds", "colour", "--tokens", 1, "--tokens", 4]
    options += ["--batch-size", 2, "--device", "cpu", "--out", "out"]
    run(*options, "--count", 2)
    first = json.loads((tmp_path / "out" / "hits" / "colour.json").read_text())
    out = run(*options, "--count", 4)
    result = json.loads((tmp_path / "out" / "scaling.json").read_text())
    methods = ("VisPruner", "VisionZip", "pooling", "random")
    there = {(p["method"], p["kind"], p["tokens"]) for p in result["scores"]}
    assert there == {
        (method, kind, n) for method in methods for kind in ("existence_random", "colour") for n in (1, 4, 9)
    }
    assert {p["count"] for p in result["scores"]} == {4} and "existence_random  VisPruner" in out
    whole = {p["value"] for p in result["scores"] if (p["kind"], p["tokens"]) == ("colour", 9)}
    assert len(whole) == 1  # all methods are equal with all tokens
    second = json.loads((tmp_path / "out" / "hits" / "colour.json").read_text())
    assert second["batches"][:1] == first["batches"] and len(second["batches"]) == 2
    assert (tmp_path / "out" / "scaling.svg").is_file() and result["contrasts"] == {}  # no questions of kind reading

    run(*options, "--count", 5)  # the incomplete last batch runs again
    run(*options, "--count", 6)
    more = json.loads((tmp_path / "out" / "hits" / "colour.json").read_text())["batches"]
    assert more[:2] == second["batches"] and [len(part["random 9"]) for part in more] == [2, 2, 2]
    monkeypatch.setattr("experiments.token_scaling.reduce_command.score_reductions", None)  # nothing runs twice
    run(*options, "--count", 4)
    with pytest.raises(ConfigError) as error:
        run(*options, "--tokens", 9)
    assert "from 1 to 8" in str(error.value)
    with pytest.raises(ConfigError, match="no preset 'fog'"):
        run("reduce", tmp_path / "model", "--preset", "fog", "--out", "out")
