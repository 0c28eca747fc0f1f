"""Choice of the speculation arm at each step: drafter, depth, width and nodes, or off.

Begin with `arms` (what a chooser sees and returns). `table` has what was measured: the cost of a pass by rows
and drafted tokens, the accepted tokens by drafter and position. `goodput` takes the arm with the most
expected tokens per second from it, and has the bandit that is the alternative. Called by the engine.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.spec_rollout.choose.arms import (
        ArmChooser,
        EngineView,
        Fixed,
        SkippedSteps,
        StepObservation,
        bucket,
        real_nodes,
    )
    from aedit.spec_rollout.choose.goodput import Bandit, Goodput
    from aedit.spec_rollout.choose.table import Floats, accepted_nodes, score_bins

__all__ = [
    "ArmChooser",
    "Bandit",
    "EngineView",
    "Fixed",
    "Floats",
    "Goodput",
    "SkippedSteps",
    "StepObservation",
    "accepted_nodes",
    "bucket",
    "real_nodes",
    "score_bins",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
