"""HTTP/1.1 connections that must make progress, and not too many of them."""

import asyncio
from typing import cast

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

_FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Connection(H11Protocol):
    """uvicorn's connection with time-outs and a limit, neither of which uvicorn has for requests that never come.

    Attributes:
        most: connections at once. One more takes the place of the one that has kept us waiting longest, for a request,
            the rest of it, or for its answer to be read; where all wait for us it is refused.
        header_seconds: from the opening of a connection, or from its last answer, until a request's header is there.
        request_seconds: from there until the answer has been sent.
    """

    most = 256
    header_seconds = 10.0
    request_seconds = 300.0

    _at_work: RequestResponseCycle | None = None
    _deadline: asyncio.TimerHandle | None = None
    _since = 0.0  # when the wait for this request, or for the next one, began

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """Begin to wait for a request."""
        super().connection_made(transport)
        if len(self.connections) > self.most and not self._drop_longest_waiting():
            transport.write(_FULL)
            transport.close()
            return
        self._set_deadline(self.header_seconds)

    def data_received(self, data: bytes) -> None:
        """Take what the other side sent."""
        super().data_received(data)
        self._see_progress()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        super().on_response_complete()
        self._see_progress()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _see_progress(self) -> None:
        """A new request has its time, and so has the wait for one; more bytes of the same give no more."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        at_work = None if cycle is None or cycle.response_complete else cycle
        if at_work is not self._at_work:
            self._at_work = at_work
            self._set_deadline(self.header_seconds if at_work is None else self.request_seconds)

    def _set_deadline(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._since = self.loop.time()
        self._deadline = self.loop.call_later(seconds, self.transport.abort)

    def _waits_for_us(self) -> bool:
        """Whether a request is here as a whole, and no answer waits to be read."""
        return self._at_work is not None and not self._at_work.more_body and not self.flow.write_paused

    def _drop_longest_waiting(self) -> bool:
        others = (other for other in self.connections if isinstance(other, Connection) and other is not self)
        waiting = [other for other in others if not other._waits_for_us()]
        if not waiting:
            return False
        longest = min(waiting, key=lambda other: other._since)
        self.connections.discard(longest)  # at once: the transport tells of its end only later
        longest.transport.abort()
        return True
