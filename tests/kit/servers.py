"""Rollout servers as the hub's directory sees them: cards and keys, without an engine."""

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from aedit.proto.rpc import DirectoryClient
from aedit.proto.rpc import directory_pb2 as pb


class Announcer:
    """Server that only announces itself."""

    def __init__(self, address, name="alpha", keys=None, **others):
        self.client = DirectoryClient([address], "run", keys, call_timeout_s=5.0, **others)
        self.key = Ed25519PrivateKey.generate()
        self.card = pb.ServerCard(name=name, address="127.0.0.1:7001", process=11, state="serving")

    @property
    def public_key(self):
        return self.key.public_key().public_bytes_raw()

    def announce(self, **changes):
        for field, value in changes.items():
            setattr(self.card, field, value)
        return self.client.announce(self.card, self.key)

    def listed(self):
        return [card.name for card in self.client.servers()]

    def accuse(self, who, server, evidence=b'{"margin": 1.5}', **changes):
        """Accuse another announcer as the node `who`."""
        accusation = pb.Accusation(node=who.node, session=who.session, server=server.card.name)
        accusation.public_key, accusation.evidence, accusation.reason = server.public_key, evidence, "margin"
        for field, value in changes.items():
            setattr(accusation, field, value)
        return self.client.accuse(accusation)
