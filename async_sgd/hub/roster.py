"""The live members of a run, by what is asked of them with every call.

It follows from the list of members and is not saved.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable

from aedit.async_sgd.hub.members import Member


class Roster:
    """Indexes of the live members, so that no call has to look at all of them."""

    def __init__(self, members: Iterable[Member] = ()) -> None:
        self.live: dict[int, Member] = {}
        """Live members by index."""
        self.order: list[int] = []
        """Their nodes, ascending."""
        self.excluded: list[int] = []
        """Nodes that were excluded, ascending."""
        self.changes = 0
        """Counts who comes and goes."""
        self._donors: list[int] = []
        for member in members:
            if member.live:
                self.add(member)
            elif member.excluded:
                self.remove(member)

    def add(self, member: Member) -> None:
        """Note that a member is live, perhaps with another donor address than before."""
        self.changes += 1
        if member.node not in self.live:
            insort(self.order, member.node)
        self.live[member.node] = member
        _put(self._donors, member.node, bool(member.donor))

    def remove(self, member: Member) -> None:
        """Note that a member has left."""
        self.changes += 1
        if self.live.pop(member.node, None) is not None:
            _put(self.order, member.node, is_in=False)
            _put(self._donors, member.node, is_in=False)
        if member.excluded:
            _put(self.excluded, member.node, is_in=True)

    def forget(self, node: int) -> None:
        """Note that a member that has left is remembered no more."""
        _put(self.excluded, node, is_in=False)

    def donors(self, node: int, most: int) -> tuple[str, ...]:
        """Return the addresses of the next `most` donors after `node`; then follows the first one again."""
        at = bisect_right(self._donors, node)
        after = (self._donors[at : at + most] + self._donors[: min(at, most)])[:most]
        return tuple(self.live[other].donor for other in after if other != node)


def _put(nodes: list[int], node: int, is_in: bool) -> None:
    """Put `node` into a sorted list, or take it out."""
    at = bisect_left(nodes, node)
    found = at < len(nodes) and nodes[at] == node
    if is_in and not found:
        nodes.insert(at, node)
    elif found and not is_in:
        del nodes[at]
