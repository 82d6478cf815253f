"""The server of OpenAI's API: streamed = unstreamed = the pipeline, and errors that name the field."""

import asyncio
import base64
import io
import json
import random
import socket
import threading
import time

import httpx2 as httpx
import numpy as np
import pytest
from PIL import Image

from helpers import randomize
from hub.shrunk_checkpoints import write_checkpoint
from serve.constrained_steps import text_pipeline
from vitrail.encoders import TextTowerConfig, ViTConfig
from vitrail.errors import ConfigError, TextError
from vitrail.generate import GREEDY, SamplingConfig
from vitrail.models.contrastive_model import ContrastiveConfig, ContrastiveModel
from vitrail.nn import AttentionConfig, BlockConfig, PlainMLPConfig
from vitrail.pipelines import ChatPipeline, EmbeddingPipeline, load
from vitrail.processing.image_preprocessor import ImagePreprocessor
from vitrail.serve import http_protocol
from vitrail.serve.engine import EngineFailedError
from vitrail.serve.engine_scheduler import EngineConfig
from vitrail.serve.generation_run import GenerationRun
from vitrail.serve.openai_schema import CompletionRequest
from vitrail.serve.openai_server import ServedModels, ServerLimits, build_app
from vitrail.serve.served_model import MediaLimits, ServedModel
from vitrail.serve.server_metrics import ServerMetrics
from vitrail.serve.server_process import open_server


def data_url(image: Image.Image, kind: str = "PNG") -> str:
    file = io.BytesIO()
    image.save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


RED, BLUE = Image.new("RGB", (40, 30), "red"), Image.effect_mandelbrot((33, 50), (-2, -1.5, 1, 1.5), 20).convert("RGB")
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "how many?"}]}


@pytest.fixture(scope="module")
def tiny():
    with (
        open_server(ServedModel("tiny", text_pipeline())) as url,
        httpx.Client(base_url=url[:-3], timeout=300) as client,
    ):
        yield client


def image_message(*images: Image.Image, text: str = "what is this?") -> list:
    parts = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


# ---- answers ----------------------------------------------------------------------------------------------------


def read_stream(stream) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def check_client(url: str, name: str, pipeline: ChatPipeline) -> None:
    """The answers of the real client equal those of the pipeline, streamed or not, greedy or sampled."""
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    for images in ((RED,), (BLUE,), (RED, BLUE)):
        messages: list = image_message(*images)
        for seed, given, sampling in ((None, {}, GREEDY), (5, {"temperature": 0.8, "top_p": 0.9}, None)):
            sampling = sampling or SamplingConfig(temperature=0.8, top_p=0.9, seed=seed)
            arguments = {"model": name, "messages": messages, "max_tokens": 16, "seed": seed, **given}
            try:
                expected = pipeline.ask(list(images), "what is this?", max_new_tokens=16, sampling=sampling)
            except TextError:  # the template takes one image
                with pytest.raises(openai.BadRequestError):
                    client.chat.completions.create(**arguments)
                continue
            complete = client.chat.completions.create(**arguments)
            assert complete.choices[0].message.content == expected
            assert complete.usage.completion_tokens <= 16
            assert read_stream(client.chat.completions.create(**arguments, stream=True)) == expected


@pytest.mark.slow
def test_the_openai_client_gets_the_answers_of_mini_vlm():
    with open_server("mini-vlm") as url:
        check_client(url, "mini-vlm", load("mini-vlm"))


@pytest.mark.parametrize(
    "name",
    [
        "llava-hf/llava-1.5-7b-hf",
        pytest.param("Qwen/Qwen3-VL-2B-Instruct", marks=pytest.mark.slow),
        pytest.param("google/gemma-3-4b-it", marks=pytest.mark.slow),
        pytest.param("google/gemma-4-31B-it", marks=pytest.mark.slow),
        pytest.param("google/paligemma-3b-pt-224", marks=pytest.mark.slow),
        # without the engine: linear attention, cross-attention, frequencies by length
        pytest.param("Qwen/Qwen3.5-small", marks=pytest.mark.slow),
        pytest.param("meta-llama/Llama-3.2-11B-Vision-Instruct", marks=pytest.mark.slow),
        pytest.param("OpenGVLab/InternVL2-2B", marks=pytest.mark.slow),
    ],
)
def test_the_openai_client_gets_the_answers_of_an_imported_checkpoint(name, tmp_path):
    folder = write_checkpoint(name, tmp_path / "shrunk")
    with open_server(folder) as url:
        check_client(url, "shrunk", load(folder))


def test_completions_stop_strings_choices_and_log_probabilities(tiny):
    pipeline = text_pipeline()
    text = pipeline.generate("a red", max_new_tokens=30)
    asked = {"model": "tiny", "prompt": "a red", "max_tokens": 30}
    answer = tiny.post("/v1/completions", json=asked).json()
    assert answer["choices"][0]["text"] == text
    stop = text[len(text) // 2 :][:3]
    stopped = tiny.post("/v1/completions", json={**asked, "stop": [stop]}).json()["choices"][0]
    assert stopped == {"index": 0, "text": text[: text.index(stop)], "logprobs": None, "finish_reason": "stop"}
    sampled = {**asked, "temperature": 1.0, "seed": 3, "n": 3, "logprobs": 2}
    several = tiny.post("/v1/completions", json=sampled).json()
    for index, choice in enumerate(several["choices"]):
        sampling = SamplingConfig(temperature=1.0, seed=3 + index)
        assert choice["text"] == pipeline.generate("a red", max_new_tokens=30, sampling=sampling)
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["tokens"])
        assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"])
    assert several["usage"]["completion_tokens"] == sum(len(c["logprobs"]["tokens"]) for c in several["choices"])


def test_information_routes(tiny):
    assert tiny.get("/health").json() == {"status": "ok"}
    (model,) = tiny.get("/v1/models").json()["data"]
    assert model["id"] == "tiny" and model["max_model_len"] == 128
    assert tiny.get("/v1/models/tiny").json() == model
    assert tiny.get("/v1/models/none").status_code == 404
    metrics = tiny.get("/metrics").text
    assert 'vitrail_num_running{model="tiny"} 0' in metrics and "vitrail_request_seconds_bucket" in metrics
    document = tiny.get("/openapi.json").json()
    assert "messages" in document["components"]["schemas"]["ChatCompletionRequest"]["properties"]


@pytest.mark.slow
def test_unified_models_answer_draw_and_edit():
    pipeline, name = load("mini"), "mini"
    with open_server("mini") as url, httpx.Client(base_url=url, timeout=600) as client:
        answer = client.post("/chat/completions", json={"model": name, "messages": image_message(BLUE)}).json()
        assert answer["choices"][0]["message"]["content"] == pipeline.ask(BLUE, "what is this?").strip()
        drawn = client.post("/images/generations", json={"model": name, "prompt": "a red dog", "seed": 3}).json()
        image = Image.open(io.BytesIO(base64.b64decode(drawn["data"][0]["b64_json"])))
        assert image.tobytes() == pipeline.draw("a red dog", seed=3).tobytes()
        mask = Image.new("RGBA", (40, 40), "black")
        mask.paste((0, 0, 0, 0), (0, 20, 40, 40))
        asked = {"model": name, "prompt": "a red dog", "image": data_url(RED), "mask": data_url(mask), "seed": 3}
        edited = client.post("/images/edits", json=asked).json()
        image = Image.open(io.BytesIO(base64.b64decode(edited["data"][0]["b64_json"])))
        assert image.tobytes() == pipeline.inpaint(RED, "a red dog", (0, 0.5, 1, 1), seed=3).tobytes()
        for change, param in (({"size": "7x7"}, "size"), ({"response_format": "url"}, "response_format")):
            wrong = client.post("/images/generations", json={"model": name, "prompt": "a dog", **change})
            assert wrong.status_code == 400 and wrong.json()["error"]["param"] == param


def test_embeddings_equal_those_of_the_pipeline():
    tower = BlockConfig(width=16, attention=AttentionConfig(heads=2), mlp=PlainMLPConfig(intermediate_size=24))
    tokenizer = text_pipeline().tokenizer
    text = TextTowerConfig(
        vocab_size=tokenizer.vocab_size, context_length=16, layers=1, block=tower, eos_token_id=tokenizer.eos_token_id
    )
    image = ViTConfig(image_size=28, patch_size=7, layers=1, block=tower, pool="mean")
    model = randomize(ContrastiveModel(ContrastiveConfig(image=image, text=text, embed_dim=8)))
    pipeline = EmbeddingPipeline(model, ImagePreprocessor.default(image), lambda: tokenizer)
    inputs = ["a red cube", {"image_url": {"url": data_url(RED)}}, "a dog"]
    with open_server(ServedModel("clip", pipeline)) as url, httpx.Client(base_url=url, timeout=300) as client:
        answer = client.post("/embeddings", json={"model": "clip", "input": inputs}).json()
        packed = client.post(
            "/embeddings", json={"model": "clip", "input": "a dog", "encoding_format": "base64"}
        ).json()
    texts, images = pipeline.encode_texts(["a red cube", "a dog"]), pipeline.encode_images([RED])
    expected = [texts[0].tolist(), images[0].tolist(), texts[1].tolist()]
    for one, vector in zip(answer["data"], expected, strict=True):
        assert one["embedding"] == pytest.approx(vector, abs=1e-6)
    vector = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    assert vector.tolist() == pytest.approx(expected[2], abs=1e-6)


# ---- bad input --------------------------------------------------------------------------------------------------

BIG = "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"x" * 100).decode()
BAD = [
    ({"model": "other"}, 404, "model"),
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 3}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, 400, "messages[0].content[0].type"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"temperature": 9}, 400, "temperature"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": 500}, 400, "max_tokens"),
    ({"n": 99}, 400, "n"),
    ({"seed": -1}, 400, "seed"),
    ({"stop": [""]}, 400, "stop[0]"),
    ({"tempreature": 1}, 400, "tempreature"),
    ({"frequency_penalty": 0.5}, 400, "frequency_penalty"),
    ({"tools": [{"type": "function"}]}, 400, "tools[0].function"),
    ({"response_format": {"type": "xml"}}, 400, "response_format.type"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"messages": [{"role": "user", "content": "x " * 400}]}, 400, "messages"),
    ({"messages": image_message(RED)}, 400, "messages"),
    ({"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/x.png"}}]}]},
     400, "messages[0].content[0].image_url.url"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": BIG}}]}]},
     400, "messages[0].content[0].image_url.url"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]},
     400, "messages[0].content[0].image_url.url"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "status", "param"), BAD)
def test_errors_name_the_field(tiny, change, status, param):
    answer = tiny.post("/v1/chat/completions", json={**CHAT, **change})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param) and error["message"]
    assert tiny.post("/v1/chat/completions", json={**CHAT, "max_tokens": 2}).status_code == 200


def test_other_requests_get_errors_of_the_api(tiny):
    for method, path, body, status in (
        ("POST", "/v1/chat/completions", b"{", 400),
        ("POST", "/v1/chat/completions", b"[" * 100_000, 400),
        ("POST", "/v1/chat/completions", b"\xff\xfe", 400),
        ("GET", "/v1/chat/completions", b"", 405),
        ("POST", "/v1/nothing", b"{}", 404),
        ("POST", "/v1/embeddings", json.dumps({"model": "tiny", "input": "x"}).encode(), 400),
        ("POST", "/v1/images/edits", b"--x--", 400),
    ):
        answer = tiny.request(method, path, content=body)
        assert answer.status_code == status and answer.json()["error"]["message"]
    form = {"content-type": "multipart/form-data; boundary=x"}
    assert tiny.post("/v1/images/edits", content=b"--x--", headers=form).status_code == 400


def test_images_have_limits(tmp_path):
    folder = write_checkpoint("llava-hf/llava-1.5-7b-hf", tmp_path / "shrunk")
    model = ServedModel("tiny", load(folder), limits=MediaLimits(max_items=2, max_bytes=4000, max_pixels=100 * 100))
    with open_server(model) as url, httpx.Client(base_url=url, timeout=300) as client:
        noise = Image.effect_noise((80, 80), 90)
        for images, match in (
            ((RED,) * 3, "more than 2 images"),
            ((Image.new("L", (101, 100)),), "limit of 10,000"),
            ((noise,), "more than 4,000 bytes"),
        ):
            answer = client.post("/chat/completions", json={"model": "tiny", "messages": image_message(*images)})
            assert answer.status_code == 400 and match in answer.json()["error"]["message"]


def mutate(value, rng: random.Random):
    """Change one place of a JSON value."""
    junk = [None, "", "x", -1, 0, 1e308, True, [], {}, [[]], "data:image/png;base64,AAAA", 2**70, "\ud800", "é" * 50]
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        roll = rng.random()
        if roll < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if roll < 0.2:
            return {**value, rng.choice(["n", "stop", "junk", "seed", "logprobs", "max_tokens"]): rng.choice(junk)}
        return {**value, key: mutate(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        index = rng.randrange(len(value))
        return [*value[:index], mutate(value[index], rng), *value[index + 1 :]]
    return rng.choice(junk)


TOOL_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "description": "x", "parameters": TOOL_SCHEMA}}
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": TOOL_SCHEMA}}


def fuzz(client: httpx.Client, count: int, seed: int) -> None:
    rng = random.Random(seed)
    seeds = [
        (
            "/v1/chat/completions",
            {**CHAT, "max_tokens": 3, "temperature": 0.5, "stop": ["a"], "n": 1, "logprobs": True},
        ),
        ("/v1/chat/completions", {"model": "tiny", "messages": image_message(RED), "max_tokens": 2, "stream": False}),
        ("/v1/completions", {"model": "tiny", "prompt": "a dog", "max_tokens": 2, "seed": 1, "top_k": 3}),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 3, "response_format": JSON_FORMAT}),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 3, "tools": [TOOL], "tool_choice": "auto"}),
        ("/v1/completions", {"model": "tiny", "prompt": [1, 2], "max_tokens": 2, "min_p": 0.1}),
        ("/v1/embeddings", {"model": "tiny", "input": ["a", "b"]}),
        ("/v1/images/generations", {"model": "tiny", "prompt": "a dog"}),
    ]
    statuses = set()
    for _ in range(count):
        path, body = rng.choice(seeds)
        for _ in range(rng.randint(1, 3)):
            body = mutate(body, rng)
        if isinstance(body, dict) and rng.random() < 0.7:
            body.setdefault("max_tokens", 2)
        data = json.dumps(body).encode()
        if rng.random() < 0.2:
            cut = rng.randrange(len(data))
            data = data[:cut] + bytes([rng.randrange(256)]) + data[cut + rng.randrange(3) :]
        answer = client.post(path, content=data)
        statuses.add(answer.status_code)
        assert answer.status_code < 500, (answer.status_code, answer.text, data)
        assert answer.status_code == 200 or answer.json()["error"]["message"]
    assert {200, 400} <= statuses


def test_fuzzed_requests_give_no_500(tiny):
    fuzz(tiny, 100, seed=0)
    assert tiny.post("/v1/chat/completions", json={**CHAT, "max_tokens": 2}).status_code == 200


@pytest.mark.slow
def test_a_thousand_fuzzed_requests_give_no_500(tiny):
    fuzz(tiny, 1000, seed=2)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_thousand_fuzzed_requests_give_no_500(tiny):
    fuzz(tiny, 10_000, seed=1)


# ---- limits -----------------------------------------------------------------------------------------------------


def test_keys_hosts_and_body_sizes_are_checked():
    model = ServedModel("tiny", text_pipeline())
    limits = ServerLimits(max_body_bytes=2000)
    with (
        open_server(model, api_keys=["secret", "other"], limits=limits) as url,
        httpx.Client(base_url=url[:-3], timeout=300) as client,
    ):
        for given, status in ((None, 401), ("Bearer wrong", 401), ("Basic secret", 401), ("Bearer other", 200)):
            headers = {} if given is None else {"Authorization": given}
            assert client.get("/v1/models", headers=headers).status_code == status
        assert client.get("/health").status_code == 200
        key = {"Authorization": "Bearer secret"}
        assert client.post("/v1/completions", content=b"x" * 2001, headers=key).status_code == 413
        chunks = (b"x" * 500 for _ in range(10))
        assert client.post("/v1/completions", content=chunks, headers=key).status_code == 413
    with (
        open_server(ServedModel("tiny", text_pipeline())) as url,
        httpx.Client(base_url=url[:-3], timeout=300) as client,
    ):
        assert client.get("/v1/models", headers={"Host": "evil.example"}).status_code == 403
        assert client.get("/v1/models", headers={"Origin": "http://evil.example"}).status_code == 403


def test_a_full_queue_gets_429():
    model = ServedModel("tiny", text_pipeline(), EngineConfig(max_num_seqs=1, max_waiting=1, page_size=4))
    app = build_app(ServedModels([model]))  # the engine does not run, so requests stay
    from starlette.testclient import TestClient

    assert model.engine is not None
    with TestClient(app) as client:
        thread = threading.Thread(target=lambda: client.post("/v1/chat/completions", json=CHAT))
        thread.start()
        while not model.engine.stats.num_waiting:
            time.sleep(0.01)
        answer = client.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) > 0
        model.engine.start()
        thread.join()
        model.engine.close()


def wait_until(is_so) -> bool:
    for _ in range(30_000):
        if is_so():
            return True
        time.sleep(0.01)
    return False


def test_a_failed_device_gives_503():
    model = ServedModel("tiny", text_pipeline())
    with open_server(model) as url, httpx.Client(base_url=url[:-3], timeout=60) as client:
        assert client.get("/health").status_code == 200
        model.engine.failure = EngineFailedError("the device of the model failed", "restart the server")
        for answer in (client.get("/health"), client.post("/v1/chat/completions", json=CHAT)):
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_failed"


def test_tokens_that_wait_are_one_chunk():
    """A loop that is behind sends several tokens at once: the text and the counts are those of single ones."""

    async def run(pause: float) -> tuple[list[str], str, int]:
        prepared = model.prepare_completion(CompletionRequest(model="tiny", prompt="how", max_tokens=20))
        generation = GenerationRun(model, prepared, ServerMetrics(), 60)
        generation.start("a")
        while pause and generation.sequences[0].end is None:
            await asyncio.sleep(pause)
        await asyncio.sleep(pause)
        deltas = [delta async for _, delta in generation.deltas()]
        texts = [one.text for one in deltas]
        return texts, deltas[-1].finish_reason, generation.num_completion_tokens

    model = ServedModel("tiny", text_pipeline())
    model.engine.start()
    late, early = asyncio.run(run(0.05)), asyncio.run(run(0.0))
    model.engine.close()
    assert len(late[0]) == 1 and "".join(early[0]) == late[0][0] and early[1:] == late[1:] == ("length", 20)


def test_a_disconnect_cancels_the_request():
    model = ServedModel("tiny", text_pipeline(context=20_000), EngineConfig(page_size=64))
    engine = model.engine
    assert engine is not None
    with open_server(model) as url:
        for stream in (True, False):
            asked = {**CHAT, "max_tokens": 15_000, "stream": stream, "temperature": 1.0, "seed": 1}
            link = socket.create_connection(("127.0.0.1", int(url.split(":")[2].split("/")[0])), timeout=300)
            body = json.dumps(asked).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            link.sendall(head.encode() + body)
            assert wait_until(lambda: engine.stats.num_running == 1)
            link.close()
            assert wait_until(lambda: engine.stats.num_running == 0)
        assert engine.num_generated_tokens < 15_000


def test_clients_that_send_nothing_are_disconnected(monkeypatch):
    monkeypatch.setattr(http_protocol.HeaderDeadlineProtocol, "request_seconds", 0.3)
    limits = ServerLimits(body_seconds=0.3)
    with open_server(ServedModel("tiny", text_pipeline()), limits=limits) as url:
        address = ("127.0.0.1", int(url.split(":")[2].split("/")[0]))
        for sent in (b"", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"):
            with socket.create_connection(address, timeout=300) as link:
                link.sendall(sent)
                assert link.recv(100) == b""
        with socket.create_connection(address, timeout=300) as link:
            link.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            assert b" 408 " in link.recv(1000)
        monkeypatch.setattr(http_protocol.HeaderDeadlineProtocol, "request_seconds", 300)
        with httpx.Client(base_url=url[:-3], timeout=300) as client:
            assert client.get("/health").status_code == 200


def test_eight_clients_are_served_fairly(monkeypatch):
    model = ServedModel("mini-vlm", load("mini-vlm"), EngineConfig(max_num_seqs=4))
    finished: list[str] = []
    engine, all_wait = model.engine, threading.Event()
    assert engine is not None
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: all_wait.wait() and step())
    with open_server(model) as url, httpx.Client(base_url=url, timeout=600) as client:
        asked = {"model": "mini-vlm", "messages": image_message(RED, text="how many dogs?"), "max_tokens": 8}

        def ask(user: str) -> None:
            assert client.post("/chat/completions", json={**asked, "user": user}).status_code == 200
            finished.append(user)

        flood = [threading.Thread(target=ask, args=("flood",)) for _ in range(24)]
        others = [threading.Thread(target=ask, args=(str(number),)) for number in range(7)]
        for thread in [*flood, *others]:
            thread.start()
        assert wait_until(lambda: engine.stats.num_waiting == 31)
        all_wait.set()
        for thread in [*flood, *others]:
            thread.join()
    assert len(finished) == 31
    last_other = max(place for place, user in enumerate(finished) if user != "flood")
    assert "flood" in finished[last_other:]  # the flood does not delay the others to its end


@pytest.mark.slow
def test_two_hundred_clients_lose_no_request():
    model = ServedModel("tiny", text_pipeline())
    statuses: list[int] = []
    stop = time.monotonic() + 20

    def ask(url: str, number: int) -> None:
        rng = random.Random(number)
        with httpx.Client(base_url=url, timeout=600) as client:
            while time.monotonic() < stop:
                asked = {**CHAT, "max_tokens": rng.randint(1, 20), "stream": rng.random() < 0.5, "user": str(number)}
                statuses.append(client.post("/chat/completions", json=asked).status_code)

    with open_server(model) as url:
        threads = [threading.Thread(target=ask, args=(url, number)) for number in range(200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(statuses) >= 200 and set(statuses) == {200}
    assert model.engine is not None
    assert model.engine.stats.pages_used == 0 and not model.engine.scheduler.clients


def test_models_that_cannot_be_served_are_refused():
    with pytest.raises(ConfigError, match="no model"):
        ServedModels([])
    model = ServedModel("tiny", text_pipeline())
    with pytest.raises(ConfigError, match="same name"):
        ServedModels([model, model])
