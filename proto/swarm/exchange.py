"""Both sides of Swarm/Exchange: what a peer asks, answers and believes. No clock, no thread, no socket.

A peer counts once it has answered at the address on its card, with a signature over our nonce; a client,
which has no address, once it has signed our challenge. No peer can vouch for another one, but a signed card
of a peer that counts is valid from any sender.
"""

import hashlib
import hmac
import random
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import grpc

from aedit.proto.rpc import PROTOCOL, Endorsement, HostCertificates, Refusal, SigningKey, is_signed_by
from aedit.proto.rpc import swarm_pb2 as pb
from aedit.proto.swarm.card import PeerCard
from aedit.proto.swarm.dialing import DialList, Evidence
from aedit.proto.swarm.known_peers import KnownPeers, Offer
from aedit.proto.swarm.statements import MOST_SENT, Pair, Statements
from aedit.types import printable

NONCE_BYTES = 32
MOST_CARDS = 256
"""Cards in one reply."""
MOST_KNOWN = 2048
"""Serials in one request."""
MOST_CONTRADICTIONS = 8
MOST_HINTS = 1024
_CHALLENGE_S = 300.0
"""A challenge is valid for this time at least, and for twice as long at most."""
_ANSWER = b"aedit peer answer 1\n"
_PROOF = b"aedit peer proof 1\n"


@dataclass(frozen=True, slots=True)
class Certified:
    """Certificates in the exchanges of a run that has keys."""

    hosts: HostCertificates
    """Checks those of others."""
    own: Endorsement = field(default_factory=Endorsement)
    """This peer's; an empty one for a client."""


class Exchanges:
    """State of the exchanges of one peer with others. Any thread may call; `now` is monotonic, in seconds."""

    def __init__(
        self,
        known: KnownPeers,
        key: SigningKey,
        *,
        certified: Certified | None = None,
        chance: random.Random | None = None,
        draw: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        """Start with the peers in `known`. certified: None without keys. chance, draw: for tests."""
        self.known, self._key, self._certified = known, key, certified
        self._statements = Statements(known.run)
        self._chance, self._draw = chance or random.Random(), draw
        self._lock = threading.Lock()
        self._dials = DialList(MOST_HINTS, self._chance)
        self._deck: list[str] = []
        """Addresses of live peers that are still to be called in this pass over all of them."""
        self._secret = draw(NONCE_BYTES)
        self._challenges: OrderedDict[str, tuple[bytes, bytes]] = OrderedDict()
        """Last challenge and key of the peer at an address."""

    def received(self, statements: Iterable[bytes], now: float) -> None:
        """Take statements of owners that the node of this peer has received."""
        self._blame(self._statements.received(statements), now)

    def about(self, part: int) -> Sequence[bytes]:
        """Return the newest statements about a part that nodes have received."""
        return self._statements.about(part)

    # -- which peers to call

    def hint(self, found: str | bytes, now: float) -> None:
        """Take a hint of discovery: an address, or a card."""
        if isinstance(found, bytes):
            self._offer(found, now)
        else:
            self._add(found, Evidence.HINT, now)

    def remember(self, address: str, now: float) -> None:
        """Take an address of a peer that has answered to an earlier process of this peer."""
        self._add(address, Evidence.ANSWERED, now)

    def targets(self, now: float, fanout: int, dials: int) -> list[str]:
        """Return the addresses to call now: at most `fanout` of live peers and `dials` others.

        Every live peer has its turn before one has its second.
        """
        known = self.known.live(now)
        cards = [card for card in known.values() if card.address]
        live, leaving = {card.address for card in cards}, {card.address for card in cards if card.leaving}
        mine = known[self.known.own_key].address if self.known.own_key in known else ""
        with self._lock:
            others = live - leaving - {mine}
            self._deck = [address for address in self._deck if address in others]
            if not self._deck:
                self._deck = sorted(others)
                self._chance.shuffle(self._deck)
            called = [self._deck.pop() for _ in range(min(fanout, len(self._deck)))]
            return called + self._dials.due(now, dials, skip=live | {mine})

    # -- the calling side

    def request(self, address: str) -> pb.ExchangeRequest:
        """Return what to ask the peer at `address`. Needs an own card."""
        with self._lock:
            challenge, theirs = self._challenges.get(address, (b"", b""))
        signed = _PROOF + challenge + theirs + self._key.public
        serials = list(self.known.serials().items())[-MOST_KNOWN:]
        return pb.ExchangeRequest(
            protocol=PROTOCOL,
            nonce=self._draw(NONCE_BYTES),
            card=self.known.own_card,
            known=[pb.KnownCard(key=key, serial=serial) for key, serial in serials],
            proof=self._key.private.sign(signed) if challenge else b"",
            statements=self._statements.unsent(address) if challenge else (),
        )

    def take(self, address: str, request: pb.ExchangeRequest, reply: pb.ExchangeReply, now: float) -> None:
        """Take the answer from `address` to `request`.

        Raises:
            ValueError: It is not an answer of a peer of this run that has the key of its card.
        """
        _check_protocol(reply.protocol)
        card = self._answerer(request, reply, now)
        if len(reply.cards) > MOST_CARDS or len(reply.contradictions) > MOST_CONTRADICTIONS:
            raise ValueError(f"it sends {len(reply.cards)} cards; at most {MOST_CARDS} are allowed")
        if len(reply.challenge) > NONCE_BYTES:
            raise ValueError(f"its challenge has {len(reply.challenge)} bytes; expected {NONCE_BYTES}")
        if card.public_key == self.known.own_key:
            with self._lock:
                self._dials.drop(address)  # another name of this peer
            return
        if card.address == address:
            self._confirm(card, reply, now)
        self._note_answer(address, card, reply.challenge, now)
        if request.statements:
            self._statements.sent(address, request.statements)
        for data in reply.cards:
            self._offer(data, now)
        for both in reply.contradictions:
            self.known.contradict(both.one, both.other, now)

    def failed(self, address: str) -> None:
        """Note that a call has failed."""
        with self._lock:
            self._dials.failed(address)

    # -- the answering side

    def answer(self, request: pb.ExchangeRequest, now: float) -> pb.ExchangeReply:
        """Return the answer to another peer.

        Raises:
            Refusal: This peer has no card yet, or the caller may not take part.
            Violation: The request is not one of a peer of this run.
        """
        own = self.known.own_card
        if not own:
            raise Refusal(grpc.StatusCode.UNAVAILABLE, "this peer is starting: ask again in a second")
        _check_protocol(request.protocol)
        if len(request.nonce) != NONCE_BYTES:
            raise ValueError(f"nonce has {len(request.nonce)} bytes; expected {NONCE_BYTES}")
        if len(request.known) > MOST_KNOWN:
            raise ValueError(f"known has {len(request.known)} entries; at most {MOST_KNOWN} are allowed")
        if len(request.statements) > MOST_SENT:
            most = f"at most {MOST_SENT} are allowed"
            raise ValueError(f"statements has {len(request.statements)} entries; {most}")
        offer = self._offer(request.card, now, Evidence.CALLED)
        key = self._caller(request, offer, now)
        endorsed = self._certified.own if self._certified else Endorsement()
        # Without our own card, which the reply has anyway.
        news = self.known.newer({one.key: one.serial for one in request.known}, key, now)
        return pb.ExchangeReply(
            protocol=PROTOCOL,
            card=own,
            certificate=endorsed.certificate,
            endorsement=endorsed.signature,
            signature=self._key.private.sign(_ANSWER + request.nonce + key + self._key.public),
            cards=news if len(news) <= MOST_CARDS else self._chance.sample(news, MOST_CARDS),
            challenge=self._challenge(key, now),
            contradictions=self._contradictions(),
        )

    # -- parts of both

    def _answerer(self, request: pb.ExchangeRequest, reply: pb.ExchangeReply, now: float) -> PeerCard:
        """Return the newest card of the peer that has answered."""
        offer = self._offer(reply.card, now, None)
        if offer.card is None:
            raise ValueError(f"its card is refused: {offer.reason}")
        signed = _ANSWER + request.nonce + self.known.own_key + offer.card.public_key
        if not is_signed_by(offer.card.public_key, reply.signature, signed):
            raise ValueError(f"it has not signed our nonce with the key of {printable(offer.card.name)!r}")
        if not offer.card.address:
            raise ValueError(f"{printable(offer.card.name)!r} answers calls, and its card names no address")
        return offer.card

    def _confirm(self, card: PeerCard, reply: pb.ExchangeReply, now: float) -> None:
        """Let the peer count that has answered at its own address, with its certificate over TLS."""
        made = Endorsement(reply.certificate, reply.endorsement) if self._certified else Endorsement()
        if self._certified:
            if card.fingerprint != made.fingerprint:
                raise ValueError(
                    f"the card of {printable(card.name)!r} names another certificate than it has"
                )
            try:
                self._certified.hosts.check(made, self.known.run, card.public_key, card.address)
            except ValueError as error:
                raise ValueError(f"{printable(card.name)!r}: {error}") from None
        if self.known.confirm(card.public_key, now, made.fingerprint):
            return
        if made.certificate and (twin := self.known.twin(card, made.fingerprint, now)):
            names = f"{printable(card.name)!r} and {printable(twin.name)!r} at {twin.address}"
            raise ValueError(f"{names} have one certificate: give each peer a folder of keys of its own")

    def _note_answer(self, address: str, card: PeerCard, challenge: bytes, now: float) -> None:
        with self._lock:
            if card.address == address and card.leaving:
                self._dials.drop(address)
            elif card.address == address:
                self._dials.answered(address, now)
            else:  # another name of the same place, or a peer that passes calls on
                self._dials.add(card.address, Evidence.CALLED, now)
            self._challenges[address] = (challenge, card.public_key)
            self._challenges.move_to_end(address)
            while len(self._challenges) > MOST_HINTS:
                self._challenges.popitem(last=False)

    def _caller(self, request: pb.ExchangeRequest, offer: Offer, now: float) -> bytes:
        """Return the key of the caller, and let a client count that has signed our challenge."""
        if offer.card is None:
            raise Refusal(grpc.StatusCode.PERMISSION_DENIED, f"your card is refused: {offer.reason}")
        key = offer.card.public_key
        is_client = not offer.card.address
        if (is_client or request.statements) and request.proof:
            signed = [_PROOF + self._challenge(key, now, ago) + self._key.public + key for ago in (0, 1)]
            # A proof that is too old, or for the process that was here before, is followed by a new one.
            if any(is_signed_by(key, request.proof, one) for one in signed):
                if is_client:
                    self.known.confirm(key, now)
                self._blame(self._statements.received_from(key, request.statements), now)
        return key

    def _blame(self, pairs: Iterable[Pair], now: float) -> None:
        for one, other in pairs:
            self.known.contradict(one, other, now)

    def _challenge(self, key: bytes, now: float, ago: int = 0) -> bytes:
        window = int(now // _CHALLENGE_S) - ago
        return hmac.digest(self._secret, key + str(window).encode(), hashlib.sha256)

    def _contradictions(self) -> Sequence[pb.Contradiction]:
        faults = [fault for fault in self.known.faults.values() if not fault.is_replayed]
        if len(faults) > MOST_CONTRADICTIONS:  # drawn, so that new ones hide no old one
            faults = self._chance.sample(faults, MOST_CONTRADICTIONS)
        return [pb.Contradiction(one=fault.one, other=fault.other) for fault in faults]

    def _offer(self, data: bytes, now: float, evidence: Evidence | None = Evidence.HINT) -> Offer:
        """Offer a card to those that are known, and remember its address if it may lead to a new peer.

        A peer that leaves is not called any more; it calls others when it comes back. Only a peer that counts
        at its address is believed that it leaves: any key can sign a card with another's address.
        """
        offer = self.known.offer(data, now)
        if offer.card and offer.card.leaving:
            if offer.kind == "newer":
                with self._lock:
                    self._dials.drop(offer.card.address)
        elif offer.card and offer.card.address and evidence is not None and offer.kind in ("new", "known"):
            self._add(offer.card.address, evidence, now)
        return offer

    def _add(self, address: str, evidence: Evidence, now: float) -> None:
        with self._lock:
            self._dials.add(address, evidence, now)


def _check_protocol(theirs: int) -> None:
    if theirs != PROTOCOL:
        raise ValueError(f"protocol is {theirs}; this peer speaks {PROTOCOL}: run the same version of aedit")
