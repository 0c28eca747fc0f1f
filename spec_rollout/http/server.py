"""An HTTP server in a thread of its own, with limits and strict reading of its connections.

Connections cannot harm each other: each request is read in one way only, and number and idle time of
connections are limited.
"""

import asyncio
import re
import socket
import ssl
import threading
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from aedit.spec_rollout.http.errors import ApiError
from aedit.types import check

MAX_HEADER_BYTES = 32 << 10
_LINE_RULES = (
    (re.compile(rb"(?<!\r)\n"), "a line of the header ends without CR"),
    (re.compile(rb"\n[ \t]"), "a line of the header continues the one before"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Limits of requests and connections. A request beyond them is refused and harms no other."""

    max_body_bytes: int = 8 << 20
    max_buffered_bytes: int = 64 << 20
    """Upper limit of the bodies that are being read and parsed at the same time."""
    max_prompts: int = 128
    """Prompts of one request."""
    max_samples: int = 128
    """Samples of one request: prompts times `n`."""
    max_stop: int = 16
    max_stop_chars: int = 256
    max_logprobs: int = 20
    max_logit_bias: int = 1024
    max_entries: int = 1 << 20
    """Log-probabilities of one answer: tokens that it may have, times the alternatives of each and one."""
    max_connections: int = 512
    """Connections at a time. A further one ends the one that has been idle for the longest time."""
    idle_s: float = 15.0
    """Time for the headers of a request, and between two requests of a connection."""
    body_s: float = 30.0
    """Time for the body of a request."""
    write_s: float = 30.0
    """Time in which a client must read a part of the answer."""
    request_s: float = 600.0
    """Time for a whole request."""

    def __post_init__(self) -> None:
        for field in fields(self):
            check(getattr(self, field.name) > 0, field.name, "must be above 0", getattr(self, field.name))


START_S = 60.0


class HttpServer:
    """Serves an application until `close`."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        limits: HttpLimits | None = None,
        *,
        certificate: tuple[Path, Path] | None = None,
    ) -> None:
        """Bind the address and start.

        Args:
            app: The application.
            host: Name or address of an interface of this machine.
            port: Port; 0 chooses a free one.
            limits: Limits of connections.
            certificate: Files of a certificate and its private key in PEM, for HTTPS.

        Raises:
            OSError: The address cannot be bound, or the files cannot be read.
        """
        limits = limits or HttpLimits()
        if certificate is not None:  # uvicorn reads them in its thread
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*certificate)
        self._socket = _bound(host, port)
        self._started = threading.Event()
        config = uvicorn.Config(
            app,
            http=guarded_protocol(limits),
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=min(limits.max_connections, 1024),
            timeout_keep_alive=max(1, round(limits.idle_s)),
            timeout_graceful_shutdown=5,
            ssl_certfile=certificate[0] if certificate else None,
            ssl_keyfile=certificate[1] if certificate else None,
        )
        self._server = _Server(config, self._started)
        self._thread = threading.Thread(target=self._run, name=f"http {self.address}", daemon=True)
        self._thread.start()
        if not self._started.wait(START_S):
            raise OSError(f"the HTTP server at {self.address} did not start within {START_S:g} s")

    @property
    def address(self) -> str:
        """Return HOST:PORT."""
        host, port = self._socket.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def close(self, timeout_s: float = 30.0) -> None:
        """Close the port, give running answers a few seconds, and end the thread.

        Raises:
            TimeoutError: The thread has not ended in time.
        """
        self._server.should_exit = True
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the HTTP server has not ended within {timeout_s:g} s")

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, started: threading.Event) -> None:
        super().__init__(config)
        self._is_up = started

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self._is_up.set()


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address."""
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(place)
    except OSError:
        found.close()
        raise
    return found


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
