"""A gRPC server that the usual tools can inspect: health and reflection are on."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from aedit.proto.rpc.async_calls import AsyncCalls, Handler
from aedit.proto.rpc.connections import Connections, most_connections
from aedit.proto.rpc.event_loop import finish
from aedit.proto.rpc.fair_pool import FairPool
from aedit.proto.rpc.frames import MESSAGE_BYTES
from aedit.proto.rpc.limits import Limits
from aedit.proto.rpc.security import ServerKeys
from aedit.proto.rpc.service import HubCore, Service, hub_services
from aedit.types import UserError

_LOOK_S = 1.0
"""Interval at which connections are counted."""
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
    # Windows would grow with the speed of the line, and hold megabytes of each upload that nobody reads yet.
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
    ) -> None:
        """Start serving. `threads` serve services without `pools`."""
        keys = keys or ServerKeys()
        pool = FairPool(threads, "serve")
        self._pools = [pool, *(p for service in services for p in service.pools)]
        limits = limits or Limits()
        self.connections = Connections(limits.connections)
        finish(self._start(services, address, keys, limits))
        self.address = f"{address.rpartition(':')[0]}:{self.port}"

    def stop(self, grace_s: float) -> None:
        """Take no more calls; those under way have `grace_s` to end, and end then. Returns when they have."""
        finish(self._stop(grace_s), grace_s + 5)
        for pool in self._pools:
            pool.shutdown()

    async def _start(
        self, services: Sequence[Service], address: str, keys: ServerKeys, limits: Limits
    ) -> None:
        calls = AsyncCalls(self._pools[0], limits, self.connections)
        checks = [_Check(check, calls) for check in keys.interceptors]
        most = ("grpc.max_allowed_incoming_connections", most_connections())
        window = ("grpc.http2.lookahead_bytes", limits.window_bytes)
        self._server = aio.server(interceptors=checks, options=(*_OPTIONS, most, window))
        for service in services:
            handlers = {name: calls.handler(plain) for name, plain in service.handlers.items()}
            self._server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(service.name, handlers),)
            )
        self._health = await _add_health(self._server, [service.name for service in services])
        self.port = self._listen(address, keys)
        await self._server.start()
        self._counting = asyncio.create_task(self._count_connections())

    async def _count_connections(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_LOOK_S)
            await loop.run_in_executor(None, self.connections.cut, self.port)

    async def _stop(self, grace_s: float) -> None:
        self._counting.cancel()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)

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


class _Check(aio.ServerInterceptor):
    """A check of `ServerKeys` in front of an asynchronous server."""

    def __init__(self, check: grpc.ServerInterceptor, calls: AsyncCalls) -> None:
        self._check, self._calls = check, calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Return the handler of the call, or one that refuses it."""
        refusing = self._refusal(handler_call_details)
        if refusing is not None:
            return self._calls.handler(refusing)
        found = await continuation(handler_call_details)
        stream: Any = None if found is None else found.stream_stream
        # Health and reflection are not coroutines: they tell nothing of the run.
        is_ours = inspect.iscoroutinefunction(stream)
        return self._checked_again(stream, handler_call_details) if is_ours else found

    def _refusal(self, details: grpc.HandlerCallDetails) -> "Handler | None":
        return self._check.intercept_service(lambda details: None, details)

    def _checked_again(
        self, stream: Callable[..., Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> "Handler":
        """Return a handler that ends its call when the caller's keys are revoked."""

        async def watch(call: "asyncio.Task[Any]") -> None:
            while self._refusal(details) is None:
                await asyncio.sleep(_CHECKED_EVERY_S)
            call.cancel()

        async def run(messages: Any, context: Any) -> Any:
            call = asyncio.current_task()
            assert call is not None
            watching = asyncio.create_task(watch(call))
            try:
                return await stream(messages, context)
            finally:
                watching.cancel()

        return grpc.stream_stream_rpc_method_handler(run)


def serve(
    core: HubCore,
    address: str,
    *,
    credentials: ServerKeys | None = None,
    limits: Limits | None = None,
    threads: int = 16,
    others: Sequence[Service] = (),
) -> Server:
    """Serve `core` to nodes, standbys and readers at HOST:PORT, and `others` beside it.

    `threads`: pushes, and as many pulls, at a time. Raises UserError if the address is not available.
    """
    services = (*hub_services(core, limits or Limits(), threads), *others)
    return Server(services, address, keys=credentials, limits=limits)


async def _add_health(server: aio.Server, names: list[str]) -> "health.aio.HealthServicer":
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    for name in (*names, ""):
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return servicer
