"""A gRPC server: event loop, handlers, limits of connections; health and reflection are on.

gRPC's asynchronous stack has one completion queue per process: with a loop per server they would wake each
other for every event. A call that waits for its peer takes no thread.
"""

import asyncio
import inspect
import logging
import threading
import time
import traceback
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import suppress
from functools import cache, partial
from typing import Any, TypeAlias, TypeVar

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from aedit.proto.rpc.connections import ConnectionLimit, most_connections
from aedit.proto.rpc.frames import MESSAGE_BYTES
from aedit.proto.rpc.identity import TokenReader, check_validity
from aedit.proto.rpc.keys import ServerKeys
from aedit.proto.rpc.limits import CallCost, FairPool, Limits, ReadPermits, WaitingCalls
from aedit.proto.rpc.retry import Refusal
from aedit.proto.rpc.service import CallContext, HubCore, NoNews, Service, hub_services
from aedit.types import UserError

T = TypeVar("T")


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop, which runs in a thread of its own from the first call on."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="grpc", daemon=True).start()
    return loop


def finish(work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
    """Run `work` in the loop and return its result. Must not be called by the loop's own thread."""
    return asyncio.run_coroutine_threadsafe(work, event_loop()).result(timeout_s)


log = logging.getLogger(__name__)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Write: TypeAlias = Callable[[Any], Any]
_Work: TypeAlias = Callable[[AsyncIterator[bytes], CallContext, _Write], Coroutine[Any, Any, Any]]
_LATER = grpc.StatusCode.RESOURCE_EXHAUSTED
_SILENT = "too many open calls that have sent nothing: this one was ended to make room"
_UNREAD = "too many answers that are not read: this one was ended to make room"
_END = object()
_GATHER_S = 0.005
"""Pause before a handler that had nothing to send is asked again: what follows shortly is sent together."""


class _Messages:
    """The messages of a call as they arrive. None of them is held here.

    gRPC's own iterator holds each one until the next one comes, which may be never.
    """

    def __init__(self, context: "aio.ServicerContext[Any, Any]", received: Callable[[int], object]) -> None:
        self._context, self._received = context, received
        self.on_first: Callable[[], object] = _nothing
        """Called when the first message has arrived."""
        self.after_first: Callable[[], object] = _nothing
        """Called when the first message has been dealt with."""
        self._begun = False

    def __aiter__(self) -> "_Messages":
        return self

    async def __anext__(self) -> bytes:
        if self._begun:
            self.after_first()
        message = await self._context.read()
        if message is aio.EOF:
            raise StopAsyncIteration
        self.on_first()
        self._begun = True
        self._received(len(message))
        return message  # type: ignore[no-any-return]


def _nothing() -> None:
    pass


def _clear_frames(error: BaseException | None) -> None:
    """Clear the frames of an error and of those that led to it: they hold what has arrived."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _threaded(
    behaviour: Callable[..., Any], pool: FairPool, request_streaming: bool, response_streaming: bool
) -> _Work:
    async def work(messages: AsyncIterator[bytes], context: CallContext, write: _Write) -> Any:
        is_dialogue = request_streaming and response_streaming
        first = None if is_dialogue else await anext(messages, None)
        if first is None and not request_streaming:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call ended without a request")
        request = _blocking([first], messages) if request_streaming else first
        first = None
        if not response_streaming:
            return await pool.run(context.peer(), lambda: behaviour(request, context))
        answers = behaviour(request, context)
        try:
            while (answer := await pool.run(context.peer(), lambda: next(answers, _END))) is not _END:
                if isinstance(answer, NoNews):
                    await answer.notifier.wait(answer.seen, answer.limit_s)
                    await asyncio.sleep(_GATHER_S)
                else:
                    await write(answer)
        finally:
            # One that a thread runs at this moment ends by itself, as its call is over.
            with suppress(ValueError):
                answers.close()

    return work


def _blocking(begun: list[bytes | None], messages: AsyncIterator[bytes]) -> Iterator[bytes]:
    """Yield what is in `begun`, taken out of it, and then `messages`, for a thread that waits for each."""
    loop = asyncio.get_running_loop()

    def rest() -> Iterator[bytes]:
        while begun:
            if (first := begun.pop()) is not None:
                yield first
            del first
        while True:
            try:
                message = asyncio.run_coroutine_threadsafe(_next(messages), loop).result()
            except BaseException:
                raise grpc.RpcError("the call is over") from None
            if message is None:
                return
            yield message
            del message

    return rest()


async def _next(messages: AsyncIterator[bytes]) -> bytes | None:
    return await anext(messages, None)


wall_s = time.time
"""Clock of certificates."""
_MEASURED_EVERY_S = 1.0
"""Interval at which the cost of calls is measured."""
_CHECKED_EVERY_S = 1.0
"""Interval at which the server checks that the caller of a stream may still read it."""
_FRAME_BYTES = 2**18
_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    # Otherwise a second hub on the same port gets every other connection, and no error.
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 10_000),
    # As patient as a client that sends arrays: the answer to a ping waits behind them.
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 30_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Clients ping every 5 s; a server that is asked to pings them less and calls more often an attack.
    ("grpc.http2.min_ping_interval_without_data_ms", 2_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_concurrent_streams", 256),
    # Windows would grow with the speed of the line, and hold megabytes of each upload that is not read yet.
    # They are `Limits.window_bytes` instead.
    ("grpc.http2.bdp_probe", 0),
    # A message that is cut into frames of 16 KiB costs more time to put together.
    ("grpc.http2.max_frame_size", _FRAME_BYTES),
    # Who connects and says nothing, or has made no call for long, keeps no descriptor.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 120_000),
)


class Server:
    """Serves from its creation until `stop`. Raises UserError if the address is not available.

    address: HOST:PORT; port 0 takes a free one, which `port` and `address` then tell.
    """

    def __init__(
        self,
        services: Sequence[Service],
        address: str,
        *,
        keys: ServerKeys | None = None,
        limits: Limits | None = None,
        threads: int = 8,
        cost: CallCost | None = None,
    ) -> None:
        """Start serving. `threads` serve services without `pools`. cost: is measured."""
        keys = keys or ServerKeys()
        pool = FairPool(threads, "serve")
        self._pools = [pool, *(p for service in services for p in service.pools)]
        limits, self._cost = limits or Limits(), cost or CallCost()
        self.connections = ConnectionLimit(limits.connections)
        self._stopped = threading.Event()
        self._waiting = WaitingCalls(limits.silent_calls)
        self._uploads = ReadPermits(limits.unread_uploads)
        self._unread = WaitingCalls(limits.unread_answers)
        finish(self._start(services, address, keys, limits))
        self.address = f"{address.rpartition(':')[0]}:{self.port}"

    def stop(self, grace_s: float) -> None:
        """Take no more calls; those under way have `grace_s` to end, and end then. Returns when they have."""

        async def stop() -> None:
            self._stopped.set()
            self.connections.awake.set()
            await self._health.enter_graceful_shutdown()
            await self._server.stop(grace_s)

        finish(stop(), grace_s + 5)
        for pool in self._pools:
            pool.shutdown()

    def handler(self, plain: Handler) -> Handler:
        """Return `plain` for an asynchronous server. Its bytes on the wire are the same.

        A handler that streams both ways is called at once, and bounds its silent calls by itself.
        """
        behaviour: Any = plain.unary_unary or plain.unary_stream or plain.stream_unary or plain.stream_stream
        pool = getattr(behaviour, "experimental_thread_pool", self._pools[0])
        reads_more, replies_once = bool(plain.request_streaming), not plain.response_streaming
        if inspect.iscoroutinefunction(behaviour):
            work: _Work = lambda messages, context, write: behaviour(messages, context)  # noqa: E731
        else:
            work = _threaded(behaviour, pool, reads_more, not replies_once)

        # Its first argument is gRPC's own iterator, which holds each message for too long; see `_Messages`.
        async def run(_: AsyncIterator[bytes], context: "aio.ServicerContext[Any, Any]") -> Any:
            task = asyncio.current_task()
            assert task is not None
            seen = CallContext(context, task)
            peer, refusal, is_writing = seen.peer(), None, False
            end = partial(seen.end, _LATER, _SILENT)

            def received(num_bytes: int) -> None:
                self.connections.received(peer, num_bytes)
                self._cost.message()

            messages = _Messages(context, received)

            async def write(answer: Any) -> None:
                """Send an answer; gRPC returns when the peer has room for it."""
                nonlocal is_writing
                self._unread.enter(peer, seen, partial(seen.end, _LATER, _UNREAD))
                self._cost.message()
                is_writing = True
                try:
                    await context.write(answer)
                finally:
                    self._unread.leave(peer, seen)
                is_writing = False

            try:
                if replies_once:  # what it sends may wait to be read; a call without a token is none of these
                    self.connections.received(peer, 0)
                if not reads_more:
                    self._waiting.enter(peer, seen, end)
                    messages.on_first = partial(self._waiting.leave, peer, seen)
                elif replies_once:
                    permit = await self._uploads.enter(peer, end)
                    messages.on_first = partial(setattr, permit, "has_sent", True)
                    messages.after_first = partial(self._uploads.leave, permit)
                return await work(messages, seen, write)
            except (Refusal, asyncio.CancelledError) as error:
                refusal = error if isinstance(error, Refusal) else seen.ended
                _clear_frames(error)
                if refusal is None:  # the peer has ended the call
                    raise
                # gRPC would hold what was not read until the peer reads it, or its connection ends. A call
                # that was to make room may have got on in between.
                if refusal is seen.ended and (is_writing or refusal.text == _UNREAD):
                    event_loop().run_in_executor(None, self.connections.end, self.port, peer)
            finally:
                messages.on_first()
                messages.after_first()
                seen.finish()
            # Not `context.abort`: its exception and the call would hold each other, and what was not read.
            context.set_code(refusal.code)
            context.set_details(refusal.text)
            return b"" if replies_once else None

        # Both kinds read by themselves: gRPC would wait for a single request out of our sight.
        kind = grpc.stream_unary_rpc_method_handler if replies_once else grpc.stream_stream_rpc_method_handler
        return kind(run)

    async def _start(
        self, services: Sequence[Service], address: str, keys: ServerKeys, limits: Limits
    ) -> None:
        checks = [TokenCheck(keys.tokens, self)] if keys.tokens else []
        most = ("grpc.max_allowed_incoming_connections", most_connections())
        window = ("grpc.http2.lookahead_bytes", limits.window_bytes)
        self._server = aio.server(interceptors=checks, options=(*_OPTIONS, most, window))
        for service in services:
            handlers = {name: self.handler(plain) for name, plain in service.handlers.items()}
            self._server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(service.name, handlers),)
            )
        names = [service.name for service in services]
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        for name in (*names, ""):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        others = (health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection((*names, *others), self._server)
        self.port = self._listen(address, keys)
        await self._server.start()

        # Not in the loop, which a flood may hold up.
        threading.Thread(target=self._look, name="connections", daemon=True).start()

    def _look(self) -> None:
        """End connections that flood, and have the cost of calls measured, until the server stops."""
        due_s = 0.0
        while not self._stopped.is_set():
            self.connections.awake.wait(self.connections.pause_s)
            self.connections.awake.clear()
            if self.connections.is_due(now_s := time.monotonic(), time.process_time()):
                with suppress(OSError):  # no descriptor is left to look with
                    self.connections.cut(self.port)
            if now_s >= due_s:
                due_s = now_s + _MEASURED_EVERY_S
                event_loop().call_soon_threadsafe(self._measure)

    def _measure(self) -> None:
        self._cost.measure(time.thread_time())

    def _listen(self, address: str, keys: ServerKeys) -> int:
        try:
            if keys.credentials is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, keys.credentials)
        except RuntimeError as error:
            for pool in self._pools:
                pool.shutdown()
            raise UserError(
                f"cannot listen on {address}: is another process there, or is it not an address of this"
                f" machine? ({error})"
            ) from error


class TokenCheck(aio.ServerInterceptor):
    """Refuses a caller without a valid token whose role may make the call, before a handler is reached."""

    def __init__(self, tokens: TokenReader, server: Server) -> None:
        self._tokens, self._server = tokens, server

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Return the handler of the call, or one that refuses it."""
        if refusal := self._refusal(handler_call_details, {}):

            async def refuse(messages: AsyncIterator[bytes], context: CallContext) -> None:
                raise refusal

            # Of all kinds of calls this one reads nothing by itself, so it serves for the others as well.
            return self._server.handler(grpc.stream_stream_rpc_method_handler(refuse))
        found = await continuation(handler_call_details)
        stream: Any = None if found is None else found.stream_stream or found.stream_unary
        # Health and reflection are not coroutines: they tell nothing of the run.
        is_ours = inspect.iscoroutinefunction(stream)
        return self._checked_again(found, stream, handler_call_details) if is_ours else found

    def _refusal(
        self, details: grpc.HandlerCallDetails, auth: Mapping[str, Iterable[bytes]]
    ) -> Refusal | None:
        try:
            self._tokens.check(details.invocation_metadata or (), details.method)
            check_validity(auth, wall_s())
        except Refusal as refusal:
            return refusal
        return None

    def _checked_again(
        self, found: Any, stream: Callable[..., Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> "Handler":
        """Return a handler that ends its call when the keys of the caller are revoked or expire."""

        async def run(messages: Any, context: Any) -> Any:
            auth, loop = context.auth_context() or {}, asyncio.get_running_loop()
            refusal, call = self._refusal(details, auth), asyncio.current_task()
            timer: asyncio.TimerHandle | None = None
            assert call is not None

            def look() -> None:
                nonlocal refusal, timer
                refusal = self._refusal(details, auth)
                timer = None if refusal else loop.call_later(_CHECKED_EVERY_S, look)
                if refusal:
                    call.cancel()

            if refusal is None:
                timer = loop.call_later(_CHECKED_EVERY_S, look)
                try:
                    return await stream(messages, context)
                except asyncio.CancelledError:
                    if refusal is None:  # the peer has ended the call
                        raise
                finally:
                    if timer is not None:
                        timer.cancel()
            context.set_code(refusal.code)
            context.set_details(refusal.text)
            return b"" if found.stream_unary else None

        if found.stream_unary:
            return grpc.stream_unary_rpc_method_handler(run)
        return grpc.stream_stream_rpc_method_handler(run)


def serve(
    core: HubCore,
    address: str,
    *,
    credentials: ServerKeys | None = None,
    limits: Limits | None = None,
    threads: int = 16,
    others: Sequence[Service] = (),
    cost: CallCost | None = None,
) -> Server:
    """Serve `core` to nodes, standbys and readers at HOST:PORT, and `others` beside it.

    `threads`: pushes, and as many pulls, at a time. cost: of a small call, is measured. Raises UserError if
    the address is not available.
    """
    services = (*hub_services(core, limits or Limits(), threads, cost), *others)
    return Server(services, address, keys=credentials, limits=limits, cost=cost)
