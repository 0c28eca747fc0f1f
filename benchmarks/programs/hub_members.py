"""Nodes of `benchmarks.hub`: everything a hub sees of a node, without the computation.

Many fit into one process. Each sleeps through its steps, sends the same pseudo-gradients at its interval,
fetches the anchors once the hub has decided, and reports with each heartbeat. Prints "ready" once all are
members of a run that is founded, begins when a line comes in, and prints one JSON line at the end.
"""

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

import numpy as np

from aedit.async_sgd.rules import HubConfig
from aedit.proto.codecs import Floats, codec
from aedit.proto.rpc import HubClient, HubRefused
from aedit.proto.rpc import hub_pb2 as pb

RUN = "bench"
BEAT_S = HubConfig().heartbeat_s
WITHIN_S = 120.0
LATE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """Nodes of one process, and their job."""

    hub: str
    names: list[str]
    step_s: list[float]
    """Step time of each node."""
    every: int
    """Steps between two pushes of every unit."""
    units: int
    numel: int
    """Elements of each unit."""
    codec: str
    seconds: float


@dataclass(slots=True)
class Seen:
    """Results of the nodes of one process."""

    heartbeat_s: list[float] = field(default_factory=list)
    """Seconds until the hub answered each heartbeat."""
    merged: int = 0
    """Pushes of a unit."""
    refused: int = 0
    late: int = 0
    """Rounds that began before the one before it was through."""


class Payloads:
    """Payloads of all nodes of a process: pseudo-gradients that agree, and the first anchor."""

    def __init__(self, crew: Crew) -> None:
        rng = np.random.default_rng(0)
        anchor = rng.standard_normal(crew.numel, np.float32) * np.float32(0.02)
        self.anchor = codec("fp32").encode(anchor)
        self.push = codec(crew.codec).encode(self._gradient(rng, crew.numel))

    @staticmethod
    def _gradient(rng: np.random.Generator, numel: int) -> Floats:
        return rng.standard_normal(numel, np.float32) * np.float32(1e-4)


class Node:
    """One member of the run."""

    def __init__(self, crew: Crew, index: int, payloads: Payloads, seen: Seen) -> None:
        self._crew, self._payloads, self._seen = crew, payloads, seen
        self._name, self._step_s = crew.names[index], crew.step_s[index]
        self._client = HubClient(crew.hub)
        self._who = pb.Who(run=RUN)
        self._versions = [0] * crew.units
        self._seqs = [0] * crew.units
        self._told: dict[int, pb.UnitNews] = {}
        self._change = threading.Condition()
        self._over = threading.Event()
        self._anchor = memoryview(bytearray(4 * crew.numel))
        self._heartbeats = threading.Thread(target=self._heartbeat, daemon=True)

    def join(self) -> None:
        """Become a member, and send the first anchors if no other node does."""
        reply = self._client.join(_request(self._name, self._crew))
        self._who = pb.Who(run=RUN, term=reply.term, node=reply.node, session=reply.session)
        self._heartbeats.start()
        if reply.founder:
            for unit in range(self._crew.units):
                self._push(unit, "fp32", self._payloads.anchor)
        for unit in range(self._crew.units):
            self._pull(unit)

    def walk(self) -> None:
        """Push and pull at a fixed pace until the time is over, then leave."""
        due_s = time.monotonic()
        end_s = due_s + self._crew.seconds
        while due_s < end_s:
            due_s += self._crew.every * self._step_s
            if time.monotonic() > due_s + LATE_S:
                self._seen.late += 1
                due_s = time.monotonic()
            time.sleep(max(0.0, due_s - time.monotonic()))
            self._exchange()
        self._over.set()
        self._heartbeats.join()
        self._client.leave(pb.LeaveRequest(who=self._who))
        self._client.close()

    def _exchange(self) -> None:
        """Push all units before the first is pulled."""
        for unit in range(self._crew.units):
            self._push(unit, self._crew.codec, self._payloads.push)
        for unit in range(self._crew.units):
            told = self._decision(unit)
            self._seen.merged += told.verdict == pb.MERGED
            self._seen.refused += told.verdict != pb.MERGED
            self._pull(unit)

    def _push(self, unit: int, name: str, data: memoryview) -> None:
        base = self._versions[unit]
        self._seqs[unit] += 1
        steps = self._crew.every if base else 0
        head = pb.PushHead(who=self._who, unit=unit, seq=self._seqs[unit], base=base, steps=steps, codec=name)
        head.num_bytes = data.nbytes
        self._hear([self._client.push(head, data).news])

    def _pull(self, unit: int) -> None:
        """Pull once there is an anchor: another node may still be sending the first."""
        give_up_s = time.monotonic() + WITHIN_S
        while True:
            try:
                head = self._client.pull(pb.PullRequest(who=self._who, unit=unit), self._anchor)
                break
            except HubRefused:
                if time.monotonic() > give_up_s:
                    raise
                time.sleep(0.2)
        self._versions[unit] = head.version

    def _decision(self, unit: int) -> pb.UnitNews:
        """Return the hub's decision on the last push of `unit`."""
        with self._change:
            if not self._change.wait_for(lambda: self._is_decided(unit), WITHIN_S):
                raise TimeoutError(f"{self._name}: no decision on unit {unit} within {WITHIN_S:g} s")
            return self._told[unit]

    def _is_decided(self, unit: int) -> bool:
        told = self._told.get(unit)
        return told is not None and told.verdict != pb.NONE and told.seq >= self._seqs[unit]

    def _hear(self, units: list[pb.UnitNews]) -> None:
        with self._change:
            for news in units:
                self._told[news.unit] = news
            self._change.notify_all()

    def _heartbeat(self) -> None:
        """Send heartbeats from a thread of its own, as the node agent does."""
        while not self._over.wait(BEAT_S):
            began = time.perf_counter()
            news = self._client.heartbeat(pb.HeartbeatRequest(who=self._who, steps_per_s=1 / self._step_s))
            self._seen.heartbeat_s.append(time.perf_counter() - began)
            self._hear(list(news.units))


def run(crew: Crew) -> Seen:
    """Run all nodes of this process, one thread each."""
    seen, payloads = Seen(), Payloads(crew)
    nodes = [Node(crew, index, payloads, seen) for index in range(len(crew.names))]
    with ThreadPoolExecutor(len(nodes)) as threads:
        list(threads.map(Node.join, nodes))
        print("ready", flush=True)
        sys.stdin.readline()
        seen.heartbeat_s.clear()
        list(threads.map(Node.walk, nodes))
    return seen


def _request(name: str, crew: Crew) -> pb.JoinRequest:
    request = pb.JoinRequest(who=pb.Who(run=RUN), name=name, num_samples=1_000_000, ranks=1)
    rows = max(1, crew.numel // 1024)
    for unit in range(crew.units):
        shapes = [(rows, crew.numel // rows), (crew.numel - rows * (crew.numel // rows),)]
        tensors = [pb.Tensor(name=f"p{i}", shape=s) for i, s in enumerate(shapes) if s[-1]]
        request.layout.append(pb.Unit(name=f"blocks.{unit}", tensors=tensors))
    return request


if __name__ == "__main__":
    print(json.dumps(asdict(run(Crew(**json.loads(sys.argv[1]))))))
