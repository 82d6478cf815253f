"""`vitrail eval MODEL pope --data FILE`: what is asked, shown, written and kept."""

import json

import pytest

from data.formats.conftest import MAKERS
from vitrail.cli.eval import app
from vitrail.errors import VitrailError
from vitrail.evals.suites.benchmarks import benchmark


class Toy:
    """Sees a card in every picture, and takes nothing for a no."""

    def ask(self, pictures, question, **how):
        self.how = how
        return "no" if (isinstance(pictures, list) and not pictures) or "dog" in question else "yes"


@pytest.fixture
def toy(monkeypatch):
    made = Toy()
    monkeypatch.setattr("vitrail.studio.load", lambda *_, **__: made)
    monkeypatch.setattr("vitrail.studio.talks", lambda _: True)
    return made


def run(*words) -> None:
    app([str(word) for word in words], result_action="return_value")


def test_pope(tmp_path, toy, capsys):
    made, out, kept = MAKERS["pope"][1](tmp_path), tmp_path / "scores.json", tmp_path / "answers.jsonl"
    where = ("--data", made.path, "--pictures", made.options["pictures"])
    run("folder", "pope", *where, "--out", out, "--answers", kept, "--max-new", 8, "--device", "cpu")
    told = capsys.readouterr().out
    assert "accuracy, split popular" in told and "always yes 50.0%, blind 50.0%" in told
    assert toy.how == {"max_new": 8} and len(kept.read_text().splitlines()) == 12
    found = json.loads(out.read_text())
    assert (found["suite"], found["model"]) == ("pope", "folder") and found["prompt"].startswith("{question}")
    assert found["scores"][0]["value"] == 1 and found["scores"][0]["beside"] == {"always yes": 0.5, "blind": 0.5}
    run("folder", "pope", *where, "--no-blind", "--mode", "lmms-eval", "--limit", 3)
    assert "of 3 " in capsys.readouterr().out


def test_names_shared_with_suites_of_scenes(tmp_path, toy, capsys):
    made = MAKERS["winoground"][1](tmp_path)
    run("folder", "winoground", f"--data={made.path}", "--pictures", made.options["pictures"])
    assert "chance 6.2%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("popes",), "did you mean 'pope'"),
        (("pope", "--data", "nowhere.json"), "nowhere.json does not exist"),
        (("pope", "--data", "{data}", "--boxes", "llava"), "pope has no option 'boxes'"),
        (("pope", "--data", "{data}", "--circular"), "no multiple choice"),
        (("pope", "--data", "{data}", "--annotations", "x.json"), "has no option 'annotations'"),
        (("chair", "--data", "{data}"), "cannot be scored without synonyms"),
        (("pope", "--data", "{data}", "--prompt", "{nope}"), "cannot be filled in"),
        (("pope", "--data", "{data}", "--mode", "popes"), "did you mean 'pope'"),
        (("pope", "--data", "{data}", "--out", "{file}/scores.json"), r"scores\.json cannot be written"),
        (("pope", "--data", "{data}", "--answers", "{file}/a.jsonl"), r"a\.jsonl cannot be written"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, monkeypatch, words, said):
    monkeypatch.setattr("vitrail.studio.load", None)  # before the weights are read
    made = MAKERS["pope"][1](tmp_path)
    (tmp_path / "file").touch()
    data = [word.replace("{data}", str(made.path)).replace("{file}", str(tmp_path / "file")) for word in words]
    pictures = ("--pictures", made.options["pictures"]) if len(words) > 1 else ()
    with pytest.raises(VitrailError, match=said):
        run("folder", *data, *pictures)


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("captions", ("--tokenizer", "ptbs"), "did you mean 'ptb'"),
        ("captions", ("--tokenizer", "ptb"), "there is no java here"),
        ("captions", ("--meteor",), "there is no java here"),
        ("chair", ("--synonyms", "nowhere.txt"), r"nowhere\.txt does not exist"),
        ("gqa", (), "the answer to '07333408' is not known"),
        ("refcoco", ("--boxes", "qwenvl"), "did you mean 'qwen-vl'"),
    ],
)
def test_what_cannot_be_scored_is_not_asked(tmp_path, monkeypatch, name, words, said):
    monkeypatch.setattr("vitrail.studio.load", None)
    monkeypatch.setattr("shutil.which", lambda _: None)
    row = benchmark(name)
    made = MAKERS[row.format][1](tmp_path)
    if name == "chair":
        words = (*words, "--instances", MAKERS["coco-instances"][1](tmp_path).path)
    where = [word for key, value in made.options.items() for word in (f"--{key}", value)]
    with pytest.raises(VitrailError, match=said):
        run("folder", name, "--data", made.path, *where, *words)


def test_a_picture_that_is_missing_is_known_before(tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.studio.load", None)
    made = MAKERS["pope"][1](tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(VitrailError, match="6 of 6 samples"):
        run("folder", "pope", "--data", made.path, "--pictures", empty)
