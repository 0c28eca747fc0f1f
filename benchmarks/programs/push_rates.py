"""Compare the rate of pushes over gRPC with that of a bare socket. Part of `benchmarks.hub`.

One process sends 1 MiB chunks to another, by turns: over gRPC as nodes push (protobuf, a CRC at both ends,
limits, deadlines), over servers and channels of `grpc` and `grpc.aio` as they come, over a plain TCP
connection that gRPC opens, with a CRC, and over a bare TCP socket with an 8-byte length before each chunk and
one byte back.

As a program, the hub's end of a thin wire: `python -m benchmarks.programs.push_rates ADDRESS BYTES`, or a
node's with the repetitions as a third argument.
"""

import asyncio
import multiprocessing
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from subprocess import PIPE
from typing import Any, cast

import grpc
import numpy as np
import psutil
from zlib_ng.zlib_ng import crc32

from aedit.proto.rpc import (
    CHUNK_BYTES,
    CallHandlers,
    FairPool,
    HubClient,
    HubCore,
    Limits,
    Server,
    Service,
)
from aedit.proto.rpc import hub_pb2 as pb
from aedit.system import give_back_what_is_freed
from benchmarks.kit import tun_link
from benchmarks.kit.processes import Dialogue, end, start
from benchmarks.kit.statistics import median
from benchmarks.kit.tun_link import Wire

# -- a plain TCP connection for pushes, for comparison with gRPC


_HEAD = struct.Struct("<QI")
_TOKEN_BYTES = 16


class ChannelReceiver:
    """The hub's side: gives tokens, and receives pushes of `num_bytes`."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._tokens: set[bytes] = set()

    def service(self, handlers: CallHandlers, pool: FairPool) -> Service:
        """Return the gRPC service that gives tokens."""

        def opened(head: pb.PushHead) -> pb.PushReply:
            token = secrets.token_bytes(_TOKEN_BYTES)
            self._tokens.add(token)
            return pb.PushReply(accepted=True, receipt=pb.Receipt(mac=token))

        return Service("aedit.v1.Channel", {"Open": handlers.call(pb.PushHead, opened, pool)})

    def serve(self, listener: socket.socket, timeout_s: float) -> None:
        """Receive the pushes of one connection until it ends."""
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(timeout_s)
            while token := connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL):
                self._tokens.remove(token)
                self._receive(connection)
                connection.sendall(b"!")

    def _receive(self, connection: socket.socket) -> None:
        buffer, received = np.empty(self._num_bytes, np.uint8).data, 0
        while received < self._num_bytes:
            size, crc = _HEAD.unpack(connection.recv(_HEAD.size, socket.MSG_WAITALL))
            if size > min(CHUNK_BYTES, self._num_bytes - received):
                raise ValueError(f"a chunk of {size} bytes at byte {received} of {self._num_bytes}")
            chunk = buffer[received : received + size]
            at = 0
            while at < size:
                at += connection.recv_into(chunk[at:])
            if crc32(chunk) != crc:
                raise ValueError(f"chunk at byte {received}: the checksum does not match")
            received += size


def push_over_channel(client: HubClient, connection: socket.socket, data: memoryview) -> None:
    """Ask for a token, push `data` and wait until it has arrived."""
    reply = client.call("Channel/Open", pb.PushHead(seq=1, num_bytes=data.nbytes), pb.PushReply)
    connection.sendall(reply.receipt.mac)
    for at in range(0, data.nbytes, CHUNK_BYTES):
        chunk = data[at : at + CHUNK_BYTES]
        connection.sendall(_HEAD.pack(chunk.nbytes, crc32(chunk)))
        connection.sendall(chunk)
    if connection.recv(1) != b"!":
        raise ConnectionError("the receiver has gone")


# -- the benchmark


HOST = "127.0.0.1"
STARTS_WITHIN_S = 60.0
MOVES_WITHIN_S = 120.0


@dataclass(frozen=True, slots=True)
class Way:
    """Seconds of every push, and processor seconds of both ends."""

    seconds: list[float]
    cpu_s: list[float]


@dataclass(frozen=True, slots=True)
class PushTimes:
    """Times of the ways to push, by turns."""

    grpc: Way
    bare_threads: Way
    """Over `grpc.server` and a channel, nothing else: what gRPC itself costs."""
    bare_asyncio: Way
    """The same over `grpc.aio` at both ends."""
    channel: Way
    bare: Way


def push_times(num_bytes: int, repeats: int) -> PushTimes:
    """Return the times of each push of `num_bytes` random bytes, by turns.

    The first push of each way, which makes connections and allocates memory, does not count.
    """
    data = memoryview(np.random.default_rng(0).bytes(num_bytes))
    with _receiver(num_bytes) as (ports, receiver), ExitStack() as held:
        client = HubClient(f"{HOST}:{ports.hub}", call_timeout_s=MOVES_WITHIN_S)
        held.callback(client.close)
        line = held.enter_context(grpc.insecure_channel(f"{HOST}:{ports.threads}"))
        bare, tcp = (held.enter_context(_connected(port)) for port in (ports.bare, ports.tcp))
        runner = held.enter_context(asyncio.Runner())
        aio_line = grpc.aio.insecure_channel(f"{HOST}:{ports.asyncio}")
        held.callback(lambda: runner.run(aio_line.close()))
        ways: tuple[Callable[[], object], ...] = (
            lambda: push_over_grpc(client, data),
            lambda: _stream(line, data),
            lambda: runner.run(_stream_aio(aio_line, data)),
            lambda: push_over_channel(client, tcp, data),
            lambda: _send(bare, data),
        )
        times = [[_timed(way, receiver) for way in ways] for _ in range(1 + repeats)]
    by_way = zip(*times[1:], strict=True)
    return PushTimes(*(Way([s for s, _ in found], [cpu_s for _, cpu_s in found]) for found in by_way))


def _connected(port: int) -> socket.socket:
    connection = socket.create_connection((HOST, port), MOVES_WITHIN_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _timed(act: Callable[[], object], receiver: psutil.Process) -> tuple[float, float]:
    before_s, began = _cpu_s(receiver), time.perf_counter()
    act()
    return time.perf_counter() - began, _cpu_s(receiver) - before_s


def _cpu_s(receiver: psutil.Process) -> float:
    used = receiver.cpu_times()
    return time.process_time() + used.user + used.system


def push_over_grpc(client: HubClient, data: memoryview) -> None:
    """Push `data` as a node does."""
    reply = client.push(pb.PushHead(seq=1, num_bytes=data.nbytes), data)
    assert reply.accepted


def _stream(line: grpc.Channel, data: memoryview) -> None:
    sent: Any = line.stream_unary(_METHOD)
    assert sent(_pieces(data), timeout=MOVES_WITHIN_S) == b"!"


async def _stream_aio(line: "grpc.aio.Channel", data: memoryview) -> None:
    sent: Any = line.stream_unary(_METHOD)
    assert await sent(_pieces(data), timeout=MOVES_WITHIN_S) == b"!"


def _pieces(data: memoryview) -> Iterator[bytes]:
    return (bytes(data[start : start + CHUNK_BYTES]) for start in range(0, data.nbytes, CHUNK_BYTES))


def _send(bare: socket.socket, data: memoryview) -> None:
    for at in range(0, data.nbytes, CHUNK_BYTES):
        chunk = data[at : at + CHUNK_BYTES]
        bare.sendall(chunk.nbytes.to_bytes(8, "little"))
        bare.sendall(chunk)
    if bare.recv(1) != b"!":
        raise ConnectionError("the receiver has gone")


# --- the receiving process


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of the receiver: gRPC as a hub has it, gRPC alone in two kinds, and two sockets."""

    hub: int
    threads: int
    asyncio: int
    bare: int
    tcp: int


@contextmanager
def _receiver(num_bytes: int) -> Iterator[tuple[Ports, psutil.Process]]:
    """Start the receiver; yield its ports and its process."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_receive, args=(there, num_bytes), daemon=True)
    process.start()
    try:
        if not here.poll(STARTS_WITHIN_S):
            raise TimeoutError(f"the receiver has not started within {STARTS_WITHIN_S:g} s")
        yield here.recv(), psutil.Process(process.pid)
    finally:
        here.close()
        process.join(10)
        process.kill()
        process.join()


class Sink:
    """Receiver that discards pushes."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def max_push_bytes(self, head: pb.PushHead) -> int:
        return self._num_bytes

    def garbled(self, head: pb.PushHead, reason: str) -> None:
        raise AssertionError(reason)

    def push(self, head: pb.PushHead, data: memoryview) -> pb.PushReply:
        return pb.PushReply(accepted=data.nbytes == self._num_bytes)


def _receive(asked: Connection, num_bytes: int) -> None:
    """Serve until the other end of `asked` is closed."""
    give_back_what_is_freed()
    pool = FairPool(4, "push")
    handlers, core = CallHandlers(Limits(in_flight_bytes=2 * num_bytes)), cast(HubCore, Sink(num_bytes))
    opened = ChannelReceiver(num_bytes)
    services = [
        Service("aedit.v1.Exchange", {"Push": handlers.push(core, pool)}, (pool,)),
        opened.service(handlers, pool),
    ]
    server = Server(services, f"{HOST}:0")
    with (
        _threads_server(num_bytes) as threads_port,
        _aio_server(num_bytes) as asyncio_port,
        socket.create_server((HOST, 0)) as listener,
        socket.create_server((HOST, 0)) as other,
    ):
        sockets = (each.getsockname()[1] for each in (listener, other))
        asked.send(Ports(server.port, threads_port, asyncio_port, *sockets))
        for each in (listener, other):
            each.settimeout(STARTS_WITHIN_S)
        threading.Thread(target=opened.serve, args=(other, MOVES_WITHIN_S), daemon=True).start()
        bare, _ = listener.accept()
        with bare:
            bare.settimeout(MOVES_WITHIN_S)
            _receive_bare(bare, num_bytes)
        if asked.poll(MOVES_WITHIN_S):
            server.stop(0)


_SERVICE, _PUSH = "bare.Receiver", "Push"
_METHOD = f"/{_SERVICE}/{_PUSH}"


@contextmanager
def _threads_server(num_bytes: int) -> Iterator[int]:
    """Serve with `grpc.server` alone; yield the port."""

    def receive(messages: Iterable[bytes], context: object) -> bytes:
        buffer, received = np.empty(num_bytes, np.uint8).data, 0
        for message in messages:
            buffer[received : received + len(message)] = message
            received += len(message)
        return b"!" if received == num_bytes else b"?"

    server = grpc.server(ThreadPoolExecutor(2))
    port = _added(server, grpc.stream_unary_rpc_method_handler(receive))
    server.start()
    try:
        yield port
    finally:
        server.stop(0).wait(10)


@contextmanager
def _aio_server(num_bytes: int) -> Iterator[int]:
    """Serve with `grpc.aio` alone, on an event loop in a thread of its own; yield the port."""

    async def receive(messages: AsyncIterator[bytes], context: object) -> bytes:
        buffer, received = np.empty(num_bytes, np.uint8).data, 0
        async for message in messages:
            buffer[received : received + len(message)] = message
            received += len(message)
        return b"!" if received == num_bytes else b"?"

    async def start() -> tuple[Any, int]:
        server = grpc.aio.server()
        port = _added(server, grpc.stream_unary_rpc_method_handler(receive))
        await server.start()
        return server, port

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    server, port = asyncio.run_coroutine_threadsafe(start(), loop).result(STARTS_WITHIN_S)
    try:
        yield port
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)


def _added(server: Any, handler: Any) -> int:
    """Add the handler and a free port; return that."""
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_PUSH: handler}),))
    port: int = server.add_insecure_port(f"{HOST}:0")
    return port


def _receive_bare(bare: socket.socket, num_bytes: int) -> None:
    """Receive every push into memory of its own as it arrives, as the hub does."""
    while True:
        buffer, received = np.empty(num_bytes, np.uint8).data, 0
        while received < num_bytes:
            head = bare.recv(8, socket.MSG_WAITALL)
            if not head:
                return
            end = received + int.from_bytes(head, "little")
            while received < end:
                received += bare.recv_into(buffer[received:end])
        bare.sendall(b"!")


# -- share of a thin wire that one push fills, which needs root for network namespaces


DELAY_S, PORT, REPEATS = 0.04, 7100, 3


def filled(rate_mbit: float, num_bytes: int) -> float:
    """Return how fast pushes of `num_bytes` are as a share of the wire's rate, headers not counted.

    One push at a time; a round trip takes 80 ms. The first push, which makes the connection, does not count.
    """
    with tun_link.link(Wire(delay_s=DELAY_S, rate_mbit=rate_mbit)) as (here, there):
        words = (f"{there.address}:{PORT}", str(num_bytes))
        hub = Dialogue.start(__name__, *words, place=there)
        try:
            hub.await_ready()
            node = start(__name__, *words, str(REPEATS), place=here, stdout=PIPE)
            said, _ = node.communicate(timeout=MOVES_WITHIN_S)
        finally:
            end([hub.process])
    return 8e-6 * num_bytes / rate_mbit / median([float(line) for line in said.split()])


# -- the two ends of the thin wire


def _serve(address: str, num_bytes: int) -> None:
    pool, limits = FairPool(4, "push"), Limits()
    push = CallHandlers(limits).push(cast(HubCore, Sink(num_bytes)), pool)
    Server([Service("aedit.v1.Exchange", {"Push": push}, (pool,))], address, limits=limits)
    print("ready", flush=True)
    sys.stdin.read()


def _push(address: str, num_bytes: int, repeats: int) -> None:
    data = memoryview(np.random.default_rng(0).bytes(num_bytes))
    client = HubClient(address, call_timeout_s=MOVES_WITHIN_S)
    for number in range(1 + repeats):
        began = time.perf_counter()
        push_over_grpc(client, data)
        if number:
            print(time.perf_counter() - began, flush=True)
    client.close()


if __name__ == "__main__":
    (_push if len(sys.argv) > 3 else _serve)(sys.argv[1], *map(int, sys.argv[2:]))
