"""Quorums of a configuration, any two of which have a voter in common."""

from collections.abc import Container

from aedit.async_sgd.rules import Configured


def is_quorum(config: Configured, voters: Container[int]) -> bool:
    """Return whether `voters` contains a quorum of `config`.

    Each replica has weight 2. The electors together have weight 1, for the side that has more than half of
    them. A quorum has more than half of the total weight, so that the electors decide only between equal
    halves of the replicas. Two quorums share a replica, or both have more than half of the electors and share
    an elector.
    """
    replicas = sum(replica in voters for replica in config.replicas)
    electors = sum(elector in voters for elector in config.electors)
    weight = 2 * replicas + (2 * electors > len(config.electors))
    return 2 * weight > 2 * len(config.replicas) + 1
