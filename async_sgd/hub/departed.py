"""Members that have left: the latest ones are remembered, so that they can come back as who they were.

What is forgotten depends on the records alone: a replay and a standby forget the same members at the same
record.
"""

from typing import TYPE_CHECKING

from aedit.async_sgd.hub.members import Member

if TYPE_CHECKING:
    from aedit.async_sgd.hub.state import HubState

KEPT = 1024
"""Members that have left and are remembered, besides the excluded ones.

No setting: a replay of a journal must not depend on the configuration of the day.
"""


def leave(state: "HubState", node: int) -> None:
    """Note that a member has left, and forget those that left longest ago."""
    state.departed.pop(node, None)
    if not state.members[node].excluded:
        state.departed[node] = None
    surplus = len(state.departed) - KEPT
    if surplus > 0:
        busy = {pusher for unit in state.units.values() for pusher, _ in unit.pending}
        idle = [node for node in state.departed if node not in busy and node != state.founder]
        for node in idle[:surplus]:
            _forget(state, node)


def _forget(state: "HubState", node: int) -> None:
    """Free the index and the name: who returns under it joins as a new node, whose pushes count from 1."""
    del state.departed[node]
    del state.names[state.members[node].name]
    state.members[node] = Member("", node, era=state.era)
    state.free.append(node)
    state.lost.pop(node, None)
    for unit in state.units.values():
        for known in (unit.brought, unit.times, unit.missed):
            known.pop(node, None)
