"""Responses of OpenAI's API: complete answers, chunks of streamed ones, and the OpenAPI document."""

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from vitrail.serve.engine_request import TokenLogprobs
from vitrail.serve.generation_run import ChoiceResult, GenerationRun
from vitrail.serve.openai_schema import (
    APIError,
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    ImageEditRequest,
    ImageRequest,
)
from vitrail.serve.served_model import ServedModel
from vitrail.serve.tool_calls import ParsedToolCall

REQUEST_TYPES = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/images/generations": ImageRequest,
    "/v1/images/edits": ImageEditRequest,
}
GET_PATHS = ("/v1/models", "/health", "/metrics", "/openapi.json")

encode_json = msgspec.json.encode


def _usage(run: GenerationRun) -> dict[str, Any]:
    prompt, completion = run.num_prompt_tokens, run.num_completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": run.num_cached_tokens},
    }


def _token_text(model: ServedModel, id: int) -> str:
    tokenizer = model.pipeline.tokenizer
    return tokenizer.decode([id]) or tokenizer.id_to_token(id) or ""


def _chat_logprobs(model: ServedModel, logprobs: Sequence[tuple[int, TokenLogprobs]]) -> dict[str, Any]:
    def entry(id: int, value: float) -> dict[str, Any]:
        text = _token_text(model, id)
        return {"token": text, "logprob": max(value, -9999.0), "bytes": list(text.encode())}

    content = [
        {
            **entry(id, one.logprob),
            "top_logprobs": [entry(*pair) for pair in zip(one.top_ids, one.top_logprobs, strict=True)],
        }
        for id, one in logprobs
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(model: ServedModel, logprobs: Sequence[tuple[int, TokenLogprobs]]) -> dict[str, Any]:
    tokens = [_token_text(model, id) for id, _ in logprobs]
    offsets = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
    top = [
        {_token_text(model, id): value for id, value in zip(one.top_ids, one.top_logprobs, strict=True)}
        for _, one in logprobs
    ]
    return {
        "tokens": tokens,
        "token_logprobs": [max(one.logprob, -9999.0) for _, one in logprobs],
        "top_logprobs": top,
        "text_offset": offsets,
    }


def _tool_calls(calls: Sequence[ParsedToolCall]) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{uuid.uuid4().hex}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]


def _chat_message(result: ChoiceResult) -> dict[str, Any]:
    calls = {"tool_calls": _tool_calls(result.tool_calls)} if result.tool_calls else {}
    return {"role": "assistant", "content": result.text if result.text or not calls else None, "refusal": None, **calls}


def encode_chat(
    id: str, request: ChatCompletionRequest, results: Sequence[ChoiceResult], run: GenerationRun, model: ServedModel
) -> bytes:
    """Encode a complete chat answer."""
    choices = [
        {
            "index": index,
            "message": _chat_message(one),
            "logprobs": _chat_logprobs(model, one.logprobs) if request.logprobs else None,
            "finish_reason": one.finish_reason,
        }
        for index, one in enumerate(results)
    ]
    return encode_json(_envelope(id, "chat.completion", model) | {"choices": choices, "usage": _usage(run)})


def encode_completion(
    id: str, request: CompletionRequest, results: Sequence[ChoiceResult], run: GenerationRun, model: ServedModel
) -> bytes:
    """Encode a complete text continuation."""
    choices = [
        {
            "index": index,
            "text": one.text,
            "logprobs": None if request.logprobs is None else _completion_logprobs(model, one.logprobs),
            "finish_reason": one.finish_reason,
        }
        for index, one in enumerate(results)
    ]
    return encode_json(_envelope(id, "text_completion", model) | {"choices": choices, "usage": _usage(run)})


def _envelope(id: str, kind: str, model: ServedModel) -> dict[str, Any]:
    return {"id": id, "object": kind, "created": int(time.time()), "model": model.name}


async def stream_chunks(
    id: str, request: ChatCompletionRequest | CompletionRequest, run: GenerationRun, model: ServedModel
) -> AsyncIterator[bytes]:
    """Yield the server-sent events of an answer. An error after the start is an event too."""
    is_chat = isinstance(request, ChatCompletionRequest)
    envelope = _envelope(id, "chat.completion.chunk" if is_chat else "text_completion", model)
    with_usage = request.stream_options is not None and request.stream_options.include_usage
    usage = {"usage": None} if with_usage else {}

    def event(choices: list[Any], fields: dict[str, Any] = usage) -> bytes:
        return b"data: " + encode_json({**envelope, "choices": choices, **fields}) + b"\n\n"

    started: set[int] = set()
    try:
        async for choice, delta in run.deltas():
            logprobs: dict[str, Any] | None = None
            if delta.logprobs:
                logprobs = (_chat_logprobs if is_chat else _completion_logprobs)(model, delta.logprobs)
            if not delta.text and not delta.finish_reason and logprobs is None:
                continue
            found: dict[str, Any] = {"index": choice, "logprobs": logprobs, "finish_reason": delta.finish_reason}
            if is_chat:
                role = {} if choice in started else {"role": "assistant"}
                started.add(choice)
                calls: dict[str, Any] = {}
                if delta.tool_calls:
                    calls["tool_calls"] = [{"index": i, **one} for i, one in enumerate(_tool_calls(delta.tool_calls))]
                content = {**role, "content": delta.text} if delta.text or role else {}
                found["delta"] = {**content, **calls}
            else:
                found["text"] = delta.text
            yield event([found])
    except APIError as error:
        yield b"data: " + encode_json(error.to_body()) + b"\n\n"
        return
    if with_usage:
        yield event([], {"usage": _usage(run)})
    yield b"data: [DONE]\n\n"


def build_openapi() -> dict[str, Any]:
    """Build the OpenAPI document of the server from the types of its requests."""
    kinds = list(REQUEST_TYPES.values())
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    answers = {"200": {"description": "the answer"}, "4XX": {"description": "an error that names the field"}}
    paths: dict[str, Any] = {
        path: {
            "post": {
                "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
                "responses": answers,
            }
        }
        for path, schema in zip(REQUEST_TYPES, schemas, strict=True)
    }
    paths |= {path: {"get": {"responses": {"200": {"description": "the answer"}}}} for path in GET_PATHS}
    bearer = {"bearer": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Vitrail", "version": "1"},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": bearer},
        "security": [{"bearer": []}],
    }
