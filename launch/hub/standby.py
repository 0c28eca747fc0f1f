"""A hub that follows the leading one, and takes over when more than half of the nodes ask for it."""

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
from aedit.async_sgd.service.callers import fingerprint
from aedit.async_sgd.service.hello_responder import HelloResponder
from aedit.launch.hub import folder
from aedit.launch.hub.endpoint import HubEndpoint
from aedit.launch.hub.leading import LeadingHub
from aedit.launch.hub.reports import Reports
from aedit.proto.wire import hub_pb2 as pb
from aedit.proto.wire.client import HubClient, HubRefused, HubUnreachable
from aedit.proto.wire.service import Caller, Refusal
from aedit.system import write_atomically

log = logging.getLogger(__name__)

_RETRY_S = 0.5
"""Pause before the next attempt to reach the leading hub."""
_CONFIRM_S = 0.5
"""Longest time between two confirmations to the leading hub."""
_CALL_TIMEOUT_S = 5.0
_POLL_S = 0.002

Lead = Callable[[Mirror, int], LeadingHub]
"""Start to lead with the state of the mirror, under this term."""


class _Refusing:
    """Refusals of the calls that only the leading hub may answer."""

    def _refusal(self) -> Refusal:
        return Refusal(grpc.StatusCode.FAILED_PRECONDITION, "this hub is a standby: call the leading hub")

    def join(self, request: pb.JoinRequest, caller: Caller) -> pb.JoinReply:
        raise self._refusal()

    def heartbeat(self, request: pb.HeartbeatRequest) -> pb.News:
        raise self._refusal()

    def lease(self, request: pb.LeaseRequest) -> pb.LeaseReply:
        raise self._refusal()

    def leave(self, request: pb.LeaveRequest) -> pb.LeaveReply:
        raise self._refusal()

    def max_push_bytes(self, unit: int) -> int:
        raise self._refusal()

    def push(self, head: pb.PushHead, data: memoryview) -> pb.PushReply:
        raise self._refusal()

    def garbled(self, head: pb.PushHead, reason: str) -> None:
        raise self._refusal()

    def pull(self, request: pb.PullRequest) -> tuple[pb.PullHead, memoryview]:
        raise self._refusal()

    def tail(self, request: pb.TailRequest) -> Iterator[pb.TailChunk]:
        raise self._refusal()

    def confirm(self, request: pb.ConfirmRequest) -> pb.ConfirmReply:
        raise self._refusal()


class Standby(_Refusing):
    """`HubCore` of a hub that follows the leading one; `failure` is the reason if it had to stop."""

    def __init__(
        self, endpoint: HubEndpoint, mirror: Mirror, reports: Reports, responder: HelloResponder, lead: Lead
    ) -> None:
        self._endpoint, self._mirror, self._reports = endpoint, mirror, reports
        self._responder, self._lead = responder, lead
        self._votes: dict[int, tuple[int, float]] = {}
        """Per node: session and time of its vote."""
        self._stopping, self._deciding = threading.Event(), threading.Lock()
        self._client: HubClient | None = None
        self._term = 0
        """Term of the hub whose journal is mirrored; 0 while that is unknown."""
        self._bodies = {"follow": self._follow, "confirm": self._confirm, "apply": self._apply}
        self._threads: list[threading.Thread] = []
        self.leading: LeadingHub | None = None
        self.failure = ""

    def start(self) -> None:
        """Start the threads that fetch, confirm and apply the journal of the leading hub."""
        for name, body in self._bodies.items():
            thread = threading.Thread(target=self._guarded, args=(body,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Stop following."""
        self._stopping.set()
        if self._client is not None:
            self._client.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=10)

    # --- calls

    def hello(self, request: pb.HelloRequest) -> pb.HelloReply:
        """Return the answer to a node or another hub that asks for this run."""
        return self._responder.reply(request, self._mirror.hub.state.term)

    def status(self, request: pb.StatusRequest) -> pb.StatusReply:
        """Return the state of this standby as JSON."""
        with self._mirror.lock:
            now = news.status(self._mirror.hub, time.monotonic())
        segment, offset = self._mirror.position
        following = {"follows": self._endpoint.other, "segment": segment, "offset": offset}
        return pb.StatusReply(json=self._reports.status(now | following, request.metrics_after))

    def take_over(self, request: pb.TakeOverRequest) -> pb.TakeOverReply:
        """Count a node's vote; lead once more than half of the live members have voted."""
        with self._deciding:
            if self.leading is None and not self._has_majority(request.who):
                return pb.TakeOverReply(term=self._mirror.hub.state.term, leads=False)
            if self.leading is None:
                self._start_leading()
            assert self.leading is not None
            return pb.TakeOverReply(term=self.leading.ledger.hub.state.term, leads=True)

    def _has_majority(self, who: pb.Who) -> bool:
        if who.run != self._responder.run:
            raise Refusal(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"run {who.run!r}: this hub serves the run {self._responder.run!r}",
            )
        with self._mirror.lock:
            try:
                member = self._mirror.hub.member(who.node, fingerprint(who.session))
            except Denied as denied:
                raise messages.refusal(denied) from denied
            now = time.monotonic()
            self._votes[member.node] = member.session, now
            # Nodes repeat their votes; a node that has stopped voting has reached the leading hub again.
            newest = now - self._mirror.hub.config.expire_s
            asking = {node: session for node, (session, at_s) in self._votes.items() if at_s >= newest}
            live = self._mirror.hub.state.live
            votes = [node for node, voter in live.items() if asking.get(node) == voter.session]
        self._reports.event("asked_to_lead", node=member.node, votes=len(votes), of=len(live))
        return len(votes) > len(live) / 2

    def _start_leading(self) -> None:
        self.stop()
        term = self._mirror.hub.state.term + 1
        log.warning(
            "more than half of the nodes asked for it: this hub leads from now on, under term %d", term
        )
        self.leading = self._lead(self._mirror, term)
        threading.Thread(target=self._notify_former_leader, args=(term,), name="tell", daemon=True).start()

    def _notify_former_leader(self, term: int) -> None:
        """Tell the former leader the new term: if it is alive but was disconnected, it must stop."""
        client = HubClient(self._endpoint.other, self._endpoint.client_keys(), call_timeout_s=60.0)
        try:
            client.confirm(pb.ConfirmRequest(term=term))
        except (HubUnreachable, HubRefused) as error:
            log.warning("telling the former leader the new term: %s", error)
        finally:
            client.close()

    # --- threads

    def _guarded(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            if not self._stopping.is_set():
                log.error("the standby has stopped", exc_info=error)
                self.failure = f"{type(error).__name__}: {error}"

    def _follow(self) -> None:
        while not self._stopping.is_set():
            try:
                self._follow_once()
            except (HubUnreachable, HubRefused) as error:
                log.warning("following: %s", error)
            except Damaged as error:
                log.error("following: %s; fetching the journal again from its start", error)
                self._mirror.forget()
            self._term = 0
            self._stopping.wait(_RETRY_S)

    def _follow_once(self) -> None:
        other = self._endpoint.other
        if not other:
            return  # not started yet
        self._client = HubClient(other, self._endpoint.client_keys(), call_timeout_s=_CALL_TIMEOUT_S)
        try:
            term = self._leader_term(self._client)
            segment, offset = self._mirror.position
            for chunk in self._client.tail(pb.TailRequest(term=term, segment=segment, offset=offset)):
                if self._stopping.is_set():
                    return
                self._mirror.take(chunk)
                self._term = term
        finally:
            self._client.close()

    def _leader_term(self, client: HubClient) -> int:
        """Return the term of the leading hub.

        Forget what was mirrored under another term, which it may not have.
        """
        term = client.hello(self._responder.question()).term
        noted = folder.read_line(self._endpoint.directory / "mirror.json")
        if not noted or json.loads(noted)["term"] != term:
            self._mirror.forget()
            write_atomically(self._endpoint.directory / "mirror.json", json.dumps({"term": term}))
        return term

    def _confirm(self) -> None:
        confirmed, waited_s = (0, 0), 0.0
        while not self._stopping.is_set():
            if not self._term or (self._mirror.position == confirmed and waited_s < _CONFIRM_S):
                self._stopping.wait(_POLL_S)
                waited_s += _POLL_S
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
                log.error("%s; fetching the journal again from its start", error)
                self._mirror.forget()
                moved = False
            if not moved:
                self._stopping.wait(_POLL_S)
