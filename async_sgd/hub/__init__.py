"""The hub of an asynchronous run as a state machine: records in, records out, no clock and no I/O.

- `hub`: the machine; begin here. `state`: what is journaled and how a record changes it; `saved_state`: the
  same as numbers and arrays, for snapshots. `members`, `pool`: nodes and their leases of samples.
- `decide_join`, `decide_push`, `decide_merge`: each decision, with `step_bounds` on claims and speeds, and
  `member_timeouts` of silent members and awaited pushes.
- `outer_step`: from one anchor to the next. `parent_hub`: two levels. `recovery_anchors`: a re-created
  part of a swarm. `status`: reports for members and views.

`journal.Ledger` writes its records down and applies them; `inprocess` runs it without files.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.async_sgd.hub import parent_hub
    from aedit.async_sgd.hub.decide_join import Joiner, check_first_anchor
    from aedit.async_sgd.hub.decide_push import is_next, skips
    from aedit.async_sgd.hub.hub import MOST_LEASES, Hub
    from aedit.async_sgd.hub.members import CERTIFIED, Clocks, Member, NodeReport
    from aedit.async_sgd.hub.outer_step import Computed, Quantiser
    from aedit.async_sgd.hub.saved_state import (
        Saved,
        SavedUnit,
        frozen,
        layout_from_rows,
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
    "layout_from_rows",
    "layout_rows",
    "listed_members",
    "load_state",
    "parent_hub",
    "run_news",
    "save_numbers",
    "save_state",
    "save_unit",
    "skips",
    "status_of_nodes",
    "status_of_run",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
