"""A program of a user, checked by mypy: exports have their types, and nothing else is there. It never runs.

An `ignore` that no error needs is an error itself: so an export that mypy takes for `Any` is found.
"""

from typing import assert_type

from torch import nn, optim

import aedit.edit
from aedit import (  # type: ignore[attr-defined]
    EverySteps,
    LayerSync,
    LayerSynk,  # noqa: F401
)
from aedit.async_sgd import Nesterov

assert_type(EverySteps(3), EverySteps)
EverySteps("three")  # type: ignore[arg-type]

assert_type(Nesterov().lr, float)
rate: str = Nesterov().lr  # type: ignore[assignment]

schedule: aedit.edit.RoundSchedule = EverySteps(3)
other: aedit.edit.RoundSchedule = Nesterov()  # type: ignore[assignment]


def attached(model: nn.Module, inner: optim.Optimizer, exchange: aedit.edit.Exchange) -> LayerSync:
    """Return what a user makes of a model."""
    made = LayerSync.of(model, inner, exchange=exchange, schedule=schedule)
    assert_type(made, LayerSync)
    wrong: int = made  # type: ignore[assignment]
    LayerSync.of(model, inner, exchange=wrong)  # type: ignore[arg-type]
    return made
