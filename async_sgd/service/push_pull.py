"""Pseudo-gradients in, anchors out."""

import hashlib
import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import grpc
import numpy as np
from zlib_ng.zlib_ng import crc32

from aedit.async_sgd.hub import check_first_anchor, is_next, skips
from aedit.async_sgd.journal import Payload
from aedit.async_sgd.rules import Accepted, Push, Vector
from aedit.async_sgd.service import messages
from aedit.async_sgd.service.request_guard import RequestGuard
from aedit.proto.codecs import Codec, codec, slices
from aedit.proto.rpc import Refusal, SigningKey, Statement, signed, version_of
from aedit.proto.rpc import hub_pb2 as pb
from aedit.types import UnitLayout, Verdict

log = logging.getLogger(__name__)

_KNOWN_VERSIONS = 16
_INVALID, _LATER = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED


@dataclass(frozen=True, slots=True)
class _Transfer:
    """One push, checked and measured."""

    head: pb.PushHead
    data: memoryview
    crc: int
    numel: int
    norms: tuple[float, ...]


class _Unread:
    """The values of a push that is only asked about."""

    def read(self, start: int, stop: int) -> Vector:
        raise AssertionError("a push is read after it is accepted")


class KnownAnchors:
    """SHA-256 of the latest anchors that were given whole, by unit and version: nodes may pass them on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._digests: dict[int, OrderedDict[int, bytes]] = {}

    def add(self, unit: int, version: int, digest: bytes) -> None:
        """Note what was given; forget the oldest of too many."""
        with self._lock:
            of_unit = self._digests.setdefault(unit, OrderedDict())
            of_unit[version] = digest
            while len(of_unit) > _KNOWN_VERSIONS:
                of_unit.popitem(last=False)

    def newest(self, num_units: int) -> str:
        """Return one digest of the newest anchors that were given; "" until all units were."""
        with self._lock:
            found = [(unit, *max(of_unit.items())) for unit, of_unit in sorted(self._digests.items())]
        told = "".join(f"{unit} {version} {digest.hex()}\n" for unit, version, digest in found)
        return hashlib.sha256(told.encode()).hexdigest() if len(found) >= max(1, num_units) else ""

    def digest(self, unit: int, version: int) -> bytes:
        """Return the SHA-256; empty if this anchor was not given whole of late."""
        with self._lock:
            return self._digests.get(unit, OrderedDict()).get(version, b"")


class PushPull:
    """Push and pull. Arrays are processed outside the lock."""

    def __init__(self, guard: RequestGuard) -> None:
        self._guard, self._ledger, self._hub = guard, guard.ledger, guard.ledger.hub
        self._sums: dict[int, tuple[tuple[int, int], bytes]] = {}
        """Version and base of the last answer and its SHA-256, by unit."""
        self._known = KnownAnchors()
        self._gaps = SequenceGaps()
        self.signer: Signer | None = None
        """Signs the anchors that are given, in a swarm."""
        self.bytes_in = 0
        self.bytes_out = 0

    def status(self) -> dict[str, Any]:
        """Return for views the bytes of pushes and anchors, and a digest of the newest anchors given."""
        digest = self._known.newest(len(self._hub.state.units))
        return {"bytes_in": self.bytes_in, "bytes_out": self.bytes_out, "digest": digest}

    def max_push_bytes(self, head: pb.PushHead) -> int:
        """Return the largest allowed size of this push. Raises Refusal unless a member sends it."""
        with self._guard.deciding():
            self._guard.speaker(head.who)
            numel = self._layout(head.unit).numel
        return max(4 * numel, codec(self._hub.config.codec).num_bytes(numel))

    def push(self, head: pb.PushHead, data: memoryview) -> pb.PushReply:
        """Accept the push, or say why not."""
        with self._guard.deciding():
            member = self._guard.speaker(head.who)
            layout = self._layout(head.unit)
            if skips(member, head.unit, head.seq) and self._gaps.add(member.node, member.name, head.unit):
                reason = f"gap: push {head.seq} is one of more than {FREE} in a row that skip a number"
                self._ledger.commit(self._hub.garbled(member.node, head.unit, reason))
            is_new = is_next(member, head.unit, head.seq)
        if is_new:
            self.bytes_in += len(data)
            lengths = tensor_norms(data, self._checked(head, data, layout.numel), layout)
            transfer = _Transfer(head, data, crc32(data), layout.numel, lengths)
            payload: Payload | None = None
            # A snapshot may begin a new segment while the payload is on its way into the old one: then again.
            while not self._offer(transfer, payload):
                with self._guard.told():
                    payload = self._ledger.store_payload(head.codec, layout.numel, transfer.crc, data)
        data.release()  # it is in the file, and the disk may take a while to say so
        return self._decided(head)

    def garbled(self, head: pb.PushHead, reason: str) -> None:
        """Count a message that is not a valid push against its sender, once authenticated."""
        with self._guard.deciding():
            member = self._guard.speaker(head.who)
            self._ledger.commit(self._hub.garbled(member.node, head.unit, reason))

    def pull(self, request: pb.PullRequest) -> tuple[pb.PullHead, memoryview]:
        """Return the newest anchor: whole, or the changes since `base`, whichever is shorter.

        A request without a session comes from a reader, such as `aedit export`, and not from a member.
        """
        unit = request.unit
        known = self._known.digest(unit, request.version)
        with self._guard.deciding():
            if request.who.session:
                self._guard.speaker(request.who)
            else:
                self._guard.check_who(request.who)
            self._layout(unit)
            if self._hub.state.units[unit].anchor is None:
                raise Refusal(_LATER, f"unit {unit} has no anchor yet: nobody has brought weights")
            num_bytes, term = 4 * self._layout(unit).numel, self._hub.state.term
            if known and request.offset == num_bytes:  # another node has sent all of it: is it right?
                head = pb.PullHead(version=request.version, codec="fp32", num_bytes=num_bytes, sha256=known)
                head.statement = self._statement(term, unit, request.version, known)
                return head, memoryview(b"")
            chain = self._hub.chain(unit, request.base) or None  # an empty one would mean: whole
            version, values = self._hub.anchor(unit)
        whole = values.data.cast("B")
        if chain is not None:
            data, name = memoryview(b"".join(delta for _, delta in chain)), self._hub.config.codec_down
            base = request.base
        else:
            data, name, base = whole, "fp32", 0
        self._guard.durable(self._ledger.journal.position)
        self.bytes_out += len(data)
        links = [pb.Link(version=v, num_bytes=len(delta)) for v, delta in chain or ()]
        head = pb.PullHead(version=version, codec=name, chain=links, num_bytes=len(data))
        head.sha256 = self._sum(unit, (version, base), data)
        if chain is None:
            self._known.add(unit, version, head.sha256)
        if self.signer is not None:
            head.statement = self._statement(term, unit, version, self._digest(unit, version, whole))
        return head, data

    def _statement(self, term: int, unit: int, version: int, digest: bytes) -> bytes:
        """Return what this hub signs about an anchor that is durable; empty outside a swarm."""
        if self.signer is None:
            return b""
        try:
            return self.signer.statement(self._ledger.journal.epoch, term, unit, version, digest)
        except TwoValues as error:
            self._guard.engine.fail(error)
            raise Refusal(grpc.StatusCode.UNAVAILABLE, str(error)) from error

    def _digest(self, unit: int, version: int, whole: memoryview) -> bytes:
        """Return the SHA-256 of an anchor as nodes have it, computed once for each version."""
        known = self._known.digest(unit, version)
        if not known:
            known = hashlib.sha256(whole).digest()
            self._known.add(unit, version, known)
        return known

    def _layout(self, unit: int) -> UnitLayout:
        layout = self._hub.state.layout
        if layout is None:  # of a part that was founded again: its nodes join anew
            raise Refusal(grpc.StatusCode.NOT_FOUND, "nobody has joined this hub: join first")
        if unit not in self._hub.state.units:
            raise Refusal(_INVALID, f"this hub has no unit {unit}")
        return layout.units[unit]

    def _checked(self, head: pb.PushHead, data: memoryview, numel: int) -> Codec:
        """Return the codec of the payload. Raises Refusal if the payload does not match its header."""
        wanted = self._hub.config.codec if head.base else "fp32"
        found = codec(wanted)
        try:
            if head.codec != wanted:
                raise ValueError(f"codec {head.codec[:32]!r} where this run has {wanted!r}")
            found.is_valid(data, numel)
            if not head.base and not self._hub.recovery_anchors.are_asked:
                check_first_anchor(self._hub.config, head.unit, data)
        except ValueError as error:
            self.garbled(head, f"malformed: {error}")
            raise Refusal(_INVALID, str(error)) from error
        return found

    def _offer(self, transfer: _Transfer, payload: Payload | None) -> bool:
        """Decide on the push.

        Returns False if it would be accepted but its payload is not in the journal's file.
        """
        with self._guard.deciding() as now:
            self._guard.speaker(transfer.head.who)
            decided = self._hub.offer(_push(transfer, payload), now)
            accepts = any(isinstance(record, Accepted) for record in decided)
            if accepts and (payload is None or not self._ledger.is_current(payload)):
                return False
            self._ledger.commit(decided)
            if accepts:
                self._gaps.accepted(transfer.head.who.node, transfer.head.unit)
            if accepts and not transfer.head.base and self._hub.recovery_anchors.are_asked:
                self._tell_brought(transfer.head)
        self._guard.engine.wake()
        return True

    def _tell_brought(self, head: pb.PushHead) -> None:
        """Log whose anchor a unit of a part that was lost goes on from; the lock is held."""
        version = version_of(self._hub.recovery_anchors.stamp(head.who.node, head.unit))
        name = self._hub.state.members[head.who.node].name
        members, recovery_anchors = self._hub.state.members, self._hub.recovery_anchors
        lost = [
            (members[node].name, num) for node, num in recovery_anchors.lost_after(head.who.node, head.unit)
        ]
        log.warning("unit %d goes on from version %d, which %s had", head.unit, version, name)
        if lost:
            said = ", ".join(f"{one} of {num:,}" for one, num in lost)
            log.warning("unit %d: nodes were told of later versions, which are lost: %s", head.unit, said)
        self._guard.engine.event(
            "goes_on_from", unit=head.unit, version=version, node=head.who.node, name=name, lost=lost
        )

    def _decided(self, head: pb.PushHead) -> pb.PushReply:
        """Return the answer to a decided push, once the decision is on disk."""
        with self._ledger.lock:
            last = self._hub.state.members[head.who.node].decision(head.unit)
            refused = last.seq == head.seq and last.verdict in (Verdict.REFUSED, Verdict.DISTRUSTED)
            item = messages.unit_news(self._hub, head.who.node, head.unit)
            position = self._ledger.journal.position
        receipt = self._guard.durable(position)
        return pb.PushReply(accepted=not refused, news=item, receipt=receipt)

    def _sum(self, unit: int, which: tuple[int, int], data: memoryview) -> bytes:
        known = self._sums.get(unit)
        if known is not None and known[0] == which:
            return known[1]
        found = hashlib.sha256(data).digest()
        self._sums[unit] = which, found
        return found


def _push(transfer: _Transfer, payload: Payload | None) -> Push:
    head = transfer.head
    return Push(
        node=head.who.node,
        unit=head.unit,
        seq=head.seq,
        base=head.base,
        steps=head.steps,
        tokens=head.tokens,
        values=payload or _Unread(),
        norms=transfer.norms,
    )


FREE = 2
"""Gaps of a member and unit between two of its accepted pushes that cost nothing.

The first push after a loss, and its repetition if the answer was lost: the answer makes the node join again,
which tells it the right number.
"""


class SequenceGaps:
    """Counts gaps of each member by unit."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[str, dict[int, int]]] = {}
        """Name of the member and its gaps by unit, by index. An index may go to another name later."""

    def add(self, node: int, name: str, unit: int) -> bool:
        """Count a gap and return whether it is a violation."""
        known, counts = self._counts.get(node, (name, {}))
        if known != name:
            counts = {}
        counts[unit] = counts.get(unit, 0) + 1
        self._counts[node] = name, counts
        return counts[unit] > FREE

    def accepted(self, node: int, unit: int) -> None:
        """Note that a push was accepted: gaps count from zero."""
        if node in self._counts:
            self._counts[node][1].pop(unit, None)


_KEPT = 16
"""Newest statements of each unit that are kept."""


class TwoValues(Exception):
    """One version has two values in the memory of this hub, which cannot be trusted any more."""


class Signer:
    """Signs for one hub process. Any thread may call."""

    def __init__(self, key: SigningKey, run: str, part: int) -> None:
        self._key, self._run, self._part = key, run, part
        self._lock = threading.Lock()
        self._made: dict[int, OrderedDict[Statement, tuple[bytes, bytes]]] = {}
        """Digest and statement of what was signed, by unit."""

    def statement(self, lineage: str, term: int, unit: int, version: int, digest: bytes) -> bytes:
        """Return the signed statement that a version has this SHA-256.

        Raises:
            TwoValues: This process has signed another value of that version.
        """
        place = Statement(
            run=self._run,
            part=self._part,
            public_key=self._key.public,
            lineage=lineage,
            term=term,
            unit=unit,
            version=version,
        )
        with self._lock:
            made = self._made.setdefault(unit, OrderedDict())
            if place not in made:
                made[place] = digest, signed(replace(place, sha256=digest), self._key)
                while len(made) > _KEPT:
                    made.popitem(last=False)
            known, data = made[place]
        if known != digest:
            raise TwoValues(f"{place.described()} has two values in the memory of this hub")
        return data


def tensor_norms(data: bytes | memoryview, codec: Codec, layout: UnitLayout) -> tuple[float, ...]:
    """Return the Euclidean norm of each tensor, slice by slice; NaN or infinite if an element is."""
    ends = np.cumsum([tensor.numel for tensor in layout.tensors])
    squares = [0.0] * len(layout.tensors)
    tensor = 0
    with np.errstate(over="ignore", invalid="ignore"):
        for start, stop in slices(layout.numel):
            values = codec.decode(data, layout.numel, start, stop)
            at = start
            while at < stop:
                while ends[tensor] <= at:
                    tensor += 1
                until = min(stop, int(ends[tensor]))
                piece = values[at - start : until - start]
                squares[tensor] += float(np.dot(piece, piece))
                at = until
    return tuple(sqrt(square) if square >= 0 else square for square in squares)
