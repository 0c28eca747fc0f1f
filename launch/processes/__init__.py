"""Processes on this machine: `aedit run`, `aedit join`, local clusters and the dry run.

Begin at `run_local.run`. The command line calls this package; the processes are those of `aedit.child`.

run_local: `aedit run`: first checks, then the nodes of this machine until the run is over.
join_run: `aedit join`: the configuration comes from a hub or a peer.
cluster: hubs, peers and nodes of a run on this machine.
plan: `aedit run --dry-run`: what the run needs and sends.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.launch.processes.join_run import join
    from aedit.launch.processes.plan import check_plan_fits, measure, render
    from aedit.launch.processes.run_local import preflight, run

__all__ = [
    "check_plan_fits",
    "join",
    "measure",
    "preflight",
    "render",
    "run",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
