"""Peers of a run without a central hub: which peers there are, and which of them host what.

- `card`, `statements`: what a peer signs about itself and its anchors, and proofs that a key lied
- `gossip`, `exchange`, `dialing`, `known_peers`: peers exchange cards; begin with `gossip`
- `discovery`: how peers find addresses: the interface, and the list in a file
- `placement`, `founding`: which peers host a part, and votes that re-create one
- `local_files`: files that the processes of one machine share

Called by `proto.agent`, `edit` and `launch`.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.proto.swarm.card import Founding, PartReplica, PeerCard, Serials, decoded_card, encoded_card
    from aedit.proto.swarm.dialing import PeerCalls
    from aedit.proto.swarm.discovery import Discovery, PeerFile
    from aedit.proto.swarm.exchange import Certified
    from aedit.proto.swarm.founding import (
        MOST_FORCED,
        Register,
        founds_now,
        mark,
        with_agreed,
        with_force,
        with_owner,
        with_vote,
    )
    from aedit.proto.swarm.gossip import Gossip, GossipPlan
    from aedit.proto.swarm.known_peers import KnownPeers
    from aedit.proto.swarm.local_files import (
        KEY,
        NODE,
        REPLICAS,
        STATEMENTS,
        WRITTEN_EVERY_S,
        NodeState,
        PartPlaces,
        ReplicasFile,
        StatementsFile,
        read_node,
        write_node,
        write_statements,
    )
    from aedit.proto.swarm.placement import candidates, hosts_of, ranking
    from aedit.proto.swarm.statements import Contradiction, Proofs, read_proof, replay_difference

__all__ = [
    "KEY",
    "MOST_FORCED",
    "NODE",
    "REPLICAS",
    "STATEMENTS",
    "WRITTEN_EVERY_S",
    "Certified",
    "Contradiction",
    "Discovery",
    "Founding",
    "Gossip",
    "GossipPlan",
    "KnownPeers",
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
    "candidates",
    "decoded_card",
    "encoded_card",
    "founds_now",
    "hosts_of",
    "mark",
    "ranking",
    "read_node",
    "read_proof",
    "replay_difference",
    "with_agreed",
    "with_force",
    "with_owner",
    "with_vote",
    "write_node",
    "write_statements",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
