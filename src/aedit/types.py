"""The words every package shares. Standard library only, so that configuration and `--help` stay instant."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Round:
    """One agreed exchange of pseudo-gradients."""

    id: int
    """Counts from 1 and is equal on all nodes that take part."""

    steps: int
    """Inner steps this node has taken since its previous round."""


class IdleWork(Protocol):
    """Something useful and interruptible to do while a node must wait."""

    @property
    def used_s(self) -> float:
        """Processor time that the work has used so far, in seconds. Never decreases, and never blocks; it may
        lag behind by the piece of work in progress."""

    def window(self, cause: str) -> AbstractContextManager[None]:
        """Entered when a wait begins; leaving it returns at once, whatever the work is doing."""


class UserError(Exception):
    """Something only the person at the keyboard can mend: shown as one line, exit code 2."""


def check(ok: bool, name: str, rule: str, value: object) -> None:
    """Refuse a configuration value: `check(n > 0, "train.steps", "must be above 0", n)`."""
    if not ok:
        raise ValueError(f"{name} {rule}, got {value}")
