"""Two levels: a hub that is itself a node of another hub, for distant regions (HALoS, arXiv:2506.04531).

Every `hub.parent_every` versions of a unit its progress is sent to the parent like a node's; the parent's
answer is mixed in, x <- (1 - a) x + a global. Progress that the region makes while its push travels is part
of the next one: it will be measured from (1 - a) sent + a global. HALoS measures from the mixed x instead, so
that the parent never receives that progress.
"""

from aedit.async_sgd.hub.hub import Hub
from aedit.async_sgd.rules import Mixed, SentUp, Values, Vector


def due(hub: Hub) -> list[int]:
    """Return the units with enough progress since they were last sent to the parent."""
    far = hub.config.parent_every
    return [
        index
        for index, unit in hub.state.units.items()
        if unit.up is not None and unit.sent is None and unit.version >= unit.sent_at + far
    ]


def send(hub: Hub, index: int) -> SentUp:
    """Return the record that the unit's newest version is sent to the parent; `owed` gives the values."""
    return SentUp(index, hub.state.units[index].version)


def owed(hub: Hub, index: int) -> Vector:
    """Return the pseudo-gradient for the parent, once SentUp is applied.

    Its view of the unit minus what was sent.
    """
    unit = hub.state.units[index]
    assert unit.up is not None, "there is no parent"
    assert unit.sent is not None, "nothing is on its way up"
    return unit.up - unit.sent


def withdraw(index: int) -> SentUp:
    """Return the record that the parent has refused the push: the progress is still owed."""
    return SentUp(index, 0)


def mix(hub: Hub, index: int, values: Values, share: float | None = None) -> Mixed:
    """Return the record that mixes in the parent's newest anchor.

    share: of that anchor; 1 takes it as it is. Default: `hub.parent_mix`.
    """
    version = hub.state.units[index].version + 1
    return Mixed(index, version, values, hub.config.parent_mix if share is None else share)
