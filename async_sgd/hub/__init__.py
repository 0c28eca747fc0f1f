"""The hub as a state machine: records in, records out, no clock and no I/O."""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.async_sgd.hub import outer_step, parent_hub, state, step_bounds
    from aedit.async_sgd.hub.decide_join import LONGEST_NAME, Joiner, check_first_anchor
    from aedit.async_sgd.hub.decide_push import is_next, skips
    from aedit.async_sgd.hub.hub import MOST_LEASES, Hub
    from aedit.async_sgd.hub.members import CERTIFIED, Clocks, Member, NodeReport
    from aedit.async_sgd.hub.outer_step import Computed, Quantiser
    from aedit.async_sgd.hub.saved_state import (
        Saved,
        SavedUnit,
        frozen,
        layout_of,
        layout_rows,
        load_state,
        save_numbers,
        save_state,
        save_unit,
    )
    from aedit.async_sgd.hub.state import Denied, HubState, Unit
    from aedit.async_sgd.hub.status import (
        hub_status,
        listed_members,
        run_news,
        status_of_nodes,
        status_of_run,
    )

__all__ = [
    "CERTIFIED",
    "LONGEST_NAME",
    "MOST_LEASES",
    "Clocks",
    "Computed",
    "Denied",
    "Hub",
    "HubState",
    "Joiner",
    "Member",
    "NodeReport",
    "Quantiser",
    "Saved",
    "SavedUnit",
    "Unit",
    "check_first_anchor",
    "frozen",
    "hub_status",
    "is_next",
    "layout_of",
    "layout_rows",
    "listed_members",
    "load_state",
    "outer_step",
    "parent_hub",
    "run_news",
    "save_numbers",
    "save_state",
    "save_unit",
    "skips",
    "state",
    "status_of_nodes",
    "status_of_run",
    "step_bounds",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
