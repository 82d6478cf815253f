"""Fair shares of clients: counters of what each received, and turns for models that answer one request at a time."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from vitrail.errors import VitrailError


class QueueFullError(VitrailError):
    """As many requests wait as are accepted."""


class ClientCounters:
    """What each client received, in tokens or seconds. The client with the lowest counter is next.

    A client that becomes active is lifted to the lowest counter of the active ones: it cannot save up a share, and a
    client that sends its requests one after another has no advantage over one that sends many at once. Counters of
    inactive clients are forgotten as soon as they would be lifted.
    """

    def __init__(self) -> None:
        self._received: dict[str, float] = {}
        self._num_requests: Counter[str] = Counter()  # of the active clients

    def __getitem__(self, client: str) -> float:
        return self._received[client]

    def __len__(self) -> int:
        return len(self._received)

    def enter(self, client: str) -> None:
        """Count a request that waits or runs."""
        if client not in self._num_requests:
            self._received[client] = max(self._received.get(client, 0.0), self._find_lowest())
        self._num_requests[client] += 1

    def leave(self, client: str) -> None:
        """Count the end of a request."""
        self._num_requests[client] -= 1
        if self._num_requests[client]:
            return
        del self._num_requests[client]
        lowest = self._find_lowest()
        for other, received in list(self._received.items()):
            if other not in self._num_requests and (received <= lowest or not self._num_requests):
                del self._received[other]

    def add(self, client: str, amount: float) -> None:
        """Add to what a client received."""
        self._received[client] += amount

    def _find_lowest(self) -> float:
        return min((self._received[client] for client in self._num_requests), default=0.0)


class FairTurns:
    """Turns for one request at a time, shared fairly by seconds. All methods run in one event loop."""

    def __init__(self, max_waiting: int):
        self.max_waiting, self.num_waiting = max_waiting, 0
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._clients = ClientCounters()
        self._is_taken = False

    def check_queue(self) -> None:
        """Raise an error if no further request may wait."""
        if self.num_waiting >= self.max_waiting:
            raise QueueFullError(f"{self.max_waiting} requests are waiting", "try again later")

    @asynccontextmanager
    async def take(self, client: str) -> AsyncIterator[None]:
        """Wait for a turn and keep it while the context is active."""
        self._clients.enter(client)
        try:
            await self._wait(client)
            start = time.monotonic()
            try:
                yield
            finally:
                self._clients.add(client, time.monotonic() - start)
                self._pass_on()
        finally:
            self._clients.leave(client)

    async def _wait(self, client: str) -> None:
        if not self._is_taken:
            self._is_taken = True
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self.num_waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it got the turn meanwhile
                self._pass_on()
            else:
                self._remove(client, turn)
            raise
        finally:
            self.num_waiting -= 1

    def _pass_on(self) -> None:
        """Give the turn to the client that received least."""
        self._is_taken = bool(self._waiting)
        if self._waiting:
            client = min(self._waiting, key=lambda name: self._clients[name])
            turn = self._waiting[client][0]
            self._remove(client, turn)
            if turn.cancelled():
                self._pass_on()
            else:
                turn.set_result(None)

    def _remove(self, client: str, turn: asyncio.Future[None]) -> None:
        own = self._waiting.get(client, deque())
        if turn in own:
            own.remove(turn)
            if not own:
                del self._waiting[client]
