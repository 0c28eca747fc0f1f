"""The replicas that the owner of a part of a swarm wants in its next configuration. A pure function."""

from collections.abc import Callable, Set


def placed_replicas(
    kept: Set[int], near: Set[int], me: int, place: Callable[[int], int], copies: int
) -> set[int]:
    """Return the replicas for the next configuration: those of the best places, one surplus at a time.

    Only the owner gives replicas up, one by one, each by an agreement of all voters. A peer that deleted its
    replica while a configuration still counted on it would take a vote away from the others for good.

    Args:
        kept: Replicas of the newest configuration that answer.
        near: Replicas that have nearly all of the owner's journal.
        me: The owner. It stays, and hands the part over if another replica should own it.
        place: Returns the place of a replica in the ranking of the part; a lower one is better.
        copies: Replicas that are wanted.
    """

    def order(one: int) -> tuple[int, int]:
        return place(one), one

    best = set(sorted(kept | near, key=order)[:copies])
    if len(kept) > copies:
        surplus = kept - best - {me}
        return set(kept) - {max(surplus, key=order)} if surplus else set(kept)
    newcomers = sorted((near - kept) & best, key=order)
    return set(kept).union(newcomers[: copies + 1 - len(kept)])
