"""The speculative generation engine: prompts go in, rollouts come out as they finish, and no token changes.

Begin with `engine`. `rows` assigns samples to rows, `prefill` brings their text there and has the cache of
prefixes, `verification` chooses tokens, `weight_swap` takes new weights between two steps, `meters` counts,
`speed` estimates, `scoring` scores given texts, `request_checks` has limits and checks of prompts, `trial`
calls objects given by import path once. `engine_source` makes it a source of rollouts. Called by training
loops, rollout workers, servers and audits.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.spec_rollout.engine.engine import Engine, SampleKeys
    from aedit.spec_rollout.engine.engine_source import EngineSource
    from aedit.spec_rollout.engine.meters import Meters, Step
    from aedit.spec_rollout.engine.request_checks import EngineLimits, check_prompt
    from aedit.spec_rollout.engine.scoring import Scoring
    from aedit.spec_rollout.engine.speed import EngineSpeed, SpeedMeter
    from aedit.spec_rollout.engine.trial import try_chooser, try_drafter, try_engine
    from aedit.spec_rollout.engine.verification import NoNextTokenError
    from aedit.spec_rollout.engine.weight_swap import WeightSwap

__all__ = [
    "Engine",
    "EngineLimits",
    "EngineSource",
    "EngineSpeed",
    "Meters",
    "NoNextTokenError",
    "SampleKeys",
    "Scoring",
    "SpeedMeter",
    "Step",
    "WeightSwap",
    "check_prompt",
    "try_chooser",
    "try_drafter",
    "try_engine",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
