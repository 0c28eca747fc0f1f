"""The hub as a state machine: records in, records out, no clock and no I/O."""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.async_sgd.hub import news, upward
    from aedit.async_sgd.hub.admission import is_next, skips
    from aedit.async_sgd.hub.advance import Computed, Quantiser
    from aedit.async_sgd.hub.cards import Card
    from aedit.async_sgd.hub.clocks import Clocks
    from aedit.async_sgd.hub.denied import Denied
    from aedit.async_sgd.hub.directory import Complaint, Directory
    from aedit.async_sgd.hub.founding import check_first_anchor
    from aedit.async_sgd.hub.hub import MOST_LEASES, Hub
    from aedit.async_sgd.hub.joins import Joiner
    from aedit.async_sgd.hub.members import CERTIFIED, Member, Report, Told
    from aedit.async_sgd.hub.plan import HubPlan
    from aedit.async_sgd.hub.saved import (
        Saved,
        SavedUnit,
        frozen,
        load_state,
        save_numbers,
        save_state,
        save_unit,
    )
    from aedit.async_sgd.hub.state import HubState, Unit

__all__ = [
    "CERTIFIED",
    "MOST_LEASES",
    "Card",
    "Clocks",
    "Complaint",
    "Computed",
    "Denied",
    "Directory",
    "Hub",
    "HubPlan",
    "HubState",
    "Joiner",
    "Member",
    "Quantiser",
    "Report",
    "Saved",
    "SavedUnit",
    "Told",
    "Unit",
    "check_first_anchor",
    "frozen",
    "is_next",
    "load_state",
    "news",
    "save_numbers",
    "save_state",
    "save_unit",
    "skips",
    "upward",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
