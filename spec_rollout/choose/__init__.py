"""Choice of the speculation arm: expected tokens per second, bandit, calibration, step times."""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.spec_rollout.choose.arms import ArmChooser, EngineView, Fixed, StepObservation, bucket
    from aedit.spec_rollout.choose.bandit import Bandit
    from aedit.spec_rollout.choose.calibration import DraftNodes, Floats, accepted_nodes
    from aedit.spec_rollout.choose.goodput import Goodput

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
