"""Several peers of a swarm in one process, each with hubs of its own as child processes.

    python -m benchmarks.programs.peers '{"toml": ..., "directory": ..., "introduction": ""}'

Reads a command per line and answers each with a line of JSON: `start NAME`, `leave NAME`, `figures`.
"""

import json
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from aedit.launch.config import load
from aedit.launch.swarm import Peer, PeerOptions
from aedit.proto.rpc import raise_descriptor_limit
from aedit.proto.rpc import swarm_pb2 as pb
from aedit.proto.swarm import PeerCalls

TURN_S = 0.5
"""Pause between two looks of a peer, as in `aedit peer`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersPlan:
    """Peers of one process."""

    toml: str
    directory: str
    introduction: str = ""
    """HOST:PORT of a peer that runs; empty: the first peer here begins the run."""


@dataclass(slots=True)
class Messages:
    """Calls of gossip that the peers here have made, and their bytes, those of the answers included."""

    calls: int = 0
    num_bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, num_bytes: int) -> None:
        """Count a call."""
        with self.lock:
            self.calls += 1
            self.num_bytes += num_bytes


class Member:
    """One peer, with a thread that lets it look."""

    def __init__(self, plan: PeersPlan, name: str, introduction: str) -> None:
        directory = Path(plan.directory) / name
        directory.mkdir(parents=True)
        founds = not introduction
        options = PeerOptions(
            directory=directory, name=name, peers=introduction, founds=founds, insecure=True
        )
        self._peer = Peer(load(Path(plan.toml), []).config, options)
        self._peer.start()
        self.address = self._peer.address
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Hand over what the peer owns, say good-bye and end; the thread does it."""
        self._over.set()

    def join(self) -> None:
        """Wait until it has left."""
        self._thread.join(60.0)

    def _run(self) -> None:
        while not self._over.wait(TURN_S):
            self._peer.turn()
        self._peer.close()


def counted(messages: Messages) -> Any:
    """Return a context in which all calls of gossip are counted."""
    call = PeerCalls.call

    def counting(calls: PeerCalls, address: str, request: pb.ExchangeRequest) -> pb.ExchangeReply:
        reply = call(calls, address, request)
        messages.count(request.ByteSize() + reply.ByteSize())
        return reply

    return patch.object(PeerCalls, "call", counting)


def main(words: list[str]) -> int:
    plan, messages = PeersPlan(**json.loads(words[0])), Messages()
    raise_descriptor_limit()
    members: dict[str, Member] = {}
    introduction = plan.introduction
    with counted(messages):
        for line in sys.stdin:
            command, _, name = line.strip().partition(" ")
            if command == "start":
                members[name] = Member(plan, name, introduction)
                introduction = introduction or members[name].address
            elif command == "leave":
                members[name].leave()
            figures = {"cpu_s": time.process_time(), "calls": messages.calls, "bytes": messages.num_bytes}
            print(json.dumps(figures | {"introduction": introduction}), flush=True)
        for member in members.values():
            member.leave()
        for member in members.values():
            member.join()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
