"""The directory of rollout servers at a leading hub: who may say what, and the answers."""

import json
import secrets
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

import grpc

from aedit.async_sgd.hub import Card, Complaint, Directory
from aedit.async_sgd.rules import Banned
from aedit.async_sgd.service.messages import json_line
from aedit.async_sgd.service.request_guard import RequestGuard, check_name
from aedit.proto.rpc import (
    LONGEST_REASON,
    MOST_EVIDENCE_BYTES,
    DirectoryCore,
    Rates,
    Refusal,
    hub_pb2,
    is_signed_card,
)
from aedit.proto.rpc import directory_pb2 as pb

_EVENTS_PER_S = 5.0
"""Limit of recorded events of servers that come and go: nobody can fill the disk with them."""

Event = Callable[..., None]


class ServerDirectory:
    """`DirectoryCore` of a leading hub."""

    def __init__(self, guard: RequestGuard, event: Event) -> None:
        """Create an empty directory; bans are those of the hub's journal."""
        config = guard.ledger.hub.config
        self._guard, self._ledger, self._event = guard, guard.ledger, event
        state = self._ledger.hub.state
        self._directory = Directory(state, most=config.limits.servers, lease_s=config.expire_s)
        self._salt = secrets.token_bytes(16)
        self._events = Rates(_EVENTS_PER_S)

    # --- calls

    def announce(self, card: pb.ServerCard, certified: str | None) -> pb.AnnounceReply:
        """Register a server, or renew its lease. Raises Refusal with the reason."""
        check_name(card.name, certified, "server")
        if not is_signed_card(card):
            raise _wrong("signature: the card is not signed with the key that it names")
        with self._guard.deciding() as now:
            self._check_run(card.run)
            self._expire(now)
            is_new, ban = self._directory.announce(card_of(card), now, certified=certified is not None)
            if is_new:
                self._happened("server", name=card.name, address=card.address)
            return self._reply(ban, now)

    def withdraw(self, request: pb.WithdrawRequest, certified: str | None) -> pb.WithdrawReply:
        """Take out a server that ends."""
        check_name(request.name, certified, "server")
        with self._guard.deciding():
            self._check_run(request.run)
            if self._directory.withdraw(request.name, request.process):
                self._happened("server_gone", name=request.name, reason="left")
        return pb.WithdrawReply()

    def servers(self, request: pb.ServersRequest, certified: str | None) -> pb.ServersReply:
        """Return the live servers of the run."""
        with self._guard.deciding() as now:
            self._check_run(request.run)
            cards = self._directory.live(now)
        return pb.ServersReply(servers=[self._listed(card) for card in cards])

    def accuse(self, accusation: pb.Accusation, certified: str | None) -> pb.AccuseReply:
        """Count what a live member says of a server; ban it once more than half of them say so."""
        who = hub_pb2.Who(run=accusation.run, node=accusation.node, session=accusation.session)
        with self._guard.deciding() as now:
            self._check_run(accusation.run)
            member = self._guard.speaker(who)
            _check_complaint(accusation.reason, accusation.evidence)
            complaint = Complaint(
                server=accusation.server,
                public_key=accusation.public_key,
                node=member.node,
                reason=accusation.reason,
                evidence=_evidence(accusation.evidence),
            )
            decided = self._directory.accuse(complaint, self._ledger.hub.elapsed_s(now))
            self._accused(member.name, complaint)
            position = self._ledger.commit(decided)
            ban = self._ledger.hub.state.ban_of(accusation.server, accusation.public_key)
        if decided:
            self._guard.durable(position)
        return pb.AccuseReply(banned=ban is not None)

    # --- for the hub itself

    def status(self, now: float) -> list[dict[str, Any]]:
        """Return the servers for the views; the ledger's lock is held."""
        self._expire(now)
        return self._directory.status(now)

    def num_live(self, now: float) -> int:
        """Return the number of live servers; the ledger's lock is held."""
        return len(self._directory.live(now))

    # --- inside

    def _check_run(self, run: str) -> None:
        if run != self._guard.run:
            raise _wrong(f"this hub leads the run {self._guard.run!r}, not {run[:64]!r}")

    def _reply(self, ban: Banned | None, now: float) -> pb.AnnounceReply:
        return pb.AnnounceReply(
            lease_s=self._directory.lease_s,
            banned=ban is not None,
            reason=ban.reason if ban else "",
            finished=self._ledger.hub.progress(now) >= 1.0,
        )

    def _listed(self, card: Card) -> pb.ServerCard:
        """Return a card as others see it: who knows the number of a process could withdraw its server."""
        number = int.from_bytes(sha256(self._salt + b"%d" % card.process).digest()[:8], "little")
        return pb.ServerCard(
            run=self._guard.run,
            name=card.name,
            address=card.address,
            process=number,
            public_key=card.public_key,
            rows=card.rows,
            tokens_per_s=card.tokens_per_s,
            serial=card.serial,
            running=card.running,
            waiting=card.waiting,
            state=card.state,
            idle_s=card.idle_s,
            idle_used_s=card.idle_used_s,
            figures=dict(card.figures),
        )

    def _expire(self, now: float) -> None:
        for name in self._directory.expire(now):
            self._happened("server_gone", name=name, reason="silent")

    def _accused(self, node: str, complaint: Complaint) -> None:
        server, reason = complaint.server, complaint.reason
        self._happened("accused", server=server, node=node, reason=reason, evidence=complaint.evidence)

    def _happened(self, event: str, **values: Any) -> None:
        if self._events.allow(event):
            self._event(event, **values)


class DirectorySwitch:
    """`DirectoryCore` that passes every call to `core` once this hub has the directory."""

    def __init__(self, elsewhere: str) -> None:
        """Refuse until `core` is set. elsewhere: the text that callers get meanwhile."""
        self._elsewhere = elsewhere
        self.core: DirectoryCore | None = None

    def announce(self, card: pb.ServerCard, certified: str | None) -> pb.AnnounceReply:
        """Call `core.announce`."""
        return self._leading().announce(card, certified)

    def withdraw(self, request: pb.WithdrawRequest, certified: str | None) -> pb.WithdrawReply:
        """Call `core.withdraw`."""
        return self._leading().withdraw(request, certified)

    def servers(self, request: pb.ServersRequest, certified: str | None) -> pb.ServersReply:
        """Call `core.servers`."""
        return self._leading().servers(request, certified)

    def accuse(self, accusation: pb.Accusation, certified: str | None) -> pb.AccuseReply:
        """Call `core.accuse`."""
        return self._leading().accuse(accusation, certified)

    def _leading(self) -> DirectoryCore:
        if self.core is None:
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, self._elsewhere)
        return self.core


def card_of(card: pb.ServerCard) -> Card:
    """Return the card that a server has sent."""
    return Card(
        name=card.name,
        address=card.address,
        process=card.process,
        public_key=card.public_key,
        rows=card.rows,
        tokens_per_s=card.tokens_per_s,
        serial=card.serial,
        running=card.running,
        waiting=card.waiting,
        state=card.state,
        idle_s=card.idle_s,
        idle_used_s=card.idle_used_s,
        figures=dict(card.figures),
    )


def _check_complaint(reason: str, evidence: bytes) -> None:
    if not reason or len(reason) > LONGEST_REASON or not reason.isprintable():
        raise _wrong(f"an accusation's reason has 1 to {LONGEST_REASON} printable characters")
    if len(evidence) > MOST_EVIDENCE_BYTES:
        raise _wrong(f"evidence has {len(evidence)} bytes; at most {MOST_EVIDENCE_BYTES} are kept")


def _evidence(data: bytes) -> dict[str, Any]:
    """Return the evidence. Raises Refusal unless it is a JSON object or empty."""
    try:
        found = json.loads(data.decode()) if data else {}
    except (ValueError, RecursionError) as error:
        raise _wrong(f"evidence is not JSON: {error}") from error
    if not isinstance(found, Mapping):
        raise _wrong("evidence is not a JSON object")
    plain: dict[str, Any] = json.loads(json_line(found))  # without NaN
    return plain


def _wrong(text: str) -> Refusal:
    return Refusal(grpc.StatusCode.INVALID_ARGUMENT, text)
