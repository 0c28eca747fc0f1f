"""Decide when the pushes of a unit become its next anchor."""

from collections.abc import Mapping, Set

from aedit.async_sgd.rules.config import HubConfig


def is_due(
    config: HubConfig, came_s: Mapping[int, float], awaited: Set[int], usual_s: float, now_s: float
) -> bool:
    """Return whether to merge the pushes that have arrived.

    came_s: arrival time of each node's push of this unit. awaited: members that may still bring one. usual_s:
    usual time between merges.

    When all awaited pushes are here: at once. With a quorum: after a grace period of `grace` times the usual
    time (Decoupled DiLoCo, arXiv:2604.21428). Without one: after three times the usual time, but not before a
    silent node would be given up, so that a live node that brings nothing blocks nobody.
    """
    if not came_s:
        return False
    if awaited <= came_s.keys():
        return True
    times = sorted(came_s.values())
    wanted = len(awaited) if config.quorum == "all" else min(config.quorum, max(1, len(awaited)))
    if config.quorum != "all" and len(times) >= wanted:
        return now_s >= times[wanted - 1] + min(config.grace_cap_s, config.grace * usual_s)
    return now_s >= times[0] + max(3 * usual_s, config.expire_s)
