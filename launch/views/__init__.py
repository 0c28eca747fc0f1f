"""Views of a run for terminal, plots and report. They only read the run directory or ask the hub.

live: shows a run, or prints its state. Begin there.
panel, tables, server_folder_view: the panel of a run, its tables, and that of one rollout server.
run_report: printed at the end of a run.
plot, plots, rl_plots: the plots of a run as files.
page: the page of a run for a browser.
sources: reads a run from its directory or its hub.
figures: computes what is shown.
formatting: formats numbers, and builds every table.

The command line calls it. None imports torch.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.launch.views.figures import (
        after_warm_up,
        newest,
        rl_held_out,
        rl_lines_of,
        rl_totals,
        splits,
    )
    from aedit.launch.views.live import status_command, top_command, watch
    from aedit.launch.views.page.server import view_command
    from aedit.launch.views.plot import plot_command
    from aedit.launch.views.run_report import report
    from aedit.launch.views.sources import is_hub

__all__ = [
    "after_warm_up",
    "is_hub",
    "newest",
    "plot_command",
    "report",
    "rl_held_out",
    "rl_lines_of",
    "rl_totals",
    "splits",
    "status_command",
    "top_command",
    "view_command",
    "watch",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
