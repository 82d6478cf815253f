"""Server of OpenAI's API: routes, authentication, limits, and streamed answers.

app = build_app(ServedModels([ServedModel.load("mini-vlm")]))
"""

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitrail.errors import ConfigError
from vitrail.serve.client_fairness import QueueFullError
from vitrail.serve.engine import EngineFailedError
from vitrail.serve.generation_run import GenerationRun
from vitrail.serve.image_answers import draw_images, edit_image, embed_inputs, encode_vector, parse_form
from vitrail.serve.loopback_requests import is_loopback_request
from vitrail.serve.openai_responses import build_openapi, encode_chat, encode_completion, encode_json, stream_chunks
from vitrail.serve.openai_schema import (
    APIError,
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    ImageEditRequest,
    ImageRequest,
    parse_request,
)
from vitrail.serve.remote_images import RemoteImageReader, download_images, find_remote_images
from vitrail.serve.served_model import ServedModel
from vitrail.serve.server_metrics import ServerMetrics

OPEN_PATHS = ("/health",)  # without a key


@dataclass(frozen=True)
class ServerLimits:
    """Limits of the server.

    max_body_bytes    bytes of a request
    max_in_flight     requests at the same time; more get 429
    body_seconds      longest wait for the next bytes of a request
    send_seconds      longest wait for a client to take the next bytes of a response
    request_seconds   longest time of a request
    """

    max_body_bytes: int = 64 << 20
    max_in_flight: int = 512
    body_seconds: float = 20.0
    send_seconds: float = 30.0
    request_seconds: float = 600.0


@dataclass
class ServedModels:
    """The models of a server, its keys and limits."""

    models: Sequence[ServedModel]
    api_keys: Sequence[str] = ()
    limits: ServerLimits = ServerLimits()
    is_local: bool = False  # whether the server listens on the loopback address
    remote_images: RemoteImageReader | None = None  # None: images are data URLs only
    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    created: int = field(default_factory=lambda: int(time.time()))
    in_flight: int = 0

    def __post_init__(self) -> None:
        names = [name for model in self.models for name in model.names]
        if not names:
            raise ConfigError("there is no model to serve", "name at least one")
        if len(set(names)) != len(names):
            raise ConfigError(f"two models have the same name: {', '.join(names)}", "rename one of their folders")
        self.preparation = asyncio.Semaphore(4)  # requests whose images are decoded at the same time
        self.downloads = asyncio.Semaphore(16)  # requests whose remote images are read at the same time

    def start(self) -> None:
        """Start the engines. On a GPU, this captures their CUDA graphs first."""
        for model in self.models:
            if model.engine is not None:
                model.engine.warm_up()
                model.engine.start()

    def close(self, drain_seconds: float = 0.0) -> None:
        """Stop the engines. Running requests get `drain_seconds` to end."""
        for model in self.models:
            if model.engine is not None:
                model.engine.close(drain_seconds)

    def find(self, name: str, endpoint: str) -> ServedModel:
        """Return the model of a request."""
        for model in self.models:
            if name in model.names:
                if endpoint in model.endpoints:
                    return model
                raise APIError(f"{name} serves {', '.join(model.endpoints)} and not {endpoint}", param="model")
        known = ", ".join(name for model in self.models for name in model.names)
        raise APIError(
            f"there is no model {name[:200]!r}; models: {known}", status=404, param="model", code="model_not_found"
        )

    def find_client(self, request: Request, user: str | None) -> str:
        """Name the client for fair scheduling: its key or address, and the user that it names."""
        key = request.headers.get("authorization", "")
        host = request.client.host if request.client else ""
        return f"{key or host} {user or ''}"

    def accepts_key(self, headers: Headers) -> bool:
        """Whether a request has one of the keys. The time does not depend on how much of a key is right."""
        if not self.api_keys:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        found = False
        for key in self.api_keys:
            found |= hmac.compare_digest(given.strip().encode(), key.encode())
        return found and scheme.lower() == "bearer"


class GuardMiddleware:
    """Middleware that checks keys, counts requests, limits them, and turns every error into a response of the API."""

    def __init__(self, app: ASGIApp, served: ServedModels):
        self.app, self.served = app, served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        served, started = self.served, time.monotonic()
        status = 0

        async def guarded_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-content-type-options", b"nosniff")]
            async with asyncio.timeout(served.limits.send_seconds):
                await send(message)

        served.in_flight += 1
        try:
            await self._handle(scope, receive, guarded_send)
        except (ClientDisconnect, TimeoutError, OSError):
            if not status:  # the client may still read
                await build_error_response(APIError("the request was too slow", status=408))(scope, receive, send)
        except APIError as error:
            if status:
                raise  # a response has started
            await build_error_response(error)(scope, receive, guarded_send)
        except Exception:
            logging.getLogger(__name__).exception("a request failed")
            if not status:
                error = APIError("internal error; see the log of the server", status=500)
                await build_error_response(error)(scope, receive, guarded_send)
        finally:
            served.in_flight -= 1
            route = scope.get("route")
            served.metrics.count_request(getattr(route, "path", "other"), status)
            served.metrics.observe("request_seconds", time.monotonic() - started)
        return None

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        served, headers = self.served, Headers(scope=scope)
        if served.is_local and not served.api_keys and not is_loopback_request(headers):
            raise APIError("this server accepts requests from localhost only", status=403)
        if scope["path"] not in OPEN_PATHS:
            if not served.accepts_key(headers):
                raise APIError("the API key is missing or wrong", status=401, code="invalid_api_key")
            if served.in_flight > served.limits.max_in_flight:
                raise APIError("too many requests at the same time", status=429, retry_after=1)
        await self.app(scope, receive, send)


def build_queue_error(error: QueueFullError) -> APIError:
    return APIError(error.problem, status=429, code="queue_full", retry_after=2)


def build_error_response(error: APIError) -> Response:
    headers = {"Retry-After": str(error.retry_after)} if error.retry_after else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(encode_json(error.to_body()), error.status, headers, "application/json")


async def read_body(request: Request, limits: ServerLimits) -> bytes:
    """Read the body of a request, within its limits of size and time."""
    length = request.headers.get("content-length", "0")
    too_large = APIError(f"the body has more than {limits.max_body_bytes:,} bytes", status=413)
    if length.isdecimal() and int(length[:20]) > limits.max_body_bytes:
        raise too_large
    parts, size, stream = [], 0, request.stream().__aiter__()
    while True:
        try:
            part = await asyncio.wait_for(anext(stream), limits.body_seconds)
        except StopAsyncIteration:
            return b"".join(parts)
        size += len(part)
        if size > limits.max_body_bytes:
            raise too_large
        parts.append(part)


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStreamResponse(Response):
    """Server-sent events of a run. The run is cancelled when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, run: GenerationRun, chunks: AsyncIterator[bytes]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.run, self.chunks = run, chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.ensure_future(wait_for_disconnect(receive))
        watch.add_done_callback(lambda _: self.run.cancel())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for chunk in self.chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self.run.cancel()
            watch.cancel()


def build_app(served: ServedModels) -> Starlette:
    """Build the web application."""
    limits = served.limits

    async def prepare(function: Callable[..., Any], *arguments: Any) -> Any:
        """Prepare a request in a thread."""
        async with served.preparation:
            return await asyncio.to_thread(function, *arguments)

    async def compute(request: Request, function: Callable[..., Any], model: ServedModel, parsed: Any) -> Any:
        """Answer a request of a model without an engine in a thread, when it is the client's turn."""
        try:
            model.turns.check_queue()
        except QueueFullError as error:
            raise build_queue_error(error) from None
        async with model.turns.take(served.find_client(request, parsed.user)):
            return await asyncio.to_thread(function, model, parsed)

    async def download(request: ChatCompletionRequest | EmbeddingRequest, model: ServedModel) -> None:
        """Read the remote images of a request in a thread, if the server allows them."""
        if served.remote_images is not None and next(find_remote_images(request), None) is not None:
            async with served.downloads:
                await asyncio.to_thread(download_images, request, served.remote_images, model.limits.max_items)

    async def generate(request: Request, kind: Any, endpoint: str, prepare_name: str) -> Response:
        asked = parse_request(kind, await read_body(request, limits))
        model = served.find(asked.model, endpoint)
        if isinstance(asked, ChatCompletionRequest):
            await download(asked, model)
        if asked.stream_options is not None and not asked.stream:
            raise APIError("stream_options needs stream", param="stream_options")
        prepared = await prepare(getattr(model, prepare_name), asked)
        run = GenerationRun(model, prepared, served.metrics, limits.request_seconds)
        try:
            run.start(served.find_client(request, asked.user))
        except QueueFullError as error:
            raise build_queue_error(error) from None
        except EngineFailedError as error:
            raise APIError(str(error), status=503, code="engine_failed") from None
        id = f"{'chatcmpl' if endpoint.startswith('chat') else 'cmpl'}-{uuid.uuid4().hex}"
        if asked.stream:
            return EventStreamResponse(run, stream_chunks(id, asked, run, model))
        watch = asyncio.ensure_future(wait_for_disconnect(request.receive))
        watch.add_done_callback(lambda _: run.cancel())
        try:
            results = await run.collect()
        finally:
            watch.cancel()
            run.cancel()
        encode = encode_chat if endpoint.startswith("chat") else encode_completion
        return Response(encode(id, asked, results, run, model), media_type="application/json")

    async def chat(request: Request) -> Response:
        return await generate(request, ChatCompletionRequest, "chat/completions", "prepare_chat")

    async def complete(request: Request) -> Response:
        return await generate(request, CompletionRequest, "completions", "prepare_completion")

    async def embed(request: Request) -> Response:
        asked = parse_request(EmbeddingRequest, await read_body(request, limits))
        model = served.find(asked.model, "embeddings")
        await download(asked, model)
        vectors, tokens = await compute(request, embed_inputs, model, asked)
        data = [
            {"object": "embedding", "index": i, "embedding": encode_vector(vector, asked.encoding_format)}
            for i, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return _json({"object": "list", "data": data, "model": model.name, "usage": usage})

    async def draw(request: Request) -> Response:
        asked = parse_request(ImageRequest, await read_body(request, limits))
        model = served.find(asked.model, "images/generations")
        return _json(await compute(request, draw_images, model, asked))

    async def edit(request: Request) -> Response:
        body, kind = await read_body(request, limits), request.headers.get("content-type", "")
        asked = parse_form(body, kind) if kind.startswith("multipart/") else parse_request(ImageEditRequest, body)
        model = served.find(asked.model, "images/edits")
        return _json(await compute(request, edit_image, model, asked))

    def describe(model: ServedModel, name: str) -> dict[str, Any]:
        found = {"id": name, "object": "model", "created": served.created, "owned_by": "vitrail"}
        context = {} if model.engine is None else {"max_model_len": model.engine.max_request_tokens}
        return {**found, "endpoints": list(model.endpoints), **context}

    async def list_models(request: Request) -> Response:
        return _json(
            {"object": "list", "data": [describe(model, name) for model in served.models for name in model.names]}
        )

    async def show_model(request: Request) -> Response:
        name = request.path_params["name"]
        for model in served.models:
            if name in model.names:
                return _json(describe(model, name))
        raise APIError(f"there is no model {name[:200]!r}", status=404, param="model", code="model_not_found")

    async def health(request: Request) -> Response:
        if failed := [one.name for one in served.models if one.engine is not None and one.engine.failure is not None]:
            raise APIError(f"the device of {', '.join(failed)} failed", status=503, code="engine_failed")
        return _json({"status": "ok"})

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(
            served.metrics.render(read_gauges(served.models)), media_type="text/plain; version=0.0.4"
        )

    async def openapi(request: Request) -> Response:
        return _json(build_openapi())

    async def on_api_error(request: Request, error: Any) -> Response:
        return build_error_response(error)

    async def on_http_error(request: Request, error: Any) -> Response:
        return build_error_response(
            APIError(f"{request.method} {request.url.path[:200]}: {error.detail}", status=error.status_code)
        )

    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/embeddings", embed, methods=["POST"]),
        Route("/v1/images/generations", draw, methods=["POST"]),
        Route("/v1/images/edits", edit, methods=["POST"]),
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", show_model),
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/openapi.json", openapi),
    ]
    app = Starlette(routes=routes, exception_handlers={APIError: on_api_error, HTTPException: on_http_error})
    app.add_middleware(GuardMiddleware, served=served)
    return app


def _json(value: Any) -> Response:
    return Response(encode_json(value), media_type="application/json")


def read_gauges(models: Sequence[ServedModel]) -> dict[str, tuple[str, dict[str, float]]]:
    """Return the counts of the engines: name → type and values by model."""
    stats = {model.name: model.engine.stats._asdict() for model in models if model.engine is not None}
    names = next(iter(stats.values()), {})
    gauges = ("num_running", "num_waiting", "pages_used", "pages_total")
    return {
        name if name in gauges else f"{name}_total": (
            "gauge" if name in gauges else "counter",
            {model: float(own[name]) for model, own in stats.items()},
        )
        for name in names
    }
