"""A gRPC server that the usual tools can inspect: health and reflection are on."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from aedit.proto.wire.frames import MESSAGE_BYTES
from aedit.proto.wire.limits import Limits
from aedit.proto.wire.security import ServerKeys
from aedit.proto.wire.service import HubCore, Service, hub_services
from aedit.types import UserError

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
)
_MAX_CALLS = 4096


class Server:
    """Serves from its creation until `stop`. Raises UserError if the address is not available.

    address: HOST:PORT; port 0 takes a free one, which `port` and `address` then tell.
    """

    def __init__(
        self, services: Sequence[Service], address: str, *, keys: ServerKeys | None = None, threads: int = 8
    ) -> None:
        """Start serving. `threads` serve health, reflection, and services without `pools`."""
        keys = keys or ServerKeys()
        pool = ThreadPoolExecutor(threads, "serve")
        self._pools = [pool, *(p for service in services for p in service.pools)]
        self._server = grpc.server(
            pool, interceptors=list(keys.interceptors), options=_OPTIONS, maximum_concurrent_rpcs=_MAX_CALLS
        )
        for service in services:
            self._server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(service.name, dict(service.handlers)),)
            )
        self._health = _add_health(self._server, [service.name for service in services], pool)
        self.port = self._listen(address, keys)
        self.address = f"{address.rpartition(':')[0]}:{self.port}"
        self._server.start()

    def stop(self, grace_s: float) -> None:
        """Take no more calls; those under way have `grace_s` to end, and end then. Returns when they have."""
        self._health.enter_graceful_shutdown()
        self._server.stop(grace_s).wait(grace_s + 5)
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)

    def _listen(self, address: str, keys: ServerKeys) -> int:
        try:
            if keys.credentials is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, keys.credentials)
        except RuntimeError as error:
            for pool in self._pools:
                pool.shutdown(wait=False)
            raise UserError(
                f"cannot listen on {address}: is another process there, or is it not an address of this"
                f" machine? ({error})"
            ) from error


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
    return Server(services, address, keys=credentials)


def _add_health(server: grpc.Server, names: list[str], pool: ThreadPoolExecutor) -> health.HealthServicer:
    servicer = health.HealthServicer(experimental_non_blocking=True, experimental_thread_pool=pool)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    for name in (*names, ""):
        servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return servicer
