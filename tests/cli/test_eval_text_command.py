"""`vitrail eval MODEL piqa --data FILE`: printed tables, output files and errors."""

import json
import re

import datasets
import pytest

from data.formats.conftest import MAKERS
from evals.test_suites_models import own
from evals.text_rows import HUB, llama
from vitrail.cli.eval_command import app
from vitrail.errors import VitrailError
from vitrail.evals.suites.text_benchmarks import TEXT_BENCHMARKS


def run(*words) -> None:
    app([str(word) for word in words], result_action="return_value")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama"
    llama(folder)
    return folder


def test_help_names_every_benchmark(capsys):
    run("--help")
    assert set(TEXT_BENCHMARKS) <= set(re.findall(r"[\w-]+", capsys.readouterr().out))


@pytest.mark.parametrize("name", TEXT_BENCHMARKS)
def test_every_benchmark_reads_its_file(tmp_path, model, capsys, name):
    made, out = MAKERS[name][1](tmp_path), tmp_path / "scores.json"
    run(model, name, "--data", made.path, "--out", out, "--device", "cpu")
    result = capsys.readouterr().out
    assert all(word in result for word in ("acc ", "chance ", "majority ", "longest ", "blind "))
    assert ("acc_norm" in result) == (name in ("arc", "hellaswag", "piqa")) and ("set Easy" in result) == (
        name == "arc"
    )
    found = json.loads(out.read_text())
    assert (found["suite"], found["prompt"], found["texts_cut"]) == (name, TEXT_BENCHMARKS[name].benchmark.prompt, 0)
    assert all(0 <= score["interval"][0] <= score["value"] <= score["interval"][1] <= 1 for score in found["scores"])


def test_answers_are_saved_and_compared(tmp_path, model, capsys, monkeypatch):
    path, kept, page = tmp_path / "piqa.parquet", tmp_path / "kept.jsonl", tmp_path / "found.html"
    datasets.Dataset.from_list(HUB["piqa"]).to_parquet(path)
    monkeypatch.setattr("sys.argv", ["vitrail", "eval", "llama", "piqa"])
    run(model, "piqa", "--data", path, "--answers", kept, "--page", page, "--batch-size", 1, "--device", "cpu")
    assert "acc       50.0%" in capsys.readouterr().out and len(kept.read_text().splitlines()) == 4
    assert "Question: To open a jar" in page.read_text() and "reference: A. tap the lid on a table" in page.read_text()
    run("compare", "piqa", kept, kept, "--data", path)
    assert "+0.0%" in capsys.readouterr().out
    monkeypatch.setattr(
        "vitrail.generate.continuation_scoring.ContinuationScorer.score_texts", None
    )  # all is there already
    run(model, "piqa", "--data", path, "--answers", kept, "--device", "cpu")


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (("piqas", "--data", "{data}"), "did you mean 'piqa'"),
        (("piqa", "--data", "nowhere.jsonl"), "nowhere.jsonl does not exist"),
        (("arc", "--data", "{data}", "--label-file", "{data}"), "'arc' has no option 'label_file'"),
        (("piqa", "--data", "{data}", "--label-file", "{data}/none.lst"), "none.lst"),
        (("piqa", "--data", "{data}", "--out", "{data}/x.json"), "cannot be written"),
        (("piqa", "--data", "{untold}"), "sample '0' has no reference answer"),
        (("piqa", "--data", "{data}"), "has no language model"),
    ],
)
def test_invalid_options_are_refused_before_loading_weights(tmp_path, monkeypatch, words, output):
    own(tmp_path / "clip")
    monkeypatch.setattr("vitrail.hub.load", None)
    made, untold = MAKERS["piqa"][1](tmp_path), tmp_path / "tests.jsonl"
    untold.write_text(json.dumps({"goal": "g", "sol1": "a", "sol2": "b"}))
    given = [word.replace("{data}", str(made.path)).replace("{untold}", str(untold)) for word in words]
    with pytest.raises(VitrailError, match=output):
        run(tmp_path / "clip", *given)
