"""When the pushes of a unit become its next anchor."""

from collections.abc import Mapping, Set

from aedit.async_sgd.rules.config import HubConfig


def is_due(
    config: HubConfig, came_s: Mapping[int, float], awaited: Set[int], usual_s: float, now_s: float
) -> bool:
    """Whether to merge what is there. came_s: by node, when its push of this unit came. awaited: members
    who may still bring one.

    At once with a quorum of 1 or when all who are awaited have come. Otherwise with a quorum, after a grace
    period of `grace` times the usual time between merges (Decoupled DiLoCo, arXiv:2604.21428); and without
    one after three times the usual time, but not before a silent node would be given up, so that nobody is
    stuck because of one who is alive and brings nothing.
    """
    if not came_s:
        return False
    if config.quorum == 1 or awaited <= came_s.keys():
        return True
    times = sorted(came_s.values())
    wanted = len(awaited) if config.quorum == "all" else min(config.quorum, max(1, len(awaited)))
    if config.quorum != "all" and len(times) >= wanted:
        return now_s >= times[wanted - 1] + min(config.grace_cap_s, config.grace * usual_s)
    return now_s >= times[0] + max(3 * usual_s, config.expire_s)
