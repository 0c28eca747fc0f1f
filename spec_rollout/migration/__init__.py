"""Migration of samples between engines."""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.spec_rollout.migration.lengths import LengthDistribution
    from aedit.spec_rollout.migration.moving import HISTORY_ROLLOUTS, LocalEngine, Reallocator, SpeedMeter
    from aedit.spec_rollout.migration.reallocate import EngineLoad, EngineSpeed, SampleKey, UnfinishedSample
    from aedit.spec_rollout.migration.sample_text import (
        decode_prompt,
        decode_sampling,
        encode_prompt,
        encode_sampling,
    )

__all__ = [
    "HISTORY_ROLLOUTS",
    "EngineLoad",
    "EngineSpeed",
    "LengthDistribution",
    "LocalEngine",
    "Reallocator",
    "SampleKey",
    "SpeedMeter",
    "UnfinishedSample",
    "decode_prompt",
    "decode_sampling",
    "encode_prompt",
    "encode_sampling",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
