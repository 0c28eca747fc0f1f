"""Download of one unit's anchor: it continues at the byte where it broke off, from any sender."""

import hashlib
from collections.abc import Callable, Iterator

import grpc
from google.protobuf.message import DecodeError

from aedit.proto.rpc import frames, hub_pb2
from aedit.proto.rpc.retry import HubRefused, TransferBroken

_MAX_WRONG = 3
"""Complete answers with another hash than they say, after which the sender is no good."""


class Download:
    """Collects the answer to `request` in `into`, from one sender after another.

    into: writable bytes with room for the largest answer. If request.offset is above 0, so many bytes of the
    answer of request.version are in `into` already.
    """

    def __init__(self, request: hub_pb2.PullRequest, into: memoryview) -> None:
        self._asked = request
        self._into = into.cast("B")
        self._head: hub_pb2.PullHead | None = None
        self._hash = hashlib.sha256()
        self._wrong = 0
        self.received = request.offset
        """Bytes from the start that are there and checked."""

    @property
    def room_bytes(self) -> int:
        """Return the room in `into`."""
        return self._into.nbytes

    @property
    def request(self) -> hub_pb2.PullRequest:
        """Return the request for the next sender."""
        wanted = hub_pb2.PullRequest()
        wanted.CopyFrom(self._asked)
        wanted.offset = self.received
        if self._head is not None:
            wanted.version = self._head.version
        return wanted

    def take(self, messages: Iterator[bytes], moved: Callable[[int], None]) -> hub_pb2.PullHead:
        """Take one sender's answer to `request`, up to its end; `moved` is told how many bytes arrived.

        Raises TransferBroken if it ends early or is damaged, and keeps what was right; HubRefused if it
        can never succeed.
        """
        try:
            assembly = None
            for message in messages:
                chunk = frames.unpack_chunk(message)
                if assembly is None:
                    chunk.check()
                    assembly = self._begin(hub_pb2.PullHead.FromString(bytes(chunk.head)), chunk.offset)
                assembly.add(chunk)
                self._hash.update(chunk.data)
                self.received = assembly.received
                moved(len(message))
            if assembly is None or assembly.received < assembly.num_bytes:
                raise TransferBroken(f"the answer ended after {self.received} bytes")
        except (ValueError, DecodeError) as error:
            raise TransferBroken(str(error)) from error
        assert self._head is not None
        self._check_hash(self._head)
        return self._head

    def _begin(self, head: hub_pb2.PullHead, offset: int) -> frames.Assembly:
        room = self.room_bytes
        if head.num_bytes > room:
            raise HubRefused(
                grpc.StatusCode.DATA_LOSS, f"an answer of {head.num_bytes} bytes, where {room} have room"
            )
        if offset and (offset != self.received or not self._goes_on(head)):
            self._restart()
            raise TransferBroken(f"the answer starts at byte {offset} of something else")
        if offset == 0 or self._head is None:
            self._hash = hashlib.sha256(self._into[:offset])
        self._head, self.received = head, offset
        return frames.Assembly(head.num_bytes, limit_bytes=room, into=self._into, offset=offset)

    def _goes_on(self, head: hub_pb2.PullHead) -> bool:
        """Return whether `head` belongs to the answer that is partly here."""
        if self._head is None:
            return head.version == self._asked.version
        return _content(head) == _content(self._head)

    def _restart(self) -> None:
        self._head, self.received = None, 0

    def _check_hash(self, head: hub_pb2.PullHead) -> None:
        if self._hash.digest() == head.sha256:
            return
        self._restart()
        self._wrong += 1
        text = f"version {head.version} is not what its SHA-256 says"
        if self._wrong == _MAX_WRONG:
            raise HubRefused(grpc.StatusCode.DATA_LOSS, text)
        raise TransferBroken(text)


def _content(head: hub_pb2.PullHead) -> hub_pb2.PullHead:
    """Return what a head says of the bytes. Other nodes sign nothing, and hubs sign anew in each term."""
    copy = hub_pb2.PullHead()
    copy.CopyFrom(head)
    copy.ClearField("statement")
    return copy
