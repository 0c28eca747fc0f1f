"""The speculative generation engine."""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.spec_rollout.engine.engine import Engine
    from aedit.spec_rollout.engine.engine_source import EngineSource
    from aedit.spec_rollout.engine.meters import Meters, Step
    from aedit.spec_rollout.engine.request_checks import EngineLimits, check_prompt
    from aedit.spec_rollout.engine.scoring import Scoring
    from aedit.spec_rollout.engine.verification import NoNextTokenError
    from aedit.spec_rollout.engine.weight_swap import WeightSwap

__all__ = [
    "Engine",
    "EngineLimits",
    "EngineSource",
    "Meters",
    "NoNextTokenError",
    "Scoring",
    "Step",
    "WeightSwap",
    "check_prompt",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
