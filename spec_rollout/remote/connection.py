"""One connection to a rollout server: its stream, its samples, and the policy versions that it is given.

A thread reads the stream and hands each message on, in order; another one uses the connection.
"""

import json
import math
import queue
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from aedit.proto.rpc import ClientKeys, author_metadata, channel, why
from aedit.proto.rpc import rollouts_pb2 as pb
from aedit.spec_rollout.audit import Origin
from aedit.spec_rollout.remote.discovery import Place
from aedit.spec_rollout.remote.publisher import VersionGiven, VersionSender
from aedit.spec_rollout.remote.report_checks import Violation
from aedit.spec_rollout.remote.session import ServerFacts, Session
from aedit.spec_rollout.sampling import ROLLOUT_PROTOCOL
from aedit.spec_rollout.server import Channel
from aedit.types import name_fault

METHOD = "/aedit.v1.Rollouts/Generate"


Post = Callable[["pb.ToTrainer | str | Violation"], None]
"""Takes a message, or the reason why the stream has ended; may block, and then nothing more is read."""


class ServerStream:
    """An open stream. `send` and `close` may be called by any thread."""

    def __init__(self, address: str, keys: ClientKeys, secret: str, begin: pb.Open, post: Post) -> None:
        """Connect, and send `begin`. secret: of the author of the line."""
        self.address, self._post = address, post
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = channel(address, keys, quick=True)
        self._encrypted = keys is not None
        self._closed = threading.Event()
        self.send(pb.ToServer(open=begin))
        opened: Any = self._channel.stream_stream(METHOD)
        self._call = opened(iter(self._messages.get, None), metadata=author_metadata(secret))
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


MAX_ROWS, MAX_WAITING = 4096, 4096
"""Most samples that a server may say it takes."""
KEY_BYTES = 32
BEAT_S = 1.0
"""Interval of signs of life for the server."""


class Connection:
    """A connection from its first try to its end. Used by one thread."""

    def __init__(
        self, number: int, place: Place, stream: ServerStream, sender: VersionSender, channel: Channel
    ) -> None:
        self.number, self.place, self.stream, self.sender = number, place, stream, sender
        self.session: Session | None = None
        """None until the server has answered."""
        self.quiet_s = 0.0
        """Seconds without a message."""
        self.closing = ""
        """Why it ends, while samples are still held."""
        self.version = 0
        """Newest version that the server has."""
        self.wanted = 0
        """Newest version that it is to have."""
        self.num_version_bytes = 0
        self.is_audited = False
        """The auditor was asked about its samples, and has not answered."""
        self.asked: tuple[int, bool] | None = None
        """That question: the number of held samples, and whether one must be judged."""
        self.held_since_s = 0.0
        """Time since which the oldest sample is held."""
        self._channel = channel
        self._wanted_s, self._took_s = 0.0, 0.0
        self._refuses_until_s = -math.inf
        self._now_s = self.reported_s = self._beat_s = 0.0

    def open(self, found: pb.Opened, origin: Origin, **settings: Any) -> None:
        """Take the server's answer. settings: of `Session`.

        Raises:
            Violation: It is none, or that of another server than expected.
        """
        name, key = found.server, found.public_key
        if found.protocol != ROLLOUT_PROTOCOL:
            raise Violation(f"it speaks protocol {found.protocol}, expected {ROLLOUT_PROTOCOL}")
        if fault := name_fault(name):
            raise Violation(f"its name {fault}")
        if len(key) != KEY_BYTES:
            raise Violation(f"its key has {len(key)} bytes, expected {KEY_BYTES}")
        if self.place.name and (self.place.name, self.place.public_key) != (name, key):
            raise Violation(f"{name} answers, or another key, where the directory has {self.place.name}")
        if not 1 <= found.rows <= MAX_ROWS:
            raise Violation(f"it decodes {found.rows} samples at a time, expected 1 to {MAX_ROWS}")
        facts = ServerFacts(
            name=name,
            rows=found.rows,
            room=found.rows + min(found.max_waiting, MAX_WAITING),
            public_key=key,
            origin=Origin(origin.run, origin.line, name),
        )
        self.session = Session(facts, self._to_rank, self.stream.send, **settings)
        self.session.versions = self.sender.offered
        self._channel.send(
            "joined",
            lane=self.number,
            server=name,
            address=self.place.address,
            rows=found.rows,
            room=facts.room,
        )
        self.report(self._now_s)

    def want(self, version: int, now_s: float) -> None:
        """Give the server this version as soon as possible."""
        if version > self.wanted:
            if self.version >= self.wanted:
                self._wanted_s = now_s
            self.wanted = version
            self.sender.want(version)

    def given(self, done: VersionGiven, now_s: float) -> None:
        """Note that the server has a version."""
        self.num_version_bytes += done.num_bytes
        if done.error:
            return
        self.version, self._took_s = max(self.version, done.version), done.seconds
        self._wanted_s = now_s
        self.report(now_s)

    def advance(self, now_s: float, passed_s: float, stalled_s: float) -> None:
        """Note the time, and take samples back that have not advanced for `stalled_s`.

        passed_s: Since the last call, as far as this process has run.
        """
        self._now_s = now_s
        self.quiet_s += passed_s
        if self.session is None:
            return
        if now_s - self._beat_s >= BEAT_S and not self.closing:
            self._beat_s = now_s
            self.stream.send(pb.ToServer(beat=pb.Beat()))
        self.session.speed.advance(now_s, self.session.live)
        if not self.closing and self.session.take_back_stalled(passed_s, stalled_s):
            self._refuses_until_s = max(self._refuses_until_s, self.place.stalled(now_s, stalled_s))
        if self.session.refuses_for_s:
            self._refuses_until_s = max(self._refuses_until_s, now_s + self.session.refuses_for_s)
            self.session.refuses_for_s = 0.0

    def report(self, now_s: float) -> None:
        """Send the rank the figures of a server that is connected."""
        self.reported_s = now_s
        session = self.session
        if session is None:
            return
        session.changed = False
        speed = session.speed.speed()
        room = 0 if self.closing or self._now_s < self._refuses_until_s else session.facts.room
        figures = {
            "rollout_tokens": session.num_delivered,
            "passes": session.num_passes,
            "arms": {},
            "link": {
                "progress": session.progress(),
                "room": room,
                "ready_in_s": self._ready_in_s(),
                "totals": {
                    "tokens": session.num_tokens,
                    "samples": session.num_samples,
                    "moved": session.num_moved,
                    "taken_back": session.num_taken_back,
                    "version_bytes": self.num_version_bytes,
                },
            },
        }
        found = pb.Figures(
            version=self.version,
            **({} if speed is None else asdict(speed)),
            json=json.dumps(figures).encode(),
        )
        self._to_rank(pb.ToTrainer(figures=found))

    def close(self) -> None:
        """End stream and transfers without waiting."""
        self.stream.close()
        self.sender.close()

    def _to_rank(self, message: pb.ToTrainer) -> None:
        if message.HasField("ended"):
            self.report(self._now_s)
        self._channel.send_frame(self.number, message.SerializeToString())

    def _ready_in_s(self) -> float:
        """Return the expected rest of the transfer under way.

        As the last one took; one that takes longer is expected to take as long again.
        """
        if self.version >= self.wanted:
            return 0.0
        passed_s = self._now_s - self._wanted_s
        return max(self._took_s - passed_s, passed_s)
