"""Exchange of one unit: encode, push until the hub has it, wait for the decision, pull, answer.

In a swarm the statements that owners of parts sign about their anchors are checked and passed to the peer.
"""

import hashlib
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
from numpy.typing import NDArray

from aedit import traces
from aedit.proto.agent.link import Answer
from aedit.proto.agent.mailbox import Mailbox
from aedit.proto.agent.membership import Membership
from aedit.proto.agent.plan import AgentPlan
from aedit.proto.codecs import Codec, Feedback, codec, slices
from aedit.proto.rpc import (
    HubRefused,
    HubUnreachable,
    is_signed_statement,
    parsed_statement,
    stamp,
)
from aedit.proto.rpc import hub_pb2 as pb
from aedit.proto.swarm import STATEMENTS, write_statements
from aedit.traces import TraceContext
from aedit.types import Verdict

log = logging.getLogger(__name__)


class Traffic:
    """Counters that several threads update."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._active = 0
        self._since_s = 0.0
        self._wire_s = 0.0
        self.bytes_up = 0
        self.bytes_down = 0

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Count the time of the block as transfer time; overlapping blocks count once."""
        with self._lock:
            self._since_s = self._since_s if self._active else self._clock()
            self._active += 1
        try:
            yield
        finally:
            with self._lock:
                self._active -= 1
                self._wire_s += 0.0 if self._active else self._clock() - self._since_s

    def count(self, *, up: int = 0, down: int = 0) -> None:
        """Add bytes."""
        with self._lock:
            self.bytes_up += up
            self.bytes_down += down

    @property
    def wire_s(self) -> float:
        """Return the seconds in which a transfer was under way."""
        with self._lock:
            return self._wire_s + (self._clock() - self._since_s if self._active else 0.0)


_VERSIONS = 4
"""Newest statements of each unit that the peer gets."""


class Unsigned(ValueError):
    """An owner has given an anchor without a statement that is valid for it; the text says what is wrong."""


class StatementCheck:
    """Checks for one node. Any thread may call. Outside a swarm it checks nothing."""

    def __init__(self, plan: AgentPlan) -> None:
        self._run = plan.run
        self._path = Path(plan.replicas).parent / STATEMENTS if plan.replicas else None
        self._lock = threading.Lock()
        self._kept = [deque[bytes](maxlen=_VERSIONS) for _ in plan.units]
        self._is_new = False

    @property
    def is_on(self) -> bool:
        """Return whether owners must sign: in a swarm."""
        return self._path is not None

    def check(self, membership: Membership, unit: int, head: pb.PullHead, digest: bytes) -> None:
        """Keep the statement in the answer of the owner to a pull.

        Args:
            membership: At that owner.
            unit: Unit that was pulled.
            head: First message of the answer.
            digest: SHA-256 of the anchor as it is here now.

        Raises:
            Unsigned: There is none, or it is not for this anchor, or not signed by a host of that owner.
        """
        if not self.is_on:
            return
        place = f"unit {unit}, version {head.version} from {membership.address}"
        try:
            found = parsed_statement(head.statement)
        except ValueError as error:
            raise Unsigned(f"{place}: the owner has not signed it: {error}") from None
        wanted = (self._run, membership.part, unit, head.version)
        signed = (found.run, found.part, found.unit, found.version)
        if signed != wanted:
            raise Unsigned(f"{place}: the owner has signed (run, part, unit, version) {signed}, not {wanted}")
        if found.sha256 != digest:
            raise Unsigned(f"{place}: the owner has signed another value than it has given")
        if found.public_key.hex() not in membership.host_keys():
            key = found.public_key.hex()[:16]
            raise Unsigned(
                f"{place}: signed with the key {key}..., which no live peer has there that is not shut out"
            )
        if not is_signed_statement(head.statement):
            raise Unsigned(f"{place}: the signature is not of the key that it names")
        with self._lock:
            if head.statement not in self._kept[unit]:
                self._kept[unit].append(head.statement)
                self._is_new = True

    def save(self) -> None:
        """Write what is new into the file that the peer of this machine reads."""
        with self._lock:
            if self._path is None or not self._is_new:
                return
            kept, self._is_new = [data for of_unit in self._kept for data in of_unit], False
        try:
            write_statements(self._path, kept)
        except OSError as error:
            log.warning("%s: %s; other nodes do not hear of these statements", self._path, error)


PAUSE_S = 1.0
"""Mean pause before what a hub could not take now is tried again."""


Vector = NDArray[np.float32]


@dataclass(slots=True)
class Transfer:
    """One exchange under way."""

    unit: int
    seq: int
    """The trainer's number."""
    base: int
    steps: int
    tokens: int
    used: int = 0
    """The first samples of this attempt that its steps, and all before them, have used."""
    round: int = 0
    trace: TraceContext | None = None
    """Span of the trainer."""
    span: traces.TraceSpan = traces.OFF
    number: int = 0
    """The hub's number: counts the node's pushes of this unit over restarts of the trainer."""
    payload: memoryview | None = None
    tried: bool = False
    """The hub may have a part of the payload."""
    verdict: Verdict = Verdict.NONE
    arrived: bool = False

    def is_lost(self, last: int) -> bool:
        """Return whether a hub that had this undecided push now says that `last` was the last it has."""
        return self.arrived and not self.verdict and self.number > last


class UnitTransfers:
    """All exchanges of a node, at most one per unit at a time.

    The owner calls `start` and passes on what hubs report; answers appear in the mailbox.
    """

    def __init__(
        self, plan: AgentPlan, box: Mailbox, memberships: Sequence[Membership], traffic: Traffic
    ) -> None:
        self._plan, self._box, self._memberships, self._traffic = plan, box, memberships, traffic
        self._codec = codec(plan.codec)
        self._lock = threading.Lock()
        self._active: dict[int, Transfer] = {}
        self._accepted = [0] * len(plan.units)
        self._news: dict[int, pb.UnitNews] = {}
        self.versions = [0] * len(plan.units)
        """Version of each unit in `box.anchors`."""
        self.statements = StatementCheck(plan)
        self.guards = [threading.Lock() for _ in plan.units]
        """Held while anchors change; a donor reads under it."""
        self._pools = [ThreadPoolExecutor(plan.streams, f"hub-{k}") for k in range(len(memberships))]
        self.inherits = [0] * len(plan.units)
        """Stamps of the anchors that are of an earlier generation of their part."""
        self.reported = [0] * len(plan.units)
        """Stamps of the newest anchors of an earlier generation that a hub has reported, here or not."""
        self._outdated: set[int] = set()
        """Units whose last answer to the trainer was of an earlier generation of their part."""
        self._brought: set[int] = set()
        """Units whose anchors are on their way to a part that was founded again, or there."""
        self._failed: Callable[[BaseException], None] = lambda error: None
        self.consumed: Callable[[int], Sequence[pb.Consumed]] = lambda used: ()
        """Returns the leased blocks that the first samples of this attempt, so many, reach into."""
        self.announce_use: Callable[[int], None] = lambda used: None
        """Returns when the hub that leases knows that these samples are used; see `Agent.announce_use`."""

    def on_failure(self, tell: Callable[[BaseException], None]) -> None:
        """Set the function that is called when an exchange cannot end."""
        self._failed = tell

    def start(self, transfer: Transfer) -> None:
        """Start an exchange whose slices are in the outbox; without steps nothing of them is sent."""
        with self._lock:
            assert transfer.unit not in self._active, f"unit {transfer.unit}: two exchanges at a time"
            self._active[transfer.unit] = transfer
        transfer.span = traces.opened("agent: push", transfer.trace, unit=transfer.unit, steps=transfer.steps)
        self._submit(self._push if transfer.steps else self._answer, transfer)

    def awaits(self, part: int) -> bool:
        """Return whether hub process `part` has a push of this node and has not said what became of it."""
        with self._lock:
            return any(
                transfer.arrived and not transfer.verdict
                for unit, transfer in self._active.items()
                if unit % len(self._memberships) == part
            )

    @property
    def under_way(self) -> int:
        """Return the number of exchanges under way."""
        return len(self._active)

    def accepted(self, part: int, numbers: Sequence[int]) -> None:
        """Take from a join which push of each of its units was the last that the hub has.

        A push that it had and no longer has is pushed again: a successor may know less than its predecessor.
        """
        units = range(part, len(numbers), len(self._memberships))
        with self._lock:
            for unit in units:
                self._count(unit, numbers[unit])
            lost = [p for unit in units if (p := self._active.get(unit)) and p.is_lost(numbers[unit])]
            for transfer in lost:
                transfer.arrived = False
        for transfer in lost:
            log.warning("unit %d, push %d: the hub has forgotten it", transfer.unit, transfer.number)
            self._submit(self._push, transfer)

    def refounded(self, part: int, generation: int) -> None:
        """Begin anew with a part that was lost after this generation and founded again, with another journal.

        What was measured from anchors of an earlier generation is refused here: the trainer keeps it, and
        measures it from the anchor with which the part goes on.
        """
        for unit in range(part, len(self.versions), len(self._memberships)):
            with self.guards[unit]:
                self.inherits[unit] = stamp(generation, self.versions[unit]) or self.inherits[unit]
                self.versions[unit] = 0
                with self._lock:
                    newest = self._news[unit].version if unit in self._news else 0
                    self.reported[unit] = max(
                        self.reported[unit], self.inherits[unit], stamp(generation, newest)
                    )
                    self._outdated.add(unit)
                    self._brought.discard(unit)
                    self._count(unit, 0)
                    self._news.pop(unit, None)
                    transfer = self._active.get(unit)
            if transfer is not None and transfer.arrived:
                self._consider(transfer, _refusal(transfer))

    def asked_for(self, units: Sequence[int]) -> list[int]:
        """Return those of the units that are to be brought now, of which the hub wants the anchors from here.

        Each is returned once: `bring` is called for them.
        """
        with self._lock:
            asked = self._outdated.intersection(units) - self._brought
            due = [unit for unit in asked if self.inherits[unit]]
            self._brought.update(due)
        return due

    def bring(self, units: Sequence[int]) -> None:
        """Push the anchors as the first ones of units of a part that was founded again; return when done."""
        for unit in units:
            reply = self._deliver(Transfer(unit, 0, 0, 0, 0, payload=_bytes(self._box.anchors[unit])))
            if reply is not None and not reply.accepted:
                with self._lock:
                    self._brought.discard(unit)

    def known(self) -> pb.Claim:
        """Return the pushes and versions of each unit that this node saw acknowledged."""
        with self._lock:
            return pb.Claim(seqs=self._accepted, versions=self.versions)

    def take_news(self, news: Sequence[pb.UnitNews]) -> None:
        """Take the hub's decisions."""
        for item in news:
            with self._lock:
                self._news[item.unit] = item
                transfer = self._active.get(item.unit)
            # Before the push has come back its number may still change.
            if transfer is not None and transfer.arrived:
                self._consider(transfer, item)

    def found(self, unit: int) -> None:
        """Push anchors[unit] as the run's first; return when the hub has them, or others are here."""
        reply = self._deliver(Transfer(unit, 0, 0, 0, 0, payload=_bytes(self._box.anchors[unit])))
        if reply is None or reply.accepted:
            self.versions[unit] = 1
        else:
            self.pull(unit)

    def close(self) -> None:
        """Stop all work."""
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)

    # --- in the pools' threads

    def _submit(self, work: Callable[[Transfer], None], transfer: Transfer) -> None:
        def guarded() -> None:
            try:
                work(transfer)
            except BaseException as error:
                self._failed(error)

        self._pools[transfer.unit % len(self._memberships)].submit(guarded)

    def _push(self, transfer: Transfer) -> None:
        if transfer.payload is None:
            with traces.spanning("agent: encode", transfer.span.context):
                transfer.payload = self._encode(transfer.unit)
        if transfer.used and transfer.unit % len(self._memberships):
            self.announce_use(transfer.used)
        reply = self._deliver(transfer)
        with self._lock:
            transfer.arrived = True
            said = self._news.get(transfer.unit)
        for news in (reply.news if reply else None, said):
            if news is not None:
                self._consider(transfer, news)
        if not transfer.verdict:
            self._memberships[transfer.unit % len(self._memberships)].ask_soon()

    def _deliver(self, transfer: Transfer) -> pb.PushReply | None:
        """Push until the hub has answered; None if it has the push already, or it is no longer needed."""
        membership = self._memberships[transfer.unit % len(self._memberships)]
        while membership.wait():
            if self._is_there(transfer):
                return None
            who = membership.who()
            try:
                if transfer.seq and transfer.unit in self._outdated:  # looked up after `who`, see `refounded`
                    return pb.PushReply(accepted=False, news=_refusal(transfer))
                return self._try_push(membership, transfer, who)
            except HubUnreachable as error:
                log.info("unit %d, push %d: %s", transfer.unit, transfer.number, error)
                membership.missed()
            except HubRefused as error:
                if error.code == grpc.StatusCode.INVALID_ARGUMENT:
                    log.warning("unit %d, push %d is not believed: %s", transfer.unit, transfer.number, error)
                    news = pb.UnitNews(unit=transfer.unit, seq=transfer.number, verdict=pb.DISTRUSTED)
                    return pb.PushReply(accepted=False, news=news)
                _refused(membership, error, who)
        return None

    def _is_there(self, transfer: Transfer) -> bool:
        """Return whether the hub said at a join that it has this push.

        Numbers the push if it has no number yet, or if the hub counts anew.
        """
        with self._lock:
            last = self._accepted[transfer.unit]
            if transfer.number and last >= transfer.number:
                return True
            transfer.number = last + 1
        return False

    def _try_push(self, membership: Membership, transfer: Transfer, who: pb.Who) -> pb.PushReply:
        assert transfer.payload is not None
        founds = transfer.base == 0
        head = pb.PushHead(who=who, unit=transfer.unit, seq=transfer.number, base=transfer.base)
        head.steps, head.tokens, head.round = transfer.steps, transfer.tokens, transfer.round
        head.codec, head.num_bytes = "fp32" if founds else self._codec.name, len(transfer.payload)
        if transfer.used and membership.part == 0:
            head.consumed.extend(self.consumed(transfer.used))
        report = membership.report_in_push()
        if report is not None:
            head.report.CopyFrom(report)
        with self._traffic.moving(), traces.below(transfer.span):
            continues, transfer.tried = transfer.tried, True
            reply = membership.client.push(head, transfer.payload, continues=continues)
        membership.acknowledged(reply.receipt, who.term)
        if report is not None and reply.HasField("run"):
            membership.carried(report, reply.run)
        if not reply.accepted and not reply.news.verdict:
            reply.news.MergeFrom(pb.UnitNews(unit=transfer.unit, seq=transfer.number, verdict=pb.REFUSED))
        self._traffic.count(up=len(transfer.payload))
        self._box.sent(self._traffic.bytes_up)
        with self._lock:
            self._count(transfer.unit, max(self._accepted[transfer.unit], transfer.number))
        return reply

    def _count(self, unit: int, number: int) -> None:
        """Set the number of the newest push of a unit that the hub has. The caller holds the lock."""
        self._accepted[unit] = number
        self._box.set_pushed(unit, number)

    def _consider(self, transfer: Transfer, news: pb.UnitNews) -> None:
        """End the transfer if `news` has its decision."""
        with self._lock:
            if transfer.verdict or not news.verdict or news.seq < transfer.number:
                return
            transfer.verdict = Verdict(news.verdict)
        if news.reason:
            log.warning("unit %d, push %d: %s", transfer.unit, transfer.number, news.reason)
        self._submit(self._answer, transfer)

    def _answer(self, transfer: Transfer) -> None:
        with traces.spanning("agent: pull", transfer.span.context):
            version = (not transfer.steps and self._newest_here(transfer.unit)) or self.pull(transfer.unit)
        if version == 0:
            return
        if self._codec.feedback and transfer.steps:
            self._settle(transfer)
        with self.guards[transfer.unit], self._lock:
            if self.versions[transfer.unit] == version:
                self._outdated.discard(transfer.unit)
            del self._active[transfer.unit]
        transfer.span.end(number=transfer.number, verdict=transfer.verdict.name, version=version)
        self._box.answer(transfer.unit, Answer(transfer.seq, version, transfer.verdict))

    # --- anchors

    def _newest_here(self, unit: int) -> int:
        """Return the version of anchors[unit] if the hub has said that it has no newer one; 0 if it has."""
        with self._lock:
            news, version = self._news.get(unit), self.versions[unit]
        return version if news is not None and news.version == version else 0

    def pull(self, unit: int) -> int:
        """Bring anchors[unit] to the hub's newest version and return that; 0 if stopped."""
        membership = self._memberships[unit % len(self._memberships)]
        while membership.wait():
            who = membership.who()
            try:
                return self._try_pull(membership, unit, who)
            except HubUnreachable as error:
                log.info("unit %d, pull: %s", unit, error)
                membership.missed()
            except HubRefused as error:
                if error.code == grpc.StatusCode.DATA_LOSS:
                    self.versions[unit] = 0  # no good as a delta: ask for the whole
                _refused(membership, error, who)
            except Unsigned as error:
                log.warning("refused: %s", error)
                membership.pause(random.uniform(0.5, 1.5) * PAUSE_S)
        return 0

    def _try_pull(self, membership: Membership, unit: int, who: pb.Who) -> int:
        anchor = self._box.anchors[unit]
        whole = self._plan.codec_down == "fp32" or self.versions[unit] == 0
        with self.guards[unit], self._traffic.moving():
            base, self.versions[unit] = 0 if whole else self.versions[unit], 0
            # What comes whole is written where it belongs. A delta is never larger, but needs its base.
            into = _bytes(anchor) if whole else memoryview(bytearray(anchor.nbytes))
            try:
                head = membership.client.pull(pb.PullRequest(who=who, unit=unit, base=base), into)
            except BaseException:
                self.versions[unit] = base
                raise
            self._traffic.count(down=head.num_bytes)
            if head.chain:
                add_chain(anchor, into[: head.num_bytes], head, codec(self._plan.codec_down))
            elif not whole:
                _bytes(anchor)[:] = into[: head.num_bytes]
            self.check(membership, unit, head)
            self.versions[unit] = head.version
        return head.version

    def check(self, membership: Membership, unit: int, head: pb.PullHead) -> None:
        """Raise Unsigned if the owner of a part in a swarm has not signed the anchor that is here now."""
        if self.statements.is_on:
            # What came whole has the hash that was checked on its way.
            digest = hashlib.sha256(_bytes(self._box.anchors[unit])).digest() if head.chain else head.sha256
            self.statements.check(membership, unit, head, digest)

    # --- error feedback

    def _encode(self, unit: int) -> memoryview:
        """Return the payload: the outbox plus the error of earlier encodings of this unit."""
        outbox = self._box.outbox[unit]
        if self._codec.name == "fp32":
            return _bytes(outbox)
        return self._feedback(unit).encode(outbox) if self._codec.feedback else self._codec.encode(outbox)

    def _settle(self, transfer: Transfer) -> None:
        """Update the error feedback after a decision.

        The hub has taken the decoded payload; the rest goes with the next push. A refused push stays with the
        trainer, so the residual stays as it was; a distrusted one is dropped.
        """
        assert transfer.payload is not None
        if transfer.verdict == Verdict.DISTRUSTED:
            self._box.residuals[transfer.unit][:] = 0
        elif transfer.verdict == Verdict.MERGED:
            self._feedback(transfer.unit).taken(self._box.outbox[transfer.unit], transfer.payload)

    def _feedback(self, unit: int) -> Feedback:
        return Feedback(self._codec, self._box.residuals[unit])


def add_chain(anchor: Vector, data: memoryview, head: pb.PullHead, decoder: Codec) -> None:
    """Bring `anchor` from the chain's base to head.version: the hub's own additions, in its order."""
    offset = 0
    for link in head.chain:
        delta = data[offset : offset + link.num_bytes]
        for start, stop in slices(len(anchor)):
            anchor[start:stop] += decoder.decode(delta, len(anchor), start, stop)
        offset += link.num_bytes


def _refusal(transfer: Transfer) -> pb.UnitNews:
    """Return the decision that the trainer keeps what it has pushed."""
    reason = "its part was lost and founded again: measured anew from the anchor with which it goes on"
    return pb.UnitNews(unit=transfer.unit, seq=transfer.number, verdict=pb.REFUSED, reason=reason)


def _bytes(vector: Vector) -> memoryview:
    return vector.view(np.uint8).data


def _refused(membership: Membership, error: HubRefused, who: pb.Who) -> None:
    """Pass the refusal to the membership, and pause. who: the caller, as the call named it."""
    membership.refused(error, who.session)
    membership.pause(random.uniform(0.5, 1.5) * PAUSE_S)
