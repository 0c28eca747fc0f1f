"""Helpers for tests of the node agent.

A hub in memory behind a real server, and nodes with simple numbers.
"""

import hashlib
import threading
from contextlib import contextmanager

import grpc
import numpy as np

from aedit.proto.agent import AgentPlan, start_agent
from aedit.proto.codecs import codec
from aedit.proto.rpc import PROTOCOL, Refusal, serve
from aedit.proto.rpc import hub_pb2 as pb
from aedit.types import TensorLayout, UnitLayout
from kit.waiting import until

SHAPES = (((3, 5), (7,)), ((5000,),))
DEADLINE_S = 20.0


def plan(addresses, **changes):
    units = tuple(
        UnitLayout(f"unit{i}", tuple(TensorLayout(f"p{j}", shape) for j, shape in enumerate(shapes)))
        for i, shapes in enumerate(changes.pop("shapes", SHAPES))
    )
    settings = {
        "name": "a",
        "run": "test",
        "units": units,
        "num_samples": 100,
        "codec": "fp32",
        "heartbeat_s": 0.05,
    }
    settings |= {"expire_s": 0.5, "call_timeout_s": 2.0, "lease_samples": 16, "steps_ahead": 4}
    return AgentPlan(addresses=tuple(addresses), **(settings | changes))


@contextmanager
def node(made, *, ranks=1, mode="thread", start=None):
    """Yield a node that has not joined yet; end its agent afterwards."""
    link = start_agent(made, ranks=ranks, mode=mode)
    for i, anchor in enumerate(link.anchors):
        anchor[:] = np.arange(anchor.size) + 100 * i if start is None else start[i]
    try:
        yield link
    finally:
        link.stop()


def exchange(link, unit, seq, value, base, *, steps=1, used=0):
    """Push `value` and wait for its result."""
    order(link, unit, seq, value, base, steps=steps, used=used)
    return until(lambda: link.answer(unit, seq), f"the answer to push {seq} of unit {unit}")


def order(link, unit, seq, value, base, *, steps=1, used=0):
    link.outbox[unit][:] = value
    link.written(unit, seq)
    link.send(unit, seq, base=base, steps=steps, tokens=10 * steps, used=used)


class MemoryHub:
    """Hub in memory that keeps its state when its server stops, as a hub with a journal does.

    It merges every arrival at once or, with `slow`, at a heartbeat, as anchor - push.

    pushed: all merged pushes, in order, as (node, unit, seq, values). broken: names of calls that fail after
    they have taken effect, each once, as when the hub is killed before it answers.
    """

    def __init__(self, shapes=SHAPES, codec_down="fp32", slow=False):
        self.numels = [sum(int(np.prod(shape)) for shape in unit) for unit in shapes]
        self.num_tensors = [len(unit) for unit in shapes]
        self.codec_down, self.slow = codec_down, slow
        self.lock = threading.RLock()
        self.anchors = [None] * len(self.numels)
        self.versions = [0] * len(self.numels)
        self.deltas = [{} for _ in self.numels]
        self.names, self.sessions, self.seqs, self.told = {}, {}, {}, {}
        self.founder, self.term, self.position = None, 1, 0
        self.pushed, self.waiting, self.heartbeats, self.used, self.broken = [], [], [], {}, []
        self.calls = []  # pushes and uses in their order: ("push", unit), ("used", samples)
        self.leased = {}  # blocks by node
        self.processes = []  # numbers of processes, one for each join
        self.donors, self.left, self.pulled_bytes, self.joins, self.leads = {}, set(), 0, 0, True
        self.refuse = {}
        self.news = {}
        self.server = None
        self.dead = False
        self.keeps = False  # with `slow`: merge nothing more
        self.stubborn, self.votes = False, 0  # stubborn: leads, whatever term others speak of

    def serve(self, address="127.0.0.1:0"):
        self.server = serve(self, address)
        return self.server.address

    def kill(self):
        """Drop the server and every open call at once, as nodes see a killed hub."""
        self.server.stop(0)

    def _who(self, who):
        self._live()
        if not self.leads:
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, "does not lead")
        if who.run != "test" or self.sessions.get(who.node) != who.session:
            raise Refusal(grpc.StatusCode.NOT_FOUND, "no such session")

    def _live(self):
        if self.dead:
            raise Refusal(grpc.StatusCode.UNAVAILABLE, "dead")

    def _die(self, name):
        if name in self.broken:
            self.broken.remove(name)
            raise Refusal(grpc.StatusCode.UNAVAILABLE, f"killed in {name}")

    def hello(self, request):
        self._live()
        return pb.HelloReply(protocol=PROTOCOL, run="test", term=self.term)

    def join(self, request, caller):
        with self.lock:
            if not self.leads:
                raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, "does not lead")
            if [len(unit.tensors) for unit in request.layout] != self.num_tensors:
                raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "unit1 has another number of parameters")
            node = self.names.setdefault(request.name, len(self.names))
            self.joins += 1
            self.processes.append(request.process)
            self.sessions[node] = self.joins
            self.founder = node if self.founder is None else self.founder
            seqs = [self.seqs.get((node, unit), 0) for unit in range(len(self.numels))]
            others = [d for n, d in self.donors.items() if n != node and d]
            self.donors[node] = request.donor
            return pb.JoinReply(
                term=self.term,
                node=node,
                session=self.joins,
                founder=self.founder == node,
                versions=self.versions,
                seqs=seqs,
                donors=others,
                news=self._news(node),
            )

    def heartbeat(self, request):
        with self.lock:
            self._who(request.who)
            self.heartbeats.append(request)
            self._use(request.consumed)
            while self.waiting and not self.keeps:
                self._merge(*self.waiting.pop(0))
            return self._news(request.who.node)

    def _news(self, node):
        units = [
            pb.UnitNews(unit=unit, version=self.versions[unit], seq=seq, verdict=verdict)
            for (n, unit), (seq, verdict) in self.told.items()
            if n == node
        ]
        return pb.News(term=self.term, units=units, nodes=len(self.sessions), **self.news)

    def lease(self, request):
        with self.lock:
            self._who(request.who)
            held = {block.start for block in request.held}
            leased = self.leased.setdefault(request.who.node, [])
            unused = [block for block in leased if self.used.get(block.start, 0) < block.end]
            lost = [block for block in unused if request.lists_held and block.start not in held]
            if not lost:
                start, self.position = self.position, self.position + request.samples
                lost = [pb.Block(start=start, end=self.position)]
                leased += lost
            self._die("lease")
            return pb.LeaseReply(blocks=lost)

    def _use(self, consumed):
        before, self.used = self.used, self.used | {c.start: c.upto for c in consumed}
        if self.used != before:
            self.calls.append(("used", sum(upto - start for start, upto in self.used.items())))

    def leave(self, request):
        with self.lock:
            self._who(request.who)
            self._use(request.consumed)
            self.left.add(request.who.node)
            del self.sessions[request.who.node]
            return pb.LeaveReply()

    def take_over(self, request):
        self._live()
        self.votes += 1
        if self.stubborn:
            return pb.TakeOverReply(term=self.term, leads=True)
        self.leads = True
        self.term = max(self.term, request.who.term + 1)
        return pb.TakeOverReply(term=self.term, leads=True)

    def propose(self, request):
        raise AssertionError("no other hub asks for votes")

    def max_push_bytes(self, head):
        return 4 * self.numels[head.unit]

    def garbled(self, head, reason):
        raise AssertionError(f"a damaged push: {reason}")

    def push(self, head, data):
        with self.lock:
            self._who(head.who)
            self._die("push before")
            key = (head.who.node, head.unit)
            if head.seq == self.seqs.get(key, 0) + 1:
                verdict = self.refuse.pop((head.unit, head.seq), None)
                self.seqs[key] = head.seq
                if head.base:
                    self.calls.append(("push", head.unit))
                self._use(() if verdict else head.consumed)
                if verdict:
                    self.told[key] = (head.seq, verdict)
                elif self.slow and head.base:
                    self.waiting.append((head, bytes(data)))
                else:
                    self._merge(head, data)
            self._die("push after")
            seq, verdict = self.told.get(key, (0, pb.NONE))
            news = pb.UnitNews(unit=head.unit, version=self.versions[head.unit], seq=seq, verdict=verdict)
            return pb.PushReply(accepted=verdict != pb.REFUSED and verdict != pb.DISTRUSTED, news=news)

    def _merge(self, head, data):
        unit, numel = head.unit, self.numels[head.unit]
        value = codec(head.codec).decode(data, numel, 0, numel)
        if head.base == 0:
            self.anchors[unit] = value
        else:
            self.pushed.append((head.who.node, unit, head.seq, value))
            step = -value
            if self.codec_down != "fp32":
                down = codec(self.codec_down)
                encoded = bytes(down.encode(step))
                self.deltas[unit][self.versions[unit] + 1] = encoded
                step = down.decode(encoded, numel, 0, numel)
            self.anchors[unit] = self.anchors[unit] + step
        self.versions[unit] += 1
        self.told[head.who.node, unit] = (head.seq, pb.MERGED)

    def pull(self, request):
        with self.lock:
            self._who(request.who)
            self._die("pull")
            unit, version = request.unit, self.versions[request.unit]
            wanted = range(request.base + 1, version + 1)
            pieces = [self.deltas[unit].get(v) for v in wanted]
            shorter = None not in pieces and sum(map(len, pieces)) < 4 * self.numels[unit]
            if request.base and self.codec_down != "fp32" and shorter:
                chain = [pb.Link(version=v, num_bytes=len(p)) for v, p in zip(wanted, pieces, strict=True)]
                data, name = b"".join(pieces), self.codec_down
            else:
                data, name, chain = self.anchors[unit].tobytes(), "fp32", []
            self.pulled_bytes += len(data) - (request.offset if request.version == version else 0)
            head = pb.PullHead(version=version, codec=name, chain=chain, num_bytes=len(data))
            head.sha256 = hashlib.sha256(data).digest()
            return head, memoryview(data)

    def status(self, request):
        return pb.StatusReply(json="{}")

    def tail(self, request):
        yield pb.TailChunk()

    def confirm(self, request):
        return pb.ConfirmReply()
