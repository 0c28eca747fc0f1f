"""Migration of samples between engines, in one process or over workers and servers.

The sources of `workers` call `Reallocator`; begin with `moving.py`.

- `moving.py`: engines whose samples can move, their measured speed, and the `Reallocator`.
- `reallocate.py`: the plan of migrations, and the expected lengths of samples.
- `sample_text.py`: samples as text for other processes, and their transfer between ranks.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.spec_rollout.migration.moving import HISTORY_ROLLOUTS, LocalEngine, Reallocator, SpeedMeter
    from aedit.spec_rollout.migration.reallocate import (
        EngineLoad,
        EngineSpeed,
        LengthDistribution,
        SampleKey,
        UnfinishedSample,
    )
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
