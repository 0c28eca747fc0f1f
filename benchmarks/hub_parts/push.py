"""Compare the rate of pushes over gRPC with that of a bare socket. Part of `benchmarks.hub`.

One process sends 1 MiB chunks to another, by turns over gRPC as nodes push (protobuf, a CRC at both ends,
limits, deadlines) and over a bare TCP socket with an 8-byte length before each chunk and one byte back.
"""

import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import cast

import numpy as np

from aedit.async_sgd.service.memory import give_back_what_is_freed
from aedit.proto.wire import hub_pb2 as pb
from aedit.proto.wire.client import HubClient
from aedit.proto.wire.fair_pool import FairPool
from aedit.proto.wire.frames import CHUNK_BYTES
from aedit.proto.wire.limits import Limits
from aedit.proto.wire.server import Server
from aedit.proto.wire.service import CallHandlers, HubCore, Service

HOST = "127.0.0.1"
STARTS_WITHIN_S = 60.0
MOVES_WITHIN_S = 120.0


def push_seconds(num_bytes: int, repeats: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each push of `num_bytes` random bytes over gRPC and over a bare socket, by turns.

    The first push of each, which makes connections and allocates memory, does not count.
    """
    data = memoryview(np.random.default_rng(0).bytes(num_bytes))
    with _receiver(num_bytes) as (grpc_port, tcp_port):
        client = HubClient(f"{HOST}:{grpc_port}", call_timeout_s=MOVES_WITHIN_S)
        try:
            with socket.create_connection((HOST, tcp_port), MOVES_WITHIN_S) as bare:
                bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                ways: tuple[Callable[[], object], ...] = (
                    lambda: _push(client, data),
                    lambda: _send(bare, data),
                )
                times = [[_seconds(way) for way in ways] for _ in range(1 + repeats)]
        finally:
            client.close()
    return [grpc_s for grpc_s, _ in times[1:]], [tcp_s for _, tcp_s in times[1:]]


def _seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _push(client: HubClient, data: memoryview) -> None:
    reply = client.push(pb.PushHead(seq=1, num_bytes=data.nbytes), data)
    assert reply.accepted


def _send(bare: socket.socket, data: memoryview) -> None:
    for start in range(0, data.nbytes, CHUNK_BYTES):
        chunk = data[start : start + CHUNK_BYTES]
        bare.sendall(chunk.nbytes.to_bytes(8, "little"))
        bare.sendall(chunk)
    if bare.recv(1) != b"!":
        raise ConnectionError("the receiver has gone")


# --- the receiving process


@contextmanager
def _receiver(num_bytes: int) -> Iterator[tuple[int, int]]:
    """Start the receiver; yield its ports, for gRPC and for the bare socket."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_receive, args=(there, num_bytes), daemon=True)
    process.start()
    try:
        if not here.poll(STARTS_WITHIN_S):
            raise TimeoutError(f"the receiver has not started within {STARTS_WITHIN_S:g} s")
        yield here.recv()
    finally:
        here.close()
        process.join(10)
        process.kill()
        process.join()


class _Sink:
    """Receiver that discards pushes."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def max_push_bytes(self, unit: int) -> int:
        return self._num_bytes

    def garbled(self, head: pb.PushHead, reason: str) -> None:
        raise AssertionError(reason)

    def push(self, head: pb.PushHead, data: memoryview) -> pb.PushReply:
        return pb.PushReply(accepted=data.nbytes == self._num_bytes)


def _receive(asked: Connection, num_bytes: int) -> None:
    """Serve until the other end of `asked` is closed."""
    give_back_what_is_freed()
    pool = FairPool(4, "push")
    handlers, core = CallHandlers(Limits(in_flight_bytes=2 * num_bytes)), cast(HubCore, _Sink(num_bytes))
    server = Server([Service("aedit.v1.Exchange", {"Push": handlers.push(core, pool)}, (pool,))], f"{HOST}:0")
    with socket.create_server((HOST, 0)) as listener:
        asked.send((server.port, listener.getsockname()[1]))
        listener.settimeout(STARTS_WITHIN_S)
        bare, _ = listener.accept()
        with bare:
            bare.settimeout(MOVES_WITHIN_S)
            _receive_bare(bare, num_bytes)
    if asked.poll(MOVES_WITHIN_S):
        server.stop(0)


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
