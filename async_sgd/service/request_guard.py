"""Checks before a call is answered: identity, term, leadership; and the refusals that a peer gets."""

import ipaddress
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256

import grpc

from aedit.async_sgd.hub import CERTIFIED, Denied, Joiner, Member
from aedit.async_sgd.journal import JournalBroken, Ledger, NoSpace, Position, Unconfirmed
from aedit.async_sgd.replication import Leadership
from aedit.async_sgd.rules import LimitConfig
from aedit.async_sgd.service import messages
from aedit.async_sgd.service.hello_responder import check_part
from aedit.async_sgd.service.hub_worker import HubWorker
from aedit.proto.rpc import HUB, Caller, Refusal, VoteReply, lineage
from aedit.proto.rpc import hub_pb2 as pb

SHOWN_LIMIT_S = 0.5
"""Shorter than a node waits for the reply to a heartbeat."""
_JOIN_WAITS, _JOIN_WAIT_S = 10, 1.0
"""Waits of a join for the replicas, which may lag behind; after each it ends if the leader wants votes."""
_ASK_S = 1.0
"""Least time between two questions to the other hub for its term."""


class RequestGuard:
    """The checks of a hub that leads under one term, for all its services."""

    def __init__(
        self, ledger: Ledger, engine: HubWorker, run: str, leadership: Leadership, part: int = 0
    ) -> None:
        """Create the checks. part: see `HelloResponder.part`."""
        self.ledger, self.engine, self.run, self.leadership = ledger, engine, run, leadership
        self._part = part
        self.replaced = threading.Event()
        """Another hub leads under a higher term: this hub refuses all further calls."""
        self.lacking = ""
        """Acknowledged records that this hub has lost, as text; it does not lead unless this is empty."""
        self._other_terms: Callable[[], tuple[int, Sequence[VoteReply]]] = lambda: (0, ())
        self.is_shut_out: Callable[[str], bool] = lambda address: False
        self.check_candidate: Callable[[pb.ProposeRequest], None] = lambda request: None
        self._beside: Callable[[Callable[[], None]], None] = _in_thread
        self._asking = threading.Lock()
        self._asked_s = -math.inf

    def trust(
        self,
        *,
        other_terms: Callable[[], tuple[int, Sequence[VoteReply]]],
        shut_out: Callable[[str], bool] = lambda address: False,
        candidate: Callable[[pb.ProposeRequest], None] = lambda request: None,
        beside: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """Set which callers are trusted.

        Args:
            other_terms: Asks the other hubs for the highest term that one leads, and for what they have
                promised; whatever a caller claims of a higher term is checked there.
            shut_out: Returns whether the replica at an address is not to be waited for, see
                `HubEndpoint.is_shut_out`.
            candidate: Raises Refusal for a request for a vote of a peer that is not let in.
            beside: Calls what it is given beside the call that asks, by default in a thread.
        """
        self._beside = beside or self._beside
        self._other_terms = other_terms
        self.is_shut_out, self.check_candidate = shut_out, candidate

    @contextmanager
    def deciding(self) -> Iterator[float]:
        """Hold the lock and yield the time; errors inside become refusals."""
        with self.refusing(), self.ledger.lock:
            self.check_leads()
            yield self.ledger.clock()

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Turn errors inside the block into refusals."""
        try:
            yield
        except Denied as denied:
            raise messages.refusal_of(denied) from denied
        except NoSpace as error:
            self.engine.is_full(error)
            raise Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)) from error
        except Unconfirmed as error:
            raise Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)) from error
        except JournalBroken as error:
            self.engine.fail(error)
            raise Refusal(grpc.StatusCode.UNAVAILABLE, f"the hub's disk has failed: {error}") from error

    def speaker(self, who: pb.Who) -> Member:
        """Return the live member that calls; the lock is held."""
        self.check_who(who)
        self.check_lineage(who)
        return self.ledger.hub.member(who.node, fingerprint(who.session))

    def check_lineage(self, who: pb.Who) -> None:
        """Raise Refusal for a member of a part that was lost; its receipts are of another journal."""
        if lineage(who.term) < lineage(self.ledger.hub.state.term):
            text = "this part was lost and has been founded again since: join again"
            raise Refusal(grpc.StatusCode.NOT_FOUND, text)

    def check_who(self, who: pb.Who) -> None:
        """Raise Refusal unless the call is about this run and under this hub's term."""
        if who.run and who.run != self.run:
            text = f"this hub leads the run {self.run!r}, not {who.run[:64]!r}"
            raise messages.invalid(text)
        check_part(who.part, self._part)
        self.check_term(who.term)

    def check_term(self, term: int) -> None:
        """Raise Refusal for a higher term than this hub's.

        No caller is believed: this hub asks the others. Without another hub there is no higher term.
        """
        self.check_leads()
        own = self.ledger.hub.state.term
        if term <= own:
            return
        if not self.leadership.has_others:
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, f"there is no term {term} in this run")
        self.ask_the_others()
        text = f"this hub leads under term {own}, and {term} is claimed: ask the other one"
        raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, text)

    def end_term(self) -> None:
        """Note that another hub leads under a higher term; followers learn it at once."""
        self.replaced.set()
        self.ledger.grown.notify()

    def ask_the_others(self, lacking: str = "") -> None:
        """Find out beside this call whether another hub leads under a higher term, at most once a second.

        lacking: becomes `lacking` if none is known to have led.
        """
        now = self.ledger.clock()
        if now - self._asked_s < _ASK_S or not self._asking.acquire(blocking=False):
            return
        self._asked_s = now

        def ask() -> None:
            try:
                leads, promises = self._other_terms()
                if leads > self.ledger.hub.state.term:
                    self.end_term()
                elif lacking:
                    self.lacking = lacking
                else:
                    for promise in promises:
                        self.leadership.note_promise(promise)
            finally:
                self._asking.release()

        self._beside(ask)

    def check_follower(self) -> None:
        """Raise Refusal if no hub can follow this one: a false standby would only make it wait."""
        if not self.leadership.has_others:
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "this run has no standby (hub.standby)")

    def check_leads(self) -> None:
        """Raise Refusal if this hub has been replaced, or lacks what was acknowledged."""
        if self.lacking:
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, self.lacking)
        if self.replaced.is_set():
            term = self.ledger.hub.state.term
            text = f"this hub led under term {term}, which is over: ask the other one"
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, text)

    def check_claim(self, claim: pb.Claim, node: int | None, term: int = 0) -> None:
        """Raise Refusal unless the journal has what was acknowledged to a node that knows this term.

        A receipt of this journal proves that something is missing: then this hub leads no longer. Under a
        higher term another hub may have acknowledged it, which is asked first. A receipt of another journal
        proves nothing to this hub, and only its node is refused.
        """
        with self.refusing():
            if not self.ledger.receipts.lacks(claim.receipt):
                return
        with self.ledger.lock:
            lacking = describe_loss(self.ledger, claim, node)
        if term > self.ledger.hub.state.term and self.leadership.has_others:
            self.ask_the_others(lacking)
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, lacking)
        self.lacking = lacking
        self.check_leads()

    def durable(self, position: Position) -> pb.Receipt:
        """Return a receipt when a crash cannot take `position` back; only then may a peer get a reply."""
        with self.refusing():
            receipt = self.ledger.durable(position)
        self.check_leads()
        return receipt

    def admitted(self, position: Position) -> pb.Receipt:
        """Return `durable(position)` for a join; raise Refusal soon if a vote is wanted for it.

        A node that waits for the reply to a join gives no vote, and the replicas may wait for just that.
        """
        for _ in range(_JOIN_WAITS):
            try:
                self.leadership.wait(position, _JOIN_WAIT_S)
                break
            except Unconfirmed as error:
                if self.leadership.asks() is not None:
                    raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from error
        return self.durable(position)

    def shown(self, position: Position) -> None:
        """Return when neither a crash nor another hub that leads can take back what is before `position`.

        A reply shows versions: they must not go back.
        """
        with self.refusing():
            self.ledger.journal.sync(position)
            self.leadership.wait(position, SHOWN_LIMIT_S)
        self.check_leads()


def _in_thread(call: Callable[[], None]) -> None:
    threading.Thread(target=call, name="ask the other hub", daemon=True).start()


_MOST_SHOWN = 8


def describe_loss(ledger: Ledger, claim: pb.Claim, node: int | None) -> str:
    """Return what is missing and what to do about it; the lock is held.

    Args:
        ledger: Of the hub that has lost something.
        claim: With a receipt that proves the loss. The numbers by unit are as its node says.
        node: Index of the node here; None if it is not known here.
    """
    receipt, (segment, offset) = claim.receipt, ledger.journal.position
    missing = "; ".join(_missing(ledger, claim, node)[:_MOST_SHOWN]) or "records of other nodes"
    return (
        f"the journal {receipt.epoch} has lost what was acknowledged: a node has a receipt up to byte"
        f" {receipt.offset} of segment {receipt.segment}; here the end is byte {offset} of segment {segment},"
        f" or other records are before it. Missing: {missing}. Copy the journal back, or promote the standby;"
        " `aedit hub --force-lead` goes on with what is left, and nodes must be started again"
    )


def _missing(ledger: Ledger, claim: pb.Claim, node: int | None) -> list[str]:
    """Return the pushes and versions that the node has seen and this hub does not have, by unit."""
    state = ledger.hub.state
    is_known = node is not None and node < len(state.members)
    received = state.members[node].received if node is not None and is_known else {}
    units, found = state.layout.units if state.layout else (), []
    for unit, (seq, version) in enumerate(zip(claim.seqs, claim.versions, strict=False)):
        name = units[unit].name if unit < len(units) else f"unit {unit}"
        here = state.units[unit].version if unit in state.units else 0
        if seq > received.get(unit, 0):
            found.append(f"{name}: pushes {received.get(unit, 0) + 1} to {seq} of the node")
        if version > here:
            found.append(f"{name}: versions {here + 1} to {version}")
    return found


MOST_PROOF_BYTES = 64
_FINGERPRINT_BYTES = 16


@lru_cache(4096)
def fingerprint(secret: int) -> int:
    """Return the fingerprint under which the journal has a secret number; 0 for 0, which proves nothing."""
    return _digest(secret.to_bytes(8, "little")) if secret else 0


def known_by(joiner: Joiner, request: pb.JoinRequest, caller: Caller, limits: LimitConfig) -> Joiner:
    """Return the joiner with its proofs, as fingerprints, and its origin.

    Raises Refusal if it takes the name of other keys, or names a donor on another machine.
    """
    named = caller.name is not None and caller.role != HUB  # the hub of a region names itself after its run
    if named:
        check_name(request.name, caller.name, "node")
    if len(request.rejoin) > MOST_PROOF_BYTES:
        raise messages.invalid(f"rejoin has {len(request.rejoin)} bytes; at most {MOST_PROOF_BYTES} are kept")
    _check_donor(request.donor, caller.host)
    return replace(
        joiner,
        session=fingerprint(request.who.session),
        process=fingerprint(request.process),
        proof=CERTIFIED if named else f"{_digest(request.rejoin):x}" if request.rejoin else "",
        origin=f"keys of {caller.name}" if named else origin_of(caller.host),
        most_names=limits.nodes if is_local(caller.host) else limits.names,
    )


def check_name(name: str, certified: str | None, role: str) -> None:
    """Raise Refusal if the caller's keys are for another name. certified: in its keys; None: none, or any."""
    if certified is not None and name != certified:
        text = f"the certificate is for {certified!r}: a {role} has the name of its certificate"
        raise Refusal(grpc.StatusCode.PERMISSION_DENIED, text)


def origin_of(host: str) -> str:
    """Return the host as an origin: an IPv6 network counts as one, since a host there has 2^64 addresses."""
    try:
        address = ipaddress.ip_address(_address(host))
    except ValueError:
        return f"host {host[:64]}"
    if address.version == 6 and not address.is_loopback:
        return f"host {ipaddress.ip_network((address, 64), strict=False)}"
    return f"host {address}"


def is_local(host: str) -> bool:
    """Return whether the caller is on this machine. host: as gRPC writes it, `ipv4:127.0.0.1`."""
    try:
        return ipaddress.ip_address(_address(host)).is_loopback
    except ValueError:
        return host.startswith("unix")


def _address(host: str) -> str:
    return host.partition(":")[2].replace("%5B", "").replace("%5D", "").strip("[]").partition("%")[0]


def _check_donor(donor: str, host: str) -> None:
    """Raise Refusal for an address at which the node itself cannot be: others would connect there."""
    if not donor:
        return
    place, _, port = donor.rpartition(":")
    try:
        there = ipaddress.ip_address(place.strip("[]"))
    except ValueError:
        raise messages.invalid("donor: expected HOST:PORT with an IP address") from None
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 2**16):
        raise messages.invalid("donor: expected HOST:PORT with a port from 1 to 65535")
    if not (there.is_loopback and is_local(host)) and str(there) != _address(host):
        raise messages.invalid(f"donor: {there} is not where this node calls from")


def _digest(data: bytes) -> int:
    return int.from_bytes(sha256(b"aedit session" + data).digest()[:_FINGERPRINT_BYTES], "little")
