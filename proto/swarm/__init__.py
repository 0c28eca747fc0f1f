"""Peers of a run without a central hub: who is there, and which of them host what."""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.proto.swarm.averaging import (
        AVERAGING,
        INTRODUCTION,
        AveragedRound,
        Averager,
        AveragingSettings,
        HivemindAverager,
    )
    from aedit.proto.swarm.calling import PeerCalls
    from aedit.proto.swarm.card import Founding, PartReplica, PeerCard, decoded, encoded
    from aedit.proto.swarm.contradiction import Contradiction
    from aedit.proto.swarm.dht import DhtDiscovery, DhtSettings
    from aedit.proto.swarm.discovery import Discovery
    from aedit.proto.swarm.exchange import Certified
    from aedit.proto.swarm.founding import MOST_FORCED, Register, accepted, begins, forced, mark, owned, voted
    from aedit.proto.swarm.gossip import Gossip, GossipPlan
    from aedit.proto.swarm.hivemind_child import bind_children, remove_socket
    from aedit.proto.swarm.known_peers import KnownPeers
    from aedit.proto.swarm.maddr import announced_maddr, checked_maddrs, listening_maddr
    from aedit.proto.swarm.node_file import NODE, WRITTEN_EVERY_S, NodeFile, NodeState, write_node
    from aedit.proto.swarm.peer_file import PeerFile
    from aedit.proto.swarm.placement import candidates, chosen, ranking
    from aedit.proto.swarm.proofs import Proofs, read_proof
    from aedit.proto.swarm.received_file import STATEMENTS, StatementsFile, write_statements
    from aedit.proto.swarm.replicas_file import KEY, REPLICAS, PartPlaces, ReplicasFile
    from aedit.proto.swarm.serials import Serials

__all__ = [
    "AVERAGING",
    "INTRODUCTION",
    "KEY",
    "MOST_FORCED",
    "NODE",
    "REPLICAS",
    "STATEMENTS",
    "WRITTEN_EVERY_S",
    "AveragedRound",
    "Averager",
    "AveragingSettings",
    "Certified",
    "Contradiction",
    "DhtDiscovery",
    "DhtSettings",
    "Discovery",
    "Founding",
    "Gossip",
    "GossipPlan",
    "HivemindAverager",
    "KnownPeers",
    "NodeFile",
    "NodeState",
    "PartPlaces",
    "PartReplica",
    "PeerCalls",
    "PeerCard",
    "PeerFile",
    "Proofs",
    "Register",
    "ReplicasFile",
    "Serials",
    "StatementsFile",
    "accepted",
    "announced_maddr",
    "begins",
    "bind_children",
    "candidates",
    "checked_maddrs",
    "chosen",
    "decoded",
    "encoded",
    "forced",
    "listening_maddr",
    "mark",
    "owned",
    "ranking",
    "read_proof",
    "remove_socket",
    "voted",
    "write_node",
    "write_statements",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
