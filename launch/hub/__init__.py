"""The hub process: `aedit hub`, its folder, standby and uplink. Imports no torch.

`main` starts and ends the process (begin there); `leading` serves the nodes with anchors and writes records,
`standby` follows the leading hub until it is elected, `owner_check` compares what the owner of a part has
signed with its journal, `uplink` connects to a parent hub. `endpoint` is the
place of a hub among those of the run and asks the others who leads and for votes, `folder` its files and the
replay of its journal, `page_process` the page of the run, `sample_accounts` what journals say of samples,
`policy_versions` the policy versions made of its anchors. The command line, `launch.processes`,
`launch.swarm` and exports call it.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.launch.hub.endpoint import HUB_PROGRAM, HubOptions
    from aedit.launch.hub.folder import anchors_of, hub_of, of_standby, records_of, replayed
    from aedit.launch.hub.leading import overview
    from aedit.launch.hub.main import hub
    from aedit.launch.hub.page_process import PageProcess
    from aedit.launch.hub.sample_accounts import accounts_line, journal_facts, read_accounts

__all__ = [
    "HUB_PROGRAM",
    "HubOptions",
    "PageProcess",
    "accounts_line",
    "anchors_of",
    "hub",
    "hub_of",
    "journal_facts",
    "of_standby",
    "overview",
    "read_accounts",
    "records_of",
    "replayed",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
