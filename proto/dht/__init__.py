"""hivemind: discovery by its distributed hash table, and averaging, each with a process of its own.

- `dht`: `DhtDiscovery`, an implementation of `proto.swarm.Discovery`; begin here. `dht_process`: its process
- `averaging`: `Averager`, and `HivemindAverager`, an implementation. `averaging_process`: its process
- `child`: what both share: the start, restart and end of a process that runs hivemind

Nothing else imports hivemind, which is an optional dependency. Called by `edit` and `launch`.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.proto.dht.averaging import (
        AVERAGING,
        INTRODUCTION,
        AveragedRound,
        Averager,
        AveragingSettings,
        HivemindAverager,
    )
    from aedit.proto.dht.child import bind_children, remove_socket
    from aedit.proto.dht.dht import (
        DhtDiscovery,
        DhtSettings,
        announced_maddr,
        checked_maddrs,
        listening_maddr,
    )

__all__ = [
    "AVERAGING",
    "INTRODUCTION",
    "AveragedRound",
    "Averager",
    "AveragingSettings",
    "DhtDiscovery",
    "DhtSettings",
    "HivemindAverager",
    "announced_maddr",
    "bind_children",
    "checked_maddrs",
    "listening_maddr",
    "remove_socket",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
