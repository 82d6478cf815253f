"""Requests of evaluation frameworks: lmms-eval and VLMEvalKit evaluate a model through the server."""

import base64
import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import httpx2 as httpx
import pytest
from PIL import Image

from vitrail.pipelines import load
from vitrail.serve.server_process import open_server

QUESTIONS = ["How many dogs are there?", "What color is the ball?", "Is there a lamp?"]
TASK = """\
task: vitrail_questions
dataset_path: json
dataset_kwargs:
  data_files:
    test: FOLDER/questions.jsonl
test_split: test
output_type: generate_until
doc_to_visual: !function questions.read_images
doc_to_text: !function questions.read_question
doc_to_target: answer
generation_kwargs:
  max_new_tokens: 16
process_results: !function questions.score
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""
FUNCTIONS = """\
from PIL import Image


def read_images(doc):
    return [Image.open(doc["image"]).convert("RGB")]


def read_question(doc, lmms_eval_specific_kwargs=None):
    return doc["question"]


def score(doc, results):
    return {"exact_match": float(results[0].strip() == doc["answer"])}
"""


@pytest.fixture(scope="module")
def question_file(tmp_path_factory) -> tuple[Path, list[dict]]:
    """A benchmark file whose answers are those of the pipeline, except the last one."""
    folder, pipeline, rows = tmp_path_factory.mktemp("benchmark"), load("mini-vlm"), []
    for number, question in enumerate(QUESTIONS):
        image = Image.effect_mandelbrot((64, 48), (-2, -1.5, 1 + number / 10, 1.5), 20).convert("RGB")
        image.save(folder / f"{number}.png")
        content = [{"type": "text", "text": question}, {"type": "image", "image": image}]
        text_first = pipeline.chat([{"role": "user", "content": content}], max_new_tokens=16)
        answer = pipeline.ask(image, question, max_new_tokens=16)
        rows.append(
            {"image": str(folder / f"{number}.png"), "question": question, "answer": answer, "text_first": text_first}
        )
    rows[-1] |= {key: rows[-1][key] + " no" for key in ("answer", "text_first")}
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "vitrail_questions.yaml").write_text(TASK.replace("FOLDER", str(folder)))
    (folder / "questions.py").write_text(FUNCTIONS)
    return folder, rows


def encode(path: str, kind: str) -> str:
    file = io.BytesIO()
    Image.open(path).save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


def build_lmms_eval_body(row: dict) -> dict:
    """Return the request of lmms-eval's older client: the text is first. The newer one has the images first."""
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encode(row['image'], 'PNG')}"}}
    content = [{"type": "text", "text": row["question"]}, image]
    return {"messages": [{"role": "user", "content": content}], "model": "mini-vlm", "max_tokens": 16, "temperature": 0}


def build_vlmevalkit_body(row: dict) -> dict:
    """Return the request of VLMEvalKit 0.2: class `OpenAIWrapper`. The test has PNG files, so that pixels are equal."""
    url = f"data:image/jpeg;base64,{encode(row['image'], 'PNG')}"
    content = [
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "text", "text": row["question"]},
    ]
    messages = [{"role": "user", "content": content}]
    return {"model": "mini-vlm", "messages": messages, "n": 1, "temperature": 0, "max_tokens": 16}


@pytest.mark.slow
@pytest.mark.parametrize(("build", "key"), [(build_lmms_eval_body, "text_first"), (build_vlmevalkit_body, "answer")])
def test_requests_of_the_frameworks_get_the_answers_of_the_pipeline(question_file, build, key):
    _, rows = question_file
    with open_server("mini-vlm") as url, httpx.Client(base_url=url, timeout=300) as client:
        answers = [client.post("/chat/completions", json=build(row)).json() for row in rows]
        found = [
            one["choices"][0]["message"]["content"].strip() == row[key] for one, row in zip(answers, rows, strict=True)
        ]
        assert found == [True, True, False]
        # Their default token limits exceed a small context: the error says how many fit.
        refused = client.post("/chat/completions", json={**build(rows[0]), "max_tokens": 2048}).json()["error"]
        assert refused["param"] == "max_tokens" and "generate at most" in refused["message"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lmms_eval") is None, reason="lmms-eval is not installed")
def test_lmms_eval_evaluates_a_benchmark_file(question_file, tmp_path):
    folder, _ = question_file
    with open_server("mini-vlm") as url:
        command = [sys.executable, "-m", "lmms_eval", "--model", "openai", "--tasks", "vitrail_questions"]
        command += ["--model_args", f"model_version=mini-vlm,base_url={url},api_key=none,max_retries=1"]
        command += ["--include_path", str(folder), "--batch_size", "1", "--output_path", str(tmp_path)]
        environment = os.environ | {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = tmp_path.rglob("*_results.json")
    scores = json.loads(file.read_text())["results"]["vitrail_questions"]
    assert scores["exact_match,none"] == pytest.approx(2 / 3)
