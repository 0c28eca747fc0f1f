"""Speed of an engine: the time of a step by its number of samples. Imports no torch."""

from dataclasses import dataclass

DECAY = 0.99
"""Weight of a step's measurement after each further step."""
OUTLIER_FACTOR = 4.0
"""Measurements are clipped to this multiple of the expected time."""


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """Speed of an engine: with B running samples each gets a token every fixed_s + B * row_s seconds."""

    fixed_s: float
    row_s: float
    prefill_s: float
    """Seconds per token that is computed again."""

    def token_s(self, live: int) -> float:
        """Return the seconds per token of each sample."""
        return self.fixed_s + live * self.row_s

    def times(self, factor: float) -> "EngineSpeed":
        """Return the speed of an engine whose steps take `factor` times as long."""
        return EngineSpeed(self.fixed_s * factor, self.row_s * factor, self.prefill_s * factor)


class SpeedMeter:
    """Estimate of an engine's speed from its steps.

    Least squares with decay of the seconds per token over the number of running samples.
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of 1, B, B^2, y, B y

    def add(self, live: int, token_s: float) -> None:
        """Add a step with `live` running samples that took `token_s` seconds per token of a sample."""
        current = self.speed()
        if current is not None:
            token_s = min(token_s, OUTLIER_FACTOR * current.token_s(live))
        terms = (1.0, live, live * live, token_s, live * token_s)
        self._sums = [DECAY * old + more for old, more in zip(self._sums, terms, strict=True)]

    def speed(self) -> EngineSpeed | None:
        """Return the estimate, or None before the first step.

        Computing a token again costs at most what one more sample costs.
        """
        count, b, bb, y, by = self._sums
        if not count:
            return None
        spread = bb * count - b * b
        slope = max(0.0, (by * count - b * y) / spread) if spread > 1e-6 * bb * count else 0.0
        slope = min(slope, y / b)
        return EngineSpeed((y - slope * b) / count, slope, slope)
