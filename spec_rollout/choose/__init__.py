"""Choice of the speculation arm at each step: drafter, depth, width and nodes, or off.

Begin with `arms` (what a chooser sees and returns). `goodput` takes the most expected tokens per second and
has the bandit that is the alternative; `cost` predicts the time of a step, `calibration` the accepted tokens.
Called by the engine.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.spec_rollout.choose.arms import ArmChooser, EngineView, Fixed, StepObservation, bucket
    from aedit.spec_rollout.choose.calibration import DraftNodes, Floats, accepted_nodes
    from aedit.spec_rollout.choose.goodput import Bandit, Goodput

__all__ = [
    "ArmChooser",
    "Bandit",
    "DraftNodes",
    "EngineView",
    "Fixed",
    "Floats",
    "Goodput",
    "StepObservation",
    "accepted_nodes",
    "bucket",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
