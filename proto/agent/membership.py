"""Membership of a node at one hub process: join, send heartbeats, reconnect, follow the run to a standby."""

import itertools
import logging
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from aedit.proto.agent.plan import AgentPlan
from aedit.proto.rpc import (
    PROTOCOL,
    Extent,
    HubClient,
    HubRefused,
    HubUnreachable,
    PortClosed,
    Voter,
    answer_out,
    generation,
    lineage,
    offer_out,
    proposal_in,
)
from aedit.proto.rpc import hub_pb2 as pb
from aedit.proto.swarm import ReplicasFile
from aedit.types import UserError

if TYPE_CHECKING:
    from aedit.proto.agent.agent import Agent

FATAL = frozenset(
    {
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNAVAILABLE,  # as a refusal, it means that TLS does not come about
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
SOON_S = 0.05
"""Between two heartbeats, at least."""
_OWN_HUB_S = 0.5
"""How long a hub that does not answer heartbeats may take to answer an offer of a vote."""
_OTHER_HUB_S = 1.0
"""How long a replica of a swarm may take to say whether it leads: another one may."""
_SILENT_S = 2.0
"""Silence after which an owner in a swarm may have been replaced: all its replicas are asked."""
_EARLY = 0.5
"""Part of the interval of heartbeats after which a push carries the next report."""
_RELAXED = 4.0
"""Times `hub.heartbeat_s`: interval of heartbeats while the trainer needs nothing of its hubs."""
_RESTING_S, _RESTS = 4.0, 5
"""Longest such interval, and the least number of them in `hub.expire_s`."""
_PER_ROUND = 4
"""Heartbeats between two rounds, at least, where nodes learn from the hub that one is due."""
_PER_LEAD = 4
"""Heartbeats, at least, in the time of `max_steps_ahead` steps."""
_MOST_WAITS = 16
_LONGEST_S, _LONGEST_SILENCE_S = 600.0, 3600.0
"""What a hub may ask for at most: a node whose hub lies must notice another one."""
_TAKEN = 2.0
"""Times hub.expire_s: a process that has ended is given up sooner."""
log = logging.getLogger(__name__)

Connect = Callable[[str], HubClient]


class Membership:
    """Membership of this node at hub process `part`. `run` is the body of a thread.

    Any thread may call the rest.
    """

    def __init__(self, part: int, plan: AgentPlan, connect: Connect) -> None:
        self.part, self._plan, self._connect = part, plan, connect
        self._address, self._finder = plan.addresses[part], ReplicaFinder(plan, part)
        self._ballots = Elector(plan.voter_file(part))
        self.client = connect(self._address)
        self.ranks = 1
        self._asked = part + 1 if plan.replicas else 0
        """The part as calls name it."""
        self._who = pb.Who(run=plan.run, part=self._asked)
        self._member = False
        self._here = False
        self._ended = False
        self.process = secrets.randbits(63) | 1
        """Number of this process of the node, equal at all its hubs: their journals name it."""
        self.donor = ""
        """HOST:PORT at which this node gives anchors to others; empty if it gives none."""
        self.known: Callable[[], pb.Claim] = pb.Claim
        """Returns the pushes and versions that this node saw acknowledged, for a hub that has fewer."""
        self._receipt = pb.Receipt()
        self._seen: Extent = (0, 0, 0)
        """End of the records for which there was a receipt: this node votes for no hub that has less."""
        self._lineage = 0
        """Lineage of the journal that gave `_receipt`; see `lineage`."""
        self._heard_s = time.monotonic()
        self._taken_s: float | None = None
        """Since when the name is refused, because another node has it."""
        # A heartbeat that is late is better tried anew than waited for.
        self.patience_s = min(plan.call_timeout_s, max(2.0, 4 * plan.heartbeat_s))
        # While another hub may lead by now, the old one is waited for in every fourth try only.
        self._limits_s = itertools.cycle((*[min(self.patience_s, _OWN_HUB_S)] * 3, self.patience_s))
        self._change = threading.Condition()
        self._hurry = threading.Event()
        self._is_wanted = True
        """A heartbeat is to be sent now, also if a push has just carried a report."""
        self._every_s, self._expire_s = plan.heartbeat_s, plan.expire_s
        """Interval of heartbeats, and the silence after which the hub gives this node up, as it has said."""
        self._waits = 0
        """Heartbeats in a row after which the hub was away, or something was awaited still."""
        self._reported_s = float("-inf")
        """Time of the last report, in a heartbeat or in the head of a push."""
        self._owner: Agent | None = None
        self._carried: deque[tuple[pb.HeartbeatRequest, pb.News]] = deque()
        """Reports that pushes have carried, with the replies."""
        self.awaits: Callable[[], bool] = lambda: False
        """Returns whether this node waits for what the next news will say."""
        self.is_computing: Callable[[], bool] = lambda: False
        """Returns whether the trainer is in a step and needs nothing of its hubs meanwhile."""
        self._steps, self._still = -1, 0
        """Steps in the last report, and reports in a row after it that have said the same."""
        self._round_s = 0.0
        """When the next round opens, on the monotonic clock, if rounds are at multiples of an interval."""

    # --- for those who push and pull

    def wait(self, timeout_s: float = float("inf")) -> bool:
        """Wait until this node is a member and the hub answers; False if it never will be, or not in time."""
        deadline_s = time.monotonic() + timeout_s
        with self._change:
            while not (self._member and self._here) and not self._ended:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._change.wait(min(left_s, 1.0))
            return not self._ended

    def who(self) -> pb.Who:
        """Return the identity that every request carries."""
        with self._change:
            copy = pb.Who()
            copy.CopyFrom(self._who)
            return copy

    @property
    def node(self) -> int:
        """Return the index that this hub gave."""
        return self.who().node

    @property
    def address(self) -> str:
        """Return the address of the hub that leads, as far as this node knows."""
        return self._address

    def host_keys(self) -> Collection[str]:
        """Return the keys, in hexadecimal, that may sign for the owner of this part, in a swarm."""
        return self._finder.keys_of(self._address)

    def acknowledged(self, receipt: pb.Receipt, term: int) -> None:
        """Keep the newest receipt of this hub: its successor must have everything before it.

        term: of the membership when it was asked for. A part that was founded again has another journal.
        """
        with self._change:
            if lineage(term) != self._lineage:
                return
            if (receipt.segment, receipt.offset) >= (self._receipt.segment, self._receipt.offset):
                self._receipt = receipt
                self._seen = max(self._seen, (term, receipt.segment, receipt.offset))

    def join_again(self) -> None:
        """Join again now, to receive everything once more."""
        self._set(member=False)
        self.ask_soon()

    def ask_soon(self) -> None:
        """Send the next heartbeat early: there may be news."""
        self._is_wanted = True
        self._hurry.set()

    def report_in_push(self) -> pb.HeartbeatRequest | None:
        """Return the report that the next push carries in place of a heartbeat; None if none is due soon."""
        now_s = time.monotonic()
        if self._owner is None or now_s - self._reported_s < _EARLY * self._every_s:
            return None
        self._reported_s = now_s
        report = self._owner.report(self.part)
        report.claim.CopyFrom(self._claim())
        return report

    def carried(self, report: pb.HeartbeatRequest, news: pb.News) -> None:
        """Take the reply to a report that a push has carried."""
        self._carried.append((report, news))
        self._hurry.set()

    def missed(self) -> None:
        """Note that a call found the hub away. No other call is made until a heartbeat gets through."""
        self._set(here=False)
        if self._plan.replicas or self._every_s > self._plan.heartbeat_s:
            self.ask_soon()

    def refused(self, error: HubRefused, session: int) -> None:
        """React to a refused call of a session: join again, follow a new hub, or end."""
        if error.code == grpc.StatusCode.NOT_FOUND:
            if session != self.who().session:
                return  # it has joined again meanwhile
            self._set(member=False)
        elif error.code in FATAL:
            raise error
        else:
            self._set(here=False)
        log.warning("%s", error)
        self.ask_soon()

    def pause(self, pause_s: float) -> None:
        """Wait, unless the membership ends."""
        with self._change:
            self._change.wait_for(lambda: self._ended, pause_s)

    def stop(self) -> None:
        """End `run` and all waits."""
        with self._change:
            self._ended = True
            self._change.notify_all()
        self._hurry.set()

    def leave(self, consumed: list[pb.Consumed]) -> None:
        """Tell the hub that this node leaves, if it answers. No later heartbeat joins again."""
        self.stop()
        if self._member:
            with suppress(HubUnreachable, HubRefused):
                self.client.leave(pb.LeaveRequest(who=self.who(), consumed=consumed), self.patience_s)

    # --- the thread

    def run(self, owner: "Agent") -> None:
        """Stay a member until `stop`.

        Send heartbeats, join again when needed, follow the run to the standby.
        """
        self._owner = owner
        while not self._ended:
            self._hurry.clear()
            is_told = False
            with self._reacting(owner):
                is_told = self._take_carried(owner)
            if self._is_wanted or not (is_told and self._here and self._member):
                self.turn(owner)
            # Nodes whose hub was away must not all come back to it at one time.
            self.pause(min(SOON_S, self._plan.heartbeat_s))
            self._hurry.wait(self.interval_s() * random.uniform(0.9, 1.1))

    def interval_s(self) -> float:
        """Return the time until the next heartbeat: what the hub has asked for.

        Shorter after a hub that was away, and while this node awaits news: it begins with `hub.heartbeat_s`
        and doubles. A fast node reports before it has trained `max_steps_ahead` steps.
        """
        least_s = self._plan.heartbeat_s
        longest_s = max(self._every_s, self._relaxed_s())
        speed = self._owner.steps_per_s if self._owner is not None else 0.0
        ahead_s = self._plan.steps_ahead / _PER_LEAD / speed if speed > 0 else longest_s
        usual_s = max(least_s, min(longest_s, ahead_s))
        if self._here and self._member and not self.awaits():
            self._waits = 0
            return usual_s
        self._waits = min(self._waits + 1, _MOST_WAITS)
        return min(usual_s, least_s * 2.0 ** (self._waits - 1))

    def _relaxed_s(self) -> float:
        """Return the interval while the trainer needs nothing of its hubs; it doubles in a long step.

        0 where it needs something, or other hubs may lead, which need the votes of nodes soon.
        """
        plan = self._plan
        if not self.is_computing() or plan.standbys or plan.replicas:
            return 0.0
        bounds = [_RESTING_S, self._expire_s / _RESTS]
        if plan.round_s:
            left_s = self._round_s - time.monotonic()
            bounds += [plan.round_s / _PER_ROUND, *([left_s + SOON_S] if left_s > 0 else [])]
        return min(_RELAXED * plan.heartbeat_s * 2.0**self._still, *bounds)

    def has_stepped(self) -> None:
        """Report soon that the trainer has ended a long step."""
        if self._still > 1:
            self._still = 0
            self.ask_soon()

    def turn(self, owner: "Agent") -> None:
        """Join or send a heartbeat, once; look for another hub if this one does not answer."""
        self._is_wanted = False
        if self._finder.is_shut_out(self._address):
            why = f"there is proof that the owner at {self._address} gives nodes different anchors"
            return self._lost(why, at_once=True)
        with self._reacting(owner):
            if not self._member:
                owner.joined(self.part, self._join(owner))
                self.ask_soon()
            else:
                heartbeat = owner.report(self.part)
                heartbeat.who.CopyFrom(self.who())
                heartbeat.claim.CopyFrom(self._claim())
                self._reported_s = time.monotonic()
                news = self.client.heartbeat(heartbeat, timeout_s=self._limit_s())
                if not self._is_of_now(news.term):
                    return self._lost(f"{self._address} speaks for term {news.term}, which is over")
                self._take(heartbeat, news, owner)
                if news.asks:
                    self._offer(self.client, min(self.patience_s, _OWN_HUB_S))
            self._heard_s = time.monotonic()
            self._set(here=True, member=True)

    @contextmanager
    def _reacting(self, owner: "Agent") -> Iterator[None]:
        """Look for another hub if this one does not answer inside the block, or act on what it refuses."""
        try:
            yield
        except HubUnreachable as error:
            self._lost(str(error), has_ended=isinstance(error, PortClosed))
        except HubRefused as error:
            self._judge(error, owner)

    def _take_carried(self, owner: "Agent") -> bool:
        """Take the replies to reports that pushes have carried; return whether there was one."""
        is_told = False
        while self._carried:
            report, news = self._carried.popleft()
            if self._member and self._is_of_now(news.term):
                self._take(report, news, owner)
                self._is_wanted |= news.asks  # the vote is given after a heartbeat
                is_told = True
        return is_told

    def _take(self, report: pb.HeartbeatRequest, news: pb.News, owner: "Agent") -> None:
        """Take the reply to a report."""
        self._still = min(self._still + 1, _MOST_WAITS) if report.steps == self._steps else 0
        self._steps = report.steps
        self._heard_s = time.monotonic()
        if (every_s := self._plan.round_s) and 0.0 <= news.elapsed_s < float("inf"):
            self._round_s = self._heard_s + every_s - news.elapsed_s % every_s
        self.acknowledged(news.receipt, news.term)
        self._follow_asked(news)
        owner.take_news(self.part, news)
        owner.beaten(self.part, report)

    def _follow_asked(self, news: pb.News) -> None:
        """Report at the interval that the hub asks for; an older hub asks for none."""
        plan = self._plan
        asked_s = news.heartbeat_s if 0.0 < news.heartbeat_s <= _LONGEST_S else 0.0  # also false for NaN
        self._every_s = max(plan.heartbeat_s, asked_s)
        expire_s = news.expire_s if news.expire_s <= _LONGEST_SILENCE_S else 0.0
        self._expire_s = max(plan.expire_s, expire_s)

    @property
    def expire_s(self) -> float:
        """Return the silence after which the hub gives this node up, as it has said."""
        return self._expire_s

    def is_silent(self, limit_s: float) -> bool:
        """Return whether the hub has not answered for this long, or will not be called any more."""
        return self._ended or time.monotonic() - self._heard_s > limit_s

    def _limit_s(self) -> float:
        return self.patience_s if self._here or not self._plan.replicas else next(self._limits_s)

    def _join(self, owner: "Agent") -> pb.JoinReply:
        plan = self._plan
        method = None if plan.method is None else pb.Method(settings=dict(plan.method))
        hello = self.client.hello(
            pb.HelloRequest(protocol=PROTOCOL, version=plan.version, method=method, part=self._asked),
            self._limit_s() if plan.replicas else None,
        )
        request = pb.JoinRequest(who=self.who(), name=plan.name, num_samples=plan.num_samples)
        for unit in plan.units:
            tensors = [pb.Tensor(name=tensor.name, shape=tensor.shape) for tensor in unit.tensors]
            request.layout.add(name=unit.name, tensors=tensors)
        request.facts.update(dict(plan.facts))
        request.donor, request.ranks = self.donor, self.ranks
        request.process, request.rejoin = self.process, bytes.fromhex(plan.rejoin)
        request.offer.CopyFrom(self._ballots.shown)
        request.prefers = 0 if plan.prefers is None else plan.prefers + 1
        if not self._is_of_now(hello.term):
            raise HubUnreachable(f"{self._address} speaks for term {hello.term}, which is over")
        self._begin_anew(hello.term, owner)
        request.claim.CopyFrom(self._claim())
        request.inherits.extend(owner.inherits())
        request.told.extend(owner.reported())
        request.leased_upto = owner.leased_upto() if self.part == 0 else 0
        reply = self.client.join(request)
        with self._change:
            self._who = pb.Who(
                run=plan.run, term=reply.term, node=reply.node, session=reply.session, part=self._asked
            )
        self.acknowledged(reply.news.receipt, reply.term)
        self._follow_asked(reply.news)
        return reply

    def _begin_anew(self, term: int, owner: "Agent") -> None:
        """Forget the receipt of a part that was founded again: its journal is another one."""
        with self._change:
            before, is_new = self._who, lineage(term) > self._lineage
            if is_new:
                self._lineage, self._receipt = lineage(term), pb.Receipt()
        if is_new and before.session:
            log.warning("part %d was lost, and has been founded again", self.part)
            owner.refounded(self.part, generation(before.term))

    def _claim(self) -> pb.Claim:
        claim = self.known()
        with self._change:
            claim.receipt.CopyFrom(self._receipt)
        return claim

    def _is_of_now(self, term: int) -> bool:
        """Take over a higher term and return True; return False for a lower one."""
        with self._change:
            if term < self._who.term or lineage(term) < self._lineage:
                return False
            if lineage(term) == lineage(self._who.term):  # else it joins anew, and gets another session
                self._who.term = term
        return True

    def _judge(self, error: HubRefused, owner: "Agent") -> None:
        if error.code in FATAL:
            owner.refused(str(error))
            self.stop()
        elif error.code == grpc.StatusCode.NOT_FOUND:
            self._set(member=False)
            self.ask_soon()
        elif error.code == grpc.StatusCode.ALREADY_EXISTS:
            # The hub gives up another process of this name soon, unless that one goes on.
            now_s = time.monotonic()
            if self._taken_s is None:
                self._taken_s = now_s
                log.warning("%s", error)
            elif now_s - self._taken_s > _TAKEN * self._plan.expire_s:
                owner.refused(str(error))
                self.stop()
        elif error.code == grpc.StatusCode.FAILED_PRECONDITION:
            self._lost(str(error), at_once=True)
        else:
            self._lost(str(error))

    def _lost(self, why: str, *, at_once: bool = False, has_ended: bool = False) -> None:
        """Look for the hub that leads now.

        Args:
            why: For the log.
            at_once: The hub itself has said that it leads no more.
            has_ended: No program listens at its address.
        """
        if self._here:
            log.warning("no hub: %s", why)
        self._set(here=False)
        others = self._finder.others(self._address)
        if not others:
            return
        gone = has_ended or (at_once and self._member)
        if not gone:  # it may be alive, and wait for votes before it lets a node join
            self._offer(self.client, min(self.patience_s, _OWN_HUB_S))
        if at_once or self._is_given_up(has_ended):
            any(self._follows(other) for other in others)

    def _is_given_up(self, has_ended: bool) -> bool:
        """Return whether another hub may lead by now: in a swarm that takes a moment, else `expire_s`."""
        # Before the next heartbeat was due, nothing was to be expected.
        silent_s = time.monotonic() - self._heard_s - (self._every_s - self._plan.heartbeat_s)
        if self._plan.replicas and (has_ended or silent_s > _SILENT_S):
            return True
        return silent_s > self._plan.expire_s or self._finder.has_moved(self._address)

    def _offer(self, hub: HubClient, timeout_s: float) -> bool:
        """Offer this node's vote to a hub; return whether that one leads now."""
        try:
            reply = self._ballots.offer(hub, self.who(), timeout_s, self._seen)
            return reply.leads and self._is_of_now(reply.term)
        except (HubUnreachable, HubRefused, OSError, ValueError) as error:
            log.warning("no vote: %s", error)
            return False

    def _follows(self, address: str) -> bool:
        """Offer the vote to another hub; return whether it leads, and is this node's hub from now on.

        The old one may come back as a standby.
        """
        other = self._connect(address)
        if not self._offer(other, _OTHER_HUB_S if self._plan.replicas else self.patience_s):
            other.close()
            return False
        log.warning("%s leads now, not %s", address, self._address)
        self._finder.adopt(address, self._address)
        old, self._address, self.client = self.client, address, other
        old.close()
        self._set(member=False)
        self.ask_soon()
        return True

    def _set(self, *, here: bool | None = None, member: bool | None = None) -> None:
        with self._change:
            self._here = self._here if here is None else here
            self._member = self._member if member is None else member
            self._change.notify_all()


_QUESTIONS = 4
"""Most proposals that are answered in a row: a vote, and the first configurations of the new leader."""


class Elector:
    """Votes of one node. Its promises are in the file before they are sent."""

    def __init__(self, file: Path | None) -> None:
        """Continue with the promises in the file. Raises UserError if it is damaged."""
        self._file, self._voter = file, Voter.load(file)
        if file is not None and not file.exists():
            with suppress(OSError):  # kept from now on: configurations may name it before it votes
                self._voter.save(file)
        self._key = self._voter.signing_key
        self.shown = offer_out(self._key)
        """Shows to a hub under which identity this node votes."""

    def offer(
        self, hub: HubClient, who: pb.Who, timeout_s: float, seen: Extent = (0, 0, 0)
    ) -> pb.TakeOverReply:
        """Answer everything that a hub asks; return its last reply.

        seen: end of the records that are known to be acknowledged; a hub with less gets no vote.

        Raises HubUnreachable, HubRefused, ValueError if the hub has not signed what it asks, or OSError if
        the promise cannot be written.
        """
        offering = self.offering(who, seen)
        request = next(offering)
        while True:
            reply = hub.take_over(request, timeout_s)
            try:
                request = offering.send(reply)
            except StopIteration:
                return reply

    def offering(
        self, who: pb.Who, seen: Extent = (0, 0, 0)
    ) -> Generator[pb.TakeOverRequest, pb.TakeOverReply, None]:
        """Yield the requests of an `offer`; the hub's reply to each is sent in."""
        reply, asked = (yield pb.TakeOverRequest(who=who, answer=self.shown)), None
        for _ in range(_QUESTIONS):
            if not reply.HasField("asks") or reply.asks == asked:
                return
            asked = reply.asks
            reply = yield pb.TakeOverRequest(who=who, answer=self.answer(asked, who.term, seen))

    def answer(self, asks: pb.Proposal, term: int, seen: Extent = (0, 0, 0)) -> pb.Answer:
        """Return the signed answer to what a hub asks, once its promise is in the file.

        Raises ValueError if the hub has not signed what it asks, or OSError if the promise cannot be written.

        Args:
            asks: What the hub asks.
            term: Of the hub that the node follows.
            seen: See `offer`.
        """
        voter, answer = self._voter.saw(seen).answer(proposal_in(asks), term)
        if voter != self._voter:
            voter.save(self._file)
            self._voter = voter
        return answer_out(answer, self._key)


_LOOK_S = 0.2


def replicas_of_parts(path: Path, limit_s: float) -> Sequence[str]:
    """Return the address of the owner of each part, or of a replica, as soon as one is known for each.

    A part may have no owner because it needs the vote of this node. Raises UserError if no replica of a part
    is known within `limit_s`.
    """
    file, deadline_s = ReplicasFile(path), time.monotonic() + limit_s
    while True:
        found = [part.owner or next(iter(part.replicas), "") for part in file.parts()]
        if found and all(found):
            return found
        if time.monotonic() > deadline_s:
            missing = ", ".join(str(k) for k, owner in enumerate(found) if not owner) or "any part"
            raise UserError(
                f"{path}: no replica of {missing} was found within {limit_s:g} s; see the peer's log"
            )
        time.sleep(_LOOK_S)


class ReplicaFinder:
    """The hubs of one part that may lead, besides the one that a node follows."""

    def __init__(self, plan: AgentPlan, part: int) -> None:
        self._part, self._standbys = part, deque(plan.standbys_of(part))
        self._file = ReplicasFile(Path(plan.replicas)) if plan.replicas else None

    def others(self, current: str) -> Sequence[str]:
        """Return the hubs besides `current` to be asked now, in this order.

        Those are the replicas in a swarm, the one that leads first, and else one standby, the next at each
        call.
        """
        if self._file is not None:
            places = self._file.part(self._part)
            ordered = dict.fromkeys((places.owner, places.first, *places.replicas))
            return [one for one in ordered if one and one != current]
        self._standbys.rotate(-1)
        return list(self._standbys)[-1:]

    def adopt(self, new: str, old: str) -> None:
        """Note that a node follows `new` from now on, and not `old`, which may come back as a standby."""
        if self._file is None:
            self._standbys.remove(new)
            self._standbys.append(old)

    def has_moved(self, current: str) -> bool:
        """Return whether the peers know another owner than `current`."""
        owner = self._file.part(self._part).owner if self._file is not None else ""
        return bool(owner) and owner != current

    def keys_of(self, address: str) -> Collection[str]:
        """Return the keys, in hexadecimal, that may sign for a hub of a swarm; see `ReplicasFile.keys_of`."""
        return self._file.keys_of(address) if self._file is not None else ()

    def is_shut_out(self, address: str) -> bool:
        """Return whether there is proof against the peer of a hub; see `ReplicasFile.is_shut_out`."""
        return self._file is not None and self._file.is_shut_out(address)
