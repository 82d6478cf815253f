"""HTTP connections with time limits: clients that send nothing, or too slowly, are disconnected."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class RequestDeadlineProtocol(H11Protocol):
    """HTTP/1.1 protocol that closes a connection whose request is not complete after `request_seconds`."""

    request_seconds = 10.0
    incomplete_states = (
        h11.IDLE,
        h11.SEND_BODY,
    )  # of the client: before the end of the header, before that of the body

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._update_deadline()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_deadline()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # begins to read the next request
        self._update_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        super().connection_lost(exc)

    def _update_deadline(self) -> None:
        if self.conn.their_state not in self.incomplete_states:
            self._cancel_deadline()
        elif self._deadline is None:  # bytes that follow do not extend it
            self._deadline = self.loop.call_later(self.request_seconds, self._close_incomplete)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close_incomplete(self) -> None:
        if self.transport.get_protocol() is self and not self.transport.is_closing():  # no WebSocket by now
            self.transport.close()


class HeaderDeadlineProtocol(RequestDeadlineProtocol):
    """Protocol with a deadline for the header alone, for servers that limit the time of the body themselves."""

    request_seconds = 20.0
    incomplete_states: tuple[Any, ...] = (h11.IDLE,)
