"""Goodput of `vitrail serve` and `transformers serve` under Poisson arrivals.

    python perf/goodput.py --out results.json                   # needs a CUDA device; about 5 minutes
    python perf/goodput.py --out results.json --tiny            # the same script with a tiny model, on the CPU
    python perf/goodput.py --out results.json --plot plot.png   # draws the results of --out; needs matplotlib

Both servers run one after the other, on the loopback address, with the same folder: a 1.1B Llama in bf16 with random
weights, and a tokenizer of one token a word. Clients stream `/v1/completions`, greedy: prompts of 64 to 1,024 tokens,
64 to 256 new tokens, no common prefixes. The arrivals of a rate are the same for both servers.

A request is good if its first token arrives within 1 s and the later ones take at most 50 ms on average. Goodput is
the number of good requests per second of arrivals. A server gets the next rate while at least half are good.
`transformers serve` runs with continuous batching; it needs fastapi, uvicorn, pydantic and openai.
"""

import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from decode import make_llama_config
from record import make_parser, write_record
from timing import describe_error

TTFT_SECONDS, TPOT_SECONDS = 1.0, 0.05  # the targets
RATES = (1, 2, 4, 8, 16, 32, 64, 128)  # requests per second
DRAIN_SECONDS = 8.0  # after the last arrival; later answers are cut
START_SECONDS, WARM_UP_SECONDS = 120.0, 45.0  # at most
WORDS = 32_000
MEASURED = (
    "vitrail.serve.engine",
    "vitrail.serve.engine_scheduler",
    "vitrail.serve.generation_run",
    "vitrail.serve.openai_responses",
    "vitrail.serve.openai_server",
    "vitrail.serve.served_model",
    "vitrail.generate.fused_paged_decoder",
)


class Sizes(NamedTuple):
    """Lengths of the requests: prompts and new tokens, the smallest and the largest."""

    prompt: tuple[int, int] = (64, 1024)
    new: tuple[int, int] = (64, 256)


class Arrival(NamedTuple):
    """A request of the workload, `seconds` after the start."""

    seconds: float
    prompt: str
    num_prompt_tokens: int
    new: int


@dataclass
class Answer:
    """When the chunks of an answer arrived, in seconds after its request."""

    new: int
    times: list[float] = field(default_factory=list)
    num_tokens: int = 0
    error: str | None = None

    @property
    def is_complete(self) -> bool:
        return self.error is None and self.num_tokens == self.new

    @property
    def tpot(self) -> float:
        """Mean seconds of a token after the first."""
        return (self.times[-1] - self.times[0]) / (self.new - 1)

    @property
    def is_good(self) -> bool:
        return self.is_complete and self.times[0] <= TTFT_SECONDS and self.tpot <= TPOT_SECONDS


# ---- model and workload ---------------------------------------------------------------------------------------------


def write_model(folder: Path, tiny: bool) -> None:
    """Write a Llama with random weights, and a tokenizer whose ids are words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaForCausalLM

    size: dict[str, Any] = {"max_position_embeddings": 2048, "bos_token_id": None, "eos_token_id": None}
    if tiny:
        size |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
        size |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(make_llama_config(**size)).to(torch.float32 if tiny else torch.bfloat16)
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    vocab_size = model.config.vocab_size
    del model  # the servers need the memory of the GPU
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.Fuse()
    words.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048, "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))


def make_arrivals(rate: float, seconds: float, sizes: Sizes, seed: int = 0) -> list[Arrival]:
    """Sample `rate · seconds` arrivals of a Poisson process, which are uniform given their number."""
    rng = random.Random(f"{seed} {rate}")
    arrivals = []
    for start in sorted(rng.uniform(0, seconds) for _ in range(max(1, round(rate * seconds)))):
        count = rng.randint(*sizes.prompt)
        prompt = " ".join(f"w{rng.randrange(WORDS)}" for _ in range(count))
        arrivals.append(Arrival(start, prompt, count, rng.randint(*sizes.new)))
    return arrivals


# ---- client ---------------------------------------------------------------------------------------------------------


async def read_events(reader: asyncio.StreamReader) -> Any:
    """Yield the bytes of each server-sent event of a chunked response."""
    status = await reader.readline()
    if b" 200 " not in status:
        raise OSError((status + await reader.read(2000)).decode(errors="replace"))
    while (await reader.readline()).strip():
        pass
    rest = b""
    while size := int(await reader.readline(), 16):
        rest += (await reader.readexactly(size + 2))[:-2]
        *events, rest = rest.split(b"\n\n")
        for event in events:
            yield event


async def send_request(port: int, model: str, arrival: Arrival) -> Answer:
    """Stream one completion over a connection of its own."""
    fields = {"model": model, "prompt": arrival.prompt, "max_tokens": arrival.new, "temperature": 0, "stream": True}
    body = json.dumps(fields | {"stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    answer, events, start = Answer(arrival.new), [], time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
            async for event in read_events(reader):
                answer.times.append(time.perf_counter() - start)
                events.append(event)
        finally:
            writer.close()
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
        answer.error = describe_error(error)
        return answer
    except asyncio.CancelledError:
        answer.error = "not complete in time"
        return answer
    parse_answer(answer, events)
    return answer


def parse_answer(answer: Answer, events: list[bytes]) -> None:
    """Keep the times of the events with text, and the number of tokens that the server reports."""
    times = []
    for event, seconds in zip(events, answer.times, strict=True):
        data = event.removeprefix(b"data: ")
        if data == b"[DONE]":
            continue
        fields = json.loads(data)
        if "error" in fields:
            answer.error = str(fields["error"])[:300]
        if fields.get("usage"):
            answer.num_tokens = fields["usage"]["completion_tokens"]
        if any(choice.get("text") for choice in fields.get("choices", ())):
            times.append(seconds)
    answer.times = times
    if not times and answer.error is None:
        answer.error = "no text"


async def send_arrivals(port: int, model: str, arrivals: list[Arrival], drain_seconds: float) -> list[Answer]:
    """Send each request at its time. Answers that are not complete `drain_seconds` after the last are cut."""
    start, tasks = time.perf_counter(), []
    for arrival in arrivals:
        await asyncio.sleep(max(0.0, start + arrival.seconds - time.perf_counter()))
        tasks.append(asyncio.ensure_future(send_request(port, model, arrival)))
    _, late = await asyncio.wait(tasks, timeout=drain_seconds)
    for task in late:
        task.cancel()
    return await asyncio.gather(*tasks)


# ---- servers --------------------------------------------------------------------------------------------------------


def build_command(server: str, folder: Path, port: int) -> list[str]:
    address = ["--host", "127.0.0.1", "--port", str(port)]
    if server == "vitrail":
        return [sys.executable, "-m", "vitrail", "serve", str(folder), *address, "--max-num-seqs", "256"]
    call = "import sys; from transformers.cli.transformers import main; sys.argv[0] = 'transformers'; main()"
    options = ["--continuous-batching", "--log-level", "error"]
    if not torch.cuda.is_available():  # the default is sized for the memory of a GPU
        options += ["--cb-num-blocks", "64", "--cb-max-batch-tokens", "512"]
    return [sys.executable, "-c", call, "serve", str(folder), *address, *options]


@contextmanager
def open_server(server: str, folder: Path, log: Path) -> Iterator[int]:
    """Run a server in a process of its own and return its port, once it is ready."""
    with socket.socket() as link:
        link.bind(("127.0.0.1", 0))
        port = link.getsockname()[1]
    with log.open("w") as file:
        command = build_command(server, folder, port)
        offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(command, stdout=file, stderr=file, env=offline, start_new_session=True)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not is_ready(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{server} did not start: {log.read_text()[-1500:]}")
                time.sleep(0.2)
            yield port
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def is_ready(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as link:
            link.sendall(f"GET /health HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())
            return b" 200 " in link.recv(200)
    except OSError:
        return False


# ---- measurement ----------------------------------------------------------------------------------------------------


def percentiles(values: list[float]) -> dict[str, float]:
    """Return the median and the 99th percentile, in milliseconds."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {
        "p50": 1000 * statistics.median(ordered),
        "p99": 1000 * ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
    }


def summarize(answers: list[Answer], rate: float, seconds: float) -> dict[str, Any]:
    """Return the figures of one rate."""
    complete = [one for one in answers if one.is_complete]
    good = sum(one.is_good for one in answers)
    errors = [one.error or f"{one.num_tokens} tokens instead of {one.new}" for one in answers if not one.is_complete]
    gaps = [b - a for one in complete for a, b in zip(one.times, one.times[1:], strict=False)]
    return {
        "rate": rate,
        "sent": len(answers),
        "complete": len(complete),
        "good": good,
        "good_share": good / len(answers),
        "goodput": good / seconds,
        "ttft_ms": percentiles([one.times[0] for one in answers if one.times]),
        "tpot_ms": percentiles([one.tpot for one in complete]),
        "inter_token_ms": percentiles(gaps),
        "tokens_per_s": sum(one.num_tokens for one in complete) / seconds,
        "errors": {error: errors.count(error) for error in sorted(set(errors))[:5]},
    }


def measure_server(
    server: str, folder: Path, log: Path, rates: list[float], seconds: float, sizes: Sizes
) -> dict[str, Any]:
    """Measure the rates in order, until fewer than half of the requests of a rate are good."""
    start = time.perf_counter()
    model = folder.name if server == "vitrail" else str(folder)
    with open_server(server, folder, log) as port:
        warm_up = make_arrivals(8, 3, sizes, seed=1)  # also compiles and captures what a server leaves to first use
        first = summarize(asyncio.run(send_arrivals(port, model, warm_up, WARM_UP_SECONDS)), 8, 3)
        if not first["complete"]:
            raise RuntimeError(f"{server} completes no answer: {first['errors']}; its log is {log}")
        result: dict[str, Any] = {"ready_s": time.perf_counter() - start, "warm_up": first, "rates": []}
        for rate in rates:
            answers = asyncio.run(send_arrivals(port, model, make_arrivals(rate, seconds, sizes), DRAIN_SECONDS))
            result["rates"].append(summarize(answers, rate, seconds))
            print(server, json.dumps(result["rates"][-1]), flush=True)
            if result["rates"][-1]["good_share"] < 0.5:
                break
    result["seconds"] = time.perf_counter() - start
    return result


def draw_results(source: Path, target: Path) -> None:
    """Draw goodput, time to the first token and time per token against the rate."""
    from vitrail.plots.charts import add_figure_legend, chart_style, make_panels, save_chart, set_token_axis

    record = json.loads(source.read_text())
    panels = {
        "good requests per second": lambda one: one["goodput"],
        "time to first token, median, ms": lambda one: one["ttft_ms"]["p50"],
        "time per later token, median, ms": lambda one: one["tpot_ms"].get("p50", float("nan")),
    }
    targets = (None, 1000 * TTFT_SECONDS, 1000 * TPOT_SECONDS)
    with chart_style():
        model = "tiny Llama" if "--tiny" in record["origin"]["command"] else "1.1B Llama"
        note = f"{model}, {record['origin']['device']}; targets: first token in 1 s, later ones in 50 ms on average"
        figure, all_axes = make_panels(3, "Goodput under Poisson arrivals", note, size=(300, 240), legend_height=30)
        for (title, read), limit, axes in zip(panels.items(), targets, all_axes, strict=True):
            axes.set_title(title)
            set_token_axis(axes)
            axes.set_yscale("log")
            axes.set_xlabel("requests per second")
            for server, found in record["figures"].items():
                if rates := found.get("rates"):
                    points = [(one["rate"], value) for one in rates if (value := read(one)) > 0]
                    axes.plot(*zip(*points, strict=True), marker="o", label=f"{server} serve")
            axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
            axes.yaxis.set_minor_formatter(lambda *_: "")
            if limit is None:
                rates = [one["rate"] for found in record["figures"].values() for one in found.get("rates", ())]
                axes.plot((min(rates), max(rates)), (min(rates), max(rates)), ":", color="gray", label="all good")
            else:
                axes.axhline(limit, linestyle="--", color="gray", label="target")
        add_figure_legend(figure, all_axes)
        save_chart(figure, target)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--plot", type=Path, help="draw the results of --out into this file")
    parser.add_argument("--servers", nargs="+", default=["vitrail", "transformers"])
    parser.add_argument("--rates", nargs="+", type=float, default=RATES)
    parser.add_argument("--seconds", type=float, default=12.0, help="of arrivals at each rate")
    arguments = parser.parse_args()
    if arguments.plot:
        draw_results(arguments.out, arguments.plot)
        return
    sizes = Sizes((4, 24), (4, 12)) if arguments.tiny else Sizes()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "llama"
        write_model(folder, arguments.tiny)
        for server in arguments.servers:
            try:
                log = arguments.out.with_suffix(f".{server}.log")
                result[server] = measure_server(server, folder, log, arguments.rates, arguments.seconds, sizes)
            except Exception as error:
                traceback.print_exc()
                result[server] = {"error": describe_error(error)}
            write_record(arguments.out, result, MEASURED)


if __name__ == "__main__":
    main()
