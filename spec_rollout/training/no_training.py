"""Idle work that does nothing but measure the windows: what a trainer could have used."""

import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from aedit.spec_rollout.training.publishing import Publication
from aedit.spec_rollout.training.windows import Windows


class NoTraining:
    """`DrafterTraining` without a trainer."""

    def __init__(self) -> None:
        self.windows = Windows()
        self._lock = threading.Lock()

    @contextmanager
    def window(self, cause: str) -> Iterator[None]:
        """Measure the time inside the context."""
        with self._lock:
            began_s = time.monotonic()
            self.windows.enter(began_s)
        try:
            yield
        finally:
            with self._lock:
                self.windows.leave(cause, began_s, time.monotonic())

    @property
    def used_s(self) -> float:
        """Return 0."""
        return 0.0

    def newest(self, after: int = 1) -> Publication | None:
        """Return None."""
        return None

    def update_policy(self, policy: Mapping[str, Tensor], version: int, kl_nats: float = math.nan) -> None:
        """Do nothing."""

    def offer(self, drafter: Mapping[str, Tensor]) -> int:
        """Return 1, the number of the initial drafter."""
        return 1

    def status(self) -> dict[str, Any]:
        """Return the windows; see `DrafterTraining.status`."""
        with self._lock:
            return {
                "state": "off",
                "error": "",
                "windows": self.windows.count,
                "idle_s": self.windows.idle_s(time.monotonic()),
                "idle_by_cause_s": dict(self.windows.by_cause),
                "steps": 0,
                "published": 0,
                "refused": 0,
                "training": {},
            }

    def close(self) -> None:
        """Do nothing."""
