"""Requests of OpenAI's API: their fields, the limits of these, and the errors of the API.

A field that is unknown is an error. Fields that OpenAI has and this server does not implement are accepted only with
the value that changes nothing.
"""

import re
from typing import Annotated, Any, Literal

import msgspec

from vitrail.errors import VitrailError
from vitrail.generate.sampling import GREEDY, SamplingConfig

MAX_CHOICES, MAX_STOP_STRINGS, MAX_STOP_LENGTH, MAX_MESSAGES = 16, 4, 256, 1024
MAX_INPUTS = 256  # texts or images of one embedding request
MAX_TOOLS = 128

Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]
Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
Penalty = Annotated[float, msgspec.Meta(ge=0, le=0)]
PositiveInteger = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
ChoiceNumber = Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)]
SeedNumber = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
FunctionName = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
StopString = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
Stop = StopString | Annotated[list[StopString], msgspec.Meta(max_length=MAX_STOP_STRINGS)] | None


class APIError(Exception):
    """Error response. `param` is the field of the request that is wrong."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int = 0,
    ):
        super().__init__(message)
        self.message, self.status, self.param, self.code, self.retry_after = message, status, param, code, retry_after

    def to_body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, kind)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def to_api_error(error: VitrailError, param: str | None = None) -> APIError:
    """Return the response of an error of the library."""
    message = f"{error.problem}; {error.remedy}" if error.remedy else error.problem
    return APIError(message[:2000], param=param)


class RequestSchema(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base class of all requests and their parts."""


class ImageURL(RequestSchema, kw_only=True):
    """Address of an image. `detail` is accepted; the model's resolution policy decides."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class VideoURL(RequestSchema, kw_only=True):
    """Address of a video file, and how many of its frames to sample."""

    url: str
    num_frames: PositiveInteger | None = None
    fps: Annotated[float, msgspec.Meta(gt=0, le=1000)] | None = None


class TextPart(RequestSchema, kw_only=True, tag="text"):
    """Text of a message."""

    text: str


class ImagePart(RequestSchema, kw_only=True, tag="image_url"):
    """Image of a message."""

    image_url: ImageURL


class VideoPart(RequestSchema, kw_only=True, tag="video_url"):
    """Video file of a message."""

    video_url: VideoURL


class VideoFramesPart(RequestSchema, kw_only=True, tag="video_frames"):
    """Frames of a video as images, `fps` frames a second."""

    video_frames: Annotated[list[ImageURL], msgspec.Meta(min_length=1)]
    fps: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 1.0


ContentPart = TextPart | ImagePart | VideoPart | VideoFramesPart


class CalledFunction(RequestSchema, kw_only=True):
    """Function of a tool call. The arguments are JSON text."""

    name: str
    arguments: str


class ToolCall(RequestSchema, kw_only=True):
    """Tool call of an earlier answer."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(RequestSchema, kw_only=True):
    """Message of a conversation. The fields that are None are those of answers, which clients send back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], msgspec.Meta(max_length=0)] | None = None


class Function(RequestSchema, kw_only=True):
    """Function that an answer can call. `parameters` is the JSON schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestSchema, kw_only=True):
    """Tool of a chat; only functions."""

    type: Literal["function"]
    function: Function


class FunctionReference(RequestSchema, kw_only=True):
    """Name of a function."""

    name: str


class NamedToolChoice(RequestSchema, kw_only=True):
    """The tool that an answer must call."""

    type: Literal["function"]
    function: FunctionReference


class JSONSchema(RequestSchema, kw_only=True):
    """JSON schema of an answer. It is always enforced; `strict` is accepted."""

    name: FunctionName
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(RequestSchema, kw_only=True):
    """Format of the answer: free text, a JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None


class StreamOptions(RequestSchema, kw_only=True):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class GenerationRequest(RequestSchema, kw_only=True):
    """Fields of all requests that generate text. Without temperature, top_p, top_k and min_p, decoding is greedy.

    top_k, min_p and repetition_penalty are not in OpenAI's API.
    """

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: ChoiceNumber | None = None
    stop: Stop = None
    seed: SeedNumber | None = None
    max_tokens: PositiveInteger | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: PositiveInteger | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=100)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, float], msgspec.Meta(max_length=0)] | None = None
    user: Annotated[str, msgspec.Meta(max_length=256)] | None = None

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def build_sampling(self, choice: int = 0) -> SamplingConfig:
        """Build the sampling parameters of a choice. Choice i uses seed + i."""
        given = (self.temperature, self.top_p, self.top_k, self.min_p)
        penalty = 1.0 if self.repetition_penalty is None else self.repetition_penalty
        if all(value is None for value in given) or self.temperature == 0:
            return GREEDY.replace(repetition_penalty=penalty)
        temperature = 1.0 if self.temperature is None else max(self.temperature, 1e-3)
        return SamplingConfig(
            temperature=temperature,
            top_p=self.top_p or None,  # 0 keeps the most likely token
            top_k=1 if self.top_p == 0 else self.top_k,
            min_p=self.min_p,
            repetition_penalty=penalty,
            seed=None if self.seed is None else min(self.seed + choice, (1 << 63) - 1),
        )


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: PositiveInteger | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[Literal["text"]], msgspec.Meta(max_length=1)] | None = None
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions"""

    prompt: str | Annotated[list[int], msgspec.Meta(min_length=1)] | None = None
    echo: Literal[False] | None = None
    best_of: Annotated[int, msgspec.Meta(ge=1, le=1)] | None = None
    suffix: None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class EmbeddingInput(RequestSchema, kw_only=True):
    """Image to embed. Texts are strings."""

    image_url: ImageURL


class EmbeddingRequest(RequestSchema, kw_only=True):
    """POST /v1/embeddings. Images are objects with `image_url`, which OpenAI's API does not have."""

    model: str
    input: (
        str | EmbeddingInput | Annotated[list[str | EmbeddingInput], msgspec.Meta(min_length=1, max_length=MAX_INPUTS)]
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: PositiveInteger | None = None
    user: str | None = None


class ImageRequest(RequestSchema, kw_only=True):
    """POST /v1/images/generations. `seed` and `guidance_scale` are not in OpenAI's API."""

    model: str
    prompt: Annotated[str, msgspec.Meta(min_length=1, max_length=32_000)]
    n: ChoiceNumber | None = None
    size: str | None = None
    response_format: Literal["b64_json"] | None = None
    output_format: Literal["png"] | None = None
    quality: Literal["auto", "standard"] | None = None
    background: Literal["auto", "opaque"] | None = None
    seed: SeedNumber | None = None
    guidance_scale: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    user: str | None = None


class ImageEditRequest(ImageRequest, kw_only=True):
    """POST /v1/images/edits: image and mask are data URLs, or files of a form.

    The box around the transparent pixels of the mask is drawn again.
    """

    image: str
    mask: str | None = None


def parse_request(kind: type, body: bytes) -> Any:
    """Decode the JSON body of a request. An error names the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise convert_validation_error(error, kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise APIError(f"the body is not valid JSON: {str(error)[:200]}") from None


def convert_validation_error(error: msgspec.ValidationError, kind: type) -> APIError:
    """Return the response of a wrong field."""
    reason, _, path = str(error).partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    if unknown := re.search(r"unknown field `(.*?)`", reason):
        path = f"{path}.{unknown[1]}".lstrip(".")[:200]
        known = ", ".join(kind.__struct_fields__)
        return APIError(f"{path!r} is not a field of this API; known fields: {known}", param=path, code="unknown_field")
    if missing := re.search(r"missing required field `(.*?)`", reason):
        path = f"{path}.{missing[1]}".lstrip(".")
    if path in (
        "logit_bias",
        "frequency_penalty",
        "presence_penalty",
        "echo",
        "store",
    ):
        field = path.split(".", maxsplit=1)[0]
        return APIError(f"{field} is not supported: leave it out ({reason})", param=field, code="unsupported_value")
    return APIError(f"{path or 'the body'}: {reason}", param=path or None, code="invalid_value")
