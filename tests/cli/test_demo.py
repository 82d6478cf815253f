"""`vitrail demo` with a model that has learned nothing: the page is whole, and says no more than was said."""

import json
import re

import numpy as np
import pytest
from PIL import Image

from generate.test_answers import TEXTS, unified
from show.test_page import Page
from vitrail import hub
from vitrail.cli import main
from vitrail.data.examples import examples
from vitrail.data.words.templates import DRAWINGS
from vitrail.evals.suites.talking import plain
from vitrail.processing.text import Tokenizer
from vitrail.show.page import html, marked
from vitrail.studio import TRAIN, Studio
from vitrail.tour.judge import clear, judged, named, ready_judge, tells

DRAWS, PASSES, CHANGES = "It draws", "It takes its time", "It changes a drawing"
READS, OWN = "It reads", "It looks at its own drawing"


@pytest.fixture(scope="module", params=["raster", "masked"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    hub.save(unified(order=request.param), folder / "model", Tokenizer.train(TEXTS * 3, 300))
    pixels = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "a <b>.png")
    return folder


@pytest.fixture
def run(monkeypatch, capsys):
    def run(*words) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["vitrail", "demo", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        code, said = int(end.value.code or 0), capsys.readouterr()
        return code, said.err if code else said.out

    return run


def results(**more) -> dict:
    score = {"value": 0.5, "interval": [0.25, 0.75], "of": 12} | more
    first = {
        "command": "vitrail eval mini questions",
        "scores": [{"name": "colour", "beside": {"blind": 0.25}, **score}],
    }
    second = {"command": "vitrail codec compare mini", "scores": {"PSNR": score | {"value": 21.125}}}
    return {"evals": {"questions": first, "reconstruction": second}}


def test_the_page_is_whole(folder, tmp_path, run, monkeypatch):
    few = {kind: DRAWINGS[kind] for kind in ("two", "counting")}
    monkeypatch.setattr("vitrail.tour.drawing.DRAWINGS", few)  # two kinds are shown as all are
    (tmp_path / "results.json").write_text(json.dumps(results()))
    own = folder / "a <b>.png"
    model, more = ["--model", folder / "model", "--device", "cpu"], ["--results", tmp_path / "results.json"]
    code, said = run(*model, "--image", own, "--seed", 3, *more, "-o", tmp_path / "page")
    assert not code and said.strip() == str(tmp_path / "page" / "index.html")
    text = (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
    assert [file.name for file in (tmp_path / "page").iterdir()] == ["index.html"]
    found = Page(text)
    found.alone()
    scenes, studio = examples(), Studio.load(folder / "model", device="cpu")
    assert found.under("h2") == [DRAWS, PASSES, CHANGES, READS, OWN, "Measured"]
    # What is drawn: the same pictures as the model draws for the prompts.
    pictures, heads = found.pictures(), found.under("h3")
    prompts, files = heads[: len(few)], [own, *(scene.file for scene in scenes)]
    for i, one in enumerate(studio.draw([prompts[1]] * 3, seed=3)):
        assert np.array_equal(np.asarray(pictures[3 + i]), np.asarray(one))
    start = 3 * len(few) + 6 + 5
    assert len(pictures) == start + 4 * len(files) + 1
    # What is read: its codes by number, each picture four times, and the answers that the model gives.
    assert heads[len(few) :] == [own.name, *(scene.name for scene in scenes), "questions", "reconstruction"]
    codes = [int(number) for number in found.under("title")[1:]]
    assert codes == studio.tokenize(files).flatten().tolist()
    for i, file in enumerate(files):
        seen, again = pictures[start + 4 * i : start + 4 * i + 2]
        assert np.array_equal(np.asarray(seen), np.asarray(studio.seen(file)))
        assert np.array_equal(np.asarray(again), np.asarray(studio.detokenize(studio.tokenize(file))[0]))
    cells = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", text, re.S)
    told = [(html(q["question"]), html(q["answer"])) for scene in scenes for q in scene.questions]
    assert [(a, c) for a, _, c, _ in cells if (a, c) in told] == told
    for scene in scenes:
        # Asked together, as the page asks them: in half precision another batch can be another answer.
        answers = studio.ask(scene.file, [q["question"] for q in scene.questions], max_new=24)
        for q, answer in zip(scene.questions, answers, strict=True):
            right = marked(plain(answer) == plain(q["answer"]), answer)
            share = "50%" if q["kind"] == "colour" else "not measured"
            assert (html(q["question"]), right, html(q["answer"]), share) in cells
    assert all(img["alt"] for img in found.of("img"))
    assert len(re.findall("the judge sees", text)) == 3 * len(few) + 4
    assert len(re.findall("it says: ", text)) == 3 * len(few)
    assert {"blind 25.0%", "21.12 of 12"} <= set(found.under("td"))
    assert found.under("code") == ["vitrail eval mini questions", "vitrail codec compare mini"]


def test_what_is_wrong_is_said(folder, tmp_path, run):
    model = ["--model", folder / "model", "--device", "cpu", "-o", tmp_path / "page"]
    (tmp_path / "broken.png").write_bytes((folder / "a <b>.png").read_bytes()[:50])
    (tmp_path / "file").write_text("")
    (tmp_path / "bad.json").write_text(json.dumps(results(interval=None)))
    hub.save(unified().codec, tmp_path / "codec")
    for words, says in (
        (["--model", tmp_path / "none"], "none does not exist"),
        (["--model", tmp_path / "codec"], "only a unified model"),
        ([*model, "--image", tmp_path / "broken.png"], "broken.png"),
        ([*model, "--image", tmp_path / "lost.png"], "lost.png"),
        ([*model, "--results", tmp_path / "lost.json"], "lost.json"),
        ([*model, "--results", tmp_path / "bad.json"], "bad.json"),
        ([*model, "--seed", "-1"], "seed"),
        (["--model", folder / "model", "-o", tmp_path / "file"], "file cannot be made"),
    ):
        if "-o" not in words:
            words = [*words, "-o", tmp_path / "page"]
        code, said = run(*words)
        assert code == 2 and says in said and "Traceback" not in said
    assert not (tmp_path / "page" / "index.html").exists()


def test_without_a_model_scenes_are_shown(folder, tmp_path, run, monkeypatch):
    monkeypatch.setattr("vitrail.hub.configs.SHIPPED", tmp_path / "weights")
    code, said = run("-o", tmp_path, "--image", folder / "a <b>.png")
    assert not code and TRAIN in said
    found = Page((tmp_path / "index.html").read_text(encoding="utf-8"))
    found.alone()
    assert found.under("h2") == ["Scenes"] and TRAIN in " ".join(found.under("p"))
    assert len(found.pictures()) == 1 + len(examples())
    assert {q["answer"] for scene in examples() for q in scene.questions} <= set(found.under("td"))


def test_the_one_that_ships_is_shown_with_its_results(folder, tmp_path, run, monkeypatch):
    monkeypatch.setattr("vitrail.hub.configs.SHIPPED", tmp_path / "weights")
    studio = Studio.load(folder / "model", device="cpu")
    hub.save(studio.model, tmp_path / "weights" / "mini", studio.words, small=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vitrail.tour.tour", lambda *_: [])  # its sections are looked at above
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "mini.json").write_text(json.dumps(results()))
    assert not run("-o", "page", "--device", "cpu")[0]
    found = Page((tmp_path / "page" / "index.html").read_text(encoding="utf-8"))
    assert found.under("h1") == ["mini draws and reads"] and found.under("h2")[-1] == "Measured"


def test_the_judge_knows_what_it_is_asked_for():
    """Words without sprites are those of the sprites: a scene of the examples is a right drawing of its prompt."""
    import torch

    from vitrail.data.words import prompts

    judge = ready_judge("cpu")
    pixels = {e.name: torch.from_numpy(np.array(Image.open(e.file))).permute(2, 0, 1)[None] for e in examples()}
    assert sorted(named(judge, judge.look(pixels["places"])).split(", ")) == ["house", "pizza", "tiger"]
    assert sorted(named(judge, judge.look(pixels["numbers"])).split(", ")) == ["house"] * 3 + ["penguin"] * 2
    names = judge.detector.config.concepts
    asked = prompts(judge.words, "single", len(names), among=judge.knows)
    texts = judge.words.pieces.read(asked.text)
    # Nothing is asked for that it never heard of: what scenes frame things with has names too, and cannot be found.
    assert all(any(re.search(rf"\b{name}\b", text) for name in names) for text in texts)
    one = next(i for i, text in enumerate(texts) if re.search(r"\ba tiger\b", text))
    assert judge.right(asked.spec[one : one + 1], pixels["places"]).tolist() == [True]
    assert judge.right(asked.spec[one : one + 1], pixels["numbers"]).tolist() == [False]
    spec = asked.spec[one : one + 1]
    assert tells(judge, spec, "A scene with two tigers.") and not tells(judge, spec, "A scene with a cat.")
    tiger, houses = (judged(judge, "a tiger", spec, 0, Image.open(e.file).convert("RGB")) for e in examples()[:2])
    assert tiger.right and not houses.right
    assert clear(tiger._replace(seen=houses.seen)) == clear(tiger) == (True, False, 1) > clear(houses)
