"""Members that have left: the latest ones are remembered, so that they can come back as who they were.

What is forgotten depends on the records alone: a replay and a standby forget the same members at the same
record.
"""

from typing import TYPE_CHECKING

from aedit.async_sgd.hub.members import CERTIFIED, Member

if TYPE_CHECKING:
    from aedit.async_sgd.hub.state import HubState

KEPT = 1024
"""Members that have left and are remembered, and as many that were excluded.

No setting: a replay of a journal must not depend on the configuration of the day.
"""


def leave(state: "HubState", node: int) -> None:
    """Note that a member has left, and forget those that left longest ago.

    Of the excluded ones, those with keys of their own are never forgotten: there are no more than keys. The
    others could come back from as many other hosts as it takes to have them forgotten.
    """
    member = state.members[node]
    state.departed.pop(node, None)
    if not member.excluded:
        state.departed[node] = None
    elif member.proof != CERTIFIED:
        state.excluded[node] = None
    busy = {pusher for unit in state.units.values() for pusher, _ in unit.pending}
    for gone in (state.departed, state.excluded):
        idle = [node for node in gone if node not in busy and node != state.founder]
        for node in idle[: max(0, len(gone) - KEPT)]:
            del gone[node]
            _forget(state, node)


def _forget(state: "HubState", node: int) -> None:
    """Free the index and the name: who returns under it joins as a new node, whose pushes count from 1."""
    del state.names[state.members[node].name]
    state.members[node] = Member("", node, era=state.era)
    state.roster.forget(node)
    state.free.append(node)
    state.lost.pop(node, None)
    for unit in state.units.values():
        for known in (unit.brought, unit.times, unit.missed):
            known.pop(node, None)
