"""Plain TCP connection for pushes, for comparison with gRPC. Part of `benchmarks.hub`.

A call over gRPC returns a token that is valid for one push; the connection shows it, then sends every chunk
after its length and its CRC-32, and gets one byte back.
"""

import secrets
import socket
import struct

import numpy as np
from zlib_ng.zlib_ng import crc32

from aedit.proto.rpc import CHUNK_BYTES, CallHandlers, FairPool, HubClient, Service
from aedit.proto.rpc import hub_pb2 as pb

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
    for start in range(0, data.nbytes, CHUNK_BYTES):
        chunk = data[start : start + CHUNK_BYTES]
        connection.sendall(_HEAD.pack(chunk.nbytes, crc32(chunk)))
        connection.sendall(chunk)
    if connection.recv(1) != b"!":
        raise ConnectionError("the receiver has gone")
