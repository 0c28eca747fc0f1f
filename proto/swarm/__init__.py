"""Peers of a run without a central hub: which peers there are, and which of them host what.

- `card`, `statements`, `proofs`: what a peer signs about itself and its anchors, and proofs that a key lied
- `gossip`, `exchange`, `dialing`, `known_peers`: peers exchange cards; begin with `gossip`
- `discovery`: how peers find addresses. `dht`, `dht_process`: the same by hivemind's hash table
- `placement`, `founding`: which peers host a part, and votes that re-create one
- `local_files`: files that the processes of one machine share
- `averaging`, `averaging_process`, `hivemind_child`: averaging by hivemind, in a process of its own

Called by `proto.agent`, `edit` and `launch`.
"""

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
    from aedit.proto.swarm.card import Founding, PartReplica, PeerCard, Serials, decoded, encoded
    from aedit.proto.swarm.dht import (
        DhtDiscovery,
        DhtSettings,
        announced_maddr,
        checked_maddrs,
        listening_maddr,
    )
    from aedit.proto.swarm.dialing import PeerCalls
    from aedit.proto.swarm.discovery import Discovery, PeerFile
    from aedit.proto.swarm.exchange import Certified
    from aedit.proto.swarm.founding import MOST_FORCED, Register, accepted, begins, forced, mark, owned, voted
    from aedit.proto.swarm.gossip import Gossip, GossipPlan
    from aedit.proto.swarm.hivemind_child import bind_children, remove_socket
    from aedit.proto.swarm.known_peers import KnownPeers
    from aedit.proto.swarm.local_files import (
        KEY,
        NODE,
        REPLICAS,
        STATEMENTS,
        WRITTEN_EVERY_S,
        NodeFile,
        NodeState,
        PartPlaces,
        ReplicasFile,
        StatementsFile,
        write_node,
        write_statements,
    )
    from aedit.proto.swarm.placement import candidates, chosen, ranking
    from aedit.proto.swarm.proofs import Contradiction, Proofs, read_proof

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
