"""The anchors from which a re-created part of a swarm continues: the newest ones that its nodes have.

Not journaled: nodes report them again to a hub that takes over before every unit has an anchor.
"""

from collections.abc import Callable, Sequence

from aedit.async_sgd.hub.state import HubState
from aedit.async_sgd.rules import Leased, Record, Used
from aedit.proto.rpc import generation_of, lineage, version_of

MOST_REPORTED = 16
_LAST_POSITION = 2**60
"""Upper limit for sample positions that a node may report."""


class RecoveryAnchors:
    """The anchors that nodes have of the part, as they report when they join."""

    def __init__(self, state: Callable[[], HubState], gather_s: float) -> None:
        """Start empty.

        Args:
            state: Returns the state of the hub.
            gather_s: Time in which nodes can report, from the first one on.
        """
        self._state, self._gather_s = state, gather_s
        self._stamps: dict[int, tuple[int, ...]] = {}
        self._known: dict[int, tuple[int, ...]] = {}
        self._leased_upto = 0
        self._since_s: float | None = None

    @property
    def are_asked(self) -> bool:
        """Return whether this hub leads a re-created part."""
        return lineage(self._state().term) > 0

    def note(
        self, node: int, stamps: Sequence[int], leased_upto: int, now_s: float, known: Sequence[int] = ()
    ) -> None:
        """Note what a node reports when it joins.

        Args:
            node: Its number.
            stamps: Of its anchors, by unit.
            leased_upto: How far it has been given positions of samples.
            now_s: Age of the run.
            known: Stamps of the newest anchors that it knows to exist, by unit.
        """
        if not self.are_asked:
            return
        self._stamps[node], self._known[node] = tuple(stamps), tuple(known)
        if leased_upto <= _LAST_POSITION:
            self._leased_upto = max(self._leased_upto, leased_upto)
        if self._since_s is None and any(stamps):
            self._since_s = now_s

    def is_gathering(self, now_s: float) -> bool:
        """Return whether nodes may still report what they have, so that nothing can be decided yet."""
        return self._since_s is None or now_s < self._since_s + self._gather_s

    def stamp(self, node: int, unit: int) -> int:
        """Return the stamp of a node's anchor; 0 if it has reported none."""
        stamps = self._stamps.get(node, ())
        return stamps[unit] if unit < len(stamps) else 0

    def lost_after(self, node: int, unit: int) -> list[tuple[int, int]]:
        """Return which nodes know of later anchors of a unit than the one that `node` brings.

        For logs only: what a node reports here cannot be checked, and nothing follows from it.

        Returns:
            Node and number of later versions, most first; at most `MOST_REPORTED`.
        """
        brought = self.stamp(node, unit)
        later = (
            (one, _later(stamps[unit], brought)) for one, stamps in self._known.items() if unit < len(stamps)
        )
        found = [(one, versions) for one, versions in later if versions > 0]
        return sorted(found, key=lambda item: (-item[1], item[0]))[:MOST_REPORTED]

    def founder(self, unit: int, now_s: float) -> int | None:
        """Return the node whose anchor becomes version 1, or None while undecided.

        The founder of the run; in a re-created part the live node that has the newest anchor.
        """
        if not self.are_asked:
            return self._state().founder
        if self.is_gathering(now_s):
            return None
        having = [node for node in self._stamps if node in self._state().live and self.stamp(node, unit)]
        return max(having, key=lambda node: (self.stamp(node, unit), -node), default=None)

    def brings(self, node: int, now_s: float) -> list[int]:
        """Return the units whose anchors this node is to bring, in a re-created part."""
        if not self.are_asked:
            return []
        units = self._state().units.items()
        missing = [index for index, unit in units if unit.anchor is None and not unit.pending]
        return [index for index in missing if self.founder(index, now_s) == node]

    def leases(self, now_s: float) -> bool:
        """Return whether positions can be leased: in a re-created part once nodes have reported."""
        return not self.are_asked or self._state().is_founded or not self.is_gathering(now_s)

    def skipped(self, node: int) -> list[Record]:
        """Return records that move the stream past all positions leased before.

        A re-created part knows only from its nodes how far the data is used. node: that leases now.
        """
        start = self._state().pool.watermark
        if not self.are_asked or start >= self._leased_upto:
            return []
        return [Leased(node, start, self._leased_upto), Used(node, start, self._leased_upto)]


def _later(known: int, brought: int) -> int:
    """Return how many versions at least lie between two stamps; those of a later generation begin at 1."""
    if generation_of(known) > generation_of(brought):
        return version_of(known)
    return version_of(known) - version_of(brought) if known > brought else 0
