"""Speed-up of decoding over steps without drafts, from times of such steps."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from aedit.spec_rollout.choose import bucket


@dataclass(slots=True)
class _Steps:
    """Steps at about as many rows."""

    total_s: float = 0.0
    plain_steps: float = 0.0
    """Steps that plain decoding takes for their tokens: tokens per row."""
    timed_s: float = 0.0
    """Time of those that had no drafts."""
    num_timed: int = 0

    @property
    def as_plain_s(self) -> float:
        """Return the time that plain decoding takes for these steps' tokens."""
        return self.plain_steps * self.timed_s / self.num_timed


@dataclass(slots=True)
class SpeedUp:
    """Comparison of all steps with those that had no drafts, at as many rows (`bucket`).

    A batch has many rows at first and few at its end, and the chooser of the arm decodes plainly rather with
    many: tokens per second of all plain steps would be another workload's.
    """

    _by_rows: defaultdict[int, _Steps] = field(default_factory=lambda: defaultdict(_Steps))

    def add(self, rows: int, tokens: int, total_s: float, *, plain: bool) -> None:
        """Count a step of so many rows that has made these tokens."""
        if not rows:
            return
        steps = self._by_rows[bucket(rows)]
        steps.total_s += total_s
        steps.plain_steps += tokens / rows
        if plain:
            steps.timed_s += total_s
            steps.num_timed += 1

    def figures(self) -> Mapping[str, float]:
        """Return `compared_s`, the time of steps at numbers of rows for which a plain step was timed.

        And `as_plain_s`, the time that plain decoding takes for their tokens. Both are 0 before a plain step.
        """
        known = [steps for steps in self._by_rows.values() if steps.num_timed]
        return {
            "compared_s": sum(steps.total_s for steps in known),
            "as_plain_s": sum(steps.as_plain_s for steps in known),
        }
