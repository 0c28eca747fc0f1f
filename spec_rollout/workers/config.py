"""Settings of a rank's rollout workers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from aedit.spec_rollout.drafters import parse_arm
from aedit.spec_rollout.training import Restarts
from aedit.types import ImportPath, PositiveFloat, PositiveInt, check, checked

MAKE_ENGINE = ImportPath("aedit.spec_rollout.workers.worker_engine:make_engine")


@checked()
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Number of processes, their engines, and the time after which a silent one is replaced."""

    processes: PositiveInt = 1
    rows: PositiveInt
    """Samples that each process decodes at a time."""
    max_tokens: PositiveInt
    """Upper limit of prompt and answer of one sample, in tokens."""
    dtype: torch.dtype = torch.float32
    """Dtype of the policy in the workers."""
    device: str = "cpu"
    threads: PositiveInt = 1
    """Processor threads of each process."""
    arms: tuple[str, ...] = ("off",)
    """Speculation settings between which each engine chooses, such as `off`, `suffix:4`, `layer:4`."""
    tokenizer: Path | None = None
    """Directory of a saved tokenizer. Stop strings need it."""
    silent_s: PositiveFloat = 60.0
    """Seconds of waiting for a process without a message after which it is ended and replaced."""
    starts_within_s: PositiveFloat = 300.0
    """The same before its first message: it loads torch and builds the model."""
    wait_s: PositiveFloat = 0.05
    """Longest wait of one `WorkerSource.step`."""
    restarts: Restarts = field(default_factory=lambda: Restarts(pause_s=0.25))
    """Deaths in a row, of a process or around a sample without progress, after which generation fails."""
    logs: Path | None = None
    """Directory of the processes' output; None discards it."""
    make: ImportPath = MAKE_ENGINE
    """Function of the worker that returns its engine; see `make_engine`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options for `make`, which JSON can hold."""

    def __post_init__(self) -> None:
        check(bool(self.arms), "WorkerConfig: arms", "must name at least one arm", self.arms)
        for arm in self.arms:
            parse_arm(arm)
