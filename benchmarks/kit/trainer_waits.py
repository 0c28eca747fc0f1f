"""Waits of a node that computes nothing meanwhile, counted in processor seconds of a drafter's trainer."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

LOOK_S = 0.02
SLOWEST = 60.0
"""A wait ends without its processor time if it takes so many times as long: the machine is too busy."""
STARTS_WITHIN_S = 600.0


class Trainer(Protocol):
    """A trainer that runs in windows: `DrafterTraining`, `OnlineDrafter`."""

    @property
    def used_s(self) -> float:
        """Return the processor time of the training in seconds."""

    def window(self, cause: str) -> AbstractContextManager[None]:
        """Let the training run inside the context."""

    def status(self) -> dict[str, Any]:
        """Return the state by name."""


def start(trainer: Trainer) -> None:
    """Wait until the process has loaded what it needs. Raises TimeoutError."""
    give_up_s = time.monotonic() + STARTS_WITHIN_S
    with trainer.window("start"):
        while trainer.status()["state"] in ("starting", "not running"):
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"the trainer did not begin within {STARTS_WITHIN_S:g} s")
            time.sleep(LOOK_S)


def wait(trainer: Trainer, cause: str, is_enough: Callable[[], bool], idle_s: float) -> None:
    """Open a window until `is_enough`, and no longer than many times `idle_s`."""
    give_up_s = time.monotonic() + SLOWEST * idle_s + 1.0
    with trainer.window(cause):
        while not is_enough() and time.monotonic() < give_up_s:
            time.sleep(LOOK_S)
