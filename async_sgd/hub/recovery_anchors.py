"""A part of a swarm that was lost and founded again goes on from the newest anchors that nodes have.

Not journaled: a hub that takes over before every unit has an anchor is told by the nodes again.
"""

from collections.abc import Callable, Sequence

from aedit.async_sgd.hub.state import HubState
from aedit.async_sgd.rules import Leased, Record, Used
from aedit.proto.rpc import generation_of, lineage, version_of

MOST_TOLD = 16
_LAST_POSITION = 2**60
"""Positions of samples beyond this one are nobody's word to be taken for."""


class RecoveryAnchors:
    """The anchors that nodes have of the part, as they say when they join."""

    def __init__(self, state: Callable[[], HubState], gather_s: float) -> None:
        """Know nobody.

        Args:
            state: Returns the state of the hub.
            gather_s: Time in which nodes can tell, from the first one on.
        """
        self._state, self._gather_s = state, gather_s
        self._stamps: dict[int, tuple[int, ...]] = {}
        self._told: dict[int, tuple[int, ...]] = {}
        self._leased_upto = 0
        self._since_s: float | None = None

    @property
    def are_asked(self) -> bool:
        """Return whether this hub leads a part that was founded again."""
        return lineage(self._state().term) > 0

    def note(
        self, node: int, stamps: Sequence[int], leased_upto: int, now_s: float, told: Sequence[int] = ()
    ) -> None:
        """Note what a node says when it joins.

        Args:
            node: Its number.
            stamps: Of its anchors, by unit.
            leased_upto: How far it has been given positions of samples.
            now_s: Age of the run.
            told: Stamps of the newest anchors that it was told of, by unit.
        """
        if not self.are_asked:
            return
        self._stamps[node], self._told[node] = tuple(stamps), tuple(told)
        if leased_upto <= _LAST_POSITION:
            self._leased_upto = max(self._leased_upto, leased_upto)
        if self._since_s is None and any(stamps):
            self._since_s = now_s

    def may_tell(self, now_s: float) -> bool:
        """Return whether nodes may still tell what they have, so that nothing can be decided yet."""
        return self._since_s is None or now_s < self._since_s + self._gather_s

    def stamp(self, node: int, unit: int) -> int:
        """Return the stamp of a node's anchor; 0 if it has told none."""
        stamps = self._stamps.get(node, ())
        return stamps[unit] if unit < len(stamps) else 0

    def lost_after(self, node: int, unit: int) -> list[tuple[int, int]]:
        """Return which nodes were told of later anchors of a unit than the one that `node` brings.

        Only for people: nobody can check what a node says here, and nothing follows from it.

        Returns:
            Node and number of later versions, most first; at most `MOST_TOLD`.
        """
        brought = self.stamp(node, unit)
        told = (
            (one, _later(stamps[unit], brought)) for one, stamps in self._told.items() if unit < len(stamps)
        )
        found = [(one, versions) for one, versions in told if versions > 0]
        return sorted(found, key=lambda item: (-item[1], item[0]))[:MOST_TOLD]

    def founder(self, unit: int, now_s: float) -> int | None:
        """Return the node that brings the unit's first anchor here; None if that is nobody yet.

        The founder of the run; in a part that was founded again the live node that has the newest anchor.
        """
        if not self.are_asked:
            return self._state().founder
        if self.may_tell(now_s):
            return None
        having = [node for node in self._stamps if node in self._state().live and self.stamp(node, unit)]
        return max(having, key=lambda node: (self.stamp(node, unit), -node), default=None)

    def brings(self, node: int, now_s: float) -> list[int]:
        """Return the units whose anchors this node is to bring, in a part that was founded again."""
        if not self.are_asked:
            return []
        units = self._state().units.items()
        missing = [index for index, unit in units if unit.anchor is None and not unit.pending]
        return [index for index in missing if self.founder(index, now_s) == node]

    def leases(self, now_s: float) -> bool:
        """Return whether positions can be leased: in a part that was founded again once nodes have told."""
        return not self.are_asked or self._state().is_founded or not self.may_tell(now_s)

    def skipped(self, node: int) -> list[Record]:
        """Return the records after which nobody is given positions that nodes were given before.

        A part that was founded again knows only from them how far the data is used. node: that leases now.
        """
        start = self._state().pool.watermark
        if not self.are_asked or start >= self._leased_upto:
            return []
        return [Leased(node, start, self._leased_upto), Used(node, start, self._leased_upto)]


def _later(told: int, brought: int) -> int:
    """Return how many versions at least lie between two stamps; those of a later generation begin at 1."""
    if generation_of(told) > generation_of(brought):
        return version_of(told)
    return version_of(told) - version_of(brought) if told > brought else 0
