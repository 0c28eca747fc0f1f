"""Hubs as real processes, and a node that is only a client."""

import json
import os
import signal
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np

from aedit.proto.agent.membership import Elector
from aedit.proto.codecs import codec
from aedit.proto.rpc import PROTOCOL, HubClient, HubRefused, HubUnreachable, SigningKey, identity_of, sign
from aedit.proto.rpc import hub_pb2 as pb
from kit.commands import Command
from kit.waiting import until

LIMIT_S = 60.0
CALL_S = 30.0
"""Deadline of a call that is answered: long, as hubs and disks of a busy machine may be slow."""

RUN = """
name = "run"
dir = "{dir}"
[train]
steps = 100000
[edit]
every = 10
landing = "arrival"
[outer]
kind = "delayed-nesterov"
[hub]
address = "127.0.0.1:0"
expire_s = {expire_s}
codec = "fp32"
snapshot_bytes = {snapshot_bytes}
{more}
"""


def write_run(directory, more="", expire_s=60.0, snapshot_bytes=2**30, template=RUN):
    """Write a configuration file whose run is in `directory`."""
    path = directory / "run.toml"
    path.write_text(
        template.format(dir=directory, expire_s=expire_s, snapshot_bytes=snapshot_bytes, more=more)
    )
    return path


class HubProcess:
    """Process of `aedit hub`, started as from a shell or a supervisor."""

    started = []  # noqa: RUF012 - those that `ending` sees to

    def __init__(self, toml, directory, *words):
        self.directory, self.log = Path(directory), Path(f"{directory}.log")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        words = ["hub", str(toml), f"--directory={directory}", *words]
        address = self.directory / "address"
        before = _mark(address)
        env = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.process = Command(words, self.log, env=env)
        self.started.append(self.process)
        self.address = None
        until(lambda: self.process.poll() is not None or _mark(address) not in (None, before), "a hub")
        if self.process.poll() is None:
            self.address = address.read_text()

    def kill(self):
        self.process.kill()
        self.process.wait(LIMIT_S)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LIMIT_S)

    def events(self, name):
        lines = (self.directory / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == name]


def _mark(path):
    """Return a mark of the file's current state, which changes when the file is written again."""
    with suppress(OSError):
        return path.stat().st_ino, path.stat().st_mtime_ns
    return None


@contextmanager
def ending():
    """End every hub after its test, including those started by other processes."""
    try:
        yield
    finally:
        while HubProcess.started:
            process = HubProcess.started.pop()
            process.kill()
            process.wait(LIMIT_S)


@dataclass
class Client:
    """One node that joins, pushes numbers computed from (unit, seq), and records what was accepted."""

    address: str
    name: str = "node"
    numels: tuple = (5000, 70)
    secret: bytes = b"of its run directory"
    accepted: list = field(default_factory=list)

    def __post_init__(self):
        self.hub = HubClient(self.address, call_timeout_s=CALL_S)
        self.who = pb.Who(run="run")
        self.elector = Elector(None)
        self.versions, self.seqs = [], []

    def request(self, **others):
        """Return the request it joins with."""
        layout = [
            pb.Unit(name=f"unit{i}", tensors=[pb.Tensor(name="w", shape=[n])])
            for i, n in enumerate(self.numels)
        ]
        request = pb.JoinRequest(who=self.who, name=self.name, layout=layout, num_samples=1000)
        request.offer.CopyFrom(self.elector.shown)
        request.facts.update({"seed": "0"} | others)
        request.rejoin = self.secret
        return request

    def join(self, **others):
        reply = self.hub.join(self.request(**others))
        self.who = pb.Who(run="run", term=reply.term, node=reply.node, session=reply.session)
        self.versions, self.seqs = list(reply.versions), list(reply.seqs)
        return reply

    def found(self):
        """Join, and send the first anchors if there are none."""
        if self.join().founder:
            for unit in range(len(self.numels)):
                assert self.push(unit, base=0).accepted
            until(lambda: all(news.version for news in self.heartbeat().units), "the first anchors")
        return self

    def push(self, unit, base=None, scale=0.01):
        self.seqs[unit] += 1
        seq = self.seqs[unit]
        values = numbers(unit, seq, self.numels[unit]) * np.float32(1.0 if base == 0 else scale)
        base = max(1, self.version(unit)) if base is None else base
        data = codec("fp32").encode(values.astype(np.float32))
        head = pb.PushHead(who=self.who, unit=unit, seq=seq, base=base, steps=1, tokens=10, codec="fp32")
        head.num_bytes = len(data)
        reply = self.hub.push(head, data)
        if reply.accepted:
            self.accepted.append((self.who.node, unit, seq))
        return reply

    def merged(self, unit):
        """Push, and wait until the push is in the anchor."""
        reply = self.push(unit)
        assert reply.accepted, reply
        until(lambda: self.news(unit).seq >= self.seqs[unit], "a merge")
        return self.news(unit)

    def heartbeat(self):
        return self.hub.heartbeat(
            pb.HeartbeatRequest(who=self.who, steps=1, steps_per_s=1.0, state="training")
        )

    def news(self, unit):
        return next(item for item in self.heartbeat().units if item.unit == unit)

    def version(self, unit):
        return self.news(unit).version

    def anchor(self, unit):
        buffer = memoryview(bytearray(4 * self.numels[unit]))
        head = self.hub.pull(pb.PullRequest(who=self.who, unit=unit), buffer)
        return head.version, np.frombuffer(buffer, np.float32)

    def status(self):
        return json.loads(self.hub.status(pb.StatusRequest()).json)

    @contextmanager
    def impatient(self, call_timeout_s=3.0):
        """Let calls in the block, which may not be answered, end soon."""
        usual, self.hub = self.hub, HubClient(self.address, call_timeout_s=call_timeout_s)
        try:
            yield
        finally:
            self.hub.close()
            self.hub = usual

    def leave(self):
        self.hub.leave(pb.LeaveRequest(who=self.who))

    def vote(self, address):
        """Offer the vote to a hub, as an agent does that cannot reach its own."""
        other = HubClient(address, call_timeout_s=CALL_S)
        try:
            return self.elector.offer(other, self.who, CALL_S)
        finally:
            other.close()

    def elect(self, address):
        """Offer the vote to a hub until it leads: it may still believe that its leader is there."""
        until(lambda: self.vote(address).leads, "the election")

    def go_to(self, address):
        """Connect to another hub."""
        self.hub.close()
        self.hub, self.address = HubClient(address, call_timeout_s=CALL_S), address
        self.who = pb.Who(run="run", session=self.who.session)
        return self.admitted()

    def admitted(self):
        """Join as soon as the hub lets this node in, and return the reply."""
        return until(self._admitted, "the join")

    def _admitted(self):
        """Join and return the reply; None, after the hub has had this node's vote, if it needs that first."""
        try:
            return self.join()
        except HubRefused as refused:
            if refused.code != grpc.StatusCode.FAILED_PRECONDITION:
                raise
            self.vote(self.address)
            return None


def confirmation(key=None, segment=1, offset=0, address=""):
    """Return what a standby sends that has so much of the journal on disk. key: its own, as a voter."""
    key = key or SigningKey()
    request = pb.ConfirmRequest(term=1, segment=segment, offset=offset, address=address)
    request.replica = identity_of(key.public)
    sign(request, key)
    return request


def numbers(unit, seq, numel):
    return np.random.default_rng([unit, seq]).standard_normal(numel, dtype=np.float32)


def hello(address):
    client = HubClient(address, call_timeout_s=CALL_S)
    try:
        return client.hello(pb.HelloRequest(protocol=PROTOCOL, version="test"))
    finally:
        client.close()


def status(address):
    client = HubClient(address, call_timeout_s=CALL_S)
    try:
        return json.loads(client.status(pb.StatusRequest()).json)
    finally:
        client.close()


__all__ = [
    "Client",
    "HubProcess",
    "HubRefused",
    "HubUnreachable",
    "confirmation",
    "ending",
    "hello",
    "status",
    "until",
    "write_run",
]
