"""The hub process: `aedit hub`, its folder, standby and uplink. Imports no torch.

`main` starts and ends the process (begin there); `leading` serves the nodes with anchors, `standby` follows
the leading hub until it is elected, `other_hubs` asks the other hubs who leads and for votes, `uplink`
connects to a parent hub. `endpoint` is the place of a hub among those of the run, `folder` its files and the
replay of its journal, `reports` its records and status, `policy_versions` the policy versions made of its
anchors. The command line, `launch.swarm` and exports call it.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.launch.hub.endpoint import HUB_PROGRAM, HubOptions
    from aedit.launch.hub.folder import anchors_of, hub_of, of_standby, records_of, replayed
    from aedit.launch.hub.main import hub
    from aedit.launch.hub.reports import overview

__all__ = [
    "HUB_PROGRAM",
    "HubOptions",
    "anchors_of",
    "hub",
    "hub_of",
    "of_standby",
    "overview",
    "records_of",
    "replayed",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
