"""Decide when the pushes of a unit become its next anchor."""

from collections.abc import Set

from aedit.async_sgd.hub.watch import Expected
from aedit.async_sgd.rules import HubConfig


def is_due(config: HubConfig, expected: Expected, leaving: Set[int], usual_s: float, now_s: float) -> bool:
    """Return whether to merge the pushes that have arrived; there is one at least.

    When all awaited pushes are here: at once. With a quorum: after a grace period of `grace` times the usual
    time (Decoupled DiLoCo, arXiv:2604.21428). Without one: after three times the usual time, but not before a
    silent node would be given up, so that a live node that brings nothing blocks nobody.

    Args:
        config: Where not every arrival is merged alone.
        expected: Pushes that are here, and members that may still bring one.
        leaving: Members that are awaited no more from now on.
        usual_s: Usual time between merges.
        now_s: The time.
    """
    if expected.are_all_here(leaving):
        return True
    times = expected.came_s.values
    if config.quorum != "all":
        wanted = min(config.quorum, max(1, expected.num_awaited(leaving)))
        if len(times) >= wanted:
            return now_s >= times[wanted - 1] + min(config.grace_cap_s, config.grace * usual_s)
    return now_s >= times[0] + max(3 * usual_s, config.expire_s)
