"""A hub that follows the leading one, confirms what it has on disk, and leads once it is elected."""

import json
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import grpc

from aedit import traces
from aedit.async_sgd.hub import Denied, hub_status
from aedit.async_sgd.journal import Damaged, NoSpace, Position, begin_after, moved_aside, records_after
from aedit.async_sgd.replication import Leadership, Mirror
from aedit.async_sgd.rules import Configured, Led, Record
from aedit.async_sgd.service import HelloResponder, check_part, fingerprint, messages
from aedit.launch.hub import folder
from aedit.launch.hub.endpoint import HubEndpoint, OtherHubs
from aedit.launch.hub.leading import LeadingHub, Reports
from aedit.launch.hub.owner_check import OwnerCheck
from aedit.launch.records import resting_file
from aedit.proto.rpc import (
    Extent,
    HubClient,
    HubRefused,
    HubUnreachable,
    PortClosed,
    Refusal,
    VoteReply,
    answer_in,
    answer_out,
    lineage,
    proposal_in,
    proposal_out,
    sign,
)
from aedit.proto.rpc import hub_pb2 as pb
from aedit.system import is_full, write_atomically

log = logging.getLogger(__name__)
_SPANS = 256
_FULL_PAUSE_S = 1.0
"""Pause before the next attempt to write to a full disk."""
_RETRY_S = 0.2
"""Pause before the next attempt to reach the leading hub."""
_CURRENT_S = 1.5
"""A journal is current if its leader has sent something within this time."""
_SILENT_S = 3.0
"""A leader sends something twice a second: one that is silent for this time is lost."""
Lead = Callable[[Mirror, Sequence[Record]], LeadingHub]
"""Start to lead with the state of the mirror and these first records."""
_CONFIRM_S = 0.5
"""Longest time between two confirmations to the leading hub."""
_COPY_WAITS_S = 6.0
"""How long a process that may be the copy of another replica leaves each new leader to that one."""
_SOON_S = 0.02
"""Pause of a follower that may confirm nothing now."""
_APART_S, _FORMER_FIRST = 1.0, 10
"""Between the turns of two replicas that have lost their owner together, and turns that one which starts
leaves to the former owner: all machines may have been started again."""
_OLDER_S = 60.0
"""How long a replica does not follow an owner that lacks what it has itself sent, and asks for votes."""


class Standby:
    """`HubCore` of a hub that follows the leading one; `failure` is the reason if it had to stop.

    The threads that `start` starts only wait and call. Each step decides at once, and any caller may repeat
    them: `leader`, `tail_request`, `take` and `lost_leader`; `Confirmer.request` and `invited`; `apply`.
    """

    def __init__(
        self,
        others: OtherHubs,
        mirror: Mirror,
        reports: Reports,
        responder: HelloResponder,
        leadership: Leadership,
        lead: Lead,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._others, self._mirror, self._reports = others, mirror, reports
        self._responder, self._leadership, self._lead = responder, leadership, lead
        self._endpoint = endpoint = others.endpoint
        self._window_s = endpoint.config.hub.expire_s
        """Nodes repeat their votes; a node that has stopped voting has reached the leading hub again."""
        self._turn = ElectionTurn(self._window_s, clock)
        if self._led_last:
            self._turn.lost_owner(0)
        elif endpoint.replicas is not None and mirror.hub.state.configs:
            self._turn.lost_owner(_FORMER_FIRST + (endpoint.place_without("") or 0))
        self._older_since_s: float | None = None
        """Since when the owner lacks records that it has sent."""
        self._leader = ""
        """Address of the hub that is followed."""
        self._away = ""
        """Address of a leader whose connection has just ended."""
        self._heard_s = clock()
        """Time of the last message of the leader."""
        self._hindered = ""
        """Why this hub could not be elected when it was last asked."""
        self._full = ""
        """Why nothing could be written when it was last tried; "" if it could."""
        self.unwritten = ""
        """Why the address of this hub is not in its folder; "" if it is."""
        self._stopping, self._deciding = threading.Event(), threading.Lock()
        self._check: OwnerCheck | None = None
        if endpoint.replicas is not None:
            self._check = OwnerCheck(mirror, endpoint, self._event, lambda: self._leader)
        self.confirmer = Confirmer(mirror, leadership, endpoint, clock)
        self._client: HubClient | None = None
        self._term = 0
        """Term of the hub whose journal is mirrored; 0 while that is unknown."""
        self._bodies = {"follow": self._follow, "confirm": self._confirm, "apply": self._apply}
        self._threads: list[threading.Thread] = []
        self.leading: LeadingHub | None = None
        self.is_over = False
        """True once the run is over and its leader has ended, in a swarm."""
        self.failure = ""

    def start(self) -> None:
        """Start the threads that fetch, confirm and apply the journal of the leading hub."""
        self._threads.clear()
        for name, body in self._bodies.items():
            thread = threading.Thread(target=self._guarded, args=(body,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Stop following."""
        self._stopping.set()
        self.confirmer.note_arrival()
        if self._client is not None:
            self._client.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=10)

    # --- calls

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        text = "this hub is a standby: call the leading hub"
        raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, text)

    join = heartbeat = lease = leave = max_push_bytes = push = garbled = pull = tail = confirm = _refuse

    def hello(self, request: pb.HelloRequest) -> pb.HelloReply:
        """Return the answer to a node or another hub that asks for this run."""
        # Another process of this identity that starts must not leave the votes to one which gives none.
        promise = None if self.confirmer.twin else self._leadership.promise
        return self._responder.reply(request, self._mirror.hub.state.term, promise=promise)

    def status(self, request: pb.StatusRequest) -> pb.StatusReply:
        """Return the state of this standby as JSON."""
        with self._mirror.lock:
            now = hub_status(self._mirror.hub, self._clock())
            configs = self._mirror.hub.state.configs
            is_current = self._mirror.is_applied and self._clock() - self._heard_s < _CURRENT_S
        segment, offset = self._mirror.position
        leader = self._leader or next(iter(self._endpoint.others), "")
        in_sync = set(configs[-1].replicas if configs else ())
        following: dict[str, Any] = {"run": self._endpoint.config.name, "follows": leader}
        following |= {"segment": segment, "offset": offset}
        following |= {"is_replica": self._leadership.identity in in_sync, "confirmed": self._leadership.seen}
        # If another hub may have extended the journal, its required replicas are unknown.
        following |= {"is_needed": self.confirmer.is_needed or not (self._leader and is_current)}
        following |= {"other_replicas": len(in_sync - {self._leadership.identity})}
        following |= {"set_aside": moved_aside(self._endpoint.directory)}
        following |= {"twins": [self.confirmer.twin] if self.confirmer.twin else []}
        following |= {"false_statements": self._check.found if self._check is not None else []}
        following |= {"unconfirmed_s": self.confirmer.silent_s, "disk_full": self._full or self.unwritten}
        return pb.StatusReply(json=self._reports.status(now | following, request.metrics_after))

    def propose(self, request: pb.ProposeRequest) -> pb.Answer:
        """Answer another hub of the run that asks for a vote."""
        self._check_part(request.run, request.part)
        self._endpoint.check_candidate(request)
        self._check_twin()
        with _refusing():
            answer = self._leadership.answer(proposal_in(request.proposal), self._extent)
            return answer_out(answer, self._leadership.key)

    def take_over(self, request: pb.TakeOverRequest) -> pb.TakeOverReply:
        """Take a node's vote; lead once the voters have elected this hub."""
        answer = answer_in(request.answer) if request.HasField("answer") else None
        with self._deciding:
            if self.leading is None:
                self._check_voter(request.who, answer.voter if answer else 0)
                if self._still_stands() and answer:
                    with _refusing():
                        self._count(answer)
            if self.leading is not None:
                return self.leading.driver.take_over(request)
            reply = pb.TakeOverReply(term=self._mirror.hub.state.term, leads=False)
            asks = self._leadership.asks()
            if asks is not None:
                reply.asks.CopyFrom(proposal_out(asks, self._leadership.key))
            return reply

    def count(self, answer: VoteReply) -> None:
        """Count the answer of another hub to what this one asks."""
        with self._deciding:
            if self.leading is not None:
                self.leading.leadership.count(answer)
            elif self._still_stands():
                self._count(answer)

    def _check_twin(self) -> None:
        """Raise Refusal if another process is the same voter: it answers, and one of them must not."""
        if self.confirmer.twin:
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, f"no vote: {self.confirmer.twin}")

    def _check_part(self, run: str, part: int) -> None:
        if run != self._responder.run:
            text = f"run {run[:64]!r}: this hub serves the run {self._responder.run!r}"
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, text)
        check_part(part, self._responder.part)

    def _check_voter(self, who: pb.Who, voter: int) -> None:
        """Raise Refusal unless the caller breaks ties in this run, or is a member of it.

        voter: as which it has signed; 0: none.
        """
        self._check_part(who.run, who.part)
        with self._mirror.lock:
            state = self._mirror.hub.state
            if any(voter in config.electors for config in state.configs):
                return
            try:
                self._mirror.hub.member(who.node, fingerprint(who.session))
            except Denied as denied:
                raise messages.refusal_of(denied) from denied

    def _still_stands(self) -> bool:
        """Return whether this hub can be elected now.

        In a swarm it can only after its turn to ask for votes. Else every vote of a node lets it ask.
        """
        if self._endpoint.replicas is None:
            return self._stands(self._window_s)
        return self._leadership.asks() is not None and self._stands(None)

    @property
    def _extent(self) -> Extent:
        with self._mirror.lock:
            return self._mirror.hub.state.term, *self._mirror.position

    def _stands(self, window_s: float | None, *, invited: bool = False) -> bool:
        """Ask for votes, see `Leadership.stand`; return whether this hub can be elected."""
        with self._mirror.lock:
            while self._mirror.apply():
                pass
            configs = self._mirror.hub.state.configs
            reason = self.confirmer.twin or self._leadership.stand(
                configs, self._extent, window_s, invited=invited
            )
        if reason != self._hindered:
            self._hindered = reason
            if reason:
                log.warning("asked to lead, and it cannot: %s", reason)
                self._event("cannot_lead", reason=reason)
        return not reason

    def _event(self, event: str, **values: Any) -> None:
        """Record an event at the age of the run, as far as the journal is here."""
        with self._mirror.lock:
            state = self._mirror.hub.state
            self._reports.start(state.elapsed_s, state.members)
        self._reports.event(event, **values)

    def _count(self, answer: VoteReply) -> None:
        """Count a vote, and lead once elected. Raises NoSpace, and this hub follows on."""
        try:
            records = self._leadership.count(answer, self._window_s)
        except NoSpace:  # a hub that asked on would keep the votes from one that has room
            self._leadership.resign(self._mirror.hub.state.configs)
            raise
        if not records:
            return
        self.stop()
        term = next(record.term for record in records if isinstance(record, Led))
        log.warning("elected: this hub leads from now on, under term %d", term)
        try:
            self.leading = self._lead(self._mirror, records)
        except NoSpace as error:
            log.error("elected, and it cannot lead: %s", error)
            self._event("cannot_lead", reason=str(error))
            self._leadership.resign(self._mirror.hub.state.configs)
            self._stopping = threading.Event()
            self.start()
            raise
        except BaseException as error:
            self._fail(error)
            raise
        self._others.tell(term)

    # --- threads

    def _guarded(self, body: Callable[[], None]) -> None:
        stopping = self._stopping
        try:
            body()
        except BaseException as error:
            if not stopping.is_set():
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        log.error("the standby has stopped", exc_info=error)
        self.failure = f"{type(error).__name__}: {error}"

    def _follow(self) -> None:
        stopping = self._stopping  # there is another one after an election that failed
        while not stopping.is_set():
            ended: Exception | None = None
            if leader := self.leader():
                try:
                    self._follow_once(*leader)
                except (HubUnreachable, HubRefused, Damaged, NoSpace, OSError) as error:
                    ended = error
            stopping.wait(self.lost_leader(ended))

    def leader(self) -> tuple[str, int] | None:
        """Return the address and term of a hub that leads, and may be followed; None if none was found."""
        known = max(
            self._mirror.hub.state.term,
            folder.noted_term(self._endpoint.directory),
            self._leadership.promised,
        )
        leader = self._others.leader(known, self._stopping, without=self._away)
        self.confirmer.take_hellos(self._others.answers)
        self._away = ""
        return None if leader is None or self._is_of_another_lineage(leader[1]) else leader

    def lost_leader(self, ended: Exception | None) -> float:
        """Note that no leader is followed now; return the pause before the next search, in seconds.

        In a swarm, and after it has led, this hub asks for votes when its turn comes.

        ended: what ended the stream of the leader; None if it ended by itself, or none was found. It is
            raised if it says that the disk has failed.
        """
        try:
            if isinstance(ended, HubUnreachable | HubRefused):
                log.warning("following: %s", ended)
                self._term = 0
                self._note_end(ended)
            elif isinstance(ended, Damaged):
                self._fetch_anew(ended)
            elif ended is not None:
                raise ended
        except (NoSpace, OSError) as error:
            self._note_full(error)
            return _FULL_PAUSE_S
        lost, self._term, self._leader = self._leader, 0, ""
        if lost:
            self._leadership.drop_leader()
            self._turn.lost_owner(self._endpoint.place_without(lost))
        elif (self._led_last or self._endpoint.replicas is not None) and self._turn.take():
            self._stand_or_end()
        return _RETRY_S

    @property
    def _led_last(self) -> bool:
        """Return whether this hub was the last leader, as far as its journal goes."""
        newest = self._mirror.hub.state.configs[-1:]
        return bool(newest) and newest[0].leader == self._leadership.identity

    def _note_full(self, error: NoSpace | OSError) -> None:
        """Note that the disk is full, and confirm nothing until the leader is found again.

        The leader goes on without this hub. Raises an error that says something else.
        """
        if isinstance(error, OSError) and not is_full(error):
            raise error
        if not self._full:
            log.error("%s: nothing is mirrored until there is room", error)
            self._event("journal_full", reason=str(error))
        self._full, self._term, self._leader = str(error), 0, ""

    def _is_of_another_lineage(self, term: int) -> bool:
        """Return whether this journal is not that leader's: its part was lost and founded again.

        The peer keeps this journal aside, and begins another folder.
        """
        own = self._mirror.hub.state.term
        return own > 0 and lineage(term) != lineage(own)

    def _note_end(self, error: HubUnreachable | HubRefused) -> None:
        """Give up the support of a leader that has ended, or says itself that it leads no more."""
        if not self._leader:
            return
        refused = isinstance(error, HubRefused) and error.code == grpc.StatusCode.FAILED_PRECONDITION
        is_silent = self._clock() - self._heard_s >= _SILENT_S
        has_ended = not (refused or is_silent) and self._others.has_ended(self._leader)
        if refused or has_ended:
            self._leadership.leader_ended()
        # To wait for the answer of one that is away once more would delay the election.
        self._away = self._leader if has_ended or is_silent else ""

    def _stand_or_end(self) -> None:
        """Ask for votes; or end, if the leader has ended with the run."""
        with self._mirror.lock:
            while self._mirror.apply():
                pass
            hub = self._mirror.hub
            ended = hub.progress(self._clock()) >= 1.0 and not hub.state.live
            self.is_over = ended and not self._endpoint.stays
        if not self.is_over:
            self.ask_for_votes()

    def ask_for_votes(self, *, invited: bool = False) -> None:
        """Stand for election without a node's vote: in a swarm, other replicas may be all that is left."""
        with self._deciding:
            if self.leading is None:
                self._stands(self._window_s, invited=invited)

    def _follow_once(self, leader: str, term: int) -> None:
        """Follow the hub at this address for as long as it leads this term."""
        with self._endpoint.client(leader, _SILENT_S) as self._client:
            while not self._tail(self._client, term, leader):
                pass

    def _tail(self, client: HubClient, term: int, leader: str) -> bool:
        """Mirror the journal of a leader from where its records and those here are the same.

        Returns False if that was not where these end: they are cut off, and it may be tried again.
        """
        for chunk in client.tail(self.tail_request(term)):
            if self._stopping.is_set() or (chunk.differs and self._is_older(chunk, term, leader)):
                return True
            if not self.take(chunk, term, leader):
                return False
        return True

    def tail_request(self, term: int) -> pb.TailRequest:
        """Return the request for the journal of the leader of `term`, from where this one ends on."""
        (segment, offset), chain = self._trim(term)
        request = pb.TailRequest(
            term=term,
            segment=segment,
            offset=offset,
            chain=chain,
            last_term=self._mirror.hub.state.term,
        )
        if part := self._mirror.partial.received():
            request.snapshot_segment, request.snapshot_bytes, request.snapshot_sha256 = part
        return request

    def take(self, chunk: pb.TailChunk, term: int, leader: str) -> bool:
        """Take a chunk of the journal of the leader of `term` at this address.

        Returns False if the journal was cut off here instead, and is to be asked for again. Raises Damaged,
        NoSpace or OSError, and HubRefused if the leader must not be followed any more.
        """
        self._others.check_leader(leader, self._event)
        promised = self._leadership.promised
        if promised > max(term, self._mirror.hub.state.term) and self.confirmer.silent_s > _SILENT_S:
            # It learns of the promise when this hub looks for a leader, and is elected again.
            raise HubUnreachable(f"{leader} leads term {term}, and this hub has promised term {promised}")
        if chunk.differs:
            self._take_back(self._cut_at(chunk))
            return False
        spans = [
            traces.opened("standby: mirror", traces.parsed(text))
            for text in chunk.traces[: traces.MOST_CONTEXTS]
        ]
        self._mirror.take(chunk)
        self.confirmer.spans.extend(spans)
        if chunk.data and self._full:
            self._full = ""
            self._event("journal_has_room")
        if not self._leader:
            self._leadership.withdraw()
            self.confirmer.follows_since_s = self._clock()
        self._leadership.note_leader(self._mirror.hub.state.configs)
        # Elected again since it named its term, the leader counts confirmations of the new one only.
        self._term, self._leader = max(term, self._mirror.hub.state.term), leader
        self._heard_s = self._clock()
        self.confirmer.note_arrival()
        return True

    @property
    def term(self) -> int:
        """Return the term of the leader whose journal is mirrored; 0 without one."""
        return self._term

    def _is_older(self, chunk: pb.TailChunk, term: int, leader: str) -> bool:
        """Return whether the owner lacks a configuration on which the replicas have agreed, and what follows.

        It has elected itself with an older folder then: it is not followed, and another replica can be
        elected that has the rest; see `_OLDER_S`. To a configuration of this hub alone no other has agreed.
        """
        end, configs = self._cut_at(chunk), self._mirror.hub.state.configs
        if self._endpoint.replicas is None or not configs or len(configs[0].replicas) < 2:
            return False
        behind = records_after(self._endpoint.directory, end)
        if not any(isinstance(one, Configured) and one.ballot == configs[0].ballot for one in behind):
            return False
        now = self._clock()
        if self._older_since_s is None:
            self._older_since_s = now
            reason = (
                f"{leader} leads term {term}, and its journal is other than here from {end} on, before"
                f" configuration {configs[0].ballot}, on which the replicas have agreed: its folder is older"
            )
            log.error("%s; another replica should lead", reason)
            self._event("owner_is_older", owner=leader, reason=reason)
            self._turn.lost_owner(self._endpoint.place_without(leader))
        self._leadership.leader_ended()
        self._leadership.drop_leader()
        return now - self._older_since_s < _OLDER_S

    def _trim(self, term: int) -> tuple[Position, bytes]:
        """Return where this journal ends. Set aside a lone snapshot of another term: none compares it."""
        end = self._mirror.trim()
        if folder.noted_term(self._endpoint.directory) != term:
            if not end[1]:
                self._leadership.forget((0, 0, 0))
                self._mirror.clear(keep=True)
                end = self._mirror.trim()
            write_atomically(self._endpoint.directory / folder.MIRROR, json.dumps({"term": term}))
        return end

    def _cut_at(self, chunk: pb.TailChunk) -> Position:
        """Return where what only this hub has begins, if the leader has other records.

        There the leader goes on to terms that are not known here. If it has no record of the last term here,
        nothing of that was acknowledged.
        """
        if not chunk.lacks_term:
            return chunk.segment, chunk.offset
        return begin_after(self._endpoint.directory, self._mirror.hub.state.term - 1)[0]

    def _take_back(self, end: Position) -> None:
        """Cut off what only this hub has: it was not acknowledged, as the leader was elected without it.

        It is set aside all the same: the leader may have come back with an older copy of its folder.
        """
        term, before = self._mirror.hub.state.term, self._mirror.position
        if self._mirror.cut(end):
            log.warning("cut the journal from %s back to %s", before, end)
        else:
            log.warning("the leader has other records: fetching its journal from the start")
            self._leadership.forget((term, *before))
            self._mirror.forget()

    def _fetch_anew(self, error: Damaged) -> None:
        """Set a damaged journal aside and fetch it again. Until it is whole, this hub cannot be elected."""
        log.error("%s; fetching the journal again from its start", error)
        self._leadership.forget((self._mirror.hub.state.term, *self._mirror.position))
        self._mirror.forget()

    def _confirm(self) -> None:
        self.confirmer.run(
            lambda: (self._term, self._client), self._stopping, lambda: self.ask_for_votes(invited=True)
        )

    def _apply(self) -> None:
        stopping = self._stopping
        while not stopping.is_set():
            seen, moved = self.confirmer.num_arrived, self.apply()
            if self._check is not None:
                self._check.note() if moved else self._check.compare()
            if not moved:
                self.confirmer.wait_for_more(seen)

    def apply(self) -> bool:
        """Apply one batch of records and return True; False if there is none, or the journal is damaged."""
        try:
            return self._mirror.apply()
        except Damaged as damaged:
            try:
                self._fetch_anew(damaged)
            except (NoSpace, OSError) as error:
                self._note_full(error)
            return False


class Confirmer:
    """The confirmations of one follower.

    A replica that its peer may give up *rests*: it confirms nothing, so that the owner cannot count on it
    from then on. Once the journal counts on it all the same, it confirms again.
    """

    def __init__(
        self, mirror: Mirror, leadership: Leadership, endpoint: HubEndpoint, clock: Callable[[], float]
    ) -> None:
        """Confirm nothing yet."""
        self._mirror, self._leadership, self._endpoint = mirror, leadership, endpoint
        self._clock, self._last_s = clock, clock()
        self.twin = ""
        """Why this replica gives no vote, as another process is the same one; "" if none is."""
        self.twin_at = ""
        """Address of that process if it was there when this one started, and no leader has decided."""
        self.follows_since_s = clock()
        """Time since when the present leader is followed."""
        self._arrived, self.num_arrived = threading.Condition(), 0
        """Number of chunks of the journal that have come."""
        self.spans = deque[traces.TraceSpan](maxlen=_SPANS)
        """Of traced pushes that are mirrored and may not be on disk."""

    def note_arrival(self) -> None:
        """Note that another chunk of the journal has come, or that waits must end."""
        with self._arrived:
            self.num_arrived += 1
            self._arrived.notify_all()

    def wait_for_more(self, seen: int) -> None:
        """Return when more than `seen` chunks have come, or at the time of the next confirmation."""
        with self._arrived:
            self._arrived.wait_for(lambda: self.num_arrived != seen, _CONFIRM_S)

    @property
    def silent_s(self) -> float:
        """Return the seconds since it last confirmed anything, or was made."""
        return self._clock() - self._last_s

    @property
    def is_needed(self) -> bool:
        """Return whether a configuration that counts in the journal, as far as applied, names this one."""
        with self._mirror.lock:
            configs = self._mirror.hub.state.configs
            return any(self._leadership.identity in config.replicas for config in configs)

    def run(
        self,
        following: Callable[[], tuple[int, HubClient | None]],
        stopping: threading.Event,
        invited: Callable[[], None],
    ) -> None:
        """Confirm until `stopping` is set.

        Args:
            following: Returns the term of the leader that is followed, 0 without one, and its client.
            stopping: Ends it.
            invited: Called when the leader wants this replica to lead in its place.
        """
        confirmed = (0, 0)
        while not stopping.is_set():
            seen, term = self.num_arrived, following()[0]
            if self._mirror.position == confirmed or not term:
                self.wait_for_more(seen)
            term, client = following()
            request = None if client is None else self.request(term)
            if client is None or request is None:
                stopping.wait(_SOON_S)
                continue
            confirmed = request.segment, request.offset
            answer = self._send(client, request)
            if self.answered(answer):
                invited()
            if isinstance(answer, Exception):
                confirmed = (0, 0)
                stopping.wait(_CONFIRM_S if self.twin else _SOON_S)

    def request(self, term: int) -> pb.ConfirmRequest | None:
        """Return the confirmation of all that is mirrored, which is on disk then; None if there must be none.

        term: of the leader that is followed, 0 without one.
        """
        if not term or not self._leadership.may_confirm(term) or self._rests():
            return None
        if self.twin and self._clock() - self.follows_since_s < _COPY_WAITS_S:
            return None  # the other process is counted, if there is one still
        spans = [self.spans.popleft() for _ in range(len(self.spans))]
        segment, offset = self._mirror.sync()
        for span in spans:
            span.end()
        request = pb.ConfirmRequest(
            term=term,
            segment=segment,
            offset=offset,
            replica=self._leadership.identity,
            address=self._endpoint.own_address,
        )
        sign(request, self._leadership.key)
        self._last_s = self._clock()
        return request

    def answered(self, answer: pb.ConfirmReply | HubRefused | HubUnreachable) -> bool:
        """Take the answer to a confirmation; return whether the leader wants this replica in its place."""
        if isinstance(answer, pb.ConfirmReply):
            if answer.counts:
                self.twin = self.twin_at = ""
            return answer.stand
        is_twin = isinstance(answer, HubRefused) and answer.code is grpc.StatusCode.ALREADY_EXISTS
        self.twin_at = "" if is_twin else self.twin_at
        if not (is_twin and self.twin):
            log.warning("confirming: %s", answer)
        self.twin = str(answer) if is_twin else self.twin
        return False

    def take_hellos(self, answers: Mapping[str, pb.HelloReply | HubRefused | HubUnreachable]) -> None:
        """Give votes again if the process of this identity has ended, or gives none itself.

        answers: to the Hello of this hub, by address.
        """
        if not self.twin_at:
            return
        answer, me = answers.get(self.twin_at), self._leadership.identity
        gives_none = isinstance(answer, pb.HelloReply) and answer.promise.voter != me
        if gives_none or isinstance(answer, PortClosed):
            self.twin = self.twin_at = ""

    def _send(
        self, client: HubClient, request: pb.ConfirmRequest
    ) -> pb.ConfirmReply | HubRefused | HubUnreachable:
        try:
            return client.confirm(request, timeout_s=1.0)
        except (HubUnreachable, HubRefused) as error:
            return error
        finally:
            self._last_s = self._clock()

    def _rests(self) -> bool:
        return resting_file(self._endpoint.directory).exists() and not self.is_needed


@contextmanager
def _refusing() -> Iterator[None]:
    """Turn NoSpace inside the block into a refusal: nothing was promised."""
    try:
        yield
    except NoSpace as error:
        raise Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)) from error


class ElectionTurn:
    """The next time at which a replica without an owner asks for votes."""

    def __init__(self, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Draw the first time. window_s: how long a request for votes lasts."""
        self._window_s, self._clock = window_s, clock
        self._at_s = self._drawn_s()

    def lost_owner(self, place: int | None) -> None:
        """Note that the owner cannot be followed any more: the replicas ask one after the other.

        place: of this replica among those that are left, from 0; None if it has none.
        """
        self._at_s = self._drawn_s() if place is None else self._clock() + place * _APART_S

    def take(self) -> bool:
        """Return whether it is time to ask now; the next time is then drawn anew."""
        if self._clock() < self._at_s:
            return False
        self._at_s = self._drawn_s()
        return True

    def _drawn_s(self) -> float:
        return self._clock() + self._window_s * random.uniform(0.5, 1.5)
