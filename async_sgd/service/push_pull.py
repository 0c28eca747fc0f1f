"""Pseudo-gradients in, anchors out."""

import hashlib
import logging
import threading
from collections import OrderedDict
from dataclasses import replace
from itertools import accumulate
from math import sqrt
from typing import Any

import grpc
import numpy as np
from zlib_ng.zlib_ng import crc32

from aedit import traces
from aedit.async_sgd.hub import Member, check_first_anchor, is_next, skips
from aedit.async_sgd.journal import Payload
from aedit.async_sgd.rules import Accepted, ArrayValues, Push
from aedit.async_sgd.service import messages
from aedit.async_sgd.service.request_guard import RequestGuard
from aedit.proto.codecs import Codec, codec, slices
from aedit.proto.rpc import Refusal, SigningKey, Statement, signed, version_of
from aedit.proto.rpc import hub_pb2 as pb
from aedit.types import UnitLayout, Verdict

log = logging.getLogger(__name__)

_KNOWN_VERSIONS = 16
_INVALID, _LATER = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED


_UNREAD = ArrayValues(np.empty(0, np.float32))
"""Values of a push before the hub has decided on it: only an accepted push is read."""

FREE_GAPS = 2
"""Gaps of a member and unit between two of its accepted pushes that cost nothing.

The first push after a loss, and its repetition if the answer was lost: the answer makes the node join again,
and the reply to the join has the right number.
"""


class PushPull:
    """Push and pull. Arrays are processed outside the lock."""

    def __init__(self, guard: RequestGuard) -> None:
        self._guard, self._ledger, self._hub = guard, guard.ledger, guard.ledger.hub
        self._sums: dict[int, tuple[tuple[int, int], bytes]] = {}
        """Version and base of the last changes given and their SHA-256, by unit."""
        self._digests: dict[int, OrderedDict[int, bytes]] = {}
        """SHA-256 of the latest anchors given whole, by unit and version: nodes may pass them on."""
        self._digests_lock = threading.Lock()
        self._gaps: dict[tuple[int, int], tuple[str, int]] = {}
        """Name of the member and number of gaps, by node and unit. An index may go to another name later."""
        self.signer: Signer | None = None
        """Signs the anchors that are given, in a swarm."""
        self.bytes_in = 0
        self.bytes_out = 0

    def status(self) -> dict[str, Any]:
        """Return for views the bytes of pushes and anchors, and a digest of the newest anchors given."""
        with self._digests_lock:
            given = [(unit, *max(of_unit.items())) for unit, of_unit in sorted(self._digests.items())]
        text = "".join(f"{unit} {version} {digest.hex()}\n" for unit, version, digest in given)
        are_all = len(given) >= max(1, len(self._hub.state.units))
        digest = hashlib.sha256(text.encode()).hexdigest() if are_all else ""
        return {"bytes_in": self.bytes_in, "bytes_out": self.bytes_out, "digest": digest}

    def max_push_bytes(self, head: pb.PushHead) -> int:
        """Return the largest allowed size of this push. Raises Refusal unless a member sends it."""
        with self._guard.deciding() as now:
            self._hub.called(self._guard.speaker(head.who).node, now)
            numel = self._layout(head.unit).numel
        return max(4 * numel, codec(self._hub.config.codec).num_bytes(numel))

    def push(self, head: pb.PushHead, data: memoryview) -> pb.PushReply:
        """Accept the push, or say why not."""
        with self._guard.deciding():
            member = self._guard.speaker(head.who)
            layout = self._layout(head.unit)
            if skips(member, head.unit, head.seq) and self._count_gap(member, head.unit) > FREE_GAPS:
                reason = f"gap: push {head.seq} is one of more than {FREE_GAPS} in a row that skip a number"
                self._ledger.commit(self._hub.garbled(member.node, head.unit, reason))
            is_new = is_next(member, head.unit, head.seq)
        if is_new:
            self.bytes_in += len(data)
            with traces.spanning("hub: check"):
                push, crc = self._measured(head, data, layout), crc32(data)
            # A snapshot may begin a new segment while the payload is on its way into the old one: then again.
            while not self._offer(head, push):
                with self._guard.refusing(), traces.spanning("hub: journal write"):
                    payload = self._ledger.store_payload(head.codec, layout.numel, crc, data)
                push = replace(push, values=payload)
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
        known = self._known_digest(unit, request.version)
        with self._guard.deciding() as now:
            if request.who.session:
                self._hub.called(self._guard.speaker(request.who).node, now)
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
        if chain is None:
            head.sha256 = self._digest(unit, version, whole)
        else:
            head.sha256 = self._sum(unit, (version, base), data)
        if self.signer is not None:
            head.statement = self._statement(term, unit, version, self._digest(unit, version, whole))
        return head, data

    def _statement(self, term: int, unit: int, version: int, digest: bytes) -> bytes:
        """Return what this hub signs about an anchor that is durable; empty outside a swarm."""
        if self.signer is None:
            return b""
        try:
            return self.signer.statement(self._ledger.journal.epoch, term, unit, version, digest)
        except ValueError as error:
            self._guard.engine.fail(error)
            raise Refusal(grpc.StatusCode.UNAVAILABLE, str(error)) from error

    def _digest(self, unit: int, version: int, whole: memoryview) -> bytes:
        """Return the SHA-256 of an anchor as nodes have it, computed once for each version."""
        if known := self._known_digest(unit, version):
            return known
        known = hashlib.sha256(whole).digest()
        with self._digests_lock:
            of_unit = self._digests.setdefault(unit, OrderedDict())
            of_unit[version] = known
            while len(of_unit) > _KNOWN_VERSIONS:
                of_unit.popitem(last=False)
        return known

    def _known_digest(self, unit: int, version: int) -> bytes:
        """Return the SHA-256; empty if this anchor was not given whole of late."""
        with self._digests_lock:
            return self._digests.get(unit, OrderedDict()).get(version, b"")

    def _count_gap(self, member: Member, unit: int) -> int:
        """Count a push that skips a number; return how many did since the last accepted one."""
        name, count = self._gaps.get((member.node, unit), ("", 0))
        count = count + 1 if name == member.name else 1
        self._gaps[member.node, unit] = member.name, count
        return count

    def _layout(self, unit: int) -> UnitLayout:
        layout = self._hub.state.layout
        if layout is None:  # of a part that was founded again: its nodes join anew
            raise Refusal(grpc.StatusCode.NOT_FOUND, "nobody has joined this hub: join first")
        if unit not in self._hub.state.units:
            raise Refusal(_INVALID, f"this hub has no unit {unit}")
        return layout.units[unit]

    def _measured(self, head: pb.PushHead, data: memoryview, layout: UnitLayout) -> Push:
        """Return the push with its norms. Raises Refusal if the payload does not match its header."""
        wanted = self._hub.config.codec if head.base else "fp32"
        found = codec(wanted)
        try:
            if head.codec != wanted:
                raise ValueError(f"codec {head.codec[:32]!r} where this run has {wanted!r}")
            found.is_valid(data, layout.numel)
            if not head.base and not self._hub.recovery_anchors.are_asked:
                check_first_anchor(self._hub.config, head.unit, data)
        except ValueError as error:
            self.garbled(head, f"malformed: {error}")
            raise Refusal(_INVALID, str(error)) from error
        return Push(
            node=head.who.node,
            unit=head.unit,
            seq=head.seq,
            base=head.base,
            steps=head.steps,
            tokens=head.tokens,
            values=_UNREAD,
            norms=tensor_norms(data, found, layout),
        )

    def _offer(self, head: pb.PushHead, push: Push) -> bool:
        """Decide on the push.

        Returns False if it would be accepted but its payload is not in the journal's file.
        """
        with self._guard.deciding() as now:
            self._guard.speaker(head.who)
            used = [(block.start, block.upto) for block in head.consumed]
            decided = self._hub.offer(push, now, used)
            accepts, values = any(isinstance(record, Accepted) for record in decided), push.values
            if accepts and not (isinstance(values, Payload) and self._ledger.is_current(values)):
                return False
            self._ledger.commit(decided)
            if accepts:
                self._gaps.pop((push.node, push.unit), None)
            if accepts and not push.base and self._hub.recovery_anchors.are_asked:
                self._log_recovery(push.node, push.unit)
        self._guard.engine.wake()
        return True

    def _log_recovery(self, node: int, unit: int) -> None:
        """Log which node's anchor restarts this unit. The caller holds the lock."""
        members, anchors = self._hub.state.members, self._hub.recovery_anchors
        version, name = version_of(anchors.stamp(node, unit)), members[node].name
        lost = [(members[one].name, num) for one, num in anchors.lost_after(node, unit)]
        log.warning("unit %d goes on from version %d, which %s had", unit, version, name)
        if lost:
            said = ", ".join(f"{one} of {num:,}" for one, num in lost)
            log.warning("unit %d: nodes were told of later versions, which are lost: %s", unit, said)
        self._guard.engine.event("goes_on_from", unit=unit, version=version, node=node, name=name, lost=lost)

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


_KEPT = 16
"""Newest statements of each unit that are kept."""


class Signer:
    """Signs statements of a part's owner about its anchors, once for each version. Any thread may call."""

    def __init__(self, key: SigningKey, run: str, part: int) -> None:
        self._key, self._run, self._part = key, run, part
        self._lock = threading.Lock()
        self._made: dict[int, OrderedDict[Statement, tuple[bytes, bytes]]] = {}
        """Digest and statement of what was signed, by unit."""

    def statement(self, lineage: str, term: int, unit: int, version: int, digest: bytes) -> bytes:
        """Return the signed statement that a version has this SHA-256.

        Raises:
            ValueError: This process has signed another value of that version.
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
            raise ValueError(f"{place.described()} has two values in the memory of this hub")
        return data


def tensor_norms(data: bytes | memoryview, codec: Codec, layout: UnitLayout) -> tuple[float, ...]:
    """Return the Euclidean norm of each tensor, slice by slice; NaN or infinite if an element is."""
    ends = list(accumulate(tensor.numel for tensor in layout.tensors))
    squares = [0.0] * len(layout.tensors)
    tensor = 0
    with np.errstate(over="ignore", invalid="ignore"):
        for start, stop in slices(layout.numel):
            values = codec.decode(data, layout.numel, start, stop)
            at = start
            while at < stop:
                while ends[tensor] <= at:
                    tensor += 1
                until = min(stop, ends[tensor])
                piece = values[at - start : until - start]
                squares[tensor] += float(np.dot(piece, piece))
                at = until
    return tuple(sqrt(square) if square >= 0 else square for square in squares)
