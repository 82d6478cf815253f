"""perf/goodput.py: arrivals, targets and figures are right, and its client reads the streams of our server."""

import asyncio
import importlib
import itertools
import json
import sys
from pathlib import Path

import pytest

from serve.constrained_steps import text_pipeline

PERF = Path(__file__).parents[2] / "perf"
LATE = {"rate": 2.0, "goodput": 0.0, "ttft_ms": {"p50": 3e3}, "tpot_ms": {}}
IN_TIME = {"rate": 1.0, "goodput": 1.0, "ttft_ms": {"p50": 20.0}, "tpot_ms": {"p50": 9.0}}


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(PERF))
    return importlib.import_module("goodput")


def test_arrivals_have_the_rate_and_repeat(script):
    sizes = script.Sizes((3, 5), (7, 9))
    arrivals = script.make_arrivals(50, 8, sizes)
    assert arrivals == script.make_arrivals(50, 8, sizes) and len(arrivals) == 400
    times = [one.seconds for one in arrivals]
    assert times == sorted(times) and 0 <= times[0] and times[-1] < 8
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.15)  # exponential gaps, not regular ones
    assert {len(one.prompt.split()) for one in arrivals} == {3, 4, 5} == {one.num_prompt_tokens for one in arrivals}
    assert len({one.prompt for one in arrivals}) == 400 and {one.new for one in arrivals} == {7, 8, 9}


def test_an_answer_is_good_if_it_meets_both_targets(script):
    def answer(times, num_tokens=3, error=None):
        return script.Answer(3, times, num_tokens, error)

    good = answer([1.0, 1.02, 1.09])
    answers = [good, answer([1.01, 1.02, 1.03]), answer([0.1, 0.2, 0.21]), answer([0.1, 0.11], 2), answer([], 0, "x")]
    assert [one.is_good for one in answers] == [True, False, False, False, False]
    figures = script.summarize(answers, 5.0, 2.0)
    assert (figures["sent"], figures["complete"], figures["good"]) == (5, 3, 1)
    assert figures["goodput"] == 0.5 and figures["good_share"] == 0.2 and figures["tokens_per_s"] == 4.5
    assert figures["ttft_ms"]["p50"] == pytest.approx(550) and figures["tpot_ms"]["p50"] == pytest.approx(45)
    assert figures["errors"] == {"2 tokens instead of 3": 1, "x": 1}


def test_the_client_reads_the_streams_of_the_server(script):
    pytest.importorskip("starlette")
    from vitrail.serve.served_model import ServedModel
    from vitrail.serve.server_process import open_server

    model = ServedModel("tiny", text_pipeline())
    arrivals = [script.Arrival(0.02 * i, "how many dogs", 3, 5 + i) for i in range(4)]
    with open_server(model) as url:
        port = int(url.split(":")[2].split("/")[0])
        assert script.is_ready(port) and not script.is_ready(1)
        answers = asyncio.run(script.send_arrivals(port, "tiny", arrivals, 30))
        refused = asyncio.run(script.send_arrivals(port, "other", arrivals[:1], 30))
        cut = asyncio.run(script.send_arrivals(port, "tiny", [arrivals[0]._replace(new=100)], 0.0))
    assert [one.num_tokens for one in answers] == [5, 6, 7, 8] and all(one.is_complete for one in answers)
    assert all(one.times == sorted(one.times) and one.times[0] > 0 for one in answers)
    assert "404" in refused[0].error and cut[0].error == "not complete in time"


def test_results_are_drawn(script, tmp_path):
    pytest.importorskip("matplotlib")
    figures = {"vitrail": {"rates": [IN_TIME, {**IN_TIME, "rate": 2.0}]}, "transformers": {"rates": [IN_TIME, LATE]}}
    record = {"origin": {"device": "NVIDIA H200", "command": "python perf/goodput.py"}, "figures": figures}
    (tmp_path / "r.json").write_text(json.dumps(record))
    script.draw_results(tmp_path / "r.json", tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    assert "vitrail serve" in text and "transformers serve" in text and "NVIDIA H200" in text


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("server", ["vitrail", "transformers"])
def test_the_script_measures_a_tiny_model(server, script, monkeypatch, tmp_path):
    if server == "transformers":
        pytest.importorskip("fastapi", reason="`transformers serve` needs fastapi")
    command = ["goodput.py", "--tiny", "--servers", server, "--rates", "2", "--seconds", "3"]
    monkeypatch.setattr(sys, "argv", [*command, "--out", str(tmp_path / "r.json")])
    script.main()
    (rate,) = json.loads((tmp_path / "r.json").read_text())["figures"][server]["rates"]
    assert rate["sent"] == rate["complete"] == 6 and not rate["errors"]
