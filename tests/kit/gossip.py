"""Peers that gossip over real sockets, in this process."""

import time
from contextlib import contextmanager
from dataclasses import replace

from aedit.proto.rpc import PROTOCOL, Calls
from aedit.proto.rpc import swarm_pb2 as pb
from aedit.proto.swarm import Gossip, GossipPlan, KnownPeers, encoded_card
from kit.swarm import RUN, card_of, data_of, key_of

EVERY_S = 0.05


class Hints:
    """A discovery that returns what a test gives it."""

    state = ""

    def __init__(self, *found):
        self.given, self.announced, self.is_closed = list(found), [], False

    def announce(self, card):
        self.announced.append(card)

    def found(self):
        return self.given

    def close(self):
        self.is_closed = True


class Peer:
    """A peer with real sockets."""

    def __init__(self, number, *hints, client=False, discovery=None, allow=(), lease_s=5.0, **plan):
        self.key, self.name, self.lease_s = key_of(number), f"p{number}", lease_s
        self.known = KnownPeers(RUN, self.key.public, allow=allow)
        self.discovery = discovery or Hints(*hints)
        listen = "" if client else plan.pop("listen", "127.0.0.1:0")
        certified = plan.get("certified")
        self.fingerprint = certified.own.fingerprint if certified else ""
        settings = GossipPlan(listen=listen, every_s=EVERY_S, **plan)
        self.gossip = Gossip(self.known, self.key, self.card, self.discovery, settings)

    def card(self):
        serial = time.time_ns()
        made = card_of(self.key, serial, name=self.name, address=self.gossip.address, lease_s=self.lease_s)
        made = replace(made, fingerprint=self.fingerprint)
        return encoded_card(made, self.key.private)

    def sees(self):
        return {card.name for card in self.known.live(time.monotonic()).values()}


@contextmanager
def started(*peers):
    try:
        for peer in peers:
            peer.gossip.start()
        yield peers
    finally:
        for peer in peers:
            peer.gossip.close()


def all_see(peers, names):
    return lambda: all(peer.sees() == names for peer in peers)


def call(address, keys=None, timeout_s=5.0, **changes):
    """Return the answer to a stranger's call."""
    request = pb.ExchangeRequest(protocol=PROTOCOL, nonce=bytes(32), card=data_of(key_of(50)))
    request.MergeFrom(pb.ExchangeRequest(**changes))
    calls = Calls(address, keys, call_timeout_s=timeout_s, channels=0)
    try:
        return calls.call("Swarm/Exchange", request, pb.ExchangeReply)
    finally:
        calls.close()
