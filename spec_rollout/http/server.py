"""An HTTP server in a thread of its own."""

import socket
import threading
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from aedit.spec_rollout.http.connections import guarded_protocol
from aedit.spec_rollout.http.limits import HttpLimits

START_S = 60.0


class HttpServer:
    """Serves an application until `close`."""

    def __init__(self, app: ASGIApp, host: str, port: int, limits: HttpLimits | None = None) -> None:
        """Bind the address and start.

        Args:
            app: The application.
            host: Name or address of an interface of this machine.
            port: Port; 0 chooses a free one.
            limits: Limits of connections.

        Raises:
            OSError: The address cannot be bound.
        """
        limits = limits or HttpLimits()
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
