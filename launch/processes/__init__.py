"""Processes on this machine: `aedit run`, `aedit join`, local clusters and the dry run."""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.launch.processes.join_run import join
    from aedit.launch.processes.local_preflight import preflight
    from aedit.launch.processes.plan import check_plan_fits, measure, render
    from aedit.launch.processes.run_local import run

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
