"""`vitrail demo` with an untrained model: the page is complete and shows the model's own answers only."""

import json
import re

import numpy as np
import pytest
from PIL import Image

from generate.test_unified_generation import TEXTS, unified
from plots.test_html_page import Page
from vitrail import hub
from vitrail.cli import main
from vitrail.data.examples import load_examples
from vitrail.data.language.templates import DRAWING_PROMPT_KINDS
from vitrail.demo.judged_drawing import describe_detections, judge_drawing, load_judge, mentions_all, rank_clarity
from vitrail.evals.suites.scene_benchmarks import normalize_answer
from vitrail.hub.checkpoint_info import INSTALL_BUNDLED_MODELS
from vitrail.pipelines.unified import UnifiedPipeline
from vitrail.plots.html_page import escape_html, render_verdict
from vitrail.processing.tokenizer import Tokenizer

DRAWS, PASSES, CHANGES = "Drawing", "Stages of a drawing", "Editing a drawing"
READS, OWN = "Question answering", "Questions about its own drawing"


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
        code, output = int(end.value.code or 0), capsys.readouterr()
        return code, output.err if code else output.out

    return run


def results(**more) -> dict:
    score = {"value": 0.5, "interval": [0.25, 0.75], "count": 12} | more
    first = {
        "command": "vitrail eval mini questions",
        "scores": [{"name": "colour", "baselines": {"blind": 0.25}, **score}],
    }
    second = {"command": "vitrail codec compare mini", "scores": {"PSNR": score | {"value": 21.125}}}
    return {"evals": {"questions": first, "reconstruction": second}}


def test_page_is_complete(folder, tmp_path, run, monkeypatch):
    few = {kind: DRAWING_PROMPT_KINDS[kind] for kind in ("two", "counting")}
    monkeypatch.setattr("vitrail.demo.drawing_section.DRAWING_PROMPT_KINDS", few)  # two kinds are shown as all are
    (tmp_path / "results.json").write_text(json.dumps(results()))
    own = folder / "a <b>.png"
    model, more = ["--model", folder / "model", "--device", "cpu"], ["--results", tmp_path / "results.json"]
    code, output = run(*model, "--image", own, "--seed", 3, *more, "-o", tmp_path / "page")
    assert not code and output.strip() == str(tmp_path / "page" / "index.html")
    text = (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
    assert [file.name for file in (tmp_path / "page").iterdir()] == ["index.html"]
    found = Page(text)
    found.alone()
    scenes, unified_pipeline = load_examples(), UnifiedPipeline.load(folder / "model", device="cpu")
    assert found.under("h2") == [DRAWS, PASSES, CHANGES, READS, OWN, "Measured scores"]
    # What is drawn: the same pictures as the model draws for the prompts.
    pictures, heads = found.pictures(), found.under("h3")
    prompts, files = heads[: len(few)], [own, *(scene.file for scene in scenes)]
    for i, one in enumerate(unified_pipeline.draw([prompts[1]] * 3, seed=3)):
        assert np.array_equal(np.asarray(pictures[3 + i]), np.asarray(one))
    start = 3 * len(few) + 6 + 5
    assert len(pictures) == start + 4 * len(files) + 1
    # What is read: its codes by number, each picture four times, and the answers that the model gives.
    assert heads[len(few) :] == [own.name, *(scene.name for scene in scenes), "questions", "reconstruction"]
    codes = [int(number) for number in found.under("title")[1:]]
    assert codes == unified_pipeline.tokenize(files).flatten().tolist()
    for i, file in enumerate(files):
        seen, again = pictures[start + 4 * i : start + 4 * i + 2]
        assert np.array_equal(np.asarray(seen), np.asarray(unified_pipeline.preprocess_image(file)))
        assert np.array_equal(
            np.asarray(again), np.asarray(unified_pipeline.detokenize(unified_pipeline.tokenize(file))[0])
        )
    cells = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", text, re.S)
    result = [(escape_html(q["question"]), escape_html(q["answer"])) for scene in scenes for q in scene.questions]
    assert [(a, c) for a, _, c, _ in cells if (a, c) in result] == result
    for scene in scenes:
        # Asked together, as the page asks them: in half precision another batch can be another answer.
        answers = unified_pipeline.ask(scene.file, [q["question"] for q in scene.questions], max_new_tokens=24)
        for q, answer in zip(scene.questions, answers, strict=True):
            right = render_verdict(normalize_answer(answer) == normalize_answer(q["answer"]), answer)
            share = "50%" if q["kind"] == "colour" else "not measured"
            assert (escape_html(q["question"]), right, escape_html(q["answer"]), share) in cells
    assert all(img["alt"] for img in found.of("img"))
    assert len(re.findall("judge: ", text)) == 3 * len(few) + 4
    assert len(re.findall("model caption: ", text)) == 3 * len(few)
    assert {"blind 25.0%", "21.12 of 12"} <= set(found.under("td"))
    assert found.under("code") == ["vitrail eval mini questions", "vitrail codec compare mini"]


def test_invalid_options_are_refused(folder, tmp_path, run):
    model = ["--model", folder / "model", "--device", "cpu", "-o", tmp_path / "page"]
    (tmp_path / "broken.png").write_bytes((folder / "a <b>.png").read_bytes()[:50])
    (tmp_path / "file").write_text("")
    (tmp_path / "bad.json").write_text(json.dumps(results(interval=None)))
    hub.save(unified().codec, tmp_path / "codec")
    for words, message in (
        (["--model", tmp_path / "none"], "none does not exist"),
        (["--model", tmp_path / "codec"], "only a unified model"),
        ([*model, "--image", tmp_path / "broken.png"], "broken.png"),
        ([*model, "--image", tmp_path / "lost.png"], "lost.png"),
        ([*model, "--results", tmp_path / "lost.json"], "lost.json"),
        ([*model, "--results", tmp_path / "bad.json"], "bad.json"),
        ([*model, "--seed", "-1"], "seed"),
        (["--model", folder / "model", "-o", tmp_path / "file"], "file cannot be created"),
    ):
        if "-o" not in words:
            words = [*words, "-o", tmp_path / "page"]
        code, output = run(*words)
        assert code == 2 and message in output and "Traceback" not in output
    assert not (tmp_path / "page" / "index.html").exists()


def test_page_without_a_model_shows_scenes(folder, tmp_path, run, monkeypatch):
    monkeypatch.setattr("vitrail.hub.checkpoint_info.BUNDLED_MODELS_FOLDER", tmp_path / "weights")
    code, output = run("-o", tmp_path, "--image", folder / "a <b>.png")
    assert not code and INSTALL_BUNDLED_MODELS in output
    found = Page((tmp_path / "index.html").read_text(encoding="utf-8"))
    found.alone()
    assert found.under("h2") == ["Scenes"] and INSTALL_BUNDLED_MODELS in " ".join(found.under("p"))
    assert len(found.pictures()) == 1 + len(load_examples())
    assert {q["answer"] for scene in load_examples() for q in scene.questions} <= set(found.under("td"))


def test_shipped_model_is_shown_with_its_results(folder, tmp_path, run, monkeypatch):
    monkeypatch.setattr("vitrail.hub.checkpoint_info.BUNDLED_MODELS_FOLDER", tmp_path / "weights")
    unified_pipeline = UnifiedPipeline.load(folder / "model", device="cpu")
    hub.save(unified_pipeline.model, tmp_path / "weights" / "mini", unified_pipeline.tokenizer, int8=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vitrail.demo.build_demo", lambda *_: [])  # its sections are looked at above
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "mini.json").write_text(json.dumps(results()))
    assert not run("-o", "page", "--device", "cpu")[0]
    found = Page((tmp_path / "page" / "index.html").read_text(encoding="utf-8"))
    assert found.under("h1") == ["Demonstration of mini"] and found.under("h2")[-1] == "Measured scores"


def test_judge_knows_all_demo_prompts():
    """Words without sprites are those of the sprites: a scene of the examples is a right drawing of its prompt."""
    import torch

    from vitrail.data.language import generate_prompts

    judge = load_judge("cpu")
    pixels = {e.name: torch.from_numpy(np.array(Image.open(e.file))).permute(2, 0, 1)[None] for e in load_examples()}
    assert sorted(describe_detections(judge, judge.detect_scenes(pixels["places"])).split(", ")) == [
        "house",
        "pizza",
        "tiger",
    ]
    assert (
        sorted(describe_detections(judge, judge.detect_scenes(pixels["numbers"])).split(", "))
        == ["house"] * 3 + ["penguin"] * 2
    )
    names = judge.detector.config.concepts
    asked = generate_prompts(judge.language, "single", len(names), concepts=judge.known_concepts)
    texts = judge.language.pieces.to_texts(asked.text)
    # Nothing is asked for that it never heard of: what scenes frame things with has names too, and cannot be found.
    assert all(any(re.search(rf"\b{name}\b", text) for name in names) for text in texts)
    one = next(i for i, text in enumerate(texts) if re.search(r"\ba tiger\b", text))
    assert judge.judge_images(asked.spec[one : one + 1], pixels["places"]).tolist() == [True]
    assert judge.judge_images(asked.spec[one : one + 1], pixels["numbers"]).tolist() == [False]
    spec = asked.spec[one : one + 1]
    assert mentions_all(judge, spec, "A scene with two tigers.") and not mentions_all(
        judge, spec, "A scene with a cat."
    )
    tiger, houses = (
        judge_drawing(judge, "a tiger", spec, 0, Image.open(e.file).convert("RGB")) for e in load_examples()[:2]
    )
    assert tiger.is_right and not houses.is_right
    assert (
        rank_clarity(tiger._replace(detected=houses.detected))
        == rank_clarity(tiger)
        == (True, False, 1)
        > rank_clarity(houses)
    )
