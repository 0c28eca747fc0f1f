"""Medians, intervals and the format of figures."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def median(values: Sequence[float]) -> float:
    """Return the middle value, or the mean of the two middle ones."""
    return float(np.median(values))


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the values are, interpolated."""
    return float(np.quantile(values, share))


def percent(share: float, digits: int = 1) -> str:
    """Return `0.0123` as `1.2 %`."""
    return f"{100 * share:.{digits}f} %"


@dataclass(frozen=True, slots=True)
class Interval:
    """A median with its 95 % interval by bootstrap."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float], draws: int = 1000) -> "Interval":
        """Return the interval of the median. Of one value it is the value itself."""
        middle = median(values)
        if len(values) < 2:
            return cls(middle, middle, middle)
        from scipy import stats  # here, as it takes half a second, and most only format figures

        drawn = stats.bootstrap(
            (values,), np.median, n_resamples=draws, method="percentile", rng=np.random.default_rng(0)
        )
        return cls(middle, *map(float, drawn.confidence_interval))

    def __str__(self) -> str:
        """Return `1.50 [1.40, 1.60]`."""
        return f"{self.middle:.2f} [{self.low:.2f}, {self.high:.2f}]"


def mean_and_half_width(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half of its 95 % interval by Student's t; 0 for one value."""
    if len(values) < 2:
        return float(np.mean(values)), 0.0
    from scipy import stats

    return float(np.mean(values)), float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))


def plus_minus(values: Sequence[float], times: float = 1, digits: int = 4, sign: str = "") -> str:
    """Return `1.2345 +- 0.0012`, the mean with half of its 95 % interval; one value alone."""
    mean, half = (times * figure for figure in mean_and_half_width(values))
    text = f"{mean:{sign}.{digits}f}"
    return text if len(values) < 2 else f"{text} +- {half:.{digits}f}"
