"""`vitrail eval MODEL piqa --data FILE`: what is shown, written, kept and refused."""

import json
import re

import datasets
import pytest

from data.formats.conftest import MAKERS
from evals.test_suites_models import own
from evals.text_rows import HUB, llama
from vitrail.cli.eval import app
from vitrail.errors import VitrailError
from vitrail.evals.suites.texts import TEXTS


def run(*words) -> None:
    app([str(word) for word in words], result_action="return_value")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama"
    llama(folder)
    return folder


def test_help_names_every_benchmark(capsys):
    for words in (("--help",), ("text", "--help")):
        run(*words)
        assert set(TEXTS) <= set(re.findall(r"[\w-]+", capsys.readouterr().out))


@pytest.mark.parametrize("name", TEXTS)
def test_each_from_its_own_file(tmp_path, model, capsys, name):
    made, out = MAKERS[name][1](tmp_path), tmp_path / "scores.json"
    run(model, name, "--data", made.path, "--out", out, "--device", "cpu")
    told = capsys.readouterr().out
    assert all(word in told for word in ("acc ", "chance ", "majority ", "longest ", "blind "))
    assert ("acc_norm" in told) == (name in ("arc", "hellaswag", "piqa")) and ("set Easy" in told) == (name == "arc")
    found = json.loads(out.read_text())
    assert (found["suite"], found["prompt"], found["texts_cut"]) == (name, TEXTS[name].row.prompt, 0)
    assert all(0 <= score["interval"][0] <= score["value"] <= score["interval"][1] <= 1 for score in found["scores"])


def test_kept_shown_and_compared(tmp_path, model, capsys, monkeypatch):
    path, kept, page = tmp_path / "piqa.parquet", tmp_path / "kept.jsonl", tmp_path / "found.html"
    datasets.Dataset.from_list(HUB["piqa"]).to_parquet(path)
    monkeypatch.setattr("sys.argv", ["vitrail", "eval", "llama", "piqa"])
    run(model, "piqa", "--data", path, "--answers", kept, "--page", page, "--batch", 1, "--device", "cpu")
    assert "acc       50.0%" in capsys.readouterr().out and len(kept.read_text().splitlines()) == 4
    assert "Question: To open a jar" in page.read_text() and "right: A. tap the lid on a table" in page.read_text()
    run("compare", "piqa", kept, kept, "--data", path)
    assert "+0.0%" in capsys.readouterr().out
    monkeypatch.setattr("vitrail.generate.continuations.Continuations.likelihoods", None)  # all is there already
    run(model, "piqa", "--data", path, "--answers", kept, "--device", "cpu")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("piqas", "--data", "{data}"), "did you mean 'piqa'"),
        (("piqa", "--data", "nowhere.jsonl"), "nowhere.jsonl does not exist"),
        (("arc", "--data", "{data}", "--labels", "{data}"), "'arc' has no option 'labels'"),
        (("piqa", "--data", "{data}", "--labels", "{data}/none.lst"), "none.lst"),
        (("piqa", "--data", "{data}", "--out", "{data}/x.json"), "cannot be written"),
        (("piqa", "--data", "{untold}"), "the answer to '0' is not known"),
        (("piqa", "--data", "{data}"), "has no decoder of words"),
    ],
)
def test_what_is_wrong_is_said_before_the_weights_are_read(tmp_path, monkeypatch, words, said):
    own(tmp_path / "clip")
    monkeypatch.setattr("vitrail.hub.load", None)
    made, untold = MAKERS["piqa"][1](tmp_path), tmp_path / "tests.jsonl"
    untold.write_text(json.dumps({"goal": "g", "sol1": "a", "sol2": "b"}))
    given = [word.replace("{data}", str(made.path)).replace("{untold}", str(untold)) for word in words]
    with pytest.raises(VitrailError, match=said):
        run(tmp_path / "clip", *given)
