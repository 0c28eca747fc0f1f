"""The gRPC calls of a leading hub: check the caller, decide, write it down, answer."""

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import grpc

from aedit.async_sgd.hub import Member
from aedit.async_sgd.journal import Position
from aedit.async_sgd.replication import stream_journal, twin_text
from aedit.async_sgd.rules import Joined, Leased, Record
from aedit.async_sgd.service import messages
from aedit.async_sgd.service.hello_responder import HelloResponder
from aedit.async_sgd.service.push_pull import PushPull
from aedit.async_sgd.service.request_guard import RequestGuard, fingerprint, known_by
from aedit.proto.rpc import (
    Caller,
    NoNews,
    Refusal,
    answer_in,
    answer_out,
    check_signer,
    proposal_in,
    proposal_out,
)
from aedit.proto.rpc import hub_pb2 as pb
from aedit.types import printable

log = logging.getLogger(__name__)

_SESSION_BITS = 63
"""Bits of a session number, which a node keeps as a signed 64-bit integer."""


class Driver:
    """`HubCore` of a leading hub. Small calls hold the lock only briefly."""

    def __init__(self, guard: RequestGuard, responder: HelloResponder, status: Callable[[int], str]) -> None:
        """Create the driver. status: returns the status as JSON, with the metric lines after a number."""
        self._guard, self._ledger, self._hub = guard, guard.ledger, guard.ledger.hub
        self._responder, self._status = responder, status
        self.exchange = PushPull(guard)
        self.max_push_bytes = self.exchange.max_push_bytes
        self.pull = self.exchange.pull
        self.garbled = self.exchange.garbled

    def hello(self, request: pb.HelloRequest) -> pb.HelloReply:
        """Return the run's configuration to a peer of the same protocol and method."""
        self._guard.check_leads()
        if request.promised > self._hub.state.term:
            self._guard.ask_the_others()  # that hub confirms nothing to this one
        return self._responder.reply(
            request, self._hub.state.term, leads=True, promise=self._guard.leadership.promise
        )

    def join(self, request: pb.JoinRequest, caller: Caller) -> pb.JoinReply:
        """Make the caller a member, and return what it must know. Raises Refusal with the reason."""
        reply, position = self.admit(request, caller)
        reply.news.receipt.CopyFrom(self._guard.admitted(position))
        return reply

    def admit(self, request: pb.JoinRequest, caller: Caller) -> tuple[pb.JoinReply, Position]:
        """Make the caller a member; return the reply, and the position that must be durable before it."""
        session = secrets.randbits(_SESSION_BITS) | 1
        who = replace(
            known_by(messages.joiner(request), request, caller, self._hub.config.limits),
            new_session=fingerprint(session),
        )
        self._guard.check_claim(request.claim, self._hub.state.names.get(who.name), request.who.term)
        with self._guard.deciding() as now:
            self._guard.check_who(request.who)
            decided = self._hub.join(who, now)
            position = self._ledger.commit(decided)
            joined = next(record for record in decided if isinstance(record, Joined))
            self._hub.recovery_anchors.note(
                joined.node, request.inherits, request.leased_upto, now, request.told
            )
            reply = messages.join_reply(self._hub, self._hub.state.members[joined.node], session, now)
            reply.news.heartbeat_s, reply.news.expire_s = self._hub.ask(joined.node)
        return reply, position

    def heartbeat(self, request: pb.HeartbeatRequest) -> pb.News:
        """Take a member's report and return the state of the run."""
        messages.check_blocks(request.consumed)
        report = messages.report_of(request)
        self._guard.check_lineage(request.who)
        self._guard.check_claim(request.claim, request.who.node, request.who.term)
        with self._guard.deciding() as now:
            member = self._guard.speaker(request.who)
            self._hub.heartbeat(member.node, report, now)
            used = self._used(member, request.consumed)
            position, versions_at = self._ledger.commit(used), self._ledger.versions_at
            news = messages.member_news(self._hub, member.node, now)
            news.heartbeat_s, news.expire_s = self._hub.ask(member.node)
        if used:  # else there is nothing in it that a crash could make untrue
            self._guard.durable(position)
        self._guard.shown(versions_at)
        news.receipt.CopyFrom(self._ledger.receipt)
        news.asks = self._guard.leadership.asks_elector(member.voter)
        return news

    def push(self, head: pb.PushHead, data: memoryview) -> pb.PushReply:
        """Accept the push, or say why not. The report in its head is a heartbeat."""
        messages.check_blocks(head.consumed)
        reply = self.exchange.push(head, data)
        if head.HasField("report"):
            head.report.who.CopyFrom(head.who)
            try:
                reply.run.CopyFrom(self.heartbeat(head.report))
            except Refusal as refusal:  # the push counts all the same; a heartbeat is refused with the reason
                log.debug("the report of a push: %s", refusal.text)
        return reply

    def lease(self, request: pb.LeaseRequest) -> pb.LeaseReply:
        """Return blocks of sample positions: of a lease whose reply was lost, else new ones."""
        messages.check_blocks(request.held)
        with self._guard.deciding() as now:
            member = self._guard.speaker(request.who)
            held = [(block.start, block.end) for block in request.held]
            lost = self._hub.state.pool.unknown(member.node, held) if request.lists_held else []
            if not self._hub.recovery_anchors.leases(now):
                return pb.LeaseReply()
            self._ledger.commit(self._hub.recovery_anchors.skipped(member.node))
            leased = [] if lost else self._hub.lease(member.node, request.samples, now)
            position = self._ledger.commit(leased)
        self._guard.durable(position)
        blocks = lost or [(record.start, record.end) for record in leased if isinstance(record, Leased)]
        return pb.LeaseReply(blocks=[pb.Block(start=start, end=end) for start, end in blocks])

    def leave(self, request: pb.LeaveRequest) -> pb.LeaveReply:
        """Take a member out that has sent its last pushes."""
        messages.check_blocks(request.consumed)
        with self._guard.deciding():
            member = self._guard.speaker(request.who)
            decided = [*self._used(member, request.consumed), *self._hub.leave(member.node)]
            position = self._ledger.commit(decided)
        self._guard.engine.wake()
        self._guard.durable(position)
        return pb.LeaveReply()

    def take_over(self, request: pb.TakeOverRequest) -> pb.TakeOverReply:
        """Take a node's answer to what this leader asks of its voters; return what it asks now."""
        with self._guard.deciding():
            self._guard.check_who(request.who)
        leadership, voter = self._guard.leadership, 0
        if request.HasField("answer"):
            answer = answer_in(request.answer)
            voter = answer.voter
            with self._guard.refusing():
                leadership.count(answer)
        reply, asks = pb.TakeOverReply(term=self._hub.state.term, leads=True), leadership.asks()
        if asks is not None and leadership.asks_elector(voter):
            reply.asks.CopyFrom(proposal_out(asks, leadership.key))
        return reply

    def propose(self, request: pb.ProposeRequest) -> pb.Answer:
        """Answer another hub of the run that asks for a vote."""
        self._guard.check_who(pb.Who(run=request.run, part=request.part))
        self._guard.check_candidate(request)
        leadership, proposal = self._guard.leadership, proposal_in(request.proposal)
        with self._guard.refusing():
            return answer_out(leadership.answer(proposal), leadership.key)

    def status(self, request: pb.StatusRequest) -> pb.StatusReply:
        """Return the hub's status as JSON."""
        return pb.StatusReply(json=self._status(request.metrics_after))

    def tail(self, request: pb.TailRequest) -> Iterator[pb.TailChunk | NoNews]:
        """Stream the journal to a standby; see `stream_journal`."""
        self._guard.check_term(request.term)
        yield from stream_journal(self._ledger, request, self._guard.check_leads)

    def confirm(self, request: pb.ConfirmRequest) -> pb.ConfirmReply:
        """Note that the standby's disk has everything before this."""
        self._guard.check_follower()
        self._guard.check_term(request.term)
        position, newest = (request.segment, request.offset), self._ledger.journal.complete
        if position > newest:
            text = (
                f"byte {request.offset} of segment {request.segment} is confirmed, and {newest} is the newest"
            )
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, text)
        if request.term != self._ledger.hub.state.term or self._guard.is_shut_out(request.address):
            return pb.ConfirmReply()
        check_signer(request, request.replica)
        if self._guard.leadership.is_of_another(request.replica, request.address):
            return pb.ConfirmReply()
        if other := self._guard.leadership.twin_of(request.replica, request.address):
            here = printable(request.address) or "this process"
            raise Refusal(grpc.StatusCode.ALREADY_EXISTS, twin_text(here, printable(other)))
        stand = self._guard.leadership.confirm(request.replica, position, request.address)
        return pb.ConfirmReply(stand=stand, counts=True)

    def _used(self, member: Member, consumed: Sequence[pb.Consumed]) -> list[Record]:
        return self._hub.use(member.node, [(block.start, block.upto) for block in consumed])


class CoreSwitch:
    """Passes every call to `core`, which may be replaced while gRPC holds the methods of this object."""

    def __init__(self, core: object | None, refusal: str = "") -> None:
        """Pass calls to `core`. refusal: the text that callers get while it is None."""
        self.core, self._refusal = core, refusal

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if self.core is None:
                raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, self._refusal)
            return getattr(self.core, name)(*args)

        return call
