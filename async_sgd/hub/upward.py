"""Two levels: a hub that is itself a node of another hub, for regions that are far apart (HALoS,
arXiv:2506.04531).

Every `hub.parent_every` versions of a unit its progress is sent to the parent like a node's; what the parent
answers is mixed in, x <- (1 - a) x + a global. What the region does while its push is on the way is part of
the next one: the point it will be measured from is (1 - a) sent + a global. HALoS measures from the mixed x
instead, and the parent never hears of that progress.
"""

from aedit.async_sgd.hub.hub import Hub
from aedit.async_sgd.rules.records import Mixed, SentUp, Values, Vector


def due(hub: Hub) -> list[int]:
    """Units that have come far enough since the parent last heard of them."""
    far = hub.config.parent_every
    return [
        index
        for index, unit in hub.state.units.items()
        if unit.up is not None and unit.sent is None and unit.version >= unit.sent_at + far
    ]


def send(hub: Hub, index: int) -> SentUp:
    """The unit's newest version is what the parent will be told; `owed` is how."""
    return SentUp(index, hub.state.units[index].version)


def owed(hub: Hub, index: int) -> Vector:
    """Pseudo-gradient for the parent, once SentUp is applied: what it thinks the unit is, minus what was
    sent."""
    unit = hub.state.units[index]
    assert unit.up is not None, "there is no parent"
    assert unit.sent is not None, "nothing is on its way up"
    return unit.up - unit.sent


def withdraw(index: int) -> SentUp:
    """The parent has not believed it: the progress is still owed."""
    return SentUp(index, 0)


def mix(hub: Hub, index: int, values: Values, share: float | None = None) -> Mixed:
    """The parent's newest anchor is there. share 1 takes it as it is; default: `hub.parent_mix`."""
    version = hub.state.units[index].version + 1
    return Mixed(index, version, values, hub.config.parent_mix if share is None else share)
