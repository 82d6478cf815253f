"""`vitrail eval MODEL pope --data FILE`: what is asked, shown, written and kept."""

import json
import re

import pytest

from data.formats.conftest import MAKERS
from evals.test_suites_models import own
from vitrail.cli import COMMANDS
from vitrail.cli.eval import app
from vitrail.errors import VitrailError
from vitrail.evals.suites.benchmarks import BENCHMARKS, benchmark


class Toy:
    """Sees a card in every picture, and takes nothing for a no."""

    def ask(self, pictures, question, **how):
        self.how = how
        return "no" if (isinstance(pictures, list) and not pictures) or "dog" in question else "yes"

    def answers(self, shown, questions, **how):
        self.most = max(getattr(self, "most", 0), len(questions))
        return [self.ask(*asked, **how) for asked in zip(shown, questions, strict=True)]


def test_help_names_every_suite(capsys):
    """The names are written out, so that help needs no torch."""
    for words in (("--help",), ("benchmark", "--help")):
        run(*words)
        told = set(re.findall(r"[\w-]+", capsys.readouterr().out))
        assert set(BENCHMARKS) <= told
    assert str(len(BENCHMARKS)) in COMMANDS["eval"].says


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
    assert toy.how == {"max_new": 8} and toy.most == 6 and len(kept.read_text().splitlines()) == 12
    found = json.loads(out.read_text())
    assert (found["suite"], found["model"]) == ("pope", "folder") and found["prompt"].startswith("{question}")
    assert found["scores"][0]["value"] == 1 and found["scores"][0]["beside"] == {"always yes": 0.5, "blind": 0.5}
    toy.most = 0
    run("folder", "pope", *where, "--no-blind", "--mode", "lmms-eval", "--limit", 3, "--batch", 2)
    assert "of 3 " in capsys.readouterr().out and toy.most == 2


def test_a_page(tmp_path, toy, monkeypatch):
    made, page = MAKERS["mmbench"][1](tmp_path), tmp_path / "found.html"
    monkeypatch.setattr("sys.argv", ["vitrail", "eval", "folder", "mmbench"])
    monkeypatch.setattr(toy, "ask", lambda shown, question, **_: "A" if "colour" in question else "<who knows>")
    run("folder", "mmbench", "--data", made.path, "--page", page, "--device", "cpu")
    told = page.read_text()
    assert "<code>vitrail eval folder mmbench</code>" in told and "chance" in told
    assert not re.search(r"""(src|href)=["']?http""", told)
    right, unread = told.index("<h3>Right</h3>"), told.index("<h3>Not read</h3>")
    assert "<h3>Wrong</h3>" not in told and told.count("data:image/png") == 2
    assert "right: A. teal" in told[right:unread] and "answer: &lt;who knows&gt;" in told[unread:]
    assert "right: D. both" in told[unread:] and "without the picture: A" in told[right:unread]
    with pytest.raises(VitrailError, match="--page"):
        run("folder", "mmbench", "--data", made.path, "--page", tmp_path / "found.html" / "x.html")


def test_names_shared_with_suites_of_scenes(tmp_path, toy, capsys):
    made = MAKERS["winoground"][1](tmp_path)
    run("folder", "winoground", f"--data={made.path}", "--pictures", made.options["pictures"])
    assert "chance 6.2%" in capsys.readouterr().out


def test_by_likelihood(tmp_path, toy, capsys):
    made = MAKERS["mmbench"][1](tmp_path)
    toy.likelihoods = lambda asked: [[-float(option != "teal") for option in options] for *_, options in asked]
    run("folder", "mmbench", "--data", made.path, "--by", "likelihood", "--out", tmp_path / "found.json")
    assert "accuracy, category attribute  100.0%" in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["by"], found["prompt"]) == ("likelihood", "{question}")


def test_a_part_of_a_file(tmp_path, toy, capsys):
    made, out, kept = MAKERS["ocrvqa"][1](tmp_path), tmp_path / "scores.json", tmp_path / "kept.jsonl"
    where = ("--data", made.path, "--pictures", made.options["pictures"])
    run("folder", "ocrvqa", *where, "--out", out, "--device", "cpu")
    found = json.loads(out.read_text())
    assert (found["scores"][0]["of"], found["scores"][0]["beside"]) == (2, {"majority": 0.5, "blind": 0.5})
    run("folder", "ocrvqa", *where, "--part", "train", "--out", out, "--answers", kept, "--device", "cpu")
    found = json.loads(out.read_text())
    assert (found["part"], found["scores"][0]["of"]) == ("train", 1)
    capsys.readouterr()
    run("compare", "ocrvqa", kept, kept, *where, "--part", "train")
    assert "of 1" in capsys.readouterr().out


def test_captions_by_a_contrastive_model(tmp_path, toy, capsys):
    own(tmp_path / "clip")
    made, out = MAKERS["coco-captions"][1](tmp_path), tmp_path / "scores.json"
    where = ("--data", made.path, "--pictures", made.options["pictures"], "--device", "cpu")
    run("folder", "captions", *where, "--clip", tmp_path / "clip", "--out", out)
    assert "RefCLIPScore" in capsys.readouterr().out
    found = json.loads(out.read_text())
    scores = {score["name"]: score for score in found["scores"]}
    assert scores["CLIPScore"]["beside"].keys() == {"of another picture", "blind"}
    assert found["clip"]["model"] == str(tmp_path / "clip") and found["clip"]["texts_cut"] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("popes",), "did you mean 'pope'"),
        (("pope", "--data", "nowhere.json"), "nowhere.json does not exist"),
        (("pope", "--data", "{data}", "--boxes", "llava"), "pope has no option 'boxes'"),
        (("pope", "--data", "{data}", "--clip", "folder"), "pope has no option 'clip'"),
        (("pope", "--data", "{data}", "--circular"), "no multiple choice"),
        (("pope", "--data", "{data}", "--by", "likelihood"), "no choice between options"),
        (("pope", "--data", "{data}", "--part", "test"), "has no option 'part'"),
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
        ("captions", ("--clip", "nowhere"), "nowhere"),
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
