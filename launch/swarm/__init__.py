"""The peer process of a swarm: finds the other peers and hosts replicas of parts of the model."""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.launch.swarm.hosted_part import MARK
    from aedit.launch.swarm.introduction import INTRODUCTION, introduced, is_maddrs
    from aedit.launch.swarm.roles import part_view
    from aedit.launch.swarm.run_peer import Peer, PeerOptions, peer

__all__ = [
    "INTRODUCTION",
    "MARK",
    "Peer",
    "PeerOptions",
    "introduced",
    "is_maddrs",
    "part_view",
    "peer",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
