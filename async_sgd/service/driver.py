"""A hub that leads, as gRPC sees it: check who speaks, decide, write it down, answer."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from aedit.async_sgd.hub.members import Member
from aedit.async_sgd.rules.records import Joined, Leased, Record
from aedit.async_sgd.service import messages
from aedit.async_sgd.service.access import Desk
from aedit.async_sgd.service.exchange import Exchange
from aedit.async_sgd.service.greeting import Greeting
from aedit.async_sgd.service.tailing import Tailing
from aedit.proto.wire import hub_pb2 as pb

_SECRET_BITS = 43


class Driver:
    """`HubCore` of a hub that leads. Small calls hold the lock for a moment only."""

    def __init__(self, desk: Desk, greeting: Greeting, status: Callable[[int], str]) -> None:
        """status: JSON, with the hub's own lines after so many."""
        self._desk, self._ledger, self._hub = desk, desk.ledger, desk.ledger.hub
        self._greeting, self._status = greeting, status
        self._tailing = Tailing(desk)
        self.exchange = Exchange(desk)
        self.max_push_bytes = self.exchange.max_push_bytes
        self.push, self.pull = self.exchange.push, self.exchange.pull
        self.garbled = self.exchange.garbled
        self.confirm = self._tailing.confirm

    def hello(self, request: pb.HelloRequest) -> pb.HelloReply:
        self._desk.check_leads()
        return self._greeting.reply(request, self._hub.state.term)

    def join(self, request: pb.JoinRequest) -> pb.JoinReply:
        who = replace(messages.joiner(request), secret=secrets.randbits(_SECRET_BITS))
        with self._desk.deciding() as now:
            self._desk.check_who(request.who)
            decided = self._hub.join(who, now)
            position = self._ledger.commit(decided)
            joined = next(record for record in decided if isinstance(record, Joined))
            reply = messages.join_reply(self._hub, self._hub.state.members[joined.node], now)
        self._desk.durable(position)
        return reply

    def beat(self, request: pb.BeatRequest) -> pb.News:
        with self._desk.deciding() as now:
            member = self._desk.speaker(request.who)
            self._hub.beat(member.node, messages.report(request), now)
            used = self._used(member, request.consumed)
            position = self._ledger.commit(used)
            told = messages.tell(self._hub, member.node, now)
        if used:  # else there is nothing in it that a crash could make untrue
            self._desk.durable(position)
        return told

    def lease(self, request: pb.LeaseRequest) -> pb.LeaseReply:
        with self._desk.deciding() as now:
            member = self._desk.speaker(request.who)
            leased = self._hub.lease(member.node, request.samples, now)
            position = self._ledger.commit(leased)
        self._desk.durable(position)
        blocks = [pb.Block(start=r.start, end=r.end) for r in leased if isinstance(r, Leased)]
        return pb.LeaseReply(blocks=blocks)

    def leave(self, request: pb.LeaveRequest) -> pb.LeaveReply:
        with self._desk.deciding():
            member = self._desk.speaker(request.who)
            decided = [*self._used(member, request.consumed), *self._hub.leave(member.node)]
            position = self._ledger.commit(decided)
        self._desk.engine.wake()
        self._desk.durable(position)
        return pb.LeaveReply()

    def take_over(self, request: pb.TakeOverRequest) -> pb.TakeOverReply:
        """It leads already."""
        with self._desk.deciding():
            self._desk.check_who(request.who)
            return pb.TakeOverReply(term=self._hub.state.term, leads=True)

    def status(self, request: pb.StatusRequest) -> pb.StatusReply:
        return pb.StatusReply(json=self._status(request.metrics_after))

    def tail(self, request: pb.TailRequest) -> Iterator[pb.TailChunk]:
        return self._tailing.tail(request)

    def _used(self, member: Member, consumed: Sequence[pb.Consumed]) -> list[Record]:
        decided: list[Record] = []
        for block in consumed:
            decided += self._hub.use(member.node, block.start, block.upto)
        return decided
