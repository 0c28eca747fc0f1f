"""Connections that cannot harm each other: one reading of each request, limits on number and idle time.

h11 reads some requests in one of several ways that are in use: a proxy in front of the server may read them
in another one, and then takes a part of a body for a request, or the reverse (request smuggling). These
requests are refused.

uvicorn closes a connection that idles after an answer, but neither one that never sends a whole header nor
one that does not read. Here each connection is looked at regularly.
"""

import asyncio
import re
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from aedit.spec_rollout.http.errors import ApiError
from aedit.spec_rollout.http.limits import HttpLimits

MAX_HEADER_BYTES = 32 << 10
_LINE_RULES = (
    (re.compile(rb"(?<!\r)\n"), "a line of the header ends without CR"),
    (re.compile(rb"\n[ \t]"), "a line of the header continues the one before"),
)


def guarded_protocol(limits: HttpLimits) -> type[H11Protocol]:
    """Return uvicorn's protocol class with these limits."""
    return type("Guarded", (GuardedProtocol,), {"limits": limits})


class StrictConnection(h11.Connection):
    """Reading of requests that refuses those whose length another program may see elsewhere."""

    error = ""
    """Reason for which the last request was refused."""

    def next_event(self) -> Any:
        """Return the next event; see `h11.Connection`.

        A request with a chunked body is the last one of its connection, so that nothing behind the body is
        read, whatever its extensions and trailers were.

        Raises:
            RemoteProtocolError: The request is not valid, or its length is not clear.
        """
        before = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._check(before[: len(before) - len(self.trailing_data[0])], event)
        except h11.RemoteProtocolError as error:
            self.error = self.error or str(error)[:128]
            raise
        if isinstance(event, h11.Request) and any(name == b"transfer-encoding" for name, _ in event.headers):
            headers = [*event.headers, (b"connection", b"close")]
            return h11.Request(
                method=event.method, target=event.target, headers=headers, http_version=event.http_version
            )
        return event

    def _check(self, head: bytes, request: h11.Request) -> None:
        names = [name for name, _ in request.headers]
        wrong = [rule for pattern, rule in _LINE_RULES if pattern.search(head)]
        if request.http_version not in (b"1.0", b"1.1"):
            wrong.append("its version is not HTTP/1.0 or HTTP/1.1")
        if b"transfer-encoding" in names and b"content-length" in names:
            wrong.append("it has both Transfer-Encoding and Content-Length")
        if b"transfer-encoding" in names and request.http_version == b"1.0":
            wrong.append("it has Transfer-Encoding, which HTTP/1.0 does not have")
        if wrong:
            raise h11.RemoteProtocolError(wrong[0])


class GuardedProtocol(H11Protocol):
    """A connection that is closed when it idles too long, or when many others need its place."""

    limits: HttpLimits
    conn: StrictConnection
    _idle_since_s = 0.0
    _look: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = StrictConnection(h11.SERVER, MAX_HEADER_BYTES)

    def send_400_response(self, msg: str) -> None:
        """Answer that the request is not valid, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else an answer has begun
            error = ApiError(400, f"the request is not valid HTTP: {self.conn.error}", code="invalid_http")
            found = error.response()
            headers = [*found.raw_headers, (b"connection", b"close")]
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=bytes(found.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    @property
    def is_idle(self) -> bool:
        """Return true if no request is being answered: its header is not complete, or its answer is."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def connection_made(self, transport: Any) -> None:
        """Take a connection; end the one that has idled longest if there are too many."""
        super().connection_made(transport)
        self._idle_since_s = self.loop.time()
        if len(self.connections) > self.limits.max_connections:
            others = [each for each in self.connections if isinstance(each, GuardedProtocol)]
            idle = [each for each in others if each.is_idle]  # this one is the newest
            min(idle, key=lambda each: each._idle_since_s).transport.abort()
        self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Begin to idle."""
        self._idle_since_s = self.loop.time()
        super().on_response_complete()

    def _look_later(self) -> None:
        self._look = self.loop.call_later(self.limits.idle_s / 2, self._end_if_idle)

    def _end_if_idle(self) -> None:
        """Close a connection that idles too long; abort one that was closed and still does not read."""
        if self.transport.is_closing():
            self.transport.abort()
            return
        if self.is_idle and self.loop.time() - self._idle_since_s >= self.limits.idle_s:
            self.transport.close()
        self._look_later()
