"""A hub that follows the one that leads, and takes its place when the nodes ask for that."""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from aedit.async_sgd.hub import news
from aedit.async_sgd.hub.joins import Denied
from aedit.async_sgd.journal.frames import Damaged
from aedit.async_sgd.journal.mirror import Mirror
from aedit.async_sgd.service import messages
from aedit.async_sgd.service.hello_responder import HelloResponder
from aedit.launch.hub import folder
from aedit.launch.hub.leading import Leading
from aedit.launch.hub.place import Place
from aedit.launch.hub.reports import Reports
from aedit.proto.wire import hub_pb2 as pb
from aedit.proto.wire.client import HubClient, HubRefused, HubUnreachable
from aedit.proto.wire.service import Refusal
from aedit.system import write_atomically

log = logging.getLogger(__name__)

_AGAIN_S = 0.5
"""Pause before a primary that has gone away is tried again."""
_CONFIRM_S = 0.5
"""How often to say that we are here, at least."""
_CALL_S = 5.0
_LOOK_S = 0.002

Lead = Callable[[Mirror, int], Leading]
"""Lead from now on with what the mirror has, under this term."""


class _Refusing:
    """What a standby refuses: everything that only the hub that leads may answer."""

    def _no(self) -> Refusal:
        return Refusal(grpc.StatusCode.FAILED_PRECONDITION, "this hub is a standby: ask the other one")

    def join(self, request: pb.JoinRequest) -> pb.JoinReply:
        raise self._no()

    def heartbeat(self, request: pb.HeartbeatRequest) -> pb.News:
        raise self._no()

    def lease(self, request: pb.LeaseRequest) -> pb.LeaseReply:
        raise self._no()

    def leave(self, request: pb.LeaveRequest) -> pb.LeaveReply:
        raise self._no()

    def max_push_bytes(self, unit: int) -> int:
        raise self._no()

    def push(self, head: pb.PushHead, data: memoryview) -> pb.PushReply:
        raise self._no()

    def garbled(self, head: pb.PushHead, reason: str) -> None:
        raise self._no()

    def pull(self, request: pb.PullRequest) -> tuple[pb.PullHead, memoryview]:
        raise self._no()

    def tail(self, request: pb.TailRequest) -> Iterator[pb.TailChunk]:
        raise self._no()

    def confirm(self, request: pb.ConfirmRequest) -> pb.ConfirmReply:
        raise self._no()


class Standby(_Refusing):
    """`HubCore` of a hub that follows. `start` begins to; `failure` says why it had to give up."""

    def __init__(
        self, place: Place, mirror: Mirror, reports: Reports, responder: HelloResponder, lead: Lead
    ) -> None:
        self._place, self._mirror, self._reports = place, mirror, reports
        self._responder, self._lead = responder, lead
        self._votes: dict[int, tuple[int, float]] = {}
        """By node, the session that asked, and when."""
        self._stopping, self._deciding = threading.Event(), threading.Lock()
        self._client: HubClient | None = None
        self._term = 0
        """Of the hub whose journal this is, once it has been asked."""
        self._bodies = {"follow": self._follow, "confirm": self._confirm, "apply": self._apply}
        self._threads: list[threading.Thread] = []
        self.leading: Leading | None = None
        self.failure = ""

    def start(self) -> None:
        for name, body in self._bodies.items():
            thread = threading.Thread(target=self._guarded, args=(body,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Follow no longer."""
        self._stopping.set()
        if self._client is not None:
            self._client.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=10)

    # --- what it answers

    def hello(self, request: pb.HelloRequest) -> pb.HelloReply:
        return self._responder.reply(request, self._mirror.hub.state.term)

    def status(self, request: pb.StatusRequest) -> pb.StatusReply:
        with self._mirror.lock:
            now = news.status(self._mirror.hub, time.monotonic())
        segment, offset = self._mirror.position
        following = {"follows": self._place.other, "segment": segment, "offset": offset}
        return pb.StatusReply(json=self._reports.status(now | following, request.metrics_after))

    def take_over(self, request: pb.TakeOverRequest) -> pb.TakeOverReply:
        """A vote. With those of more than half of the members it leads."""
        with self._deciding:
            if self.leading is None and not self._has_won(request.who):
                return pb.TakeOverReply(term=self._mirror.hub.state.term, leads=False)
            if self.leading is None:
                self._win()
            assert self.leading is not None
            return pb.TakeOverReply(term=self.leading.ledger.hub.state.term, leads=True)

    def _has_won(self, who: pb.Who) -> bool:
        if who.run != self._responder.run:
            raise Refusal(
                grpc.StatusCode.INVALID_ARGUMENT, f"this is not about the run {self._responder.run!r}"
            )
        with self._mirror.lock:
            try:
                member = self._mirror.hub.member(who.node, who.session)
            except Denied as denied:
                raise messages.refusal(denied) from denied
            now = time.monotonic()
            self._votes[member.node] = member.session, now
            # Who asks goes on asking: one who has stopped has found the hub again.
            newest = now - self._mirror.hub.config.expire_s
            asking = {node: session for node, (session, at_s) in self._votes.items() if at_s >= newest}
            live = self._mirror.hub.state.live
            votes = [node for node, voter in live.items() if asking.get(node) == voter.session]
        self._reports.event("asked_to_lead", node=member.node, votes=len(votes), of=len(live))
        return len(votes) > len(live) / 2

    def _win(self) -> None:
        self.stop()
        term = self._mirror.hub.state.term + 1
        log.warning("the nodes have asked for it: this hub leads from now on, under term %d", term)
        self.leading = self._lead(self._mirror, term)
        threading.Thread(target=self._tell_the_old_one, args=(term,), name="tell", daemon=True).start()

    def _tell_the_old_one(self, term: int) -> None:
        """If it is alive but was cut off, it need not learn from a node that it is over."""
        client = HubClient(self._place.other, self._place.client_keys(), call_timeout_s=60.0)
        try:
            client.confirm(pb.ConfirmRequest(term=term))
        except (HubUnreachable, HubRefused) as error:
            log.warning("told the old one: %s", error)
        finally:
            client.close()

    # --- its threads

    def _guarded(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            if not self._stopping.is_set():
                log.error("the standby gives up", exc_info=error)
                self.failure = f"{type(error).__name__}: {error}"

    def _follow(self) -> None:
        while not self._stopping.is_set():
            try:
                self._follow_once()
            except (HubUnreachable, HubRefused) as error:
                log.warning("following: %s", error)
            except Damaged as error:
                log.error("following: %s; beginning anew", error)
                self._mirror.forget()
            self._term = 0
            self._stopping.wait(_AGAIN_S)

    def _follow_once(self) -> None:
        other = self._place.other
        if not other:
            return  # It has not come up yet.
        self._client = HubClient(other, self._place.client_keys(), call_timeout_s=_CALL_S)
        try:
            term = self._greeted(self._client)
            segment, offset = self._mirror.position
            for chunk in self._client.tail(pb.TailRequest(term=term, segment=segment, offset=offset)):
                if self._stopping.is_set():
                    return
                self._mirror.take(chunk)
                self._term = term
        finally:
            self._client.close()

    def _greeted(self, client: HubClient) -> int:
        """Term of the one that leads. What was mirrored under another term may not be what it has."""
        term = client.hello(self._responder.question()).term
        noted = folder.read_line(self._place.directory / "mirror.json")
        if not noted or json.loads(noted)["term"] != term:
            self._mirror.forget()
            write_atomically(self._place.directory / "mirror.json", json.dumps({"term": term}))
        return term

    def _confirm(self) -> None:
        confirmed, waited_s = (0, 0), 0.0
        while not self._stopping.is_set():
            if not self._term or (self._mirror.position == confirmed and waited_s < _CONFIRM_S):
                self._stopping.wait(_LOOK_S)
                waited_s += _LOOK_S
                continue
            confirmed, waited_s = self._mirror.sync(), 0.0
            request = pb.ConfirmRequest(term=self._term, segment=confirmed[0], offset=confirmed[1])
            client = self._client
            try:
                if client is not None and not self._stopping.is_set():
                    client.confirm(request, timeout_s=1.0)
            except (HubUnreachable, HubRefused) as error:
                log.warning("confirming: %s", error)
                confirmed = (0, 0)

    def _apply(self) -> None:
        while not self._stopping.is_set():
            try:
                moved = self._mirror.apply()
            except Damaged as error:
                log.error("%s; beginning anew", error)
                self._mirror.forget()
                moved = False
            if not moved:
                self._stopping.wait(_LOOK_S)
