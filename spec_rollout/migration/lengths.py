"""Expected remaining length of a sample, from the lengths of earlier ones (Kaplan and Meier 1958).

Samples that are still growing count as censored observations: longer than their current length. Without them
the short samples, which end first, would bias the estimate.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

PRIOR = 4.0
"""Weight, in samples, of the mean length of all samples in the mean length of a group."""


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Survival curve of lengths in tokens, constant between the lengths at which samples have ended."""

    at: tuple[int, ...] = (0,)
    """Ascending: 0, the lengths at which samples have ended, and the longest observed length."""
    longer: tuple[float, ...] = (1.0,)
    """Share of samples that are longer than `at`."""
    area: tuple[float, ...] = (0.0,)
    """Integral of the curve up to `at`, in tokens."""

    @classmethod
    def of(cls, completed: Iterable[int], censored: Iterable[int] = ()) -> "LengthDistribution":
        """Return the Kaplan-Meier estimate.

        Args:
            completed: Lengths of samples that have ended by themselves, 1 or more.
            censored: Lengths of samples that are growing or were cut at their limit.
        """
        ends, cut = Counter(completed), Counter(censored)
        if not ends:
            return cls()
        at_risk = ends.total() + cut.total()
        at, longer, area = [0], [1.0], [0.0]
        for length in sorted({*ends, *cut}):
            if ends[length] or length == max((*ends, *cut)):
                area.append(area[-1] + longer[-1] * (length - at[-1]))
                longer.append(longer[-1] * (1 - ends[length] / at_risk))
                at.append(length)
            at_risk -= ends[length] + cut[length]
        return cls(tuple(at), tuple(longer), tuple(area))

    def expected_remaining(self, emitted: int, max_length: int, scale: float = 1.0) -> float:
        """Return the expected number of tokens after the first `emitted` of an unfinished sample.

        Beyond the longest observed length it is `emitted`; without completed samples it is half of what is
        allowed.

        Args:
            emitted: Tokens so far.
            max_length: Upper limit of the sample's length.
            scale: Length of the sample's group relative to all samples (`group_scales`).
        """
        return scale * self._expected_remaining(emitted / scale, max_length / scale)

    def _expected_remaining(self, emitted: float, max_length: float) -> float:
        room = max_length - emitted
        if len(self.at) == 1:
            return room / 2
        here = self._longer(emitted)
        if emitted >= self.at[-1] or not here:
            return min(emitted, room)
        beyond = self.longer[-1] * min(self.at[-1], max(0.0, max_length - self.at[-1]))
        return (self._area(min(max_length, self.at[-1])) - self._area(emitted) + beyond) / here

    def _longer(self, length: float) -> float:
        return self.longer[bisect_right(self.at, length) - 1]

    def _area(self, length: float) -> float:
        i = bisect_right(self.at, length) - 1
        return self.area[i] + self.longer[i] * (length - self.at[i])


def group_scales(
    completed: Iterable[tuple[int, int]], growing: Iterable[tuple[int, int]]
) -> dict[int, float]:
    """Return for each group the length of its samples relative to all samples.

    The length of a group is its number of tokens over its number of completed samples, the estimate under a
    constant rate of ending.

    Args:
        completed: Pairs of group and length.
        growing: Pairs of group and current length.
    """
    ends: Counter[int] = Counter()
    tokens: Counter[int] = Counter()
    for group, length in completed:
        ends[group] += 1
        tokens[group] += length
    if not ends:
        return {}
    for group, length in growing:
        tokens[group] += length
    mean = tokens.total() / ends.total()
    return {group: (count / mean + PRIOR) / (ends[group] + PRIOR) for group, count in tokens.items()}
