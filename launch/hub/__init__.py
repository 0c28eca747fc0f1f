"""The hub process: `aedit hub`, its folder, standby and uplink. Imports no torch."""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.launch.hub.folder import of_standby
    from aedit.launch.hub.main import hub
    from aedit.launch.hub.replay import anchors_of, hub_of, records_of, replayed
    from aedit.launch.hub.reports import overview

__all__ = [
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
