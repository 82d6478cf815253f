"""Requests of the engine: what a caller gives, what it gets back, and the state of a running sequence."""

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from vitrail.config import Config
from vitrail.errors import ConfigError, VitrailError
from vitrail.generate.sampling import GREEDY, SamplingConfig
from vitrail.models.vision_inputs import VisionInputs
from vitrail.serve.page_allocator import PageKey, hash_page
from vitrail.serve.token_constraints import TokenConstraint
from vitrail.stream import Stream

EndReason = Literal["stop", "length", "cancelled", "error"]
"""Why a sequence ended: a stop id, the token limit, `Engine.cancel`, or an error of the model."""


class SamplingParams(Config):
    """Sampling parameters of one request.

    max_new_tokens  tokens to generate at most
    stop_ids        ids that end the sequence
    sampling        filters, temperature and seed
    logprobs        number of most likely tokens to report for every token; None for no log-probabilities
    adapter         name of a LoRA adapter; None for the base model
    """

    max_new_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    sampling: SamplingConfig = GREEDY
    logprobs: int | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}", "give at least 1")
        if self.logprobs is not None and not 0 <= self.logprobs <= 20:
            raise ConfigError(f"logprobs is {self.logprobs}", "give 0 … 20, or leave it out")


class EnginePrompt(NamedTuple):
    """A prompt: ids, and the stream with its images and videos if it has any.

    media_keys  content hash of each image and of each video, under "image" and "video"
    """

    ids: list[int]
    stream: Stream | None = None
    images: VisionInputs | None = None
    videos: VisionInputs | None = None
    media_keys: Mapping[str, Sequence[bytes]] = {}


class TokenLogprobs(NamedTuple):
    """Log-probability of a generated token, and the most likely tokens with theirs."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class TokenEvent(NamedTuple):
    """One generated token, or the end of a sequence without one (`id` is None)."""

    id: int | None
    logprobs: TokenLogprobs | None = None
    end: EndReason | None = None
    error: VitrailError | None = None


class EngineOutput(NamedTuple):
    """Complete output of a request: generated ids, their log-probabilities if they were requested, and how it ended."""

    ids: list[int]
    logprobs: list[TokenLogprobs]
    end: EndReason
    error: VitrailError | None = None


def collect_output(events: Sequence[TokenEvent]) -> EngineOutput:
    """Build the output of a request from its events."""
    last = events[-1]
    assert last.end is not None
    return EngineOutput(
        [event.id for event in events if event.id is not None],
        [event.logprobs for event in events if event.logprobs is not None],
        last.end,
        last.error,
    )


TokenCallback = Callable[[list[TokenEvent]], Any]

_numbers = itertools.count()


@dataclass(eq=False)
class SequenceState:
    """State of one request in the engine.

    num_computed   tokens whose keys and values are in the cache, or will be after the passes that are launched
    num_sampled    tokens that are sampled, or will be after the passes that are launched
    """

    prompt: EnginePrompt
    params: SamplingParams
    client: str
    on_events: TokenCallback | None
    constraint: TokenConstraint | None = None
    number: int = field(default_factory=lambda: next(_numbers))
    generated: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_sampled: int = 0
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache saved
    pages: list[int] = field(default_factory=list)
    page_keys: list[PageKey] = field(default_factory=list)
    num_registered: int = 0  # pages that have their key in the allocator
    slot: int | None = None  # row of the device tables while the sequence runs
    decoding: bool = False  # whether its last token is on the device and its prompt is processed
    end: EndReason | None = None
    embeds: Any = None  # embeddings (L, W) and fusion inputs of a prompt with images, until the prefill is done
    random: np.random.Generator | None = None
    num_preempted: int = 0
    prepared_slot: tuple[int, int] | None = None  # slot and preemptions for which the device tables are ready

    def __post_init__(self) -> None:
        if not self.params.sampling.is_greedy:
            self.random = np.random.default_rng(self.params.sampling.seed)
        stream = self.prompt.stream
        self.prompt_length = len(self.prompt.ids)
        # These are read for every token.
        sampling = self.params.sampling
        self.max_new_tokens, self.stop_ids = self.params.max_new_tokens, frozenset(self.params.stop_ids)
        # Whether it only needs the most likely tokens, without penalties, log-probabilities and masks.
        self.takes_most_likely = (
            sampling.is_greedy
            and sampling.repetition_penalty == 1
            and self.params.logprobs is None
            and self.constraint is None
        )
        if stream is None:
            self.next_position = self.prompt_length
            self.positions: np.ndarray | None = None
            self.spans: np.ndarray | None = None
            self.token_keys: list[Hashable] = list(self.prompt.ids)
        else:
            self.positions = stream.positions.numpy()  # (L, 3)
            self.next_position = int(self.positions.max()) + 1
            self.spans = stream.spans.numpy() if bool(stream.spans.any()) else None
            self.token_keys = build_token_keys(stream, self.prompt.media_keys)

    @property
    def length(self) -> int:
        """Tokens that are known: the prompt and the generated ones."""
        return self.prompt_length + len(self.generated)

    @property
    def prefill_length(self) -> int:
        """Tokens to process before the next one is sampled by decoding: those known when it was admitted."""
        return self.prompt_length + self.num_sampled

    @property
    def wants_token(self) -> bool:
        """Whether another token is to be sampled."""
        return self.end is None and self.num_sampled < self.max_new_tokens

    @property
    def can_share(self) -> bool:
        """Whether the cache of a prefix depends on the prefix only: not if the prompt is one bidirectional span."""
        return self.spans is None or not bool(self.spans.all())

    def tokens(self, start: int, end: int) -> list[int]:
        """Return the ids of known tokens."""
        if end <= self.prompt_length:
            return self.prompt.ids[start:end]
        count = self.prompt_length
        return self.prompt.ids[start:] + self.generated[max(0, start - count) : end - count]

    def position_of(self, index: int) -> int:
        """Return the position of a generated token."""
        return self.next_position + index - self.prompt_length

    def draw_uniform(self) -> float:
        """Return the next random number of the sequence."""
        return 0.0 if self.random is None else float(self.random.random())

    def extend_page_keys(self, page_size: int) -> list[PageKey]:
        """Return the keys of all pages whose tokens are known."""
        if not self.can_share:
            return []
        self.token_keys += self.generated[len(self.token_keys) - self.prompt_length :]
        while (len(self.page_keys) + 1) * page_size <= len(self.token_keys):
            start = len(self.page_keys) * page_size
            parent = self.page_keys[-1] if self.page_keys else repr(self.params.adapter).encode()
            self.page_keys.append(hash_page(parent, self.token_keys[start : start + page_size]))
        return self.page_keys

    def find_chunk_end(self, start: int, limit: int) -> int:
        """Return where a prefill chunk that starts at `start` ends: `limit`, or the end of the span around it.

        The tokens of a bidirectional span attend to each other, so they are in one chunk.
        """
        limit = min(limit, self.prefill_length)
        if self.spans is None or limit >= self.prompt_length:
            return limit
        span = self.spans[limit - 1]
        if not span:
            return limit
        inside = np.flatnonzero(self.spans == span)
        if inside[0] > start:  # the chunk ends before the span
            return int(inside[0])
        return int(inside[-1]) + 1

    def align_prefix(self, length: int) -> int:
        """Return the largest prefix of at most `length` tokens that ends outside of every span."""
        if self.spans is None or not 0 < length < self.prompt_length:
            return length
        span = self.spans[length - 1]
        if not span or self.spans[length] != span:
            return length
        return int(np.flatnonzero(self.spans == span)[0])


def build_token_keys(stream: Stream, media_keys: Mapping[str, Sequence[bytes]]) -> list[Hashable]:
    """Return a key for each token: its id, or the content hash of its image, its feature row and its position."""
    counts: Counter[str] = Counter()
    sources: list[bytes | str] = []
    for feed, _, _ in stream.sources:
        sources.append(media_keys[feed][counts[feed]] if feed in media_keys else feed)
        counts[feed] += 1
    columns = (stream.ids.tolist(), stream.source.tolist(), stream.row.tolist(), stream.positions.tolist())
    return [
        id if source < 0 else (sources[source], row, *position)
        for id, source, row, position in zip(*columns, strict=True)
    ]
