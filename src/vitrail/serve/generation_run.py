"""One request that generates text: its sequences in the engine, and their text as it comes."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, ref

from vitrail.errors import VitrailError
from vitrail.serve.engine_request import SamplingParams, SequenceState, TokenCallback, TokenEvent, TokenLogprobs
from vitrail.serve.openai_schema import APIError, to_api_error
from vitrail.serve.served_model import PreparedGeneration, PreparedText, ServedModel, TextDelta
from vitrail.serve.server_metrics import ServerMetrics
from vitrail.serve.token_constraints import ConstraintError
from vitrail.serve.tool_calls import ParsedToolCall

Arrival = tuple[int, list[TokenEvent] | TextDelta] | None
"""New tokens or text of a choice; None when the time of the request is over."""


class EventDelivery:
    """Carry events from threads to the queues of an event loop. All events of an engine step wake the loop once."""

    _of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, "EventDelivery"] = WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = ref(loop)
        self._pending: deque[tuple[asyncio.Queue[Arrival], Arrival]] = deque()
        self._is_scheduled = False

    @classmethod
    def to_running_loop(cls) -> "EventDelivery":
        """Return the delivery of the running loop."""
        loop = asyncio.get_running_loop()
        return cls._of_loops.setdefault(loop, cls(loop))

    def put(self, queue: asyncio.Queue[Arrival], arrival: Arrival) -> None:
        """Put an arrival into a queue of the loop, from any thread."""
        self._pending.append((queue, arrival))
        if not self._is_scheduled and (loop := self._loop()) is not None:  # else the loop has yet to deliver
            self._is_scheduled = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads the answer
                loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_scheduled = False
        while self._pending:
            queue, arrival = self._pending.popleft()
            queue.put_nowait(arrival)


@dataclass
class ChoiceResult:
    """Complete text of a choice."""

    text: str = ""
    num_tokens: int = 0
    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    finish_reason: str = "stop"
    tool_calls: list[ParsedToolCall] = field(default_factory=list)


class GenerationRun:
    """Run a prepared request. `deltas` yields (choice, text) as it is generated."""

    def __init__(
        self,
        model: ServedModel,
        prepared: PreparedGeneration | PreparedText,
        metrics: ServerMetrics,
        max_seconds: float,
    ):
        self.model, self.prepared, self.metrics, self.max_seconds = model, prepared, metrics, max_seconds
        self.sequences: list[SequenceState] = []
        self.num_completion_tokens = 0
        self.cancelled = False
        self._queue: asyncio.Queue[Arrival] = asyncio.Queue()
        self._started = time.monotonic()

    @property
    def num_prompt_tokens(self) -> int:
        prepared = self.prepared
        return len(prepared.prompt.ids) if isinstance(prepared, PreparedGeneration) else prepared.num_prompt_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache saved."""
        return self.sequences[0].num_cached_tokens if self.sequences else 0

    def start(self, client: str) -> None:
        """Submit the request. Raises an error if the engine does not accept it."""
        prepared, delivery = self.prepared, EventDelivery.to_running_loop()
        if isinstance(prepared, PreparedText):
            self.model.turns.check_queue()
            self._task = asyncio.ensure_future(self._take_turn(prepared, delivery, client))
            return
        assert self.model.engine is not None
        try:
            for choice, params in enumerate(prepared.params):

                def receive(events: list[TokenEvent], choice: int = choice) -> None:
                    delivery.put(self._queue, (choice, events))

                self.sequences.append(self._submit(choice, params, receive, client))
        except VitrailError:
            self.cancel()
            raise

    def _submit(self, choice: int, params: SamplingParams, receive: TokenCallback, client: str) -> SequenceState:
        prepared, engine = self.prepared, self.model.engine
        assert isinstance(prepared, PreparedGeneration) and engine is not None
        constraint = prepared.constraints[choice]
        return engine.submit(prepared.prompt, params, receive, client=client, constraint=constraint)

    async def _take_turn(self, prepared: PreparedText, delivery: EventDelivery, client: str) -> None:
        async with self.model.turns.take(client):
            if not self.cancelled:
                await asyncio.to_thread(self._run_pipeline, prepared, delivery)

    def _run_pipeline(self, prepared: PreparedText, delivery: EventDelivery) -> None:
        """Answer with the pipeline, in a thread. Its text is stripped as that of `vitrail ask`."""

        def put(delta: TextDelta) -> None:
            delivery.put(self._queue, (0, delta))

        held, started = "", False
        try:
            with self.model.lock:
                for delta in prepared.run():
                    if self.cancelled:
                        return
                    text = held + delta.text
                    text = text if started else text.lstrip()
                    started = started or bool(text)
                    kept = text.rstrip()
                    held = text[len(kept) :]
                    put(delta._replace(text=kept))
        except VitrailError as error:
            put(TextDelta("", finish_reason="error", error=error))
        except Exception as error:
            put(TextDelta("", finish_reason="error", error=VitrailError(f"the model failed: {type(error).__name__}")))

    def cancel(self) -> None:
        """Cancel all sequences that run."""
        if self.cancelled:
            return
        self.cancelled = True
        for sequence in self.sequences:
            if sequence.end is None and self.model.engine is not None:
                self.model.engine.cancel(sequence)

    async def _wait(self) -> list[tuple[int, list[TokenEvent] | TextDelta]]:
        """Wait for new tokens. All that wait for a choice are one item, so a loop that is behind sends fewer chunks."""
        arrivals = [await self._queue.get()]
        while not self._queue.empty():
            arrivals.append(self._queue.get_nowait())
        items: list[tuple[int, list[TokenEvent] | TextDelta]] = []
        tokens: dict[int, list[TokenEvent]] = {}
        for arrival in arrivals:
            if arrival is None:
                self.cancel()
                raise APIError(f"the request took more than {self.max_seconds:g} seconds", status=408)
            choice, new = arrival
            if isinstance(new, TextDelta):
                items.append((choice, new))
            elif choice in tokens:
                tokens[choice] += new
            else:
                tokens[choice] = list(new)
                items.append((choice, tokens[choice]))
        return items

    async def deltas(self) -> AsyncIterator[tuple[int, TextDelta]]:
        """Yield the text of the choices until all are complete."""
        prepared = self.prepared
        remaining = len(prepared.choices) if isinstance(prepared, PreparedGeneration) else 1
        seconds_left = max(0.01, self._started + self.max_seconds - time.monotonic())
        timer = asyncio.get_running_loop().call_later(seconds_left, self._queue.put_nowait, None)
        first = True
        try:
            while remaining:
                for choice, new in await self._wait():
                    if first:
                        self.metrics.observe("time_to_first_token_seconds", time.monotonic() - self._started)
                        first = False
                    if (delta := self._read(choice, new)) is None:
                        continue
                    remaining -= delta.finish_reason is not None
                    yield choice, delta
        finally:
            timer.cancel()

    def _read(self, choice: int, new: list[TokenEvent] | TextDelta) -> TextDelta | None:
        """Return the text of new tokens; None after the end of the choice. Raises the error of a failed request."""
        if isinstance(new, TextDelta):
            delta = new
        else:
            assert isinstance(self.prepared, PreparedGeneration)
            if self.prepared.choices[choice].done:
                return None
            delta = self.prepared.choices[choice].push(new, self.prepared.params[choice].stop_ids)
        self.num_completion_tokens += delta.num_tokens
        if delta.error is not None:
            self.cancel()
            found = to_api_error(delta.error)
            is_request = not self.sequences or isinstance(delta.error, ConstraintError)
            found.status = 400 if is_request else 500
            raise found
        if delta.finish_reason is not None and self.sequences and self.sequences[choice].end is None:
            assert self.model.engine is not None
            self.model.engine.cancel(self.sequences[choice])  # a stop string ended it
        return delta

    async def collect(self) -> list[ChoiceResult]:
        """Return all choices when they are complete."""
        prepared = self.prepared
        results = [ChoiceResult() for _ in (prepared.choices if isinstance(prepared, PreparedGeneration) else [0])]
        async for choice, delta in self.deltas():
            result = results[choice]
            result.text += delta.text
            result.num_tokens += delta.num_tokens
            result.logprobs += delta.logprobs
            result.tool_calls += delta.tool_calls
            result.finish_reason = delta.finish_reason or result.finish_reason
        return results
