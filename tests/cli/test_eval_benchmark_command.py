"""`vitrail eval MODEL pope --data FILE`: prompts, printed tables, output files and results."""

import json
import re

import pytest

from data.formats.conftest import MAKERS
from evals.test_suites_models import own
from vitrail.cli import COMMANDS
from vitrail.cli.eval_command import app
from vitrail.errors import VitrailError
from vitrail.evals.suites.benchmarks import BENCHMARKS, get_benchmark


class Toy:
    """Sees a card in every picture, and takes nothing for a no."""

    def ask(self, pictures, question, **how):
        self.how = how
        return "no" if (isinstance(pictures, list) and not pictures) or "dog" in question else "yes"

    def ask_batch(self, shown, questions, **how):
        self.most = max(getattr(self, "most", 0), len(questions))
        return [self.ask(*asked, **how) for asked in zip(shown, questions, strict=True)]


def test_help_names_every_suite(capsys):
    """The names are written out, so that help needs no torch."""
    run("--help")
    result = set(re.findall(r"[\w-]+", capsys.readouterr().out))
    assert set(BENCHMARKS) <= result
    assert str(len(BENCHMARKS)) in COMMANDS["eval"].description


@pytest.fixture
def toy(monkeypatch):
    made = Toy()
    monkeypatch.setattr("vitrail.pipelines.loading.load", lambda *_, **__: made)
    monkeypatch.setattr("vitrail.pipelines.loading.is_vlm", lambda _: True)
    return made


def run(*words) -> None:
    app([str(word) for word in words], result_action="return_value")


def test_pope(tmp_path, toy, capsys):
    made, out, kept = MAKERS["pope"][1](tmp_path), tmp_path / "scores.json", tmp_path / "answers.jsonl"
    where = ("--data", made.path, "--image-folder", made.options["image_folder"])
    run("folder", "pope", *where, "--out", out, "--answers", kept, "--max-new-tokens", 8, "--device", "cpu")
    result = capsys.readouterr().out
    assert "accuracy, split popular" in result and "always yes 50.0%, blind 50.0%" in result
    assert toy.how == {"max_new_tokens": 8} and toy.most == 6 and len(kept.read_text().splitlines()) == 12
    found = json.loads(out.read_text())
    assert (found["suite"], found["model"]) == ("pope", "folder") and found["prompt"].startswith("{question}")
    assert found["scores"][0]["value"] == 1 and found["scores"][0]["baselines"] == {"always yes": 0.5, "blind": 0.5}
    toy.most = 0
    run("folder", "pope", *where, "--no-blind", "--mode", "lmms-eval", "--limit", 3, "--batch-size", 2)
    assert "of 3 " in capsys.readouterr().out and toy.most == 2


def test_html_page(tmp_path, toy, monkeypatch):
    made, page = MAKERS["mmbench"][1](tmp_path), tmp_path / "found.html"
    monkeypatch.setattr("sys.argv", ["vitrail", "eval", "folder", "mmbench"])
    monkeypatch.setattr(toy, "ask", lambda shown, question, **_: "A" if "colour" in question else "<who knows>")
    run("folder", "mmbench", "--data", made.path, "--page", page, "--device", "cpu")
    result = page.read_text()
    assert "<code>vitrail eval folder mmbench</code>" in result and "chance" in result
    assert not re.search(r"""(src|href)=["']?http""", result)
    right, unread = result.index("<h3>Right</h3>"), result.index("<h3>Not parsed</h3>")
    assert "<h3>Wrong</h3>" not in result and result.count("data:image/png") == 2
    assert "reference: A. teal" in result[right:unread] and "answer: &lt;who knows&gt;" in result[unread:]
    assert "reference: D. both" in result[unread:] and "without the image: A" in result[right:unread]
    with pytest.raises(VitrailError, match="--page"):
        run("folder", "mmbench", "--data", made.path, "--page", tmp_path / "found.html" / "x.html")


def test_benchmark_names_shared_with_suites(tmp_path, toy, capsys):
    made = MAKERS["winoground"][1](tmp_path)
    run("folder", "winoground", f"--data={made.path}", "--image-folder", made.options["image_folder"])
    assert "chance 6.2%" in capsys.readouterr().out


def test_by_likelihood(tmp_path, toy, capsys):
    made = MAKERS["mmbench"][1](tmp_path)
    toy.loglikelihoods = lambda asked: [[-float(option != "teal") for option in options] for *_, options in asked]
    run("folder", "mmbench", "--data", made.path, "--score-by", "likelihood", "--out", tmp_path / "found.json")
    assert "accuracy, category attribute  100.0%" in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["by"], found["prompt"]) == ("likelihood", "{question}")


def test_split_of_a_file(tmp_path, toy, capsys):
    made, out, kept = MAKERS["ocrvqa"][1](tmp_path), tmp_path / "scores.json", tmp_path / "kept.jsonl"
    where = ("--data", made.path, "--image-folder", made.options["image_folder"])
    run("folder", "ocrvqa", *where, "--out", out, "--device", "cpu")
    found = json.loads(out.read_text())
    assert (found["scores"][0]["count"], found["scores"][0]["baselines"]) == (2, {"majority": 0.5, "blind": 0.5})
    run("folder", "ocrvqa", *where, "--split", "train", "--out", out, "--answers", kept, "--device", "cpu")
    found = json.loads(out.read_text())
    assert (found["split"], found["scores"][0]["count"]) == ("train", 1)
    capsys.readouterr()
    run("compare", "ocrvqa", kept, kept, *where, "--split", "train")
    assert "of 1" in capsys.readouterr().out


def test_captions_with_clip_score(tmp_path, toy, capsys):
    own(tmp_path / "clip")
    made, out = MAKERS["coco-captions"][1](tmp_path), tmp_path / "scores.json"
    where = ("--data", made.path, "--image-folder", made.options["image_folder"], "--device", "cpu")
    run("folder", "captions", *where, "--clip-model", tmp_path / "clip", "--out", out)
    assert "RefCLIPScore" in capsys.readouterr().out
    found = json.loads(out.read_text())
    scores = {score["name"]: score for score in found["scores"]}
    assert scores["CLIPScore"]["baselines"].keys() == {"of another picture", "blind"}
    assert found["clip"]["model"] == str(tmp_path / "clip") and found["clip"]["texts_cut"] == 0


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (("popes",), "did you mean 'pope'"),
        (("pope", "--data", "nowhere.json"), "nowhere.json does not exist"),
        (("pope", "--data", "{data}", "--boxes", "llava"), "pope has no option 'boxes'"),
        (("pope", "--data", "{data}", "--clip-model", "folder"), "pope has no option 'clip'"),
        (("pope", "--data", "{data}", "--circular"), "pope is not multiple choice"),
        (("pope", "--data", "{data}", "--score-by", "likelihood"), "needs options, but pope has none"),
        (("pope", "--data", "{data}", "--split", "test"), "has no option 'split'"),
        (("pope", "--data", "{data}", "--annotation-file", "x.json"), "has no option 'annotation_file'"),
        (("chair", "--data", "{data}"), "needs the option synonyms"),
        (("pope", "--data", "{data}", "--prompt", "{nope}"), "cannot be formatted"),
        (("pope", "--data", "{data}", "--mode", "popes"), "did you mean 'pope'"),
        (("pope", "--data", "{data}", "--out", "{file}/scores.json"), r"scores\.json cannot be written"),
        (("pope", "--data", "{data}", "--answers", "{file}/a.jsonl"), r"a\.jsonl cannot be written"),
    ],
)
def test_invalid_options_are_refused(tmp_path, monkeypatch, words, output):
    monkeypatch.setattr("vitrail.pipelines.loading.load", None)  # before the weights are read
    made = MAKERS["pope"][1](tmp_path)
    (tmp_path / "file").touch()
    data = [word.replace("{data}", str(made.path)).replace("{file}", str(tmp_path / "file")) for word in words]
    where = ("--image-folder", made.options["image_folder"]) if len(words) > 1 else ()
    with pytest.raises(VitrailError, match=output):
        run("folder", *data, *where)


@pytest.mark.parametrize(
    ("name", "words", "output"),
    [
        ("captions", ("--tokenizer", "ptbs"), "did you mean 'ptb'"),
        ("captions", ("--tokenizer", "ptb"), "needs Java, which is not installed"),
        ("captions", ("--meteor",), "needs Java, which is not installed"),
        ("captions", ("--clip-model", "nowhere"), "nowhere"),
        ("chair", ("--synonyms", "nowhere.txt"), r"nowhere\.txt does not exist"),
        ("gqa", (), "sample '07333408' has no reference answer"),
        ("refcoco", ("--boxes", "qwenvl"), "did you mean 'qwen-vl'"),
    ],
)
def test_unscorable_samples_are_refused_before_generation(tmp_path, monkeypatch, name, words, output):
    monkeypatch.setattr("vitrail.pipelines.loading.load", None)
    monkeypatch.setattr("shutil.which", lambda _: None)
    row = get_benchmark(name)
    made = MAKERS[row.format][1](tmp_path)
    if name == "chair":
        words = (*words, "--instances", MAKERS["coco-instances"][1](tmp_path).path)
    where = [word for key, value in made.options.items() for word in (f"--{key.replace('_', '-')}", value)]
    with pytest.raises(VitrailError, match=output):
        run("folder", name, "--data", made.path, *where, *words)


def test_missing_image_is_refused_before_generation(tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.pipelines.loading.load", None)
    made = MAKERS["pope"][1](tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(VitrailError, match="6 of 6 samples"):
        run("folder", "pope", "--data", made.path, "--image-folder", empty)
