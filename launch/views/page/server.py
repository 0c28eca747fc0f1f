"""`aedit view`: serve the page of a run, which follows the run by server-sent events. It changes nothing.

On loopback all users of this machine may read it, under a name of this machine only, so that no page of
another site reads it. At other addresses it has TLS, and a reader needs a token of the run's keys: as the
password that a browser asks for, or as a bearer token.
"""

import asyncio
import base64
import binascii
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aedit.child import StopSignals
from aedit.launch.records import KeptRollout, Run
from aedit.launch.views.page.contents import RunPage, as_json, contents, page_digest
from aedit.launch.views.page.html import (
    LICENSE,
    LIVE_POLICY,
    MOST_ROLLOUTS,
    SCRIPTS,
    STYLES,
    asset,
    live_page,
)
from aedit.launch.views.sources import open_source
from aedit.proto.rpc import SERVER, Refusal, ServerKeys, is_loopback, server_keys
from aedit.spec_rollout.http import HttpLimits, HttpServer
from aedit.types import UserError

MOST_LINES = 256
"""Lines of each long file of the run that are read, evenly spaced."""
FRESH_S, REST = 1.0, 4.0
"""Age at which the page is made anew, and the same in multiples of the time that this takes."""
UPDATE_S = 2.0
LOOK_S = 0.25
UPDATE_BYTES_PER_S = 250_000
"""An open page receives its updates not faster."""
MOST_STREAMS = 32
STATUS = "/aedit.v1.State/Status"
"""Call of a hub that needs the same right as the page."""
LIMITS = HttpLimits(max_connections=64)
HEADERS = (
    (b"content-security-policy", LIVE_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
TYPES = {".css": "text/css", ".js": "text/javascript", ".LICENSE": "text/plain"}


@dataclass(frozen=True, slots=True)
class MadePage:
    """The page of a run at one time."""

    page: RunPage
    data: str
    """As JSON."""
    digest: str
    """Of `data`."""

    @staticmethod
    def of(page: RunPage) -> "MadePage":
        """Return the page with its JSON and digest."""
        data = as_json(page)
        return MadePage(page, data, page_digest(data))


class PageSource:
    """The page of one run, made anew when it is asked for and old. Any thread may call."""

    def __init__(self, read: Callable[[], Run], rollouts: Callable[[int], Sequence[KeptRollout]]) -> None:
        """Read the run by `read`, and up to a number of rollouts. Raises UserError if it cannot be read."""
        self._read, self._rollouts, self._lock = read, rollouts, threading.Lock()
        began_s = time.monotonic()
        self._made = MadePage.of(contents(read()))
        self._keep(began_s)

    def _keep(self, began_s: float) -> None:
        self._old_s = time.monotonic() + max(FRESH_S, REST * (time.monotonic() - began_s))

    def made(self) -> MadePage:
        """Return the page, as old as `FRESH_S` or, if it takes long, `REST` times as long as it takes.

        If the run cannot be read, the last one with the reason.
        """
        with self._lock:
            if (began_s := time.monotonic()) >= self._old_s:
                try:
                    self._made = MadePage.of(contents(self._read()))
                except UserError as error:
                    last = self._made.page
                    failed = RunPage(title=last.title, alerts=(str(error),), sections=last.sections)
                    self._made = MadePage.of(failed)
                self._keep(began_s)
            return self._made

    def html(self) -> str:
        """Return the whole page with the kept rollouts."""
        made = self.made()
        return live_page(made.page, self._rollouts(MOST_ROLLOUTS), made.data)


def page_app(source: PageSource, ending: threading.Event) -> Starlette:
    """Return the application that serves the page, its data as JSON, its events and its files.

    ending: ends the events once it is set.
    """
    assets = {name: asset(name) for name in (*STYLES, *SCRIPTS, LICENSE)}
    streams = threading.BoundedSemaphore(MOST_STREAMS)

    async def page(request: Request) -> Response:
        found = await run_in_threadpool(source.html)
        return Response(found, media_type="text/html")

    async def data(request: Request) -> Response:
        found = await run_in_threadpool(source.made)
        return Response(found.data, media_type="application/json")

    async def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in assets:
            return PlainTextResponse("no such file\n", 404)
        return Response(assets[name], media_type=TYPES[f".{name.rpartition('.')[2]}"])

    async def events(request: Request) -> Response:
        async def updates() -> AsyncIterator[str]:
            if not streams.acquire(blocking=False):
                yield "retry: 10000\n\n"  # too many open pages: the browser asks again
                return
            has = request.headers.get("last-event-id") or request.query_params.get("have", "")
            try:
                while not ending.is_set():
                    found = await run_in_threadpool(source.made)
                    news = f"id: {found.digest}\ndata: {found.data}\n\n"
                    yield news if found.digest != has else ":\n\n"
                    has = found.digest
                    next_at = time.monotonic() + max(UPDATE_S, len(found.data) / UPDATE_BYTES_PER_S)
                    while time.monotonic() < next_at and not ending.is_set():
                        await asyncio.sleep(LOOK_S)
            finally:
                streams.release()

        return StreamingResponse(updates(), media_type="text/event-stream")

    routes = {"/": page, "/data.json": data, "/events": events, "/static/{name}": static}
    return Starlette(routes=[Route(path, each, methods=["GET"]) for path, each in routes.items()])


class Guard:
    """Application that answers only requests of those who may read, with headers that protect the page."""

    def __init__(self, app: ASGIApp, host: str, keys: ServerKeys) -> None:
        """Guard `app`.

        Args:
            app: The page.
            host: Name or address at which it listens.
            keys: With the tokens that callers need; without: they must name this machine as the host.
        """
        self._app, self._tokens = app, keys.tokens
        self._hosts = {"localhost", "127.0.0.1", "[::1]", host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        answer = self._refusal(headers) or self._app
        await answer(scope, receive, send_with_headers)

    def _refusal(self, headers: Mapping[bytes, str]) -> Response | None:
        """Return the answer to a caller who may not read; None for others."""
        if self._tokens is None:
            host = headers.get(b"host", "").lower()
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if name in self._hosts or is_loopback(f"{name}:0"):
                return None
            return PlainTextResponse("this page is read as localhost, or with keys: --keys\n", 403)
        try:
            self._tokens.check([("authorization", _bearer(headers.get(b"authorization", "")))], STATUS)
        except (Refusal, ValueError) as error:
            asks = {"www-authenticate": 'Basic realm="aedit: the password is a token", charset="UTF-8"'}
            reason = error.args[-1] if error.args else "no token"
            return PlainTextResponse(f"{reason}\n", 401, asks)
        return None


def _bearer(authorization: str) -> str:
    """Return `Bearer TOKEN` for either form of the header. Raises ValueError for another form."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return f"Bearer {value.strip()}"
    if scheme.lower() != "basic":
        raise ValueError("no token: give the one that `aedit keys` wrote for a reader as the password")
    try:
        _, _, token = base64.b64decode(value.strip(), validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        raise ValueError("the password is no token of `aedit keys`") from None
    return f"Bearer {token.strip()}"


def serve_page(
    read: Callable[[], Run],
    listen: str,
    keys: Path | None = None,
    rollouts: Callable[[int], Sequence[KeptRollout]] = lambda most: (),
) -> "PageServer":
    """Serve the page of the run that `read` returns; return the server.

    Args:
        read: Called from any thread, one at a time. May raise UserError.
        rollouts: Returns up to a number of kept rollouts. Called from any thread.
        listen: HOST:PORT; port 0 chooses a free one.
        keys: Folder of a hub's keys: TLS, and tokens. Not needed on loopback.

    Raises:
        UserError: The address is not right or in use, the keys do not suffice, or the run cannot be read.
    """
    host, port = _place(listen)
    admitted, certificate = ServerKeys(), None
    if not is_loopback(listen):
        if keys is None or not (keys / f"{SERVER}.crt").is_file():
            raise UserError(
                f"--listen: {listen} can be reached from other machines: name a folder with {SERVER}.crt with"
                " --keys, such as that of the hub (`aedit keys`), or listen at 127.0.0.1"
            )
        admitted = server_keys(keys)
        certificate = keys / f"{SERVER}.crt", keys / f"{SERVER}.key"
    ending = threading.Event()
    app = Guard(page_app(PageSource(read, rollouts), ending), host, admitted)
    try:
        server = HttpServer(app, host, port, LIMITS, certificate=certificate)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"--listen: cannot listen at {listen}: {reason}; choose another port") from None
    return PageServer(server, ending, is_private=is_loopback(listen))


class PageServer:
    """Server of a page, until `close`."""

    def __init__(self, server: HttpServer, ending: threading.Event, *, is_private: bool) -> None:
        """Own `server`, whose events end with `ending`. is_private: only this machine reaches it."""
        self._server, self._ending, self._is_private = server, ending, is_private

    @property
    def address(self) -> str:
        """Return HOST:PORT."""
        return self._server.address

    @property
    def url(self) -> str:
        """Return the address of the page for a browser."""
        return f"http{'' if self._is_private else 's'}://{self.address}/"

    def close(self) -> None:
        """End the open pages and the server."""
        self._ending.set()
        self._server.close()


def _place(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or not port.isascii() or int(port) >= 1 << 16:
        raise UserError(f"--listen: {listen!r} must be HOST:PORT, such as 127.0.0.1:8080")
    return host.strip("[]"), int(port)


def view_command(
    place: Path | str, keys: Path | None = None, *, insecure: bool = False, listen: str = "127.0.0.1:0"
) -> None:
    """Serve the page of the run at `place` until a signal arrives. Raises UserError, see `serve_page`.

    Args:
        place: A run directory, or HOST:PORT of a hub or peer.
        keys: Folder of keys, for a hub with TLS and for a page at another address than loopback.
        insecure: Connect to a hub on another machine without TLS.
        listen: HOST:PORT of the page.
    """
    with open_source(place, keys, insecure=insecure, most_lines=MOST_LINES) as source:
        stop = StopSignals()
        server = serve_page(source.history, listen, keys, source.rollouts)
        try:
            print(f"{server.url}  Ctrl-C ends it.", flush=True)
            while not stop.asked.wait(0.5):
                pass
        finally:
            server.close()
