"""A run in memory as one hub, or as parts with replicas: state machines, journals on disk, and no socket."""

import zlib
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from aedit.async_sgd.journal import Journal, Ledger, Store
from aedit.async_sgd.replication import Mirror
from aedit.async_sgd.rules import Accepted, Push
from aedit.proto.codecs import codec
from aedit.proto.rpc import hub_pb2 as pb
from kit.hub_machine import joiner, picture


@dataclass
class Copies:
    """An owner with its journal, and replicas that take the journal in pieces of odd lengths.

    make: returns a hub without state. replica: makes the hub of a replica.
    """

    folder: object
    make: object
    layout: object
    copies: int = 1
    replica: object = None
    now: float = 100.0
    mirrors: list = field(default_factory=list)

    def __post_init__(self):
        self.folder.mkdir(parents=True)
        journal = Journal(self.folder, 1, fsync=False)
        self.ledger = Ledger(self.make(), journal, Store(self.folder, fsync=False), clock=lambda: self.now)
        for number in range(1, self.copies):
            place = self.folder / f"copy_{number}"
            place.mkdir()
            self.mirrors.append(Mirror(Store(place, fsync=False), self.replica or self.make))

    @property
    def hub(self):
        return self.ledger.hub

    def join(self, name):
        self.ledger.commit(self.hub.join(joiner(name, layout=self.layout), self.now))

    def beat(self, node, report):
        self.hub.heartbeat(node, report, self.now)

    def push(self, node, unit, values, *, base, steps):
        """Offer the node's next push of the unit, or its first anchor; return whether it is accepted."""
        state = self.hub.state
        layout = state.layout.units[unit]
        ends = np.cumsum([0, *(tensor.numel for tensor in layout.tensors)])
        name = "bf16" if base else "fp32"
        data = codec(name).encode(values)
        decoded = codec(name).decode(data, layout.numel, 0, layout.numel)
        made = Push(
            node=node,
            unit=unit,
            seq=state.members[node].received.get(unit, 0) + 1,
            base=base,
            steps=steps,
            tokens=10 * steps,
            values=self.ledger.store_payload(name, layout.numel, zlib.crc32(data), memoryview(data)),
            norms=tuple(float(np.linalg.norm(decoded[a:b].astype(np.float64))) for a, b in pairwise(ends)),
        )
        decided = self.hub.offer(made, self.now)
        self.ledger.commit(decided)
        return any(isinstance(record, Accepted) for record in decided)

    def settle(self):
        """Do all that is due now, one record at a time; then let all replicas have the journal."""
        while decided := self.hub.tick(self.now):
            for record in decided:
                self.ledger.commit([record], self.hub.compute(record))
        for mirror in self.mirrors:
            self._send(mirror)

    def _send(self, mirror):
        number, end = self.ledger.journal.position
        pieces = np.random.default_rng(end)
        while mirror.position[1] < end:
            at = mirror.position[1]
            data = self.ledger.journal.file.read(at, min(int(pieces.integers(1, 5000)), end - at))
            mirror.take(pb.TailChunk(segment=number, offset=at, data=data, crc=zlib.crc32(data)))
        while mirror.apply():
            pass

    def anchors(self):
        """Return (version, bits) by unit."""
        found = {unit: self.hub.anchor(unit) for unit in self.hub.state.units}
        return {unit: (version, values.tobytes()) for unit, (version, values) in found.items()}

    def digests(self):
        """Return the whole state of the owner and of each replica, to be compared with ==."""
        return [picture(hub) for hub in (self.hub, *(mirror.hub for mirror in self.mirrors))]


def parts_of(folder, make, layout, *, parts, copies, replica=None):
    """Return the parts of a run. make, replica: given (k, n), return the hub of an owner, of a replica."""
    return [
        Copies(
            folder / f"part_{k}",
            lambda k=k: make((k, parts)),
            layout,
            copies,
            None if replica is None else (lambda k=k: replica((k, parts))),
        )
        for k in range(parts)
    ]
