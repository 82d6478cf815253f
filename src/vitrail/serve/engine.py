"""Engine with continuous batching: many requests share the passes of one model.

    engine = Engine(model)
    outputs = engine.generate([EnginePrompt(ids)], SamplingParams(max_new_tokens=20))

A request that is answered together with others gets the tokens that it gets alone. `start` runs the engine in a thread;
`submit` and `cancel` can be called from any thread.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from vitrail.backbones.decoder import Decoder
from vitrail.errors import CheckpointError, ConfigError, TextError, VitrailError
from vitrail.models.vlm import VLM
from vitrail.nn import PagedKVCache
from vitrail.serve.batch_sampling import BatchSampler, SampledTokens
from vitrail.serve.captured_decode import DecodeResult
from vitrail.serve.client_fairness import QueueFullError
from vitrail.serve.engine_request import (
    EndReason,
    EngineOutput,
    EnginePrompt,
    SamplingParams,
    SequenceState,
    TokenCallback,
    TokenEvent,
    collect_output,
)
from vitrail.serve.engine_scheduler import EngineConfig, Scheduler, StepPlan
from vitrail.serve.lora_adapters import LoRAAdapters
from vitrail.serve.model_runner import ModelRunner, check_supported
from vitrail.serve.page_allocator import PageAllocator
from vitrail.serve.token_constraints import TokenConstraint

T = TypeVar("T")

DEFAULT_CACHE_BYTES = 1 << 30  # of the KV cache on a CPU
IDLE_SECONDS = 0.5  # longest wait of the thread without work


class EngineFailedError(VitrailError):
    """The device of the engine does not work any more."""


class EngineStats(NamedTuple):
    """Counts since the start, and what the engine holds now."""

    num_running: int
    num_waiting: int
    pages_used: int
    pages_total: int
    prefix_hit_tokens: int
    prefix_query_tokens: int
    images_encoded: int
    images_reused: int
    preemptions: int
    prompt_tokens: int
    generated_tokens: int
    steps: int


class _LaunchedPass(NamedTuple):
    """Sampled tokens that the device may still compute."""

    sequences: list[SequenceState]
    sampled: SampledTokens
    event: Any  # CUDA event after the copy to the host, or None


class Engine:
    """Run requests with continuous batching, a paged KV cache and a prefix cache.

    `num_known_ids` is the size of the tokenizer's vocabulary: ids beyond only pad the embedding and are never sampled.
    """

    def __init__(self, model: Decoder | VLM, config: EngineConfig | None = None, *, num_known_ids: int | None = None):
        check_supported(model)
        self.model, self.config = model.eval(), config or EngineConfig()
        decoder = model.decoder if isinstance(model, VLM) else model
        self.decoder: Decoder = decoder
        self.context_length = decoder.config.context_length
        self.cache = decoder.make_paged_cache(self._choose_num_pages(), self.config.page_size)
        self.allocator = PageAllocator(self.cache.num_pages)
        self.scheduler = Scheduler(self.config, self.allocator)
        self.runner = ModelRunner(
            model, self.cache, self.config.max_num_seqs, self.context_length, self.config.feature_cache_bytes
        )
        known = min(decoder.config.vocab_size, num_known_ids or decoder.config.vocab_size)
        self.sampler = BatchSampler(known, self.config.max_num_seqs, self.runner.device)
        self.adapters = LoRAAdapters(model)  # load them before the first request
        if self.config.cuda_graphs:
            self.runner.capture_decoding(known)
        self._overlaps = self.runner.device.type == "cuda"
        self._pending: list[_LaunchedPass] = []
        self._new: deque[SequenceState] = deque()
        self._cancelled: deque[SequenceState] = deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._draining = False
        self.failure: EngineFailedError | None = None  # requests are refused after it
        self.num_prompt_tokens, self.num_generated_tokens, self.num_steps = 0, 0, 0

    def _choose_num_pages(self) -> int:
        config = self.config
        if config.num_pages is not None:
            return config.num_pages
        weight = self.decoder.embed.weight
        page_bytes = PagedKVCache.count_page_bytes(self.decoder.kv_shapes, config.page_size, weight.dtype)
        wanted = config.max_num_seqs * -(-(self.context_length + 1) // config.page_size) + 1
        limit = config.kv_cache_bytes
        if limit is None:
            limit = torch.cuda.mem_get_info(weight.device)[0] // 2 if weight.is_cuda else DEFAULT_CACHE_BYTES
        return max(2, min(wanted, limit // page_bytes))

    # ---- requests, from any thread ------------------------------------------------------------------------------

    def submit(
        self,
        prompt: EnginePrompt,
        params: SamplingParams | None = None,
        on_events: TokenCallback | None = None,
        *,
        client: str = "",
        constraint: TokenConstraint | None = None,
    ) -> SequenceState:
        """Queue a request. `on_events` is called in the engine's thread with new tokens.

        `client` names who asks; the engine shares its tokens fairly among clients.
        `constraint` restricts the answer to a grammar.
        """
        params = params or SamplingParams()
        self.check_request(prompt, params)
        sequence = SequenceState(prompt, params, client, on_events, constraint)
        with self._wake:
            if self.failure is not None:
                raise self.failure
            if self._closing or self._draining:
                raise QueueFullError("the server is shutting down", "send the request to another server")
            if self.scheduler.num_waiting + len(self._new) >= self.config.max_waiting:
                raise QueueFullError(f"{self.config.max_waiting} requests are waiting", "try again later")
            self._new.append(sequence)
            self._wake.notify()
        return sequence

    def check_request(self, prompt: EnginePrompt, params: SamplingParams) -> None:
        """Raise an error if a request can never run."""
        count, vocab = len(prompt.ids), self.decoder.config.vocab_size + self.decoder.config.extra_embeddings
        if not count:
            raise TextError("the prompt is empty", "give at least one token")
        if min(prompt.ids) < 0 or max(prompt.ids) >= vocab:
            raise TextError(f"the prompt has an id outside of 0 … {vocab - 1}", "use the model's tokenizer")
        total = count + params.max_new_tokens
        if total > self.context_length:
            raise ConfigError(
                f"{count:,} prompt tokens and {params.max_new_tokens:,} new ones exceed the context length "
                f"{self.context_length:,}",
                f"generate at most {self.context_length - count} tokens"
                if count < self.context_length
                else "shorten the prompt",
            )
        capacity = self.allocator.num_pages * self.config.page_size
        if total + 1 > capacity:
            raise ConfigError(
                f"{count:,} prompt tokens and {params.max_new_tokens:,} new ones exceed the KV cache of {capacity:,}",
                "generate fewer tokens, or give the server a larger KV cache",
            )
        if params.adapter is not None and params.adapter not in self.adapters.names:
            known = ", ".join(self.adapters.names) or "none"
            raise ConfigError(f"there is no adapter {params.adapter!r}", f"adapters: {known}")

    @property
    def max_request_tokens(self) -> int:
        """Tokens that a request can have, prompt and answer."""
        return min(self.context_length, self.allocator.num_pages * self.config.page_size - 1)

    def cancel(self, sequence: SequenceState) -> None:
        """Stop a request. It computes nothing after the step that runs now."""
        with self._wake:
            self._cancelled.append(sequence)
            self._wake.notify()

    def generate(
        self,
        prompts: Sequence[EnginePrompt],
        params: SamplingParams | Sequence[SamplingParams],
        constraints: Sequence[TokenConstraint | None] | None = None,
    ) -> list[EngineOutput]:
        """Generate from several prompts and return their outputs in order."""
        several = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        events: list[list[TokenEvent]] = [[] for _ in prompts]
        done = [threading.Event() for _ in prompts]
        sequences = []

        def collect(index: int) -> TokenCallback:
            def receive(new: list[TokenEvent]) -> None:
                events[index] += new
                if new[-1].end is not None:
                    done[index].set()

            return receive

        for index, (prompt, one) in enumerate(zip(prompts, several, strict=True)):
            self.check_request(prompt, one)
            constraint = None if constraints is None else constraints[index]
            sequences.append(SequenceState(prompt, one, "", collect(index), constraint))
        with self._wake:
            if self.failure is not None:
                raise self.failure
            self._new += sequences
            self._wake.notify()
        if self._thread is None:
            while self.step():
                pass
        for one in done:
            one.wait()
        return [collect_output(own) for own in events]

    @property
    def stats(self) -> EngineStats:
        features, allocator = self.runner.features, self.allocator
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=self.scheduler.num_waiting + len(self._new),
            pages_used=allocator.num_used,
            pages_total=allocator.num_pages,
            prefix_hit_tokens=allocator.prefix_hits,
            prefix_query_tokens=allocator.prefix_queries,
            images_encoded=features.num_encoded,
            images_reused=features.num_reused,
            preemptions=self.scheduler.num_preemptions,
            prompt_tokens=self.num_prompt_tokens,
            generated_tokens=self.num_generated_tokens,
            steps=self.num_steps,
        )

    # ---- the thread ---------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Capture the CUDA graphs of all batch sizes, which otherwise happens on first use."""
        if self.runner.captured is not None:
            self.runner.captured.warm_up()

    def start(self) -> None:
        """Run the engine in a thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="vitrail-engine", daemon=True)
            self._thread.start()

    def close(self, drain_seconds: float = 0.0) -> None:
        """Stop the thread. Requests that do not end within `drain_seconds` are cancelled."""
        self._draining = True
        deadline = time.monotonic() + drain_seconds
        while self._thread is not None and time.monotonic() < deadline and self.has_work:
            time.sleep(0.02)
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._new or self._pending or self.scheduler.has_work)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._closing or self._new or self._cancelled or self.has_work):
                    self._wake.wait(IDLE_SECONDS)
                if self._closing:
                    break
            self.step()
        try:
            self._collect_pending()
        except Exception as error:
            self._fail_all(error)
        with self._wake:
            rest = [*self.scheduler.sequences(), *self._new]
            self._new.clear()
        for sequence in rest:
            self._end(sequence, "cancelled")

    # ---- steps --------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one step: take new requests, launch a pass, and deliver the tokens of the pass before.

        Returns whether work remains. On a CPU the tokens of the pass itself are delivered.
        """
        self._take_requests()
        try:
            if any(one.constraint is not None for one in self.scheduler.running):
                self._collect_pending()  # the mask of a token depends on the token before it
            launched = self._launch(self.scheduler.schedule(self._collect_pending))
            earlier, self._pending = self._pending, launched
            for one in earlier:
                self._deliver(one)
            if not self._overlaps:
                self._collect_pending()
        except Exception as error:
            logging.getLogger(__name__).exception("a step of the engine failed")
            self._fail_all(error)
        return self.has_work

    def _take_requests(self) -> None:
        with self._wake:
            new, cancelled = list(self._new), list(self._cancelled)
            self._new.clear()
            self._cancelled.clear()
            for sequence in new:
                self.scheduler.add(sequence)
        for sequence in cancelled:
            self._end(sequence, "cancelled")

    def _launch(self, plan: StepPlan) -> list[_LaunchedPass]:
        launched: list[_LaunchedPass] = []
        chunks = []
        for chunk in plan.chunks:
            if not self._prepare(chunk.sequence):
                continue
            chunks.append(chunk)
        for adapter, sequences in _group_by_adapter(plan.decoding, plan.decoding).items():
            with self.adapters.activate(adapter):
                result = self.runner.decode(sequences, captured=adapter is None)
            launched.append(self._sample(result, sequences))
            for sequence in sequences:
                sequence.num_computed += 1
                sequence.num_sampled += 1
        for adapter, own in _group_by_adapter(chunks, [chunk.sequence for chunk in chunks]).items():
            with self.adapters.activate(adapter):
                logits = self.runner.prefill(own)
            complete = [chunk.sequence for chunk in own if chunk.is_last]
            if logits is not None:
                launched.append(self._sample(DecodeResult(logits), complete))
            for chunk in own:
                sequence = chunk.sequence
                sequence.num_computed = chunk.end
                self.num_prompt_tokens += chunk.end - chunk.start
                self._register_pages(sequence)
            for sequence in complete:
                sequence.num_sampled += 1
                sequence.decoding, sequence.embeds = True, None
        self.num_steps += bool(plan.decoding or chunks)
        return launched

    def _prepare(self, sequence: SequenceState) -> bool:
        """Prepare a sequence for its first chunk. An error, such as of its images, ends this sequence only."""
        if sequence.slot is None or sequence.end is not None:
            return False
        if sequence.prepared_slot == (sequence.slot, sequence.num_preempted):
            return True
        sequence.prepared_slot = (sequence.slot, sequence.num_preempted)
        self.runner.reset_slot(sequence)
        self.sampler.add_sequence(sequence)
        try:
            self.runner.embed_prompt(sequence)
        except Exception as error:
            logging.getLogger(__name__).exception("the images of a request cannot be encoded")
            self._end(sequence, "error", _as_vitrail_error(error))
            return False
        return True

    def _sample(self, result: DecodeResult, sequences: list[SequenceState]) -> _LaunchedPass:
        """Sample the next tokens, keep them on the device for the next pass, and start to copy them to the host."""
        with torch.no_grad():
            if result.ids is not None and result.finite is not None and all(one.takes_most_likely for one in sequences):
                sampled = SampledTokens(result.ids, result.finite, [])  # the pass has kept them already
            else:
                sampled = self.sampler.sample(result.logits, sequences)
                self.runner.write_last_ids(sequences, sampled.ids)
            sampled = sampled.to_host()
        event, logits_on_gpu = None, result.logits.is_cuda
        if logits_on_gpu:
            event = torch.cuda.Event()
            event.record()
        return _LaunchedPass(list(sequences), sampled, event)

    def _collect_pending(self) -> None:
        """Wait for the launched passes and deliver their tokens."""
        pending, self._pending = self._pending, []
        for one in pending:
            self._deliver(one)

    def _deliver(self, launched: _LaunchedPass) -> None:
        """Append sampled tokens to their sequences, and end those that are complete."""
        if launched.event is not None:
            launched.event.synchronize()
        sampled = launched.sampled
        logprobs = sampled.read_logprobs(launched.sequences)
        rows = zip(launched.sequences, sampled.ids.tolist(), sampled.finite.tolist(), strict=True)
        for row, (sequence, id, finite) in enumerate(rows):
            if sequence.end is not None:  # it ended while this pass was on the device
                continue
            if not finite:
                self._end(
                    sequence,
                    "error",
                    CheckpointError(
                        "the model gives NaN or infinite logits", "load another checkpoint, or use float32"
                    ),
                )
                continue
            if sequence.constraint is not None and (error := sequence.constraint.push(id)) is not None:
                self._end(sequence, "error", error)
                continue
            sequence.generated.append(id)
            self.num_generated_tokens += 1
            end: EndReason | None = None
            if id in sequence.stop_ids or (sequence.constraint is not None and sequence.constraint.is_complete):
                end = "stop"
            elif len(sequence.generated) >= sequence.max_new_tokens:
                end = "length"
            if end is not None:
                sequence.end = end
                self._register_pages(sequence)
                self.scheduler.remove(sequence)
            _call(sequence, [TokenEvent(id, logprobs.get(row) if logprobs else None, end)])

    def _register_pages(self, sequence: SequenceState) -> None:
        """Give the full pages of a sequence their keys, so that other sequences can share them."""
        if not self.config.prefix_caching:
            return
        S = self.config.page_size
        count = min(sequence.num_computed, sequence.length) // S
        if count <= sequence.num_registered or not sequence.pages:
            return
        keys = sequence.extend_page_keys(S)
        for index in range(sequence.num_registered, min(count, len(keys))):
            self.allocator.register(sequence.pages[index], keys[index])
        sequence.num_registered = count

    def _end(self, sequence: SequenceState, end: EndReason, error: VitrailError | None = None) -> None:
        """End a sequence without a token."""
        if sequence.end is not None:
            return
        sequence.end, sequence.embeds = end, None
        if end == "error" and sequence.pages:  # its pages may contain NaN values
            pages = self.allocator.forget(sequence.pages)
            try:
                self.cache.clear_pages(pages)
            except Exception:  # a CUDA error, after which every call fails
                logging.getLogger(__name__).exception("the device of the engine failed")
                self.failure = EngineFailedError("the device of the model failed", "restart the server")
        self.scheduler.remove(sequence)
        _call(sequence, [TokenEvent(None, None, end, error)])

    def _fail_all(self, error: Exception) -> None:
        """End all running sequences after a pass failed, such as for lack of memory. Waiting ones remain.

        They end too if none of them can be scheduled, or if the device failed.
        """
        self._pending = []
        found = _as_vitrail_error(error)
        for sequence in list(self.scheduler.running):
            self._end(sequence, "error", found)
        if self.failure is not None:
            self._take_requests()
        if self.failure is not None or isinstance(error, (AssertionError, KeyError)):
            for sequence in list(self.scheduler.sequences()):
                self._end(sequence, "error", found)


def _group_by_adapter(items: Sequence[T], sequences: Sequence[SequenceState]) -> dict[str | None, list[T]]:
    """Group items by the adapter of their sequences: a pass has one adapter."""
    groups: dict[str | None, list[T]] = {}
    for item, sequence in zip(items, sequences, strict=True):
        groups.setdefault(sequence.params.adapter, []).append(item)
    return groups


def _as_vitrail_error(error: Exception) -> VitrailError:
    if isinstance(error, VitrailError):
        return error
    return VitrailError(f"the model failed: {type(error).__name__}", "see the log of the server")


def _call(sequence: SequenceState, events: list[TokenEvent]) -> None:
    """Call back. An error of the caller does not stop the engine."""
    if sequence.on_events is None:
        return
    try:
        sequence.on_events(events)
    except Exception:
        logging.getLogger(__name__).exception("a callback of a request failed")
