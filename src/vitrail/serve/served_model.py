"""A model of the server: a pipeline, its engine, and how requests of OpenAI's API become prompts."""

import base64
import binascii
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from vitrail.errors import ConfigError, VitrailError
from vitrail.generate.sampling import GREEDY
from vitrail.generate.stopping import StopStringFilter
from vitrail.generate.vlm_generation import stream_tokens_from_streams
from vitrail.models.video_inputs import Video
from vitrail.pipelines.chat import DEFAULT_MAX_NEW_TOKENS, ChatPipeline
from vitrail.pipelines.embedding import EmbeddingPipeline
from vitrail.pipelines.loading import load
from vitrail.pipelines.text import TextPipeline
from vitrail.pipelines.unified import UnifiedPipeline
from vitrail.processing.chat_template import ChatTemplate
from vitrail.processing.image_loading import load_image
from vitrail.processing.tokenizer import Tokenizer
from vitrail.serve.client_fairness import FairTurns
from vitrail.serve.engine import Engine
from vitrail.serve.engine_request import EnginePrompt, SamplingParams, TokenEvent, TokenLogprobs
from vitrail.serve.engine_scheduler import EngineConfig
from vitrail.serve.model_runner import build_engine_prompt, explain_unsupported
from vitrail.serve.openai_schema import (
    APIError,
    ChatCompletionRequest,
    CompletionRequest,
    ContentPart,
    ImagePart,
    ImageURL,
    TextPart,
    VideoFramesPart,
    to_api_error,
)
from vitrail.serve.token_constraints import ConstraintCompiler, TokenConstraint
from vitrail.serve.tool_calls import (
    ParsedToolCall,
    ToolCallFormat,
    ToolCallParser,
    build_answer_grammar,
    build_template_message,
    build_template_tools,
    build_tool_grammar,
    check_message_roles,
    find_tool_call_format,
    select_tools,
)

DATA_URL = re.compile(r"data:([\w.+/-]*)(?:;[\w.=+/-]+)*?;base64,", re.ASCII)


class MediaLimits(NamedTuple):
    """Limits of the images and videos of one request."""

    max_items: int = 64
    max_bytes: int = 20 << 20
    max_pixels: int = 1 << 24


class TextDelta(NamedTuple):
    """New text of a choice, its tokens with their log-probabilities, and the finish reason after the last."""

    text: str
    num_tokens: int = 0
    logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
    finish_reason: str | None = None
    error: VitrailError | None = None
    tool_calls: tuple[ParsedToolCall, ...] = ()


class ChoiceText:
    """Text of one choice from its tokens: stop strings, tool calls, and for chats no white space at both ends."""

    def __init__(
        self,
        prompt: EnginePrompt,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str],
        *,
        strip: bool,
        tool_format: ToolCallFormat | None = None,
    ):
        self.parser = None if tool_format is None else ToolCallParser(tool_format)
        self.filter = StopStringFilter(tokenizer, prompt.ids, stop_strings)
        self.strip, self.held, self.started, self.done = strip, "", False, False

    def push(self, events: Sequence[TokenEvent], stop_ids: Sequence[int]) -> TextDelta:
        """Return the text that new tokens complete. Tokens after the end are dropped."""
        text, count, logprobs = "", 0, []
        for event in events:
            if self.done:
                break
            stopped = False
            if event.id is not None:
                count += 1
                if event.logprobs is not None:
                    logprobs.append((event.id, event.logprobs))
                if event.id not in stop_ids:
                    piece, stopped = self.filter.push(event.id)
                    text += piece
            if event.end is not None or stopped:
                self.done = True
                text += "" if stopped else self.filter.finish()
                calls: list[ParsedToolCall] = []
                if self.parser is not None:
                    text = self.parser.push(text)
                    held, calls = self.parser.finish()
                    text += held
                reason = "length" if event.end == "length" and not stopped else "tool_calls" if calls else "stop"
                return TextDelta(self._strip(text), count, tuple(logprobs), reason, event.error, tuple(calls))
        text = text if self.parser is None else self.parser.push(text)
        return TextDelta(self._strip(text), count, tuple(logprobs))

    def _strip(self, text: str) -> str:
        """Hold back white space until other text follows it."""
        if not self.strip:
            return text
        text = self.held + text
        if not self.started:
            text = text.lstrip()
        self.started = self.started or bool(text)
        kept = text.rstrip()
        self.held = text[len(kept) :]
        return kept


@dataclass
class PreparedGeneration:
    """A request that is ready for the engine."""

    prompt: EnginePrompt
    params: list[SamplingParams]  # of each choice
    choices: list[ChoiceText]
    constraints: list[TokenConstraint | None]


@dataclass
class PreparedText:
    """A request of a model without an engine: `run` yields the pieces of its answer. One runs at a time."""

    run: Callable[[], Iterator[TextDelta]]
    num_prompt_tokens: int


def find_stop_ids(pipeline: ChatPipeline | TextPipeline) -> Sequence[int]:
    """Return the ids that end an answer."""
    return pipeline.stop_ids if isinstance(pipeline, ChatPipeline) else pipeline.tokenizer.stop_ids


class ServedModel:
    """A pipeline under its name. Decoders and most VLMs have an engine."""

    def __init__(
        self,
        name: str,
        pipeline: Any,
        engine_config: EngineConfig | None = None,
        limits: MediaLimits | None = None,
        adapters: Mapping[str, str | Path] | None = None,
    ):
        self.name, self.pipeline, self.limits = name, pipeline, limits or MediaLimits()
        # Pipelines without an engine answer one request at a time.
        self.turns = FairTurns((engine_config or EngineConfig()).max_waiting)
        self.lock = threading.Lock()  # a turn can end before its thread, at the end of the event loop
        self.engine: Engine | None = None
        if isinstance(pipeline, ChatPipeline | TextPipeline) and explain_unsupported(pipeline.model) is None:
            model: Any = pipeline.model
            self.engine = Engine(model, engine_config, num_known_ids=pipeline.tokenizer.vocab_size)
        for adapter, folder in (adapters or {}).items():
            if self.engine is None:
                raise ConfigError(f"{name} has no engine, so it takes no LoRA adapters", "remove --lora")
            self.engine.adapters.load(adapter, folder)
        self.template: ChatTemplate | None = None
        if isinstance(pipeline, TextPipeline) and pipeline.tokenizer.chat_template is not None:
            self.template = ChatTemplate.from_tokenizer(pipeline.tokenizer)
        if isinstance(pipeline, ChatPipeline):
            self.template = pipeline.chat_template
        self.compiler: ConstraintCompiler | None = None
        if self.engine is not None:
            self.compiler = ConstraintCompiler(pipeline.tokenizer, find_stop_ids(pipeline))
        if not self.endpoints:
            raise ConfigError(
                f"{name} is a {type(pipeline).__name__}, which no endpoint serves",
                "serve a language model, a vision-language model, a unified model or a contrastive model",
            )

    @classmethod
    def load(
        cls,
        name_or_path: str | Path,
        device: str | None = None,
        engine_config: EngineConfig | None = None,
        adapters: Mapping[str, str | Path] | None = None,
    ) -> "ServedModel":
        """Load a model. Its name is that of a bundled model or hub id, or the last part of a path."""
        name = Path(name_or_path).resolve().name if Path(name_or_path).exists() else str(name_or_path)
        return cls(name, load(name_or_path, device=device), engine_config, adapters=adapters)

    @property
    def names(self) -> list[str]:
        """Names of the model in requests: its own, and those of its adapters."""
        return [self.name, *(() if self.engine is None else self.engine.adapters.names)]

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Endpoints that the model serves."""
        match self.pipeline:
            case ChatPipeline():
                return ("chat/completions", "completions") if self.engine else ("chat/completions",)
            case TextPipeline() if self.engine:
                return ("chat/completions", "completions") if self.template else ("completions",)
            case UnifiedPipeline():
                return ("chat/completions", "images/generations", "images/edits")
            case EmbeddingPipeline():
                return ("embeddings",)
        return ()

    # ---- chat ---------------------------------------------------------------------------------------------------

    def prepare_chat(self, request: ChatCompletionRequest) -> PreparedGeneration | PreparedText:
        """Build the prompt of a conversation. Images are decoded and preprocessed here, in the calling thread."""
        tool_format, tools, constraint = self._prepare_constraint(request)
        messages = self._build_messages(request)
        try:
            if self.engine is None:
                return self._prepare_without_engine(request, messages)
            if isinstance(self.pipeline, ChatPipeline):
                found = self.pipeline.build_prompt(messages, tools=tools)
                model: Any = self.pipeline.model
                prompt = build_engine_prompt(model, found.stream, found.images, found.videos)  # type: ignore[arg-type]
            else:
                assert self.template is not None
                chat = self.template.encode(messages, self.pipeline.tokenizer, add_generation_prompt=True, tools=tools)
                prompt = EnginePrompt(chat.ids)
        except VitrailError as error:
            raise to_api_error(error, "messages") from None
        return self._prepare(request, prompt, strip=True, constraint=constraint, tool_format=tool_format)

    def _prepare_constraint(
        self, request: ChatCompletionRequest
    ) -> tuple[ToolCallFormat | None, list[dict[str, Any]] | None, TokenConstraint | None]:
        """Return the format of tool calls, the tools for the template, and the constraint of the answer."""
        answer = request.response_format
        wants_json = answer is not None and answer.type != "text"
        param = "tools" if request.tools else "response_format"
        tool_format, grammar = None, None
        if select_tools(request):
            if wants_json:
                raise APIError("response_format and tools exclude each other: leave one out", param="response_format")
        elif not wants_json:
            return None, None, None
        if self.compiler is None or self.template is None:
            raise APIError(f"{param} is not supported for {self.name}: leave it out", param=param)
        tokenizer, tools = self.pipeline.tokenizer, None
        try:
            if wants_json and answer is not None:
                grammar, param = build_answer_grammar(answer), "response_format"
                if answer.type == "json_schema":
                    param = "response_format.json_schema.schema"
            else:
                tool_format = find_tool_call_format(self.template, tokenizer)
                tools = build_template_tools(request.tools or (), tokenizer)
                grammar = build_tool_grammar(request, tool_format)
            return tool_format, tools, self.compiler.compile(grammar)
        except VitrailError as error:
            raise to_api_error(error, param) from None

    def prepare_completion(self, request: CompletionRequest) -> PreparedGeneration:
        """Build the prompt of a text to continue."""
        tokenizer = self.pipeline.tokenizer
        if request.prompt is None or request.prompt == "":
            raise APIError("prompt is empty: give a text or token ids", param="prompt")
        ids = (
            tokenizer.encode(request.prompt, add_special_tokens=True)
            if isinstance(request.prompt, str)
            else list(request.prompt)
        )
        return self._prepare(request, EnginePrompt(ids), strip=False)

    def _prepare(
        self,
        request: ChatCompletionRequest | CompletionRequest,
        prompt: EnginePrompt,
        *,
        strip: bool,
        constraint: TokenConstraint | None = None,
        tool_format: ToolCallFormat | None = None,
    ) -> PreparedGeneration:
        assert self.engine is not None
        limit, param = request.token_limit, "max_tokens"
        if limit is None:
            room = max(1, self.engine.max_request_tokens - len(prompt.ids))
            limit, param = min(DEFAULT_MAX_NEW_TOKENS, room), "messages" if strip else "prompt"
        try:
            params = [
                SamplingParams(
                    max_new_tokens=limit,
                    stop_ids=tuple(find_stop_ids(self.pipeline)),
                    sampling=request.build_sampling(choice),
                    logprobs=request.num_logprobs,
                    adapter=None if request.model == self.name else request.model,
                )
                for choice in range(request.n or 1)
            ]
        except VitrailError as error:
            raise to_api_error(error) from None
        try:
            self.engine.check_request(prompt, params[0])
        except ConfigError as error:
            found = to_api_error(error, param)
            found.code = "context_length_exceeded"
            raise found from None
        except VitrailError as error:
            raise to_api_error(error, "prompt") from None
        tokenizer = self.pipeline.tokenizer
        choices = [
            ChoiceText(prompt, tokenizer, request.stop_strings, strip=strip, tool_format=tool_format) for _ in params
        ]
        constraints = [None if constraint is None else constraint.copy() for _ in params]
        return PreparedGeneration(prompt, params, choices, constraints)

    def _prepare_without_engine(self, request: ChatCompletionRequest, messages: list[Any]) -> PreparedText:
        """Answer with the pipeline: vision-language models that the engine does not run, and unified models."""
        for field in ("logprobs", "stop") if isinstance(self.pipeline, UnifiedPipeline) else ("logprobs",):
            if getattr(request, field):
                raise APIError(f"{field} is not supported for {self.name}: leave it out", param=field)
        if (request.n or 1) > 1:
            raise APIError(f"n is not supported for {self.name}: give 1", param="n")
        tokenizer, sampling = self.pipeline.tokenizer, request.build_sampling()
        if isinstance(self.pipeline, ChatPipeline):
            prompt = self.pipeline.build_prompt(messages)
            room = self.pipeline.check_capacity(prompt, request.token_limit or 1)
            tokens = partial(
                stream_tokens_from_streams,
                self.pipeline.model,
                [prompt.stream],
                prompt.images,
                prompt.videos,
                max_new_tokens=request.token_limit or min(DEFAULT_MAX_NEW_TOKENS, room),
                sampling=sampling,
                tokenizer=tokenizer,
                stop_ids=self.pipeline.stop_ids,
                stop_strings=request.stop_strings,
            )
            ends = {None: None, "length": "length", "stop": "stop", "string": "stop"}
            return PreparedText(
                lambda: (TextDelta(one.text, 1, finish_reason=ends[one.finish_reason]) for one in tokens()),
                len(prompt.stream),
            )
        parts = [part for message in messages for part in message["content"] if message["role"] == "user"]
        images = [part["image"] for part in parts if part["type"] == "image"]
        question = " ".join(part["text"] for part in parts if part["type"] == "text").strip()
        if len(images) != 1 or not question or len(messages) != 1:
            raise ConfigError(
                f"{self.name} answers one question about one image, and the conversation has {len(messages)} messages "
                f"with {len(images)} images",
                "send one user message with one image and a question",
            )
        options: dict[str, Any] = {} if request.token_limit is None else {"max_new_tokens": request.token_limit}
        if sampling != GREEDY:
            options["sampling"] = sampling
        return PreparedText(partial(self._ask_unified, images[0], question, options), len(tokenizer.encode(question)))

    def _ask_unified(self, image: Image.Image, question: str, options: dict[str, Any]) -> Iterator[TextDelta]:
        answer = self.pipeline.ask(image, question, **options)
        yield TextDelta(answer, len(self.pipeline.tokenizer.encode(answer)) + 1, finish_reason="stop")

    # ---- media --------------------------------------------------------------------------------------------------

    def _build_messages(self, request: ChatCompletionRequest) -> list[Any]:
        """Build messages of the pipeline, with decoded images."""
        messages, count = [], 0
        for index, message in enumerate(request.messages):
            check_message_roles(message, f"messages[{index}]")
            content = [TextPart(text=message.content)] if isinstance(message.content, str) else message.content or []
            parts = []
            for place, part in enumerate(content):
                where = f"messages[{index}].content[{place}]"
                count += 0 if isinstance(part, TextPart) else 1
                if isinstance(part, VideoFramesPart):
                    count += len(part.video_frames) - 1
                if count > self.limits.max_items:
                    raise APIError(f"the request has more than {self.limits.max_items} images", param=where)
                parts.append(self._build_part(part, where))
            more = build_template_message(message, f"messages[{index}]")
            texts = [part["text"] for part in parts if part["type"] == "text"]
            if isinstance(self.pipeline, TextPipeline) and len(texts) == len(parts):
                messages.append({"role": message.role, "content": "".join(texts), **more})  # as their templates expect
            else:
                messages.append({"role": message.role, "content": parts, **more})
        return messages

    def _build_part(self, part: ContentPart, where: str) -> dict[str, Any]:
        match part:
            case TextPart(text=text):
                return {"type": "text", "text": text}
            case ImagePart(image_url=image):
                return {"type": "image", "image": self.load_image(image, f"{where}.image_url.url")}
            case VideoFramesPart(video_frames=frames, fps=fps):
                images = [self.load_image(one, f"{where}.video_frames[{i}].url") for i, one in enumerate(frames)]
                try:
                    return {"type": "video", "video": Video(images, timestamps=[i / fps for i in range(len(images))])}
                except VitrailError as error:
                    raise to_api_error(error, f"{where}.video_frames") from None
        video = part.video_url
        data = self.read_data_url(video.url, f"{where}.video_url.url")
        return {"type": "video", "video": Video(data, num_frames=video.num_frames, fps=video.fps)}

    def load_image(self, source: ImageURL | str, param: str) -> Image.Image:
        """Decode the image of a data URL."""
        data = self.read_data_url(source if isinstance(source, str) else source.url, param)
        if len(data) > self.limits.max_bytes:
            raise APIError(f"{param} has more than {self.limits.max_bytes:,} bytes", param=param)
        try:
            return load_image(data, max_pixels=self.limits.max_pixels)
        except VitrailError as error:
            raise to_api_error(error, param) from None

    def read_data_url(self, url: str, param: str) -> bytes:
        """Decode a data URL."""
        if (found := DATA_URL.match(url)) is None:
            start = url[:40]
            if start.startswith(("http:", "https:")):
                raise APIError(
                    "remote URLs are not fetched: send a data URL, or start the server with --allow-remote-images",
                    param=param,
                )
            raise APIError(f"{start!r} is no data URL: give data:image/png;base64,…", param=param)
        if len(url) > self.limits.max_bytes * 4 // 3 + 200:
            raise APIError(f"{param} has more than {self.limits.max_bytes:,} bytes", param=param)
        try:
            return base64.b64decode(url[found.end() :].encode(), validate=True)
        except (binascii.Error, ValueError) as error:
            raise APIError(f"the base64 data is broken: {error}", param=param) from None
