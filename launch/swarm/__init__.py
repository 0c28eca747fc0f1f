"""The peer process of a swarm: finds the other peers and hosts replicas of parts of the model.

`run_peer` is the process and its loop (begin there); `initial_peers` finds the first peers, `hosted_part`
decides which parts a peer keeps and runs the hub process of each, `peer_service` answers Hello and Status,
and `recreate_parts` votes on parts whose replicas are lost. The command line and `launch.processes` call it.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.launch.swarm.hosted_part import MARK, PeerOptions, part_view
    from aedit.launch.swarm.initial_peers import INTRODUCTION, introduced, is_maddrs
    from aedit.launch.swarm.run_peer import PEER_PROGRAM, Peer, peer

__all__ = [
    "INTRODUCTION",
    "MARK",
    "PEER_PROGRAM",
    "Peer",
    "PeerOptions",
    "introduced",
    "is_maddrs",
    "part_view",
    "peer",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
