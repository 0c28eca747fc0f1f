"""The stream to one server: a thread reads it and hands each message on, in order."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from aedit.proto.rpc import ClientKeys, author_metadata, channel, why
from aedit.proto.rpc import rollouts_pb2 as pb
from aedit.spec_rollout.remote.report_checks import Violation

METHOD = "/aedit.v1.Rollouts/Generate"

Post = Callable[["pb.ToTrainer | str | Violation"], None]
"""Takes a message, or the reason why the stream has ended; may block, and then nothing more is read."""


class ServerStream:
    """An open stream. `send` and `close` may be called by any thread."""

    def __init__(
        self, address: str, keys: ClientKeys | None, secret: str, begin: pb.Open, post: Post
    ) -> None:
        """Connect, and send `begin`. secret: of the author of the line."""
        self.address, self._post = address, post
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = channel(address, keys, quick=True)
        self._encrypted = keys is not None and keys.credentials is not None
        self._closed = threading.Event()
        self.send(pb.ToServer(open=begin))
        opened: Any = self._channel.stream_stream(METHOD)
        self._call = opened(self._sent(), metadata=author_metadata(secret))
        threading.Thread(target=self._read, name=f"read {address}", daemon=True).start()

    def send(self, message: pb.ToServer) -> None:
        """Queue a message. Their number is bounded by the samples that the server has room for."""
        self._messages.put(message.SerializeToString())

    def close(self) -> None:
        """End the stream without waiting. Nothing is posted afterwards, except what is being posted."""
        if not self._closed.is_set():
            self._closed.set()
            self._messages.put(None)
            self._call.cancel()

    def _sent(self) -> Iterator[bytes]:
        while (message := self._messages.get()) is not None:
            yield message

    def _read(self) -> None:
        answered = False
        try:
            for text in self._call:
                answered = True
                if self._closed.is_set():
                    return
                self._post(pb.ToTrainer.FromString(text))
            self._end("the server has ended the stream")
        except DecodeError as error:
            self._end(Violation(f"a message that cannot be read: {error}"))
        except grpc.RpcError as error:
            self._end(why(error, self._encrypted, answered=answered))
        finally:
            self._messages.put(None)
            self._call.cancel()
            self._channel.close()

    def _end(self, reason: str | Violation) -> None:
        if not self._closed.is_set():
            self._post(reason)
