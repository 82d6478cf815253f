"""Scheduler of the engine: which sequences run, and how many tokens of each the next pass processes.

A step has a budget of tokens. Running sequences get one token each; prompts get the rest in chunks. Every client has a
counter of the tokens that it received. The client with the lowest counter is served first, so a client with many
requests does not delay the others. If pages run out, the sequence that arrived last is preempted: its pages are
released, and its tokens are processed again later.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from vitrail.config import Config
from vitrail.errors import ConfigError
from vitrail.serve.client_fairness import ClientCounters
from vitrail.serve.engine_request import SequenceState
from vitrail.serve.page_allocator import PageAllocator


class EngineConfig(Config):
    """Settings of the engine.

    max_num_seqs        sequences that run at the same time
    max_batched_tokens  tokens of one pass, over all sequences
    num_pages           pages of the KV cache; None: as many as `kv_cache_bytes` holds
    kv_cache_bytes      bytes of the KV cache; None: what `max_num_seqs` sequences of the context length need, and at
                        most half of the free memory
    page_size           tokens of a page
    max_waiting         requests that wait at most; more are refused
    prefix_caching      share the pages of equal prefixes
    feature_cache_bytes bytes of the cache of image features
    cuda_graphs         capture decoding as CUDA graphs, on a GPU
    """

    max_num_seqs: int = 64
    max_batched_tokens: int = 2048
    num_pages: int | None = None
    kv_cache_bytes: int | None = None
    page_size: int = 16
    max_waiting: int = 256
    prefix_caching: bool = True
    feature_cache_bytes: int = 1 << 28
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_batched_tokens", "page_size", "max_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of the engine is {getattr(self, name)}", "give at least 1")
        if self.num_pages is not None and self.num_pages < 2:
            raise ConfigError(f"num_pages of the engine is {self.num_pages}", "give at least 2")


class PrefillChunk(NamedTuple):
    """Tokens `start` … `end` − 1 of a sequence."""

    sequence: SequenceState
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        """Whether the next token is sampled after this chunk."""
        return self.end == self.sequence.prefill_length


class StepPlan(NamedTuple):
    """What the next pass processes: one token of each decoding sequence, and chunks of prompts."""

    decoding: list[SequenceState]
    chunks: list[PrefillChunk]


class Scheduler:
    """Choose the work of every step. All methods run in the engine's thread."""

    def __init__(self, config: EngineConfig, allocator: PageAllocator):
        self.config, self.allocator = config, allocator
        self.waiting: dict[str, list[SequenceState]] = {}  # by client, in order of arrival
        self.running: list[SequenceState] = []  # in order of admission
        self.clients = ClientCounters()  # tokens that each client received
        self.free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.waiting.values()))

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def sequences(self) -> Iterable[SequenceState]:
        """Return all sequences that run or wait."""
        return [*self.running, *(one for own in self.waiting.values() for one in own)]

    def add(self, sequence: SequenceState) -> None:
        """Queue a new sequence."""
        self.clients.enter(sequence.client)
        self.waiting.setdefault(sequence.client, []).append(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Remove a sequence that ended, and release its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence in (own := self.waiting.get(sequence.client, [])):
            own.remove(sequence)
            if not own:
                del self.waiting[sequence.client]
        self.clients.leave(sequence.client)

    def schedule(self, wait_for_results: Callable[[], None]) -> StepPlan:
        """Plan the next step. `wait_for_results` is called before a sequence is preempted, and may end sequences."""
        self._admit(wait_for_results)
        decoding: list[SequenceState] = []
        for sequence in list(self.running):
            if sequence.slot is None or not sequence.decoding or not sequence.wants_token:
                continue
            length = sequence.num_computed + 1
            if len(sequence.pages) * self.config.page_size >= length or self._reserve(
                sequence, length, wait_for_results
            ):
                decoding.append(sequence)
        decoding = [one for one in decoding if one.slot is not None and one.end is None]  # not preempted meanwhile
        budget = max(1, self.config.max_batched_tokens - len(decoding))
        chunks: list[PrefillChunk] = []
        prefilling = [one for one in self.running if not one.decoding and one.end is None]
        for sequence in sorted(prefilling, key=lambda one: (self.clients[one.client], one.number)):
            if budget <= 0:
                break
            start = sequence.num_computed
            end = sequence.find_chunk_end(start, start + budget)
            chunks.append(PrefillChunk(sequence, start, end))
            budget -= end - start
        for sequence in decoding:
            self.clients.add(sequence.client, 1)
        for chunk in chunks:
            self.clients.add(chunk.sequence.client, chunk.end - chunk.start)
        return StepPlan(decoding, chunks)

    # ---- admission ----------------------------------------------------------------------------------------------

    def _admit(self, wait_for_results: Callable[[], None]) -> None:
        """Start waiting sequences while there are slots and pages."""
        while self.waiting:
            client = min(self.waiting, key=lambda name: (self.clients[name], self.waiting[name][0].number))
            sequence = self.waiting[client][0]
            if not self.free_slots and not self._preempt_for(client, wait_for_results):
                return
            if not self.free_slots or sequence.client not in self.waiting or self.waiting[client][0] is not sequence:
                return
            if not self._start(sequence):
                return
            self.waiting[client].pop(0)
            if not self.waiting[client]:
                del self.waiting[client]

    def _start(self, sequence: SequenceState) -> bool:
        """Take a slot and the pages of the known tokens, shared ones first. Returns whether there were enough."""
        S, target = self.config.page_size, sequence.prefill_length
        shared: list[int] = []
        if self.config.prefix_caching:
            keys = sequence.extend_page_keys(S)[: (target - 1) // S]
            shared = self.allocator.find_prefix(keys)
            while shared and (fitting := sequence.align_prefix(len(shared) * S)) < len(shared) * S:
                shared = shared[: fitting // S]
        needed = -(-(target + 1) // S) - len(shared)
        self.allocator.share(shared)  # before allocation, which could evict them
        # Without other sequences, a sequence that fits into the cache always starts.
        if self.allocator.num_available < needed:
            self.allocator.release(shared)
            return False
        own = [page for _ in range(needed) if (page := self.allocator.allocate()) is not None]
        sequence.pages, sequence.num_computed, sequence.num_registered = shared + own, len(shared) * S, len(shared)
        sequence.num_cached_tokens = max(sequence.num_cached_tokens, min(sequence.num_computed, sequence.prompt_length))
        self.allocator.count_prefix(len(shared) * S, target)
        sequence.slot = self.free_slots.pop()
        self.running.append(sequence)
        return True

    def _preempt_for(self, client: str, wait_for_results: Callable[[], None]) -> bool:
        """Free a slot for a client that has far fewer running sequences than another."""
        counts = Counter(one.client for one in self.running)
        most, count = counts.most_common(1)[0]
        if count < counts[client] + 2 or self.config.max_num_seqs < 2:
            return False
        wait_for_results()
        own = [one for one in self.running if one.client == most]
        if self.free_slots or not own:
            return bool(self.free_slots)
        self._preempt(max(own, key=lambda one: one.number))
        return True

    # ---- pages --------------------------------------------------------------------------------------------------

    def _reserve(self, sequence: SequenceState, length: int, wait_for_results: Callable[[], None]) -> bool:
        """Make sure that the pages of a sequence hold `length` tokens. Returns False if it was preempted or ended."""
        while len(sequence.pages) * self.config.page_size < length:
            page = self.allocator.allocate()
            if page is not None:
                sequence.pages.append(page)
                continue
            wait_for_results()  # may release pages
            if sequence.end is not None:
                return False
            if self.allocator.num_available:
                continue
            last = max(self.running, key=lambda one: one.number)
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _preempt(self, sequence: SequenceState) -> None:
        """Stop a sequence and queue it again. All its sampled tokens must be known."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.num_computed, sequence.decoding, sequence.num_registered = 0, False, 0
        sequence.num_preempted += 1
        self.num_preemptions += 1
        own = self.waiting.setdefault(sequence.client, [])
        own.append(sequence)
        own.sort(key=lambda one: one.number)

    def _release(self, sequence: SequenceState) -> None:
        self.allocator.release(sequence.pages)
        sequence.pages = []
        if sequence.slot is not None:
            self.free_slots.append(sequence.slot)
            sequence.slot = None
