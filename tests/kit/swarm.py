"""Peers in memory: cards, keys, and a network in virtual time that can be cut."""

import random
from dataclasses import replace

from aedit.proto.rpc import Refusal, SigningKey
from aedit.proto.swarm import KnownPeers, PartReplica, PeerCard, encoded_card
from aedit.proto.swarm.exchange import Exchanges

RUN = "run-1"


def key_of(number):
    return SigningKey(number.to_bytes(32, "big"))


def card_of(key, serial=1, **changes):
    """Return a card of this key that is valid unless `changes` say otherwise."""
    card = PeerCard(run=RUN, name="alpha", public_key=key.public, serial=serial, address="10.0.0.1:7001")
    return replace(card, **changes)


def data_of(key, serial=1, **changes):
    return encoded_card(card_of(key, serial, **changes), key.private)


def replica(address="10.0.0.1:7100", term=3, leads=True, in_sync=True):
    return PartReplica(address=address, term=term, leads=leads, in_sync=in_sync)


class Peer:
    """A peer of a simulated network. `renew_every`: rounds between two cards."""

    def __init__(self, number, *, client=False, renew_every=3, lease_s=10.0, limit=2048):
        self.key, self.number = key_of(number + 1), number
        self.listens = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}:7001"
        self.card_address = "" if client else self.listens
        self.known = KnownPeers(RUN, self.key.public, limit=limit)
        chance = random.Random(number)
        self.exchanges = Exchanges(self.known, self.key, chance=chance, draw=chance.randbytes)
        self.serial, self.renew_every, self.lease_s = 0, renew_every, lease_s
        self.calls = 0

    def renew(self, now):
        self.serial += 1
        card = card_of(
            self.key, self.serial, name=f"p{self.number}", address=self.card_address, lease_s=self.lease_s
        )
        self.known.renew(encoded_card(card, self.key.private), now)

    def sees(self, now):
        return {card.name for card in self.known.live(now).values()}


class Network:
    """Peers that call each other in rounds of one virtual second. `cut`: groups that do not reach others."""

    def __init__(self, peers, *, fanout=3, dials=8):
        self.peers, self.fanout, self.dials = list(peers), fanout, dials
        self.by_address = {peer.listens: peer for peer in peers if peer.card_address}
        self.cut, self.now, self.rounds, self.down = {}, 0.0, 0, set()

    def round(self):
        for peer in self.peers:
            if peer in self.down:
                continue
            if self.rounds % peer.renew_every == 0:
                peer.renew(self.now)
            for address in peer.exchanges.targets(self.now, self.fanout, self.dials):
                self.call(peer, address)
        self.now += 1.0
        self.rounds += 1

    def call(self, peer, address):
        peer.calls += 1
        other = self.by_address.get(address)
        if other is None or other in self.down or self.cut.get(peer) != self.cut.get(other):
            peer.exchanges.failed(address)
            return
        request = peer.exchanges.request(address)
        try:
            reply = other.exchanges.answer(type(request).FromString(request.SerializeToString()), self.now)
            peer.exchanges.take(address, request, type(reply).FromString(reply.SerializeToString()), self.now)
        except (Refusal, ValueError):
            peer.exchanges.failed(address)

    def rounds_until(self, done, most):
        for count in range(most):
            if done():
                return count
            self.round()
        assert done(), f"not after {most} rounds"
        return most
